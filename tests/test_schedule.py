"""Tests that share what is made once for their file run in one process."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.hooks import schedule
from helpers.paths import ROOT

TESTS = """
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
    (tmp_path / "test_some.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "made").read_text().split()) == 1


def test_fixtures_of_modules_stand_in_the_files_that_use_them():
    """The schedule looks for them there."""
    shared = [*ROOT.glob("tests/**/conftest.py"), *ROOT.glob("tests/helpers/**/*.py")]
    found = [path for path in shared if schedule.has_module_fixture(path)]
    assert found == [Path(schedule.__file__)]
