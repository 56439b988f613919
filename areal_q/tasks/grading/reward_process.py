"""Scores that may raise, hang or crash, computed in processes that can be killed. Imports no torch.

    Isolated.score ──Ask──▶ stdin ▶ reward_child ▶ stdout ──Graded──▶ Isolated.score
          └ no reply in time: kill -9, no score, another process for the next one

| wait        | for                       | unblocked by                                             |
|-------------|---------------------------|----------------------------------------------------------|
| score       | an idle process           | another score that ends, by its timeout at the latest    |
|             | its reply                 | the reward's end; the process's death; the timeout       |
| start       | the process's first frame | the file or library being loaded; _START_S                |

Frames are msgpack after their length. A user's `print` goes to stderr, so that it cannot disturb them.
"""

import asyncio
import contextlib
import logging
import signal
from asyncio.subprocess import PIPE, Process

import msgspec

from areal_q.errors import ConfigError, TaskError
from areal_q.messages.trajectories import FailureCause
from areal_q.system.processes import die_with_parent, module_command
from areal_q.tasks.base import Problem, Score

logger = logging.getLogger(__name__)

TIMED_OUT = "took too long"
FAILED = "reward failed"
"""Beginning of every line of the log about a failure, by which areal_q/observability/reward_signal.py finds
it"""
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
        self._idle: asyncio.LifoQueue[Process | None] = asyncio.LifoQueue()
        self._all: set[Process] = set()
        for _ in range(processes):
            self._idle.put_nowait(None)
        self.errors = 0
        """Number of scores that failed or took too long since the start"""

    async def start(self) -> None:
        """Starts one process. Raises TaskError or ConfigError for a reward that cannot be loaded."""
        place = await self._idle.get()
        try:
            place = place or await self._spawn()
        finally:
            self._idle.put_nowait(place)

    async def score(self, problem: Problem, response: str) -> Score:
        """Returns the score of a response. It never raises: a failure is counted and gives a score that is not
        valid, with its cause."""
        process, graded = await self._idle.get(), None
        cause: FailureCause = "unavailable"
        try:
            process = process or await self._spawn()
            asked = _ask(process, Ask(problem, response))
            graded = await asyncio.wait_for(asked, self._timeout_s)
            cause, failure = graded.cause, graded.error
        except TimeoutError:
            cause, failure = "timeout", TIMED_OUT
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            cause = "killed" if process else cause
            failure = f"its process ended: {error}"
        except (TaskError, ConfigError) as error:
            failure = f"its process did not start: {error}"
        finally:
            if process and not graded:
                # A late reply would be taken for that to the next request.
                _kill(process)
                process = None
            self._idle.put_nowait(process)
        if graded and graded.score:
            return graded.score
        self._count(failure, problem)
        return Score.failed(cause)

    async def close(self) -> None:
        """Kills the processes and waits for their ends."""
        for process in self._all:
            _kill(process)
        await asyncio.gather(*(_ended(process) for process in self._all))
        self._all.clear()

    def _count(self, failure: str, problem: Problem) -> None:
        self.errors += 1
        if self.errors & (self.errors - 1) == 0:  # only the 1st, 2nd, 4th, 8th … failure is logged
            logger.warning(
                "%s, %d so far: %s, for prompt %.80r",
                FAILED,
                self.errors,
                failure,
                problem.prompt,
            )

    async def _spawn(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            *module_command(
                "areal_q.tasks.grading.reward_child", *self._source, str(self._memory_mib)
            ),
            stdin=PIPE,
            stdout=PIPE,
            preexec_fn=die_with_parent(signal.SIGKILL),
        )
        self._all = {p for p in self._all if p.returncode is None} | {process}
        try:
            ready = await asyncio.wait_for(_read(process), _START_S)
        except (TimeoutError, EOFError, msgspec.MsgspecError) as error:
            _kill(process)
            raise TaskError(f"{self._source[1]}: cannot be started: {error}") from error
        except asyncio.CancelledError:
            _kill(process)
            raise
        if ready.error:
            _kill(process)
            raise (ConfigError if ready.extra_missing else TaskError)(ready.error)
        return process


async def _ask(process: Process, ask: Ask) -> Graded:
    assert process.stdin is not None
    frame = _encoder.encode(ask)
    process.stdin.write(len(frame).to_bytes(4, "little") + frame)
    await process.stdin.drain()
    return await _read(process)


async def _read(process: Process) -> Graded:
    assert process.stdout is not None
    size = int.from_bytes(await process.stdout.readexactly(4), "little")
    if size > MAX_FRAME:
        raise EOFError(f"a reply of {size} bytes")
    return _decoder.decode(await process.stdout.readexactly(size))


def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def _ended(process: Process) -> None:
    """Waits until the process has ended and its pipes are closed."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    await process.stdout.read()
    await process.wait()
