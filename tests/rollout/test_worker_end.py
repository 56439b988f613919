"""A signal while a worker closes: the launcher's comes half a second after a run's end."""

import asyncio
import gc
import os
import signal
import weakref
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import pytest
from helpers.fixture_types import MakeRun

from areal_q.config import dump_toml
from areal_q.errors import RunChanged, RunFinished
from areal_q.system import stop_request
from areal_q.system.stop_request import StopRequest
from buffer.redis_store import LearnerBuffer
from buffer.weight_sync import WeightSource
from rollout.__main__ import _until_signal
from rollout.build import EndpointAddress, serve
from rollout.engines.base import Engine
from rollout.worker import Worker

Ended = Callable[..., Awaitable[tuple[int, list[str]]]]
Send = Callable[[int], Awaitable[None]]


@pytest.fixture
def send(monkeypatch: pytest.MonkeyPatch) -> Send:
    """Sends this process so many signals, and returns when they have come."""
    came: list[int] = []
    receive = StopRequest.receive

    def count(self: StopRequest, number: int) -> None:
        came.append(number)
        receive(self, number)

    async def send(signals: int) -> None:
        for _ in range(signals):
            wanted = len(came) + 1
            os.kill(os.getpid(), signal.SIGTERM)
            while len(came) < wanted:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)  # a cancellation arrives here at the latest

    monkeypatch.setattr(StopRequest, "receive", count)
    return send


@pytest.fixture
def ended(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, send: Send) -> Ended:
    """Runs a worker whose engine is sent `before` signals while it works, which otherwise ends by itself, and
    `during` while it closes. Returns the exit code, and what was closed."""
    closed: list[str] = []

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

        async def start(self) -> None: ...
        async def close(self) -> None:
            closed.append(self.name)

        async def leave(self, claims: list[Any]) -> None:
            closed.append(self.name)

    async def run(before: int, during: int) -> tuple[int, list[str]]:
        class Engine(Part):
            async def close(self) -> None:
                await send(during)
                await super().close()

        async def beat(worker: Worker) -> None:
            await send(before)
            raise RunFinished("it is finished")

        monkeypatch.setattr(Worker, "_beat", beat)
        for loop in ("_claim", "_swap"):
            monkeypatch.setattr(Worker, loop, lambda *_: asyncio.Event().wait())
        settings, parts = make_run(), {n: Part(n) for n in ("buffer", "reward", "environment")}
        monkeypatch.setattr("rollout.worker.build_reward", lambda run: parts["reward"])
        given: Any = parts | {"engine": Engine("engine"), "subscriber": None, "tokenizer": None}
        del given["reward"]
        return await _until_signal(Worker(name="w", run=settings, **given).run()), closed

    return run


ALL = ["engine", "reward", "environment", "buffer"]


@pytest.mark.parametrize(("before", "during"), [(0, 1), (1, 0)])
async def test_one_signal_lets_a_worker_close_all(ended: Ended, before: int, during: int):
    """It was broken off, and vLLM's directory and shared memory stayed."""
    assert await ended(before, during) == (143, ALL)


@pytest.mark.parametrize(("before", "during"), [(0, 2), (1, 1)])
async def test_a_second_signal_breaks_the_closing_off(
    ended: Ended, monkeypatch: pytest.MonkeyPatch, before: int, during: int
):
    monkeypatch.setattr(stop_request, "SAME_S", 0.0)
    assert await ended(before, during) == (143, [])


@pytest.mark.parametrize(("before", "during"), [(0, 2), (1, 1)])
async def test_a_signal_that_comes_by_two_ways_is_one(
    ended: Ended, monkeypatch: pytest.MonkeyPatch, before: int, during: int
):
    """The closing was broken off where a supervisor passed on what its group got: no ticket was handed back."""
    monkeypatch.setattr(stop_request, "SAME_S", 3600.0)
    assert await ended(before, during) == (143, ALL)


NOBODY = {"announce": "ipc:///nobody/announces", "fetch": "ipc:///nobody/serves"}


@pytest.mark.parametrize("address", ["", "0"])
async def test_a_worker_that_is_set_up_anew_leaves_nothing_behind(
    make_run: MakeRun, redis_url: str, monkeypatch: pytest.MonkeyPatch, address: str
):
    """An engine with its weights and its cache stayed for good, each time, if it had an endpoint."""
    engines: list[weakref.ref[Engine]] = []

    async def work(worker: Worker, begin: Callable[[], Awaitable[object]] | None) -> None:
        engines.append(weakref.ref(worker._engine))
        if begin:
            await begin()
        error = RunFinished("enough") if len(engines) == 3 else RunChanged("other settings")
        raise ExceptionGroup("a loop has ended", [error])

    monkeypatch.setattr(Worker, "run", work)
    run = make_run()
    with closing(LearnerBuffer(redis_url, run.name)) as learner:
        learner.publish_run(dump_toml(run), NOBODY)
    at = EndpointAddress(address)
    await serve(redis_url, run.name, "w", WeightSource(), lambda _: None, at, 0.0)
    # The loop holds the task that has ended, with its error, until its next turn.
    await asyncio.sleep(0)
    gc.collect()
    assert [engine() for engine in engines] == [None] * 3


@pytest.mark.parametrize(("signals", "code", "set_up"), [(0, 0, 2), (1, 143, 1)])
async def test_a_signal_beside_other_settings_is_not_lost(
    make_run: MakeRun, redis_url: str, monkeypatch: pytest.MonkeyPatch, send: Send, signals: int,
    code: int, set_up: int,
):  # fmt: skip
    """The worker set itself up anew and went on, until it was killed with its tickets."""
    beats: list[Worker] = []

    async def beat(worker: Worker) -> None:
        beats.append(worker)
        raise RunChanged("other settings") if len(beats) == 1 else RunFinished("enough")

    async def claim(*_: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:  # the other loop has ended, and this one withdraws its responses
            await send(signals if len(beats) == 1 else 0)

    monkeypatch.setattr(Worker, "_beat", beat)
    monkeypatch.setattr(Worker, "_claim", claim)
    run = make_run()
    with closing(LearnerBuffer(redis_url, run.name)) as learner:
        learner.publish_run(dump_toml(run), NOBODY)
    args = (WeightSource(), lambda _: None, EndpointAddress(), 0.0)
    work = serve(redis_url, run.name, "w", *args)
    assert (await _until_signal(work), len(beats)) == (code, set_up)
