"""A process that scores responses, as those that ask it see it: frames on a socket. Imports no torch.

Frames are msgpack after their length. A user's `print` goes to stderr, so that it cannot disturb them.
"""

import itertools
import socket
import subprocess
import threading
import time
from concurrent.futures import Future
from contextlib import suppress

import msgspec

from areal_q.messages.trajectories import FailureCause
from areal_q.sandbox.run_code import bare_environment
from areal_q.system.processes import die_with_parent, supervised_command
from areal_q.tasks.base import Completed, Problem, Score
from areal_q.tasks.grading.child_process import frame
from areal_q.tasks.grading.graders import is_confined

TIMED_OUT = "took too long"
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
    last: bool = False
    """True if processes that it started go on after its timeout: this process is to end, once the questions
    that are open have their answers, and they with it"""


class RewardReady(msgspec.Struct, frozen=True):
    """A process's first frame: it can score, or why it cannot."""

    error: str = ""
    extra_missing: bool = False
    """True if the error is an extra that is not installed"""
    ids: bool = False
    group: bool = False
    at_once: bool = False
    whole: bool = False
    """These are as in Scorer (own_reward.py)"""


_answers = msgspec.msgpack.Decoder(Answer)
_readiness = msgspec.msgpack.Decoder(RewardReady)


class RewardProcess:
    """A process that scores one response after the other, below its supervisor (areal_q/system/processes.py).
    The kernel tells the supervisor when the thread ends that started it, which lives until `Isolated.close`."""

    def __init__(self, source: tuple[str, str, str], memory_mib: int, timeout_s: float) -> None:
        """Starts the process, whose first frame says whether it is ready."""
        self.ready, self.over = RewardReady(), False
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
                env=bare_environment() if is_confined(source) else None,
            )

    @property
    def open(self) -> int:
        """Number of questions that were posted and have no reply."""
        return len(self._open)

    def begin(self, deadline: float) -> RewardReady:
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

    def post(self, ask: Ask, timeout_s: float) -> "Future[list[Graded]] | None":
        """Sends a question, and returns what its reply will be in; an error of the process is raised there.
        Returns None if the process is `over`, and sends nothing."""
        ask = msgspec.structs.replace(ask, number=next(self._numbers))
        reply = Future[list[Graded]]()
        with self._lock:
            if self.over:
                return None
            self._open[ask.number] = reply
        try:
            self._send(ask, timeout_s)
        except OSError as error:
            self._settle(ask.number, error)
        return reply

    def _listen(self) -> None:
        """Takes replies until the process ends, whose open questions then have its end as their reply."""
        try:
            while True:
                answer = _answers.decode(self._frame(None))
                with self._lock:
                    self.over |= answer.last
                self._settle(answer.number, answer.graded)
                if self.over and not self._open:
                    self._process.terminate()
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            with self._lock:
                self.over, left = True, [*self._open]
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
        if self._listener is None:  # which waits without a limit on the same socket
            self._socket.settimeout(timeout_s)
        self._socket.sendall(frame(ask))

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

    def end(self, patience_s: float = 0.0) -> None:
        """Has the process killed, if it is not over after `patience_s`, waits until it and all that it started
        have ended, and closes the socket, which no thread may be using."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        self._process.terminate()
        self._process.wait()
        if self._listener:
            self._listener.join()
        self._socket.close()
