"""`run_python`: a model's code against tests, where it can reach nothing.

the caller ──▶ supervisor ──▶ tests ──▶ the code, both confined; a program has no tests
                 └ kills all that is left, when the tests have their verdict or the caller ends
"""

import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Literal

from areal_q.errors import RewardUnavailable, TaskError
from areal_q.sandbox.plain_data import Channel, PeerGone
from areal_q.system.processes import die_with_parent, supervised_command

_START_S = 60.0
"""Seconds that the processes may take to start, which do not count against the time limit"""
_BLOCKED_S = 5.0
"""Seconds beyond its time limit after which the tests' process is killed that does not keep to it"""
_KEPT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "SYSTEMROOT")
"""Environment variables that the processes get; the others may be secrets"""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Those by which libraries for numbers begin no threads, which could not be confined"""

Cause = Literal["passed", "failed", "error", "memory", "timeout", "output", "ended"]


@dataclass(frozen=True)
class Ran:
    """What became of a code under its tests."""

    passed: bool
    cause: Cause
    """`failed`: an assertion, or an output that is another; `error`: the code raised, or does not have what the
    tests ask for; `memory`, `timeout`, `output`: it took more than it may; `ended`: its process ended"""
    detail: str = ""
    """At which test, and what was said, in at most some hundred characters"""


def run_python(
    code: str,
    tests: str | Sequence[tuple[str, str]],
    *,
    timeout_s: float = 5.0,
    memory_mib: int = 512,
    names: Sequence[str] = (),
    site_packages: bool = False,
) -> Ran:
    """Returns whether `code` passes `tests`: statements, such as `assert add(1, 2) == 3`, or pairs of what a
    program reads and what it then prints, in which white space at the ends of lines is not compared.

    Code and tests are separate processes. Neither has a network, files beyond Python's own library and the
    system's, or other processes; each has `memory_mib` MiB and both together `timeout_s` seconds, after which
    nothing is left of them. With `site_packages` they can import what is installed.

    No code passes by ending its process, printing, or replacing `__eq__`, AssertionError or anything else: the
    verdict is that of the tests' process, which the code cannot reach or read, and to which its answers are
    data. The names of Python's builtins mean those in the tests, unless `names` lists them as the code's. What
    remains is up to the tests. They should import what they compare with, since any other name is the code's
    own; they should compare with data, since `assert f(x)` accepts every true object, and two objects of a
    class of the code's are compared by that; and code can answer the very inputs that it has learnt by heart.
    The other way round, arguments and results that are no plain data are handed over as references: a NumPy
    array equals no list, and no `isinstance` sees a class of the code's.

    Raises TaskError for tests that cannot be compiled or ask nothing of the code, and RewardUnavailable where
    the machine has nothing that isolates (confine.py), or the processes do not start.
    """
    if not tests:
        raise TaskError("run_python: there are no tests")
    kind = "tests" if isinstance(tests, str) else "program"
    with _Trial(kind, timeout_s, memory_mib, site_packages) as trial:
        if isinstance(tests, str):
            return _as_ran(*trial.ask(code, tests, [*names]))
        for number, (given, expected) in enumerate(tests, 1):
            said, what = trial.ask(code, given)
            if said != "printed":
                return _as_ran(said, f"input {number}: {what}")
            if _lines(what) != _lines(expected):
                return Ran(False, "failed", f"input {number}: printed {what[:200]!r}")
    return Ran(True, "passed")


def _as_ran(cause: Any, detail: str) -> Ran:
    if cause == "tests":
        raise TaskError(f"run_python: {detail}")
    return Ran(cause == "passed", cause, detail)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def bare_environment() -> dict[str, str]:
    """Returns the environment of a process that is to be confined."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return kept | dict.fromkeys(_THREADS, "1")


class _Trial:
    """The processes of one call of `run_python`."""

    def __init__(self, kind: str, timeout_s: float, memory_mib: int, site_packages: bool) -> None:
        limits = (str(memory_mib), str(timeout_s), str(int(site_packages)))
        self._timeout_s = timeout_s
        with ExitStack() as opened:
            try:
                self._socket, theirs = map(opened.enter_context, socket.socketpair())
                self._process = subprocess.Popen(
                    supervised_command("areal_q.sandbox.trial", kind, *limits),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=die_with_parent(),
                    env=bare_environment(),
                )
            except OSError as error:
                raise RewardUnavailable(
                    f"run_python: its processes do not start: {error}"
                ) from error
            theirs.close()
            opened.pop_all()
        self._channel = Channel(self._socket)

    def __enter__(self) -> "_Trial":
        return self

    def ask(self, *what: Any) -> tuple[str, str]:
        """Returns what the trial says of a request. Raises RewardUnavailable if it could not begin; how it ends
        after that is the code's doing."""
        self._socket.settimeout(_START_S)
        try:
            said, *why = self._channel.receive()
        except (PeerGone, OSError) as error:
            said, why = "refused", [f"its processes do not start: {error!r}"]
        if said != "ready":
            raise RewardUnavailable(f"run_python: {why[0]}")
        self._socket.settimeout(self._timeout_s + _BLOCKED_S)
        try:
            self._channel.send(what)
            said, detail = self._channel.receive()
            return said, detail
        except TimeoutError:
            return "timeout", "took too long, and blocked the tests' process"
        except (PeerGone, OSError):
            return "ended", "the tests' process ended"

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        with suppress(OSError):
            self._channel.close()
