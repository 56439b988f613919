"""The asyncio half of an in-process engine: requests come and go on the event loop, a thread takes the steps.

       event loop                                  engine's thread, which alone touches the Stepper
    generate ──── a job ───▶ ┐                     ┌─▶ commands, if any came since the last step;
    cancelled ─── withdraw ─▶│ commands, a batch   │   else a step, while there is work
    load_weights ─── swap ──▶┘ a turn of the loop ─┘            │
       ▲   prepare: another thread, beside steps                │
       └──── tokens, completions, answers: one call a step ─────┘

| who          | waits for                                    | unblocked by                              |
|--------------|----------------------------------------------|-------------------------------------------|
| the thread   | commands, while nothing is to be drawn       | generate; the first load_weights; close   |
| generate     | job.future                                   | the step that ends its responses; close   |
|              | its unfinished tokens, when cancelled        | the end of the present step; PATIENCE_S   |
| load_weights | `_loading`: versions are swapped in in order | the swap before                           |
|              | the swap                                     | the end of the present step               |
| close        | the thread's end                             | the end of the present step; PATIENCE_S   |

A step of a real model takes up to seconds, and heartbeats, Redis and the endpoint share the loop: so no step
runs there. Nothing changes in the middle of a step, since commands are applied between two.
"""

import asyncio
import atexit
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from msgspec.structs import replace

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

PATIENCE_S = 4.0
"""Most seconds for which the end of an engine or of a request waits for the present step. Twice that is less
than what a launcher waits for a worker that it has told to stop."""
Command = Callable[[], object]


@dataclass(eq=False)
class Job:
    """A request in flight. Every response draws one token at each step from `started` on.

    It belongs to the engine's thread; `future`, `completions` and the callbacks belong to the event loop, where
    `post` has functions called.
    """

    request: Request
    future: "asyncio.Future[list[Completion]]"
    on_token: TokenCallback | None = None
    on_response: ResponseCallback | None = None
    post: Callable[..., None] = lambda function, *args: function(*args)
    """Has a function called with arguments on the event loop, after the step; by default at once"""
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
        self.post(self._completed, index, completion)

    def _completed(self, index: int, completion: Completion) -> None:
        self.completions[index] = completion
        if self.on_response:
            self.on_response(index, completion)
        if len(self.completions) == self.request.num_samples:
            settle(self.future, [self.completions[i] for i in sorted(self.completions)])

    def fail(self, error: BaseException) -> None:
        self.post(settle, self.future, None, error)


def settle(
    future: "asyncio.Future[Any]", result: object, error: BaseException | None = None
) -> None:
    """Gives a future its result, or its error if there is one, unless it is done already."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


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
    GenerationBackend instead.

    All calls come from one thread, and none during another, but for those of `prepare` and `check_request`,
    which may come beside a step. What a step tells goes through `Job.post`, `Job.complete` and `Job.fail`.
    """

    name: str
    capabilities: Capabilities
    slots: int
    waiting: deque[Job]
    tokens_per_s: float
    """Pace of generation in tokens per second; infinity means as fast as possible"""

    @property
    def version(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def active(self) -> int: ...

    def check_request(self, request: Request) -> None:
        """Raises RecordError if the request can never be served."""
        ...

    def step(self) -> int:
        """Gives rows to waiting jobs and draws one token for every response. Returns the number of tokens."""
        ...

    def unfinished(self, job: Job) -> dict[int, Completion]:
        """Returns what was drawn so far of those of a job's responses that have not ended, by index."""
        ...

    def drop(self, job: Job) -> None:
        """Forgets a waiting or running job and frees its rows."""
        ...

    def prepare(self, weights: WeightVersion) -> Any:
        """Does in another thread what a swap needs before it, and returns the argument of `swap`. Raises
        WeightVersionError for weights that cannot be used."""
        ...

    def swap(self, prepared: Any) -> None: ...


class AsyncEngine(EngineBase):
    """An Engine (rollout/engines/base.py) around a Stepper."""

    def __init__(self, stepper: Stepper) -> None:
        super().__init__(stepper.name, stepper.capabilities, stepper.slots)
        self.version = -1
        """Version of the tokens that callbacks get now; -1 before the first"""
        self._stepper = stepper
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread
        self._open: set[asyncio.Future[Any]] = set()
        """What is to come from the thread: results of jobs, answers to commands"""
        self._loading = asyncio.Lock()
        self._asked: list[Command] = []
        """Commands of this turn of the loop, which the thread gets together"""
        self._commands: queue.SimpleQueue[list[Command]] = queue.SimpleQueue()
        """Commands for the thread, batch by batch; an empty one ends it"""
        self._posted: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        """Functions that the thread will have called on the loop, with their arguments"""
        self._due_s = 0.0
        """Monotonic time before which the thread takes no step, for `tokens_per_s`"""
        self._busy: tuple[float, float | None] = (0.0, None)
        """Seconds with something to generate, and since when there is; None while there is nothing"""

    @property
    def max_positions(self) -> int:
        return self._stepper.max_positions

    @property
    def active(self) -> int:
        return self._stepper.active

    @property
    def busy_s(self) -> float:
        """Seconds since the start in which the engine had something to generate."""
        seconds, since = self._busy
        return seconds if since is None else seconds + time.perf_counter() - since

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_future()
        self._task.add_done_callback(self._stopped)
        args, name = (torch.get_num_threads(),), f"engine-{self.name}"
        self._thread = threading.Thread(target=self._run, args=args, name=name, daemon=True)
        self._thread.start()

    async def generate(
        self,
        request: Request,
        on_token: TokenCallback | None = None,
        on_response: ResponseCallback | None = None,
    ) -> list[Completion]:
        """Returns the responses of a group, in order. Raises RecordError if the request can never be served,
        and EngineDied if the engine is not running. The callbacks are called on the event loop and must not
        raise. A request that is cancelled ends after the present step, or after PATIENCE_S without its
        unfinished tokens."""
        self._check_running(request)
        if self.version >= 0:
            self._stepper.check_request(request)
        job = Job(request, self._future(), on_token, on_response, self._post)
        self._send(partial(self._stepper.waiting.append, job))
        try:
            return await job.future
        except asyncio.CancelledError:
            for index, completion in (await self._withdraw(job)).items():
                if on_response:
                    on_response(index, completion)
            raise
        except Exception:
            self._send(partial(self._stepper.drop, job))
            raise

    async def load_weights(self, weights: WeightVersion) -> float:
        """Generates with `weights` from now on. Returns for how many seconds generation paused. Raises
        WeightVersionError for weights that cannot be used, and keeps the old ones."""
        async with self._loading:
            prepared = await asyncio.to_thread(self._stepper.prepare, weights)
            return await self._ask(self._swap, prepared)

    async def close(self) -> None:
        """Ends the engine and cancels the requests in flight. It waits for a step at most PATIENCE_S; the
        process then ends when the step does."""
        if self._task is None:
            return
        self._commands.put([])
        # A thread that comes out of torch while the interpreter ends aborts the process. One that has told its
        # end still lets go of what it held.
        atexit.register(self._thread.join)
        await asyncio.wait([self._task], timeout=PATIENCE_S)
        if not self._task.done():
            self._task.cancel()

    async def _withdraw(self, job: Job) -> dict[int, Completion]:
        """Has the thread forget a job. Returns its responses that have not ended, by index, but for those of a
        policy that has diverged; none if the engine has ended or the present step takes too long."""

        def forget() -> dict[int, Completion]:
            found = self._stepper.unfinished(job)
            self._stepper.drop(job)
            return {
                index: replace(completion, finish_reason=None)
                for index, completion in found.items()
                if np.isfinite(completion.logprobs).all()
            }

        with suppress(Exception):
            async with asyncio.timeout(PATIENCE_S):
                return await self._ask(forget)
        return {}

    def _future(self) -> "asyncio.Future[Any]":
        """Returns a future that `_stopped` ends, if nothing else does."""
        future = self._loop.create_future()
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def _send(self, command: Command) -> None:
        """Has the thread call a function between two steps."""
        if not self._asked:
            self._loop.call_soon(self._hand_over)
        self._asked.append(command)

    def _hand_over(self) -> None:
        commands, self._asked = self._asked, []
        self._commands.put(commands)

    def _ask(self, function: Callable[..., Any], *args: object) -> "asyncio.Future[Any]":
        """Has the thread call a function between two steps, and returns a future of its result or error. Raises
        EngineDied if the engine is not running."""
        self._check_alive()
        answer = self._future()

        def command() -> None:
            try:
                self._post(settle, answer, function(*args))
            except Exception as error:
                self._post(settle, answer, None, error)

        self._send(command)
        return answer

    def _dispatch(self, posted: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        """Calls on the loop what the thread posted. A callback that raises ends the engine."""
        assert self._task is not None
        try:
            for function, args in posted:
                function(*args)
        except Exception as error:
            settle(self._task, None, error)

    def _stopped(self, task: "asyncio.Future[None]") -> None:
        """Ends the requests in flight when the thread ends, with its error if it raised one."""
        self._commands.put([])
        error = None if task.cancelled() else task.exception()
        for future in list(self._open):
            if error is not None:
                settle(future, None, error)
            else:
                future.cancel()

    # From here on: the engine's thread.

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)  # a number of its own for each thread
        error = None
        try:
            while self._turn():
                self._deliver()
        except BaseException as raised:
            error = raised
        self._post(settle, self._task, None, error)
        self._deliver()

    def _turn(self) -> bool:
        """Applies the commands that come before the next step is due; if none do, takes it. Returns False when
        told to end."""
        stepper = self._stepper
        ready = stepper.version >= 0 and bool(stepper.active or stepper.waiting)
        if ready != (self._busy[1] is not None):
            self._busy = (self.busy_s, time.perf_counter() if ready else None)
        wait_s = max(0.0, self._due_s - time.monotonic()) if ready else None
        try:
            commands = self._commands.get(timeout=wait_s)
        except queue.Empty:
            drawn = stepper.step()
            self.tokens_drawn += drawn
            self._due_s = time.monotonic() + drawn / stepper.tokens_per_s
            return True
        for command in commands:
            command()
        return bool(commands)

    def _swap(self, prepared: Any) -> float:
        """Swaps the weights and returns the seconds that it took. The first ones tell which requests can never
        be served."""
        stepper, first = self._stepper, self._stepper.version < 0
        began = time.perf_counter()
        stepper.swap(prepared)
        pause = time.perf_counter() - began
        self._post(setattr, self, "version", stepper.version)
        for job in list(stepper.waiting) if first else ():
            try:
                stepper.check_request(job.request)
            except RecordError as error:
                stepper.waiting.remove(job)
                job.fail(error)
        return pause

    def _post(self, function: Callable[..., None], *args: object) -> None:
        """Has a function called on the loop, after the present step and in the order of the calls."""
        self._posted.append((function, args))

    def _deliver(self) -> None:
        if self._posted:
            posted, self._posted = self._posted, []
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._dispatch, posted)
