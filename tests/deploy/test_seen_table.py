"""The table of what tests of a real system did and saw."""

import shutil
import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest

def test_second_in_the_alphabet(record_property):
    record_property("done", "killed a rank")
    record_property("seen", "it came back")
    record_property("seen", "no step is missing")

def test_fails(record_property):
    record_property("done", "filled the disk")
    assert False, "no line of log\\nand more"

def test_is_skipped(record_property):
    record_property("done", "asked for an engine")
    pytest.skip("no engine")

def test_breaks_at_its_end(record_property, request):
    record_property("done", "stopped it")
    request.addfinalizer(lambda: 1 / 0)

def test_says_nothing():
    pass
"""
ROWS = """| done | seen | seconds |
|---|---|---|
| killed a rank | it came back; no step is missing | 0 |
| filled the disk | failed: AssertionError: no line of log | 0 |
| asked for an engine | skipped: Skipped: no engine | 0 |
| stopped it | failed: ZeroDivisionError: division by zero | 0 |
"""


def run(directory: Path, *options: str) -> str:
    shutil.copy(Path(__file__).parent / "conftest.py", directory)
    (directory / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True).stdout


def test_each_test_that_said_what_it_did_has_a_row(tmp_path: Path):
    assert ROWS in run(tmp_path)


def test_tests_that_say_nothing_print_no_table(tmp_path: Path):
    assert "seconds |" not in run(tmp_path, "-k", "nothing")
