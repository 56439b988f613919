"""Commands in this process, assertions about how one ended, and whether a process has."""

import io
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from areal_q.system.command import run_command


def run_here(
    name: str, main: Callable[..., Any], *args: str, who: str = "areal-q: error"
) -> subprocess.CompletedProcess[str]:
    """Returns how `areal-q NAME` ends on `args`, without the seconds in which a process imports torch."""
    out, err = io.StringIO(), io.StringIO()
    with (
        handlers_kept(),
        mock.patch.object(sys, "argv", [name, *args]),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        run_command(name, main, who=who)
    code = ended.value.code
    assert code is None or isinstance(code, int)
    return subprocess.CompletedProcess(args, code or 0, out.getvalue(), err.getvalue())


OURS = (sys.executable, "-P", "-m", "areal_q")


def areal_q(here: Path, *words: str, command: Sequence[str] = OURS) -> str:
    """Returns what `areal-q WORDS`, in the directory `here`, prints on stdout; it must end well. A process of
    its own, whose runs start a Redis of their own. `command`: that of another installation."""
    environment = {k: v for k, v in os.environ.items() if k != "REDIS_URL"}
    environment |= {"COLUMNS": "160", "NO_COLOR": "1"}
    argv = [*command, *words]
    done = subprocess.run(argv, cwd=here, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Undoes what a command does with signals, so that Ctrl-C reaches the tests after it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def wait_until(
    holds: Callable[[], object], said: Callable[[], object], *processes: subprocess.Popen[Any]
) -> None:
    """Waits until `holds` returns something true. Fails with what was `said` where one of the processes ends,
    or shortly before pytest would end the test without a word."""
    while not holds():
        codes = [process.poll() for process in processes]
        assert codes.count(None) == len(codes), f"ended with {codes}: {said()}"
        assert time.monotonic() < limit.at_s, f"waited in vain: {said()}"
        time.sleep(0.02)


class limit:
    """Where waits of the present test end; tests/conftest.py sets it."""

    at_s = math.inf


def stretched(seconds: float) -> float:
    """Returns the seconds that what takes `seconds` alone may take beside all that shares the processors."""
    jobs = max(os.getloadavg()[0], int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    return seconds * max(1.0, jobs / (os.cpu_count() or 1))


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Lets no file of this process grow beyond `room` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refused(result: subprocess.CompletedProcess[str], *named: str) -> None:
    """Asserts that the command ended with exit code 2 and one line on stderr that names all of `named`."""
    assert result.returncode == 2, result.stdout + result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for word in named:
        assert word in result.stderr


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second between opening and reading
        return False
