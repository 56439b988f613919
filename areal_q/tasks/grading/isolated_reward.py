"""Scores that may raise, hang or crash, computed in processes that can be killed. Imports no torch.

    Isolated.score ──▶ a thread ──Ask──▶ socket ▶ reward_child ▶ socket ──Answer──▶ the thread
                          └ no reply in time: it and all that it started are killed, no score, another
                            process for the next one

| wait        | for                       | unblocked by                                             |
|-------------|---------------------------|----------------------------------------------------------|
| score       | a thread, one a process   | another score that ends, by its timeout at the latest    |
| the thread  | its process's reply       | the reward's end; the process's death; the timeout       |
| start       | the process's first frame | the file or library being loaded; _START_S               |
| a coroutine | the listener              | the reward's end or timeout; the process's death         |
| listener    | its process's next reply  | a reply; the process's death, at `close` at the latest   |

A thread waits for each process, so that answers that end together do not wait for turns of the event loop. Of a
reward that is a coroutine a process scores many responses at once: the thread only sends them, and one more
thread of the process, the listener, takes the replies in the order in which they come. Its timeout cancels the
coroutine alone; only a process whose own event loop is blocked is killed.
The process itself and its frames: reward_process.py.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from areal_q.decode_errors import in_words
from areal_q.errors import ConfigError, TaskError
from areal_q.messages.trajectories import FailureCause
from areal_q.tasks.base import Completed, Problem, Score
from areal_q.tasks.grading.reward_process import TIMED_OUT, Ask, Graded, RewardProcess, RewardReady

logger = logging.getLogger(__name__)

_BLOCKED_S = 5.0
"""Seconds beyond twice its timeout after which a process is killed that cancels no coroutine"""
_START_S = 60.0
"""Seconds that the imports of a reward may take, which do not count against its timeout"""


class Isolated:
    """A reward that runs in at most `processes` processes, which are started when they are needed.

    `source` is what the child loads: ("grader", "math", ""), ("file", path, `name` and `settings` of
    its function as TOML) or ("judge", its settings as JSON, "").
    """

    def __init__(
        self,
        source: tuple[str, str, str],
        timeout_s: float,
        processes: int,
        memory_mib: int = 0,
    ) -> None:
        self._source, self._timeout_s, self._memory_mib = source, timeout_s, memory_mib
        self._threads = ThreadPoolExecutor(processes, "reward")
        self._own = threading.local()
        """Its `child` is the process of the present thread, None or missing if it has none"""
        self._lock = threading.Lock()
        self._children: set[RewardProcess] = set()
        self._closed = False
        self._ready = RewardReady()
        self.errors = 0
        """Number of scores that failed or took too long since the start"""
        self.failure = ""
        """How the newest of them failed"""

    @property
    def whole(self) -> bool:
        """True if one call scores all responses to a prompt; known once it has started."""
        return self._ready.whole

    async def start(self) -> None:
        """Starts one process. Raises TaskError or ConfigError for a reward that cannot be loaded."""
        child = await asyncio.get_running_loop().run_in_executor(self._threads, self._child)
        self._ready = child.ready

    async def score(
        self, problem: Problem, responses: Sequence[Completed], index: int = 0
    ) -> list[Score]:
        """Returns the score of the response at `index`, or those of all where the reward is `whole`. It never
        raises: a failure is counted and gives a score that is not valid, with its cause."""
        ready, sent = self._ready, [*responses]
        if not (ready.whole or ready.group):
            sent, index = [responses[index]], 0
        if not ready.ids:
            sent = [msgspec.structs.replace(r, ids=()) for r in sent]
        ask = Ask(problem, sent, index)
        if ready.at_once:
            graded = await self._together(ask)
        else:
            loop = asyncio.get_running_loop()
            graded = await loop.run_in_executor(self._threads, self._graded, ask)
        count = len(sent) if ready.whole else 1
        if len(graded) != count:  # of the process itself: one for all that it was asked
            graded = graded[:1] * count
        for failed in (g for g in graded if not g.score):
            self._count(failed.error, problem)
        return [g.score or Score.failed(g.cause) for g in graded]

    async def close(self) -> None:
        """Kills the processes, and those that they started, and waits for their ends."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            for child in self._children:
                child.kill()
        await asyncio.to_thread(self._threads.shutdown)
        with self._lock:
            children = [*self._children]
        for child in children:
            child.end()

    def _graded(self, ask: Ask) -> list[Graded]:
        """Returns what this thread's process answers, or why there is no answer."""
        child = None
        try:
            child = self._child()
            return child.ask(ask, self._timeout_s)
        except TimeoutError:
            failed = Graded(error=TIMED_OUT, cause="timeout")
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            cause = "killed" if child else "unavailable"
            failed = Graded(error=f"its process ended: {in_words(error)}", cause=cause)
        except (TaskError, ConfigError) as error:
            failed = Graded(error=f"its process did not start: {error}", cause="unavailable")
        if child:  # a late reply would be taken for that to the next request
            self._end(child)
            self._own.child = None
        return [failed]

    async def _together(self, ask: Ask) -> list[Graded]:
        """Returns what a process answers that scores many at once, or why there is no answer: a response that
        was not alone in a process is not blamed for its end."""
        child, loop = None, asyncio.get_running_loop()
        try:
            child, reply = await loop.run_in_executor(self._threads, self._posted, ask)
            async with asyncio.timeout(2 * self._timeout_s + _BLOCKED_S):
                return await asyncio.wrap_future(reply)
        except (TimeoutError, OSError, EOFError, msgspec.MsgspecError) as error:
            late = isinstance(error, TimeoutError)
            alone = child is not None and (child.open if late else child.open_at_end) == 1
            if child:
                child.kill()
            cause: FailureCause = "timeout" if late else "killed"
            what = TIMED_OUT if late else f"its process ended: {in_words(error)}"
            return [Graded(error=what, cause=cause if alone else "unavailable")]
        except (TaskError, ConfigError) as error:
            return [Graded(error=f"its process did not start: {error}", cause="unavailable")]

    def _posted(self, ask: Ask) -> "tuple[RewardProcess, Future[list[Graded]]]":
        """Sends a question to this thread's process. Raises TaskError or ConfigError if none can be started."""
        while (reply := (child := self._child()).post(ask, self._timeout_s)) is None:
            self._own.child = None
            # Others may still wait for its answers.
            patience_s = 2 * self._timeout_s + _BLOCKED_S
            threading.Thread(target=self._end, args=[child, patience_s], daemon=True).start()
        return child, reply

    def _child(self) -> "RewardProcess":
        """Returns this thread's process, which is started if there is none."""
        child: RewardProcess | None = getattr(self._own, "child", None)
        if child is None:
            child = self._own.child = self._spawn()
        return child

    def _spawn(self) -> "RewardProcess":
        child = RewardProcess(self._source, self._memory_mib, self._timeout_s)
        with self._lock:
            self._children.add(child)
            if self._closed:
                child.kill()
        try:
            ready = child.begin(time.monotonic() + _START_S)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            self._end(child)
            raise TaskError(f"{self._source[1]}: cannot be started: {in_words(error)}") from error
        if ready.error:
            self._end(child)
            raise (ConfigError if ready.extra_missing else TaskError)(ready.error)
        return child

    def _end(self, child: "RewardProcess", patience_s: float = 0.0) -> None:
        child.end(patience_s)
        with self._lock:
            self._children.discard(child)

    def _count(self, failure: str, problem: Problem) -> None:
        self.errors += 1
        self.failure = failure
        if self.errors & (self.errors - 1) == 0:  # only the 1st, 2nd, 4th, 8th … failure is logged
            logger.warning(
                "reward failed, %d so far: %s, for prompt %.80r",
                self.errors,
                failure,
                problem.prompt,
            )
