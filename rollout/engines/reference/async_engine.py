"""The asyncio half of an in-process engine: it takes requests, and one task steps while there is work.

    generate ─Job─▶ stepper.waiting ─admitted between steps─▶ rows ─finished─▶ job.future ─▶
    generate load_weights ─prepare (a thread)─▶ swap (between two steps)

One task steps: *waits for* `_wake` when idle, *unblocked by* generate and the first load_weights.
generate: *waits for* job.future, *unblocked by* the step that draws its last token, or by close.
load_weights: *waits for* `_loading`, so that versions are swapped in the order they came.
Everything runs on one event loop and a step never awaits, so nothing changes in the middle of one.
"""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal_q.errors import RecordError
from areal_q.messages import FinishReason, Manifest, VersionSpan
from areal_q.weights.version import WeightVersion
from rollout.engines.base import (
    Capabilities,
    Completion,
    EngineBase,
    Request,
    ResponseCallback,
    TokenCallback,
    finish_reason,
)
from rollout.engines.stop_conditions import Stopper, stopper


@dataclass(eq=False)
class Job:
    """A request in flight. Every response draws one token at each step from `started` on."""

    request: Request
    future: "asyncio.Future[list[Completion]]"
    on_token: TokenCallback | None = None
    on_response: ResponseCallback | None = None
    started: int = -1
    """Step that draws the first tokens; -1 while the job waits."""
    deadline_s: float = math.inf
    """Monotonic time in seconds at which the responses are cut off"""
    stoppers: list[Stopper] = field(default_factory=list)
    """One stopper for each response; empty if the request has no stops that the tensors do not check"""
    completions: dict[int, Completion] = field(default_factory=dict)

    def start(self, step: int) -> None:
        self.started = step
        request = self.request
        if request.timeout_s:
            self.deadline_s = time.monotonic() + request.timeout_s
        drawn = request.prompt_ids[len(request.prompt_ids) - request.drawn :].tolist()
        watch = [
            stopper(request.sampling, request.decode, drawn) for _ in range(request.num_samples)
        ]
        self.stoppers = [w for w in watch if w is not None]

    def finish_reason(self, index: int, ids: Sequence[int]) -> FinishReason | None:
        """Returns why response `index`, with tokens `ids`, has ended; None if it has not."""
        stopped = bool(self.stoppers) and self.stoppers[index].stopped
        late = time.monotonic() >= self.deadline_s
        return finish_reason(self.request, ids, stopped=stopped, late=late)

    def complete(self, index: int, completion: Completion) -> None:
        self.completions[index] = completion
        if self.on_response:
            self.on_response(index, completion)
        if len(self.completions) == self.request.num_samples and not self.future.done():
            self.future.set_result([self.completions[i] for i in sorted(self.completions)])

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class StepVersions:
    """Remembers which version drew at which step, as far back as responses in flight need it."""

    def __init__(self) -> None:
        self._since: deque[tuple[int, int, str]] = deque()

    def swapped(self, step: int, manifest: Manifest) -> None:
        """Records that tokens are drawn with this version from `step` on."""
        if self._since and self._since[-1][0] == step:
            self._since.pop()
        self._since.append((step, manifest.version, manifest.digest))

    def forget_before(self, step: int) -> None:
        while len(self._since) > 1 and self._since[1][0] <= step:
            self._since.popleft()

    def spans(self, start: int, tokens: int) -> list[VersionSpan]:
        """Returns the version spans of a response that drew `tokens` tokens from step `start` on. With swaps at
        steps 0 and 7, a start at 5 and 4 tokens they are [(v0, 2), (v1, 2)]."""
        spans, end = [], start + tokens
        for step, version, digest in reversed(self._since):
            if step < end:
                begin = max(step, start)
                spans.append(VersionSpan(version, end - begin, digest))
                end = begin
            if end == start:
                break
        return spans[::-1]


class Stepper(Protocol):
    """An engine that computes in this process, as AsyncEngine drives it. It keeps a row for each response and
    draws the next token of every row in one synchronous call. An engine in processes of its own is a
    GenerationBackend instead."""

    name: str
    capabilities: Capabilities
    slots: int
    waiting: deque[Job]
    tokens_per_s: float
    """Pace of generation in tokens per second; infinity means as fast as possible"""

    @property
    def version(self) -> int: ...

    @property
    def active(self) -> int: ...

    def check_request(self, request: Request) -> None:
        """Raises RecordError if the request can never be served."""
        ...

    def step(self) -> int:
        """Gives rows to waiting jobs and draws one token for every response. Returns the number of tokens."""
        ...

    def unfinished(self, job: Job) -> dict[int, Completion]:
        """Returns the tokens drawn so far for those of a job's responses that have not ended, by index."""
        ...

    def drop(self, job: Job) -> None:
        """Forgets a waiting or running job and frees its rows."""
        ...

    def prepare(self, weights: WeightVersion) -> Any:
        """Does in a thread what a swap needs before it, and returns the argument of `swap`. Raises
        WeightVersionError for weights that cannot be used."""
        ...

    def swap(self, prepared: Any) -> None: ...


class AsyncEngine(EngineBase):
    """An Engine (rollout/engines/base.py) around a Stepper."""

    def __init__(self, stepper: Stepper) -> None:
        super().__init__(stepper.name, stepper.capabilities, stepper.slots)
        self.busy_s = 0.0
        """Seconds since the start in which the engine had something to generate."""
        self._stepper = stepper
        self._jobs: set[Job] = set()
        self._wake = asyncio.Event()
        self._loading = asyncio.Lock()

    @property
    def version(self) -> int:
        return self._stepper.version

    @property
    def active(self) -> int:
        return self._stepper.active

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"engine-{self.name}")
        self._task.add_done_callback(self._stopped)

    async def generate(
        self,
        request: Request,
        on_token: TokenCallback | None = None,
        on_response: ResponseCallback | None = None,
    ) -> list[Completion]:
        """Returns the responses of a group, in order. Raises RecordError if the request can never be served,
        and EngineDied if the engine is not running. `on_token` must not raise."""
        self._check_running(request)
        if self.version >= 0:
            self._stepper.check_request(request)
        job = Job(request, asyncio.get_running_loop().create_future(), on_token, on_response)
        self._jobs.add(job)
        self._stepper.waiting.append(job)
        self._wake.set()
        try:
            return await job.future
        except asyncio.CancelledError:
            for index, completion in self._stepper.unfinished(job).items():
                if on_response:
                    on_response(index, completion)
            raise
        finally:
            self._jobs.discard(job)
            if len(job.completions) < request.num_samples:
                self._stepper.drop(job)

    async def load_weights(self, weights: WeightVersion) -> float:
        """Generates with `weights` from now on. Returns for how many seconds generation paused. Raises
        WeightVersionError for weights that cannot be used, and keeps the old ones."""
        async with self._loading:
            prepared = await asyncio.to_thread(self._stepper.prepare, weights)
            began = time.perf_counter()
            first = self.version < 0
            self._stepper.swap(prepared)
            pause = time.perf_counter() - began
        if first:
            for job in list(self._stepper.waiting):
                try:
                    self._stepper.check_request(job.request)
                except RecordError as error:
                    self._stepper.waiting.remove(job)
                    job.fail(error)
        self._wake.set()
        return pause

    async def close(self) -> None:
        """Ends the engine and cancels the requests in flight."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        stepper = self._stepper
        while True:
            if self.version < 0 or not (stepper.active or stepper.waiting):
                self._wake.clear()
                await self._wake.wait()
                continue
            began = time.perf_counter()
            drawn = stepper.step()
            self.tokens_drawn += drawn
            await asyncio.sleep(drawn / stepper.tokens_per_s)
            self.busy_s += time.perf_counter() - began

    def _stopped(self, task: "asyncio.Task[None]") -> None:
        """Ends the requests in flight when the stepping task ends, with its error if it raised one."""
        error = None if task.cancelled() else task.exception()
        for job in list(self._jobs):
            if error is not None:
                job.fail(error)
            else:
                job.future.cancel()
