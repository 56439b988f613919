"""An engine around a backend in processes of its own: launches that fail, weights that change early."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine

import numpy as np
import pytest
from helpers.fixture_types import MakeVersion
from msgspec.structs import replace

from areal_q.config import Sampling
from areal_q.errors import EngineDied
from areal_q.weights.version import WeightVersion
from rollout.engines.base import Capabilities, Completion, Request
from rollout.engines.process.generation_backend import CompletionDelta
from rollout.engines.process.streaming_engine import StreamingEngine

REQUEST = Request(
    prompt_ids=np.array([3], np.int32),
    num_samples=1,
    sampling=Sampling(max_tokens=6),
    seed=0,
    stop_ids=frozenset(),
)


class Launches:
    """A backend that draws 0, 1, 2, … and dies at `dies_at`; its launches fail where `outcomes` says so."""

    name = "launches"
    capabilities = Capabilities(formats=frozenset({"bf16"}), kv_on_update=frozenset({"keep"}))
    slots, timeout_s, restarts, keeps_cache, max_positions = 8, 60.0, 2, True, 512

    def __init__(self, *outcomes: bool, dies_at: int | None = None) -> None:
        self.outcomes, self.launched, self.dies_at = list(outcomes), 0, dies_at
        self.asked: list[list[int]] = []
        self.begins = asyncio.Event()
        self.begins.set()
        self.ends = asyncio.Event()
        self.ends.set()
        self.dead = asyncio.Event()

    async def prepare(self) -> None: ...
    def check_weights(self, weights: WeightVersion) -> None: ...
    def check_request(self, request: Request) -> None: ...

    async def launch(self, weights: WeightVersion) -> None:
        self.launched += 1
        self.dead.clear()
        if self.outcomes and not self.outcomes.pop(0):
            raise EngineDied(f"launch {self.launched} failed")

    async def stage(self, weights: WeightVersion) -> None: ...
    async def pause(self) -> None: ...
    async def push(self, weights: WeightVersion) -> None: ...
    async def resume(self) -> None: ...

    async def stream(self, request: Request, seed: int) -> AsyncGenerator[CompletionDelta, None]:
        self.asked.append(np.asarray(request.prompt_ids).tolist())
        await self.begins.wait()
        partial = len(request.prompt_ids) - len(REQUEST.prompt_ids)
        for token in range(partial, REQUEST.sampling.max_tokens):
            if token == self.dies_at:
                self.dies_at = None
                raise EngineDied("while it drew")
            routes, last = None, token == REQUEST.sampling.max_tokens - 1
            if last:  # every token goes to the expert of its number
                routes = np.array([*request.prompt_ids, *range(partial, token)], np.uint8)
                routes = routes[:, None, None]
            mask = [np.array([token])] if request.masked else []
            yield CompletionDelta(ids=[token], logprobs=[-1.0], routes=routes, sampling_mask=mask)
        await self.ends.wait()

    async def ended(self) -> None:
        await self.dead.wait()

    async def kill(self) -> None: ...
    async def close(self) -> None: ...


def on_engine(
    backend: Callable[[], Launches],
    version: WeightVersion,
    body: Callable[[StreamingEngine, Launches], Coroutine[None, None, None]],
) -> None:
    """Runs `body` on an engine that has `version`."""

    async def run() -> None:
        made = backend()
        engine = StreamingEngine(made)
        await engine.start()
        try:
            await engine.load_weights(version)
            await body(engine, made)
        finally:
            await engine.close()

    asyncio.run(run())


def test_a_launch_that_fails_after_a_death_is_tried_again(make_version: MakeVersion):
    async def body(engine: StreamingEngine, backend: Launches) -> None:
        (done,) = await engine.generate(REQUEST)
        assert done.response_ids.tolist() == [0, 1, 2, 3, 4, 5]
        assert backend.asked == [[3], [3, 0, 1, 2, 3]]
        assert (backend.launched, engine.deaths) == (3, 2)

    on_engine(lambda: Launches(True, False, True, dies_at=4), make_version(0), body)


@pytest.mark.parametrize("dies_at", [None, 4])
def test_routes_and_masks_are_of_every_token(make_version: MakeVersion, dies_at: int | None):
    """Routes come with the end: those of tokens from before a death are of the stream after it, to which they
    are a prompt. Masks come with their tokens."""

    async def body(engine: StreamingEngine, backend: Launches) -> None:
        (done,) = await engine.generate(REQUEST)
        assert done.routes is not None and done.routes.shape == (6, 1, 1)
        assert done.routes.flatten().tolist() == [3, 0, 1, 2, 3, 4]
        assert done.sampling_mask is None
        sampling = Sampling(max_tokens=6, top_k=1, stop=((1, 2),))
        asked = replace(REQUEST, sampling=sampling, masked=True)
        (stopped,) = await engine.generate(asked)
        assert stopped.response_ids.tolist() == [0, 1, 2] and stopped.routes is None
        assert stopped.sampling_mask == [[0], [1], [2]]
        backend.dies_at = dies_at
        (whole,) = await engine.generate(replace(asked, sampling=replace(sampling, stop=())))
        assert whole.sampling_mask == [[0], [1], [2], [3], [4], [5]]

    on_engine(lambda: Launches(dies_at=dies_at), make_version(0), body)


def test_launches_are_given_up_after_so_many_deaths_in_a_row(make_version: MakeVersion):
    async def body(engine: StreamingEngine, backend: Launches) -> None:
        with pytest.raises(EngineDied, match="launch 3 failed"):
            await engine.generate(REQUEST)
        assert backend.launched == 1 + backend.restarts

    on_engine(lambda: Launches(True, False, False, dies_at=4), make_version(0), body)


@pytest.mark.parametrize("waits_for", ["stage", "pause", "push", "resume"])
def test_a_swap_ends_when_the_backend_dies(make_version: MakeVersion, waits_for: str):
    """The backend never answers again; nothing but its end tells."""

    async def body(engine: StreamingEngine, backend: Launches) -> None:
        async def never(*_: object) -> None:
            backend.dead.set()
            await asyncio.Future()

        setattr(backend, waits_for, never)
        await engine.load_weights(make_version(1))
        assert (engine.version, engine.deaths, backend.launched) == (1, 1, 2)
        assert (await engine.generate(REQUEST))[0].spans[0].version == 1

    on_engine(Launches, make_version(0), body)


def test_a_response_cancelled_after_its_last_token_has_ended(make_version: MakeVersion):
    """A stream may end later than its last token comes: there is nothing left for another worker to draw."""

    async def body(engine: StreamingEngine, backend: Launches) -> None:
        def on_token(index: int, token: int, logprob: float) -> None:
            if token == REQUEST.sampling.max_tokens - 1:
                task.cancel()

        backend.ends.clear()
        told: dict[int, Completion] = {}
        task = asyncio.ensure_future(engine.generate(REQUEST, on_token, told.__setitem__))
        await asyncio.wait([task])
        assert task.cancelled() and engine.active == 0
        assert told[0].response_ids.tolist() == [0, 1, 2, 3, 4, 5]
        assert told[0].finish_reason == "length"

    on_engine(Launches, make_version(0), body)


def test_a_lost_engine_ends_every_wait_with_the_reason(make_version: MakeVersion):
    """Requests that wait for the first weights, for room, and those that come later."""

    async def run() -> None:
        engine = StreamingEngine(Launches(False, False, False))
        await engine.start()
        waiting = [asyncio.ensure_future(engine.generate(REQUEST)) for _ in range(20)]
        await asyncio.sleep(0)
        with pytest.raises(EngineDied, match="launch 3 failed"):
            await engine.load_weights(make_version(0))
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert {str(end) for end in ends} == {"launch 3 failed"}
        for again in (engine.generate(REQUEST), engine.load_weights(make_version(1))):
            with pytest.raises(EngineDied):
                await again
        await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize("keeps_cache", [True, False])
def test_a_response_begins_anew_under_weights_that_came_first(
    make_version: MakeVersion, keeps_cache: bool
):
    """The same version as before, even: what other weights left in a cache between the two is as wrong."""
    version = make_version(0)

    async def body(engine: StreamingEngine, backend: Launches) -> None:
        backend.keeps_cache = keeps_cache
        backend.begins.clear()
        waiting = asyncio.ensure_future(engine.generate(REQUEST))
        while not backend.asked:
            await asyncio.sleep(0)
        await engine.load_weights(version)
        backend.begins.set()
        (done,) = await waiting
        assert done.response_ids.tolist() == [0, 1, 2, 3, 4, 5]
        assert len(backend.asked) == (2 if keeps_cache else 1)
        assert engine.deaths == 0

    on_engine(Launches, version, body)
