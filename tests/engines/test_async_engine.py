"""The thread that takes the steps of an engine in this process, and what the event loop does meanwhile."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from helpers.engines import HeldStepper, ask, initial_version
from helpers.fixture_types import MakeRun
from helpers.paths import ROOT

from areal_q.config import Run
from areal_q.errors import EngineDied
from rollout.engines.base import Completion, Request
from rollout.engines.reference import async_engine
from rollout.engines.reference.async_engine import AsyncEngine


@pytest.fixture
def run(make_run: MakeRun) -> Run:
    return make_run()


@asynccontextmanager
async def started(run: Run, stepper: HeldStepper) -> AsyncIterator[AsyncEngine]:
    """An engine with version 0 of `run`."""
    engine = AsyncEngine(stepper)
    await engine.start()
    await engine.load_weights(initial_version(run))
    try:
        yield engine
    finally:
        stepper.let_go()
        await engine.close()


def request(samples: int = 1, seed: int = 0, tokens: int = 4) -> Request:
    return ask([3, 4, 5, 6, 7, 8], samples, seed, max_tokens=tokens)


async def turns() -> None:
    """Gives others some turns of the loop."""
    for _ in range(20):
        await asyncio.sleep(0.001)


async def test_the_loop_turns_while_a_step_lasts(run: Run):
    """Were the step on the loop, nobody would let it end."""
    stepper = HeldStepper()
    async with started(run, stepper) as engine:
        asked = asyncio.ensure_future(engine.generate(request()))
        await stepper.in_step()
        busy = engine.busy_s
        await turns()
        assert not asked.done() and engine.busy_s > busy
        stepper.let_go()
        (done,) = await asked
        assert done.response_ids.tolist() == [8, 7, 6, 5]
        await turns()
        idle = engine.busy_s
        await turns()
        assert engine.busy_s == idle and engine.tokens_drawn == 4


async def test_weights_are_swapped_in_between_two_tokens(run: Run):
    stepper, told = HeldStepper(), []
    async with started(run, stepper) as engine:

        def on_token(index: int, token: int, logprob: float) -> None:
            told.append(engine.version)

        asked = asyncio.ensure_future(engine.generate(request(tokens=6), on_token))
        await stepper.in_step()
        loading = asyncio.ensure_future(engine.load_weights(initial_version(run, 1)))
        await turns()
        assert not loading.done() and engine.version == 0
        while not loading.done():
            stepper.may_end.release()
            await turns()
        stepper.let_go()
        (done,) = await asked
        assert [span.version for span in done.spans] == [0, 1]
        assert told == [span.version for span in done.spans for _ in range(span.tokens)]


async def test_a_cancelled_request_keeps_the_present_steps_tokens(run: Run):
    stepper, told = HeldStepper(), {}
    async with started(run, stepper) as engine:
        asked = asyncio.ensure_future(engine.generate(request(2), None, told.__setitem__))
        other = asyncio.ensure_future(engine.generate(request()))
        for _ in range(2):
            await stepper.in_step()
            stepper.may_end.release()
        await stepper.in_step()
        asked.cancel()
        await turns()
        assert not asked.done() and not told
        stepper.let_go()
        await asyncio.wait([asked])
        assert asked.cancelled()
        assert {i: c.response_ids.tolist() for i, c in told.items()} == {0: [8, 7, 6], 1: [8, 7, 6]}
        assert {c.finish_reason for c in told.values()} == {None}
        assert (await other)[0].response_ids.tolist() == [8, 7, 6, 5]
        assert engine.active == 0


async def test_ends_do_not_wait_for_a_step_that_lasts(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(async_engine, "PATIENCE_S", 0.05)
    stepper, told = HeldStepper(), {}
    before = set(threading.enumerate())
    async with started(run, stepper) as engine:
        asked = [
            asyncio.ensure_future(engine.generate(request(), None, told.__setitem__))
            for _ in range(2)
        ]
        await stepper.in_step()
        asked[0].cancel()
        await asyncio.wait(asked[:1])
        await engine.close()
        await asyncio.wait(asked)
        assert [one.cancelled() for one in asked] == [True, True] and not told
        with pytest.raises(EngineDied, match="not running"):
            await engine.generate(request())
        with pytest.raises(EngineDied, match="not running"):
            await engine.load_weights(initial_version(run, 1))
        (thread,) = [t for t in set(threading.enumerate()) - before if t.name == "engine-scripted"]
        stepper.let_go()
        await asyncio.to_thread(thread.join)


LEAVING = """
import asyncio, sys, threading, torch
from helpers.engines import HeldStepper, ask
from rollout.engines.reference import async_engine

told = threading.Event()

class Computing(HeldStepper):
    version = 0
    def step(self):
        self.begun.release()
        some = torch.randn(300, 300)
        while not told.is_set():
            some = (some @ some).clamp(-1, 1)
        for _ in range(200):
            some = (some @ some).clamp(-1, 1)
        print("the step is over", flush=True)
        return 0

async def main():
    async_engine.PATIENCE_S = 0.0
    stepper = Computing()
    stepper.version = 0
    engine = async_engine.AsyncEngine(stepper)
    await engine.start()
    asked = asyncio.ensure_future(engine.generate(ask([3, 4], max_tokens=2)))
    await stepper.in_step()
    await engine.close()
    await asyncio.wait([asked])

try:
    asyncio.run(main())
    print("closed", flush=True)
finally:
    told.set()
sys.exit(7)
"""


@pytest.mark.timeout(120)
def test_a_process_ends_as_it_should_beside_a_step():
    """Its thread came out of torch while the interpreter ended: "terminate called", exit code 134."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-c", LEAVING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.splitlines() == ["closed", "the step is over"]


class Broken(HeldStepper):
    """An engine that fails at one of these calls."""

    def __init__(self, *calls: str) -> None:
        super().__init__()
        self.let_go()
        for call in calls:
            setattr(self, call, self._fail)

    def _fail(self, *args: object) -> Any:
        raise RuntimeError("out of memory")


async def test_an_error_of_a_step_fails_all_requests(run: Run):
    async with started(run, Broken("step")) as engine:
        asked = [engine.generate(request(seed=seed)) for seed in range(3)]
        errors = await asyncio.gather(*asked, return_exceptions=True)
        assert [str(error) for error in errors] == ["out of memory"] * 3
        with pytest.raises(EngineDied, match="not running"):
            await engine.generate(request())


async def test_an_error_of_a_swap_reaches_who_asked_for_it(run: Run):
    stepper = HeldStepper()
    stepper.let_go()
    async with started(run, stepper) as engine:
        stepper.swap = Broken("swap").swap
        with pytest.raises(RuntimeError, match="out of memory"):
            await engine.load_weights(initial_version(run, 1))
        assert engine.version == 0
        assert (await engine.generate(request()))[0].spans[0].version == 0


@pytest.mark.parametrize("callback", ["on_token", "on_response"])
async def test_an_error_of_a_callback_ends_the_engine(run: Run, callback: str):
    stepper = HeldStepper()
    stepper.let_go()

    def fail(*args: object) -> None:
        raise RuntimeError("a full disk")

    async with started(run, stepper) as engine:
        with pytest.raises(RuntimeError, match="a full disk"):
            await engine.generate(request(), **{callback: fail})
        with pytest.raises(EngineDied, match="not running"):
            await engine.generate(request())


async def test_requests_of_one_turn_share_their_first_step(run: Run):
    """Prompts are computed together, as many as there are."""
    stepper = HeldStepper()
    async with started(run, stepper) as engine:
        asked = asyncio.gather(*(engine.generate(request(2, seed)) for seed in range(8)))
        stepper.let_go()
        await asked
        assert stepper.at_once == [16] * 4


async def test_callbacks_are_called_on_the_loop_in_order(run: Run):
    stepper, told = HeldStepper(), []
    stepper.let_go()
    async with started(run, stepper) as engine:

        def note(kind: str) -> Callable[..., None]:
            return lambda *args: told.append((kind, *args, threading.current_thread()))

        done = await engine.generate(request(2), note("token"), note("end"))
    assert {thread for *_, thread in told} == {threading.main_thread()}
    for index, completion in enumerate(done):
        mine = [(kind, what) for kind, i, what, *_ in told if i == index]
        drawn = [("token", token) for token in completion.response_ids.tolist()]
        assert mine[:-1] == drawn and mine[-1][0] == "end"
        assert isinstance(mine[-1][1], Completion)


async def test_steps_use_as_many_threads_as_was_set(run: Run):
    """torch keeps the number for each thread, and a new one has that of the processor's cores."""
    used, before = [], torch.get_num_threads()

    class Counting(HeldStepper):
        def step(self) -> int:
            used.append(torch.get_num_threads())
            return super().step()

    stepper = Counting()
    stepper.let_go()
    torch.set_num_threads(before + 1)
    try:
        async with started(run, stepper) as engine:
            await engine.generate(request())
    finally:
        torch.set_num_threads(before)
    assert set(used) == {before + 1}
