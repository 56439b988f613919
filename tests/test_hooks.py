"""What tests stand on: coroutines run and fail, waits end with what was seen, a fixture is made once."""

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
from helpers.hooks import schedule
from helpers.hooks.coroutine_tests import pytest_pyfunc_call
from helpers.paths import ROOT

SHARED = """
import pytest

@pytest.fixture(scope="module")
def made(worker_id):
    open("made", "a").write(worker_id + "\\n")

@pytest.mark.parametrize("i", range(8))
def test_some(made, i):
    pass
"""


@pytest.mark.timeout(60)
def test_a_fixture_of_a_file_is_made_in_one_process(tmp_path: Path):
    pytest.importorskip("xdist", reason="pytest-xdist is not installed: pip install --group dev")
    shutil.copy(schedule.__file__, tmp_path / "conftest.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_some.py").write_text(SHARED)
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
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
