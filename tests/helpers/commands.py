"""Assertions about how a command ended."""

import subprocess


def refused(result: subprocess.CompletedProcess[str], *named: str) -> None:
    """Asserts that the command ended with exit code 2 and one line on stderr that names all of `named`."""
    assert result.returncode == 2, result.stdout + result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for word in named:
        assert word in result.stderr
