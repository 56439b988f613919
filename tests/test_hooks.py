"""What the tests stand on: coroutines run and fail, waits end with what was seen, files share what is made once
for them, and a run of pytest says what it left out, and the command that would run it."""

import asyncio
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.commands import limit, wait_until
from helpers.hooks import not_run, schedule
from helpers.hooks.coroutine_tests import pytest_pyfunc_call
from helpers.paths import ROOT

LEFT_OUT = """
import pytest

def test_passes():
    pass

@pytest.mark.slow
@pytest.mark.parametrize("i", range(3))
def test_whole_run(i):
    pass

@pytest.mark.vllm
def test_engine():
    pytest.skip("vllm is not installed")

def test_tool():
    pytest.skip("no kubectl on PATH\\nand more")
"""
LEFT_OUT_FILE = """
import pytest

pytest.skip("Triton is not installed: make test-formats", allow_module_level=True)
"""
SHARED = """
import pytest

@pytest.fixture(scope="module")
def made(worker_id):
    open("made", "a").write(worker_id + "\\n")

@pytest.mark.parametrize("i", range(8))
def test_some(made, i):
    pass
"""


def run_pytest(directory: Path, hook: str, tests: str, *options: str) -> list[str]:
    """The lines that pytest prints for `tests` with that file of hooks, all of which pass or are left out."""
    if "-n" in options:
        pytest.importorskip(
            "xdist", reason="pytest-xdist is not installed: pip install --group dev"
        )
    shutil.copy(hook, directory / "conftest.py")
    (directory / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    vllm\n")
    (directory / "test_some.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *options], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("options", [[], ["-n", "2"]], ids=["alone", "two"])
def test_what_did_not_run_is_counted_with_its_command(tmp_path: Path, options: list[str]):
    (tmp_path / "test_file.py").write_text(LEFT_OUT_FILE)
    *_, last = lines = run_pytest(tmp_path, not_run.__file__, LEFT_OUT, *options)
    assert [line for line in lines if line.startswith("did not run")] == lines[-5:-1]
    assert set(lines[-5:-1]) == {
        "did not run: 3 tests deselected: make test-slow",
        "did not run: 1 test skipped: vllm is not installed: make test-vllm",
        "did not run: 1 test skipped: no kubectl on PATH",
        "did not run: 1 file skipped: Triton is not installed: make test-formats",
    }
    assert last.startswith("1 passed, 3 skipped")


@pytest.mark.timeout(60)
def test_a_fixture_of_a_file_is_made_in_one_process(tmp_path: Path):
    run_pytest(tmp_path, schedule.__file__, SHARED, "-n", "2")
    assert len((tmp_path / "made").read_text().split()) == 1


def test_fixtures_of_modules_stand_in_the_files_that_use_them():
    """The schedule looks for them there."""
    shared = [*ROOT.glob("tests/**/conftest.py"), *ROOT.glob("tests/helpers/**/*.py")]
    found = [path for path in shared if schedule.has_module_fixture(path)]
    assert found == [Path(schedule.__file__)]


async def test_a_coroutine_is_run_on_the_loop_of_its_fixture(runner: asyncio.Runner):
    assert asyncio.get_running_loop() is runner.get_loop()


@pytest.mark.parametrize("runs", [{}, {"runner": asyncio.Runner()}])
def test_a_coroutine_that_fails_or_hangs_fails(monkeypatch, runs):
    async def failing(named: str) -> None:
        raise LookupError(named)

    async def hanging() -> None:
        await asyncio.Event().wait()

    def run(test: Any, *names: str) -> None:
        info = SimpleNamespace(argnames=names)
        item = SimpleNamespace(obj=test, funcargs={"named": "x"} | runs, _fixtureinfo=info)
        pytest_pyfunc_call(cast(pytest.Function, item))

    with pytest.raises(LookupError, match="x"):
        run(failing, "named")
    monkeypatch.setattr(limit, "at_s", time.monotonic())
    with pytest.raises(TimeoutError):
        run(hanging)


def test_a_wait_ends_with_what_was_seen_when_a_process_ends():
    with (
        subprocess.Popen(["sh", "-c", "exit 3"]) as process,
        pytest.raises(AssertionError, match=r"ended with \[3\]: no step"),
    ):
        wait_until(lambda: False, lambda: "no step", process)


def test_wait_ends_with_what_was_seen_before_the_limit(monkeypatch: pytest.MonkeyPatch):
    assert limit.at_s > time.monotonic()
    monkeypatch.setattr(limit, "at_s", time.monotonic())
    wait_until(lambda: True, lambda: "")
    with pytest.raises(AssertionError, match="waited in vain: no step"):
        wait_until(lambda: False, lambda: "no step")
