"""An Engine (rollout/engines/base.py) around a backend that generates in processes of its own.

    generate ─▶ room for its responses ─▶ one stream each ─pieces─▶ PartialCompletion ─▶ completions
    load_weights ─▶ stage (generation goes on) ─▶ pause ─▶ push ─▶ resume
    a backend that died ─▶ launched again with the current weights ─▶ streams go on where they were

| task           | waits for                                      | unblocked by                       |
|----------------|------------------------------------------------|------------------------------------|
| generate       | the first weights; room; its streams           | load_weights; others' ends; tokens |
| load_weights   | `_changing`: one launch or swap at a time      | the backend's answers, or its end  |
| _watch         | time; a token must come within `timeout_s`     | a token; else it kills the backend |

If the backend dies, a response keeps the tokens that have arrived, stamped with the version that was loaded
when they did, and draws the rest after them. After too many deaths in a row every request fails with the last
error.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any

import numpy as np

from areal_q.errors import EngineDied
from areal_q.weights.version import WeightVersion
from rollout.engines.base import (
    Completion,
    EngineBase,
    Request,
    ResponseCallback,
    TokenCallback,
)
from rollout.engines.process.generation_backend import CompletionDelta, GenerationBackend
from rollout.engines.process.partial_completion import PartialCompletion

logger = logging.getLogger(__name__)

WATCH_S = 1.0


class ResponseSlots:
    """A semaphore over places for responses: first come, first served, and all responses of a group at once."""

    def __init__(self, places: int) -> None:
        self.free = places
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, count: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((count, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._queue = deque(entry for entry in self._queue if entry[1] is not turn)
                self._admit()
            else:
                self.release(count)
            raise

    def release(self, count: int) -> None:
        self.free += count
        self._admit()

    def _admit(self) -> None:
        while self._queue and self._queue[0][0] <= self.free:
            count, turn = self._queue.popleft()
            if not turn.cancelled():
                self.free -= count
                turn.set_result(None)


class StreamingEngine(EngineBase):
    """An Engine around a GenerationBackend. Its `load_weights` pauses generation for the swap, but not for the
    transfer."""

    def __init__(self, backend: GenerationBackend) -> None:
        super().__init__(backend.name, backend.capabilities, backend.slots)
        self.backend = backend
        self.deaths = 0
        """Number of deaths of the backend since the start"""
        self._deaths_in_a_row = 0
        self._lost: EngineDied | None = None
        """The last error, if the backend has died too often in a row; None otherwise"""
        self._weights: WeightVersion | None = None
        self._loadings = 0
        """Number of times that weights were loaded; it tells two loadings of the same version apart"""
        self._slots = ResponseSlots(backend.slots)
        self._changing = asyncio.Lock()
        self._ready = asyncio.Event()
        self._tasks: set[asyncio.Task[list[Completion]]] = set()
        self._active = 0
        self._busy_s, self._busy_since = 0.0, 0.0
        self._heard_s = 0.0

    @property
    def version(self) -> int:
        return -1 if self._weights is None else self._weights.manifest.version

    @property
    def max_positions(self) -> int:
        return self.backend.max_positions

    @property
    def active(self) -> int:
        return self._active

    @property
    def busy_s(self) -> float:
        return self._busy_s + (time.monotonic() - self._busy_since if self._active else 0.0)

    async def start(self) -> None:
        await self.backend.prepare()
        self._task = asyncio.create_task(self._watch(), name=f"watch-{self.name}")

    async def generate(
        self,
        request: Request,
        on_token: TokenCallback | None = None,
        on_response: ResponseCallback | None = None,
    ) -> list[Completion]:
        """Returns the responses of a group, in order. Raises RecordError if the request can never be served,
        and EngineDied if the backend could not be restarted. `on_token` must not raise."""
        self._check_running(request)
        task = asyncio.create_task(self._group(request, on_token, on_response))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await task

    async def load_weights(self, weights: WeightVersion) -> float:
        """Generates with `weights` from now on. Returns for how many seconds generation paused. Raises
        WeightVersionError for weights that cannot be used, and keeps the old ones."""
        async with self._changing:
            if self._lost is not None:
                raise self._lost
            self.backend.check_weights(weights)
            if self._weights is None:
                try:
                    await self.backend.launch(weights)
                    self._take(weights)
                except EngineDied as error:
                    await self._launch_again(weights, error)
                return 0.0
            began = time.perf_counter()
            try:
                return await self._while_it_lives(self._swap(weights))
            except EngineDied as error:
                await self._launch_again(weights, error)
            return time.perf_counter() - began

    async def close(self) -> None:
        """Ends the engine and cancels the requests in flight."""
        tasks = [*self._tasks, *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.backend.close()

    async def _swap(self, weights: WeightVersion) -> float:
        """Replaces the weights and returns for how many seconds generation paused."""
        await self.backend.stage(weights)
        began = time.perf_counter()
        await self.backend.pause()
        await self.backend.push(weights)
        self._take(weights)
        await self.backend.resume()
        return time.perf_counter() - began

    async def _while_it_lives(self, work: Coroutine[Any, Any, float]) -> float:
        """Returns the result of `work`. Raises EngineDied as soon as the backend has ended, since `work` may be
        waiting for an answer from it that cannot come any more."""
        task, ended = asyncio.ensure_future(work), asyncio.ensure_future(self.backend.ended())
        try:
            await asyncio.wait([task, ended], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineDied(f"the process of engine {self.name} ended")
            return task.result()
        finally:
            task.cancel()
            ended.cancel()
            await asyncio.gather(task, ended, return_exceptions=True)

    def _take(self, weights: WeightVersion) -> None:
        self._weights = weights
        self._loadings += 1
        self._heard_s = time.monotonic()
        self._ready.set()

    async def _group(
        self,
        request: Request,
        on_token: TokenCallback | None,
        on_response: ResponseCallback | None,
    ) -> list[Completion]:
        await self._ready.wait()
        if self._lost is not None:
            raise self._lost
        self.backend.check_request(request)
        await self._slots.acquire(request.num_samples)
        self._count(request.num_samples)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._told(request, index, on_token, on_response))
                    for index in range(request.num_samples)
                ]
                for task in tasks:
                    task.add_done_callback(self._left)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _left(self, task: "asyncio.Task[Completion]") -> None:
        """Frees a response's place as soon as it ends, although others of its group may go on."""
        self._count(-1)
        self._slots.release(1)

    async def _told(
        self,
        request: Request,
        index: int,
        on_token: TokenCallback | None,
        on_response: ResponseCallback | None,
    ) -> Completion:
        """Returns one response. `on_response` is called with it, or, if the response is cancelled, with the
        tokens that have arrived; it has a finish reason if the last of them has ended it."""
        partial = PartialCompletion(request, request.seed + index)
        try:
            completion = await self._response(partial, index, on_token)
        except asyncio.CancelledError:
            if on_response and partial.ids and np.isfinite(partial.logprobs).all():
                on_response(index, partial.completion())
            raise
        if on_response:
            on_response(index, completion)
        return completion

    async def _response(
        self, partial: PartialCompletion, index: int, on_token: TokenCallback | None
    ) -> Completion:
        while partial.finish_reason is None:
            launched = self.deaths
            try:
                begun = await self._draw(partial, index, on_token)
                if begun and partial.finish_reason is None:
                    raise EngineDied(f"a response of {len(partial.ids)} tokens ended unasked")
            except EngineDied as error:
                partial.kept = partial.spans
                async with self._changing:
                    if self.deaths == launched:
                        assert self._weights is not None
                        await self._launch_again(self._weights, error)
        self._deaths_in_a_row = 0
        return partial.completion()

    async def _draw(
        self, partial: PartialCompletion, index: int, on_token: TokenCallback | None
    ) -> bool:
        """Draws until one stream ends or the response's time is up. Returns False if a new stream is needed
        because weights changed before this one's first token: the keys and values of the prompt may then be of
        the old weights, in whole or in part, while the token would be stamped with the new version."""
        loadings, before = self._loadings, len(partial.ids)
        stream = self.backend.stream(partial.rest(), partial.seed)
        clock = asyncio.timeout_at(partial.deadline_s)
        try:
            async with clock, contextlib.aclosing(stream) as pieces:
                async for delta in pieces:
                    waited = len(partial.ids) == before and self._loadings != loadings
                    if waited and self.backend.keeps_cache:
                        return False
                    self._hear(partial, delta, index, on_token)
                    if partial.stopped:
                        return True
                    if partial.deadline_s is None and partial.ids and partial.request.timeout_s:
                        now_s = asyncio.get_running_loop().time()
                        partial.deadline_s = now_s + partial.request.timeout_s
                        clock.reschedule(partial.deadline_s)
        except TimeoutError:
            if not clock.expired():
                raise
            partial.late = True
        return True

    def _hear(
        self,
        partial: PartialCompletion,
        delta: CompletionDelta,
        index: int,
        on_token: TokenCallback | None,
    ) -> None:
        assert self._weights is not None
        manifest = self._weights.manifest
        delta = partial.add(delta, manifest.version, manifest.digest)
        self.tokens_drawn += len(delta.ids)
        self._heard_s = time.monotonic()
        if on_token:
            for token, logprob in zip(delta.ids, delta.logprobs, strict=True):
                on_token(index, token, logprob)

    async def _launch_again(self, weights: WeightVersion, error: EngineDied) -> None:
        """Launches the backend again after `error`; a launch that fails counts as another death. Raises
        EngineDied after too many of them in a row. The caller must own the lock `_changing`."""
        while True:
            if self._lost is not None:
                raise self._lost
            self.deaths += 1
            self._deaths_in_a_row += 1
            if self._deaths_in_a_row > self.backend.restarts:
                self._lost = error
                self._ready.set()
                raise error
            logger.warning("engine %s is launched again: %s", self.name, error)
            try:
                await self.backend.launch(weights)
            except EngineDied as again:
                error = again
            else:
                self._take(weights)
                return

    def _count(self, change: int) -> None:
        now = time.monotonic()
        if self._active:
            self._busy_s += now - self._busy_since
        elif change > 0:
            self._heard_s = now
        self._busy_since = now
        self._active += change

    async def _watch(self) -> None:
        """Kills a backend that draws no tokens for `timeout_s`, so that it is launched again."""
        while True:
            await asyncio.sleep(WATCH_S)
            silent_s = time.monotonic() - self._heard_s
            if self._active and not self._changing.locked() and silent_s > self.backend.timeout_s:
                logger.warning("engine %s drew nothing for %.0f s", self.name, silent_s)
                self._heard_s = time.monotonic()
                await self.backend.kill()
