"""Assertions about how a command ended, and whether a process has."""

import subprocess
from pathlib import Path


def refused(result: subprocess.CompletedProcess[str], *named: str) -> None:
    """Asserts that the command ended with exit code 2 and one line on stderr that names all of `named`."""
    assert result.returncode == 2, result.stdout + result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for word in named:
        assert word in result.stderr


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"
