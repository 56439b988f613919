"""The closing lines of a run of the tests: what it left out, and the command that would run it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
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
FILE = """
import pytest

pytest.skip("Triton is not installed: make test-formats", allow_module_level=True)
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("options", [[], ["-n", "2"]], ids=["alone", "two"])
def test_what_did_not_run_is_counted_with_its_command(tmp_path: Path, options: list[str]):
    if options:
        pytest.importorskip(
            "xdist", reason="pytest-xdist is not installed: pip install --group dev"
        )
    shutil.copy(
        Path(__file__).parent / "helpers" / "hooks" / "not_run.py", tmp_path / "conftest.py"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    vllm\n")
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_file.py").write_text(FILE)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "not slow",
            "-p",
            "no:cacheprovider",
            *options,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *_, last = lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("did not run")] == lines[-5:-1]
    assert set(lines[-5:-1]) == {
        "did not run: 3 tests deselected: make test-slow",
        "did not run: 1 test skipped: vllm is not installed: make test-vllm",
        "did not run: 1 test skipped: no kubectl on PATH",
        "did not run: 1 file skipped: Triton is not installed: make test-formats",
    }
    assert last.startswith("1 passed, 3 skipped")
