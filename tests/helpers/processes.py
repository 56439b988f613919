"""Processes that a test did not start itself."""

from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"
