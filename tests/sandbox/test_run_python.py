"""What `run_python` says of honest code, of attacks on the machine, and of code that wants to pass unearned.

Every attack also runs where nothing isolates, and succeeds there: so it is the walls that stop it.
"""

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
from helpers.commands import stretched
from helpers.own_code.hostile import (
    ASKED,
    ASKED_BY_FUNCTIONS,
    ATTACKS,
    ENDED_AT_ONCE,
    EXHAUSTING,
    FORGERIES,
    HONEST,
    RESULTS,
    unknown_number,
)
from helpers.paths import ROOT

from areal_q.errors import RewardUnavailable, TaskError
from areal_q.sandbox import Ran, run_python
from areal_q.sandbox.confine import _readable

MARK = f".{os.getpid():06d}1"
"""How each time limit of this file ends, by which its processes are known"""
LONG_S, SHORT_S = (float(f"{round(seconds)}{MARK}") for seconds in (stretched(20), stretched(1)))


def left_over() -> list[list[str]]:
    """Returns the commands of the processes of this file's trials that have not ended."""
    found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [command for command in found if any(MARK in word for word in command[1:])]


@pytest.fixture
def secret(walls: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that nobody may read, and after the test no process of it."""
    monkeypatch.setenv("SECRET_OF_THIS_TEST", "secret")
    path = tmp_path / "mine" / "secret"
    path.parent.mkdir()
    path.write_text("secret")
    yield path
    assert left_over() == []


def test_no_attack_reaches_beyond_the_code(secret, short_dir, stack):
    server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    server.bind(at := str(short_dir / "server"))
    server.setblocking(False)
    code = RESULTS.format(attacks=ATTACKS, secret=str(secret), server=at)
    before = secret.stat()
    tests = (
        f"got = results()\nassert len(got) == {len(ATTACKS)} and 'done' not in got.values(), got"
    )
    assert run_python(code, tests, timeout_s=LONG_S) == Ran(True, "passed")
    assert [*secret.parent.iterdir()] == [secret] and secret.stat() == before
    with pytest.raises(BlockingIOError):
        server.recv(9)
    succeed = f"{code}\nassert set((found := results()).values()) == {{'done'}}, found"
    subprocess.run([sys.executable, "-c", succeed], cwd="/", timeout=LONG_S, check=True)
    assert server.recv(9) == b"told"


@pytest.mark.parametrize("name", EXHAUSTING)
@pytest.mark.parametrize("kind", ["tests", "program"])
def test_what_takes_too_much_is_ended(name, kind, secret):
    code, cause = EXHAUSTING[name]
    if (name, kind) == ("endless output", "program"):
        cause = "output"
    tests = "assert 1" if kind == "tests" else [("", "")]
    ran = run_python(code, tests, timeout_s=SHORT_S if cause == "timeout" else LONG_S)
    assert (ran.passed, ran.cause) == (False, cause), ran


def processor_s(code: str, kind: str) -> tuple[Ran, float]:
    """Returns what became of `code`, and the seconds of a processor that all of its processes took together."""
    before = os.times()
    ran = run_python(code, "assert SECRET" if kind == "tests" else [("", "")], timeout_s=LONG_S)
    after = os.times()
    user_s = after.children_user - before.children_user
    return ran, user_s + after.children_system - before.children_system


@pytest.mark.parametrize("name", ENDED_AT_ONCE)
@pytest.mark.parametrize("kind", ["tests", "program"])
def test_an_attack_is_an_error_within_a_second(name, kind, secret):
    """Of a processor's time, beyond that of code which does nothing: others may have the machine meanwhile."""
    before = secret.stat()
    code = f"SECRET = {str(secret)!r}\n"
    idle, idle_s = processor_s(code, kind)
    ran, took_s = processor_s(code + ENDED_AT_ONCE[name], kind)
    assert idle.passed and not ran.passed and ran.cause in ("error", "memory"), ran
    assert took_s < idle_s + 1.0
    assert [*secret.parent.iterdir()] == [secret] and secret.stat() == before


@pytest.mark.parametrize("name", FORGERIES)
def test_no_code_passes_but_by_its_answer(name, secret):
    ran = run_python(FORGERIES[name], ASKED.format(unknown_number()), timeout_s=LONG_S)
    assert not ran.passed and ran.cause in ("failed", "error", "ended"), ran


@pytest.mark.parametrize("by", ASKED_BY_FUNCTIONS)
def test_no_code_brings_what_the_tests_compare_by(by, secret):
    code, tests = FORGERIES["brings builtins of its own"], ASKED_BY_FUNCTIONS[by]
    ran = run_python(code, tests.format(unknown_number()), timeout_s=LONG_S)
    assert (ran.passed, ran.cause) == (False, "failed"), ran


@pytest.mark.parametrize("name", HONEST)
def test_honest_code_passes(name, secret):
    code, tests = HONEST[name]
    assert run_python(code, tests, timeout_s=LONG_S) == Ran(True, "passed")
    spoilt = run_python(code, f"{tests}\nassert not 1, 'last'", timeout_s=LONG_S)
    last = len(tests.splitlines()) + 1
    said = f"line {last} of the tests, assert not 1, 'last': AssertionError: last"
    assert spoilt == Ran(False, "failed", said)


def test_programs_are_compared_by_what_they_print(secret):
    double = "import sys\nfor line in sys.stdin:\n print(int(line) * 2, end=' \\n')\nsys.exit(0)"
    cases = [("1\n2\n", "2\n4\n"), ("", ""), ("3", "6")]
    assert run_python(double, cases, timeout_s=LONG_S) == Ran(True, "passed")
    wrong = run_python(double, [*cases, ("1", "3")], timeout_s=LONG_S)
    assert wrong == Ran(False, "failed", "input 4: printed '2 \\n'")


def test_program_reads_what_no_file_can_hold(secret):
    assert run_python("print(len(input()) > 0)", [("\ud800", "True")], timeout_s=LONG_S).passed


@pytest.mark.skipif(
    os.getuid() != 0, reason="only root reads what it may not, until it is confined"
)
def test_directory_that_cannot_be_read_is_not_left_out(walls, tmp_path, monkeypatch):
    (packages := tmp_path / "site-packages").mkdir()
    (packages / "of_another.py").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), str(ROOT)]))
    os.chown(packages, 65534, 65534)
    packages.chmod(0o700)
    code = "import of_another\ndef f(): return 1"
    try:  # without namespaces it stays readable
        ran = run_python(code, "assert f() == 1", timeout_s=LONG_S, site_packages=True)
        assert ran.passed, ran
    except RewardUnavailable as error:
        assert f"Permission denied: '{packages}'" in str(error)


@pytest.mark.parametrize("fails", ["socket.socketpair", "subprocess.Popen"])
def test_machine_without_means_is_not_the_codes_fault(fails, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "no more of them")

    pair = socket.socketpair()
    monkeypatch.setattr("socket.socketpair", lambda: pair)
    monkeypatch.setattr(f"areal_q.sandbox.run_code.{fails}", fail)
    with pytest.raises(RewardUnavailable, match="no more of them"):
        run_python("def f(): pass", "f()", timeout_s=LONG_S)
    closed = fails == "subprocess.Popen"
    assert [one.fileno() == -1 for one in pair] == [closed, closed]
    for one in pair:
        one.close()


@pytest.mark.parametrize("memory_mib", [0, 64])
def test_no_code_runs_without_a_bound_on_its_memory(memory_mib, secret):
    run = partial(run_python, "def f(): return 1", "assert f() == 1", timeout_s=LONG_S)
    if memory_mib:
        assert run(memory_mib=memory_mib).passed
        return
    with pytest.raises(RewardUnavailable, match="no bound on its memory"):
        run(memory_mib=memory_mib)


def test_program_finds_no_expected_output_in_memory(secret):
    expected = f"assert answer() == {unknown_number()}"
    code = f"{FORGERIES['searches its memory']}\nprint('assert', 'answer() ==', answer())"
    searched = run_python(code, [("", expected)], timeout_s=LONG_S)
    assert searched == Ran(False, "failed", "input 1: printed 'assert answer() == 1\\n'")
    found: dict[str, Any] = {"held": [expected]}
    exec(FORGERIES["searches its memory"], found)
    assert expected.endswith(str(found["answer"]()))


def test_names_say_which_builtin_is_the_codes(secret):
    code, tests = "def sum(a, b): return a + b", "assert sum(1, 2) == 3"
    assert run_python(code, tests, timeout_s=LONG_S).cause == "error"
    assert run_python(code, tests, timeout_s=LONG_S, names=["sum"]).passed


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("", "there are no tests"),
        ([], "there are no tests"),
        ("assert f(1) ==", "cannot be compiled"),
        ("def check(f):\n assert f(1) == 1", "ask nothing of the code"),
    ],
)
def test_tests_that_test_nothing_are_refused(tests, said, secret):
    with pytest.raises(TaskError, match=said):
        run_python("def f(x): return x", tests, timeout_s=LONG_S)


MISSING = """
import ctypes
real = ctypes.CDLL

class NoLandlock:
    class Syscall:
        def __call__(self, *_): return -1
    syscall = Syscall()
    def __getattr__(self, name): return lambda *_: 0

def planted(*a, **k):
    if a[0] == 'libseccomp.so.2' and {seccomp}: raise OSError
    missing = not {seccomp} and a[0] in (None, 'libseccomp.so.2')  # which need not be there
    return NoLandlock() if missing else real(*a, **k)

ctypes.CDLL = planted
"""


@pytest.mark.parametrize(
    ("seccomp", "said"),
    [
        (True, "libseccomp is missing: apt-get install"),
        (False, "the kernel has no Landlock"),
    ],
)
def test_nothing_runs_where_a_wall_is_missing(seccomp, said, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(MISSING.format(seccomp=seccomp))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    open_before = psutil.Process().num_fds()
    with pytest.raises(RewardUnavailable, match=said) as held:
        run_python(f"open({str(tmp_path / 'ran')!r}, 'w')", "assert 1", timeout_s=LONG_S)
    assert not (tmp_path / "ran").exists()
    assert psutil.Process().num_fds() == open_before, held


def test_site_packages_are_there_when_asked_for(secret):
    code, tests = "import numpy\ndef f(): return numpy.arange(3).sum()", "assert f() == 3"
    if any(Path(numpy.__file__).is_relative_to(path) for path in _readable(site_packages=False)):
        pytest.skip("NumPy lies in a directory of Python's own library or the system's")
    assert run_python(code, tests, timeout_s=LONG_S, memory_mib=2048).cause == "error"
    assert run_python(code, tests, timeout_s=LONG_S, memory_mib=2048, site_packages=True).passed


@pytest.mark.parametrize("kills", ["the asker", "the supervisor"])
def test_no_process_outlives_the_one_above_it(kills, secret):
    asks = f"from areal_q.sandbox import run_python\nrun_python('while True: pass', 'f', timeout_s={LONG_S})"
    asking = subprocess.Popen([sys.executable, "-c", asks], cwd=ROOT)
    deadline = time.monotonic() + LONG_S
    # The one that asks, supervisor, tests and code
    while len(left_over()) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(left_over()) == 4
    if kills == "the supervisor":
        (supervisor,) = psutil.Process(asking.pid).children()
        supervisor.kill()
    else:
        asking.kill()
    asking.wait()
    while left_over() and time.monotonic() < deadline:
        time.sleep(0.05)
