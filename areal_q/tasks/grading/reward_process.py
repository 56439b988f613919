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
Frames are msgpack after their length. A user's `print` goes to stderr, so that it cannot disturb them.
"""

import asyncio
import itertools
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from areal_q.decode_errors import in_words
from areal_q.errors import ConfigError, TaskError
from areal_q.messages.trajectories import FailureCause
from areal_q.system.processes import die_with_parent, supervised_command
from areal_q.tasks.base import Completed, Problem, Score

logger = logging.getLogger(__name__)

TIMED_OUT = "took too long"
_BLOCKED_S = 5.0
"""Seconds beyond twice its timeout after which a process is killed that cancels no coroutine"""
_START_S = 60.0
"""Seconds that the imports of a reward may take, which do not count against its timeout"""
MAX_FRAME = 16 << 20
"""Most bytes of a reply; a larger one counts as an error of the reward."""


class Ask(msgspec.Struct, frozen=True):
    """Responses to one problem, of which the reward scores the one at `index`, or all if it is that kind."""

    problem: Problem
    responses: list[Completed]
    index: int = 0
    number: int = 0
    """Number among the questions to its process"""


class Graded(msgspec.Struct, frozen=True):
    """A score, or why there is none."""

    score: Score | None = None
    error: str = ""
    cause: FailureCause = "exception"
    """Cause of the error"""


class Answer(msgspec.Struct, frozen=True):
    """What became of the Ask of this number: one entry, or one for each of its responses."""

    number: int
    graded: list[Graded]


class Ready(msgspec.Struct, frozen=True):
    """A process's first frame: it can score, or why it cannot."""

    error: str = ""
    extra_missing: bool = False
    """True if the error is an extra that is not installed"""
    ids: bool = False
    group: bool = False
    at_once: bool = False
    whole: bool = False
    """These are as in Scorer (own_reward.py)"""


_encoder = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(Answer)
_readiness = msgspec.msgpack.Decoder(Ready)


class Isolated:
    """A reward that runs in at most `processes` processes, which are started when they are needed.

    `source` is what the child loads: ("grader", "math", "") or ("file", path, function).
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
        self._children: set[_Child] = set()
        self._closed = False
        self._ready = Ready()
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
        for child in self._children:
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

    def _posted(self, ask: Ask) -> "tuple[_Child, Future[list[Graded]]]":
        """Sends a question to this thread's process. Raises TaskError or ConfigError if none can be started."""
        child = self._child()
        if child.over:
            self._end(child)
            self._own.child = None
            child = self._child()
        return child, child.post(ask, self._timeout_s)

    def _child(self) -> "_Child":
        """Returns this thread's process, which is started if there is none."""
        child: _Child | None = getattr(self._own, "child", None)
        if child is None:
            child = self._own.child = self._spawn()
        return child

    def _spawn(self) -> "_Child":
        child = _Child(self._source, self._memory_mib, self._timeout_s)
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

    def _end(self, child: "_Child") -> None:
        child.end()
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


class _Child:
    """A process that scores one response after the other, below its supervisor (areal_q/system/processes.py).
    The kernel tells the supervisor when the thread ends that started it, which lives until `Isolated.close`."""

    def __init__(self, source: tuple[str, str, str], memory_mib: int, timeout_s: float) -> None:
        """Starts the process, whose first frame says whether it is ready."""
        self.ready, self.over = Ready(), False
        """What it said, and whether it has ended or is about to"""
        self.open_at_end = 0
        """Number of questions that were open when its listener noticed the end"""
        self._lock, self._open = threading.Lock(), dict[int, Future[list[Graded]]]()
        self._numbers = itertools.count(1)
        self._listener: threading.Thread | None = None
        self._socket, theirs = socket.socketpair()
        limits = (str(memory_mib), str(timeout_s))
        with theirs:
            self._process = subprocess.Popen(
                supervised_command("areal_q.tasks.grading.reward_child", *source, *limits),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    @property
    def open(self) -> int:
        """Number of questions that were posted and have no reply."""
        return len(self._open)

    def begin(self, deadline: float) -> Ready:
        """Returns the first frame, and listens from then on if the process scores many at once; `deadline` is
        in monotonic seconds. Raises what `ask` raises."""
        self.ready = _readiness.decode(self._frame(deadline))
        if self.ready.at_once:
            self._listener = threading.Thread(target=self._listen, daemon=True)
            self._listener.start()
        return self.ready

    def ask(self, ask: Ask, timeout_s: float) -> list[Graded]:
        """Returns the reply. Raises TimeoutError if there is none after `timeout_s`, and OSError, EOFError or
        MsgspecError if the process has ended or sends something else."""
        deadline = time.monotonic() + timeout_s
        self._send(ask, timeout_s)
        return _answers.decode(self._frame(deadline)).graded

    def post(self, ask: Ask, timeout_s: float) -> "Future[list[Graded]]":
        """Sends a question, and returns what its reply will be in; an error of the process is raised there."""
        ask = msgspec.structs.replace(ask, number=next(self._numbers))
        reply = Future[list[Graded]]()
        with self._lock:
            self._open[ask.number] = reply
        try:
            if self.over:
                raise EOFError("it ended")
            self._send(ask, timeout_s)
        except (OSError, EOFError) as error:
            self._settle(ask.number, error)
        return reply

    def _listen(self) -> None:
        """Takes replies until the process ends, whose open questions then have its end as their reply."""
        try:
            while True:
                answer = _answers.decode(self._frame(None))
                self._settle(answer.number, answer.graded)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            self.over = True
            with self._lock:
                left = [*self._open]
            self.open_at_end = len(left)
            for number in left:
                self._settle(number, error)

    def _settle(self, number: int, outcome: list[Graded] | Exception) -> None:
        with self._lock:
            reply = self._open.pop(number, None)
        if reply is None or not reply.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            reply.set_exception(outcome)
        else:
            reply.set_result(outcome)

    def _send(self, ask: Ask, timeout_s: float) -> None:
        frame = _encoder.encode(ask)
        if self._listener is None:  # which waits without a limit on the same socket
            self._socket.settimeout(timeout_s)
        self._socket.sendall(len(frame).to_bytes(4, "little") + frame)

    def _frame(self, deadline: float | None) -> bytes:
        size = int.from_bytes(self._receive(4, deadline), "little")
        if size > MAX_FRAME:
            raise EOFError(f"a reply of {size} bytes")
        return self._receive(size, deadline)

    def _receive(self, nbytes: int, deadline: float | None) -> bytes:
        """Returns the next bytes; a `deadline` of None is none."""
        received = b""
        while len(received) < nbytes:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(left_s)
            part = self._socket.recv(nbytes - len(received))
            if not part:
                raise EOFError(f"{len(received)} of {nbytes} bytes received")
            received += part
        return received

    def kill(self) -> None:
        """Has the process killed, so that a thread that waits for it goes on."""
        self.over = True
        self._process.terminate()

    def end(self) -> None:
        """Has the process killed, waits until it and all that it started have ended, and closes the socket,
        which no thread may be using."""
        self._process.terminate()
        self._process.wait()
        if self._listener:
            self._listener.join()
        self._socket.close()
