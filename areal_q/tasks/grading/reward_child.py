"""The process that runs a slow reward or a user's own.

It reads requests from stdin, writes replies to its original stdout, and ends when stdin is closed. Its
supervisor (areal_q/system/processes.py) ends it, and all processes that the reward started.
"""

import importlib
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from areal_q.errors import ConfigError, RewardUnavailable, TaskError
from areal_q.messages.trajectories import FailureCause
from areal_q.plugins import line_of
from areal_q.system.command import accept_any_text
from areal_q.tasks.base import Problem, Score
from areal_q.tasks.datasets.python_file import load_score
from areal_q.tasks.grading.graders import GRADERS, check_extra
from areal_q.tasks.grading.reward_process import Ask, Graded

_encoder = msgspec.msgpack.Encoder()


def main(kind: str, name: str, function: str, memory_mib: str) -> None:
    questions, replies = _private_pipes()
    accept_any_text()  # a reward may print what the model wrote
    try:
        score = _load(kind, name, function)
    except (ConfigError, TaskError) as error:
        _send(replies, Graded(error=str(error), extra_missing=isinstance(error, ConfigError)))
        return
    _limit_memory(int(memory_mib) << 20)
    _send(replies, Graded())
    decoder = msgspec.msgpack.Decoder(Ask)
    own = name if kind == "file" else ""
    while size := questions.read(4):
        ask = decoder.decode(questions.read(int.from_bytes(size, "little")))
        _send(replies, _graded(score, ask, own))


def _load(kind: str, name: str, function: str) -> Callable[[Problem, str], Score]:
    """Returns the score of a built-in grader or of a file."""
    if kind == "file":
        return load_score(name, function)
    check_extra(name)
    if needs := GRADERS[name].needs:
        importlib.import_module(
            needs
        )  # imported now, so that it does not count against the first timeout
    return GRADERS[name].score


def _graded(score: Callable[[Problem, str], Score], ask: Ask, own: str) -> Graded:
    """Returns the score of a response, or why there is none: of code of the user's `own`, with their line."""
    try:
        return Graded(score(ask.problem, ask.response))
    except Exception as error:  # a user's code, and sympy, may raise anything
        said = f"raised {type(error).__name__}: {error}"[:500]
        said += f", in {line_of(error, own)}" if own else ""
        return Graded(error=said, cause=_cause(error))


def _cause(error: Exception) -> FailureCause:
    if isinstance(error, RewardUnavailable):
        return "unavailable"
    return "killed" if isinstance(error, MemoryError) else "exception"


def _limit_memory(more: int) -> None:
    """Limits this process to `more` bytes of address space beyond what it has now; 0 means no limit. The memory
    that libraries reserve on import, for some of them tens of gigabytes, does not count."""
    held = Path("/proc/self/statm")
    if not more or not held.exists():
        return
    now = int(held.read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    bound = now + more if most == resource.RLIM_INFINITY else min(now + more, most)
    resource.setrlimit(resource.RLIMIT_AS, (bound, most))


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Returns duplicates of stdin and stdout. The reward's own reads are then empty, and its prints go to
    stderr."""
    questions, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return questions, replies


def _send(replies: BinaryIO, graded: Graded) -> None:
    frame = _encoder.encode(graded)
    replies.write(len(frame).to_bytes(4, "little") + frame)
    replies.flush()
