"""Scores that may raise, hang or crash, computed in processes that can be killed. Imports no torch.

    Isolated.score ──▶ a thread ──Ask──▶ socket ▶ reward_child ▶ socket ──Graded──▶ the thread
                          └ no reply in time: it and all that it started are killed, no score, another
                            process for the next one

| wait        | for                       | unblocked by                                             |
|-------------|---------------------------|----------------------------------------------------------|
| score       | a thread, one a process   | another score that ends, by its timeout at the latest    |
| the thread  | its process's reply       | the reward's end; the process's death; the timeout       |
| start       | the process's first frame | the file or library being loaded; _START_S                |

A thread waits for each process, since the event loop comes back only after a step of the engine, and many
answers end with one step. Frames are msgpack after their length. A user's `print` goes to stderr, so that it
cannot disturb them.
"""

import asyncio
import logging
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec

from areal_q.decode_errors import in_words
from areal_q.errors import ConfigError, TaskError
from areal_q.messages.trajectories import FailureCause
from areal_q.system.processes import die_with_parent, supervised_command
from areal_q.tasks.base import Problem, Score

logger = logging.getLogger(__name__)

TIMED_OUT = "took too long"
_START_S = 60.0
"""Seconds that the imports of a reward may take, which do not count against its timeout"""
MAX_FRAME = 1 << 20
"""Most bytes of a reply; a larger one counts as an error of the reward."""


class Ask(msgspec.Struct, frozen=True):
    problem: Problem
    response: str


class Graded(msgspec.Struct, frozen=True):
    """A score, or why there is none. The first one that a process sends says that it is ready."""

    score: Score | None = None
    error: str = ""
    cause: FailureCause = "exception"
    """Cause of the error, if a response was to be scored"""
    extra_missing: bool = False
    """True if the error is an extra that is not installed"""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Graded)


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
        self.errors = 0
        """Number of scores that failed or took too long since the start"""
        self.failure = ""
        """How the newest of them failed"""

    async def start(self) -> None:
        """Starts one process. Raises TaskError or ConfigError for a reward that cannot be loaded."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._child)

    async def score(self, problem: Problem, response: str) -> Score:
        """Returns the score of a response. It never raises: a failure is counted and gives a score that is not
        valid, with its cause."""
        loop, ask = asyncio.get_running_loop(), Ask(problem, response)
        graded = await loop.run_in_executor(self._threads, self._graded, ask)
        if graded.score:
            return graded.score
        self._count(graded.error, problem)
        return Score.failed(graded.cause)

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

    def _graded(self, ask: Ask) -> Graded:
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
        return failed

    def _child(self) -> "_Child":
        """Returns this thread's process, which is started if there is none."""
        child: _Child | None = getattr(self._own, "child", None)
        if child is None:
            child = self._own.child = self._spawn()
        return child

    def _spawn(self) -> "_Child":
        child = _Child(self._source, self._memory_mib)
        with self._lock:
            self._children.add(child)
            if self._closed:
                child.kill()
        try:
            ready = child.read(time.monotonic() + _START_S)
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

    def __init__(self, source: tuple[str, str, str], memory_mib: int) -> None:
        """Starts the process, whose first frame says whether it is ready."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                supervised_command("areal_q.tasks.grading.reward_child", *source, str(memory_mib)),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    def ask(self, ask: Ask, timeout_s: float) -> Graded:
        """Returns the reply. Raises TimeoutError if there is none after `timeout_s`, and OSError, EOFError or
        MsgspecError if the process has ended or sends something else."""
        deadline = time.monotonic() + timeout_s
        frame = _encoder.encode(ask)
        self._socket.settimeout(timeout_s)
        self._socket.sendall(len(frame).to_bytes(4, "little") + frame)
        return self.read(deadline)

    def read(self, deadline: float) -> Graded:
        """Returns the next frame; `deadline` is in monotonic seconds. Raises what `ask` raises."""
        size = int.from_bytes(self._receive(4, deadline), "little")
        if size > MAX_FRAME:
            raise EOFError(f"a reply of {size} bytes")
        return _decoder.decode(self._receive(size, deadline))

    def _receive(self, nbytes: int, deadline: float) -> bytes:
        received = b""
        while len(received) < nbytes:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(left_s)
            part = self._socket.recv(nbytes - len(received))
            if not part:
                raise EOFError(f"{len(received)} of {nbytes} bytes received")
            received += part
        return received

    def kill(self) -> None:
        """Has the process killed, so that a thread that waits for it goes on."""
        self._process.terminate()

    def end(self) -> None:
        """Has the process killed, waits until it and all that it started have ended, and closes the socket,
        which no thread may be using."""
        self._process.terminate()
        self._process.wait()
        self._socket.close()
