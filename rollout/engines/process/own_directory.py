"""A temporary directory for an engine's processes, and the removal of those that killed workers left behind.

A worker locks its directory for as long as it lives, so that another worker can tell which directories nobody
uses. The shared memory of the engine's processes is removed with the directory: if all of them are killed with
`kill -9`, it would otherwise stay in /dev/shm for ever.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from multiprocessing import resource_tracker
from pathlib import Path

from areal_q.system.files import remove_abandoned, try_lock

SHARED_MEMORY = Path("/dev/shm")
SEGMENTS = "segments"
"""Name of a file in the directory that lists each segment of shared memory by name and inode, one a line"""


class OwnDirectory:
    """A new directory in `parent`, which only this user can enter."""

    def __init__(self, prefix: str, parent: str | Path) -> None:
        remove_abandoned(Path(parent), prefix, _remove_segments)
        lock = None
        while lock is None:  # another worker may have removed the directory before it was locked
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            with contextlib.suppress(FileNotFoundError):
                lock = try_lock(self.path)
        self._lock = lock

    def note_segments(self, pids: Iterable[int]) -> None:
        """Writes down which shared memory the processes `pids` have mapped under names that Python gave it, for
        its removal later."""
        found = sorted({name for pid in pids for name in _mapped(pid)})
        lines = [
            f"{name} {(SHARED_MEMORY / name).stat().st_ino}\n"
            for name in found
            if (SHARED_MEMORY / name).exists()
        ]
        (self.path / SEGMENTS).write_text("".join(lines))

    def close(self) -> None:
        """Removes the directory, and the shared memory of processes that were killed and so did not."""
        _remove_segments(self.path, _untrack)
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _untrack(name: str, kind: str) -> None:
    """Takes a name off this process's list, on which another process may have put it, or not."""
    resource_tracker.register(name, kind)
    resource_tracker.unregister(name, kind)


def _mapped(pid: int) -> Iterable[str]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return
    for line in maps:
        path = Path(line.split()[-1])
        if path.parent == SHARED_MEMORY and path.name.startswith("psm_"):
            yield path.name


def _remove_segments(
    directory: Path, forget: Callable[[str, str], None] = lambda name, kind: None
) -> None:
    """Removes the shared memory that a directory lists. `forget` takes what Python has on its list of things to
    remove at its end: it would warn of a leak."""
    if not (listed := directory / SEGMENTS).exists():
        return
    for line in listed.read_text().splitlines():
        name, _, inode = line.partition(" ")
        segment = SHARED_MEMORY / Path(name).name
        if segment.exists() and str(segment.stat().st_ino) == inode:
            segment.unlink()
            forget(f"/{segment.name}", "shared_memory")
