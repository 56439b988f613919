"""A directory for an engine's processes, and the removal of what workers that were killed left behind.

A worker holds a lock on its directory while it lives, so that another can tell a dead one's. Shared memory that
the engine's processes made goes with it: `kill -9` of all of them leaves it in /dev/shm for ever.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from areal_q.system.run_dir import try_lock

SHARED_MEMORY = Path("/dev/shm")
SEGMENTS = "segments"
"""Name of a file in the directory that holds the name and inode of each segment, one a line"""


class OwnDirectory:
    """A new directory in `parent`, which only this user can enter."""

    def __init__(self, prefix: str, parent: str | Path) -> None:
        tidy(prefix, Path(parent))
        lock = None
        while lock is None:  # another worker that tidies may have taken it for a dead one's
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            with contextlib.suppress(FileNotFoundError):
                lock = try_lock(self.path)
        self._lock = lock

    def note_segments(self, pids: Iterable[int]) -> None:
        """Remembers the shared memory that `pids` have mapped under Python's own names for it."""
        found = sorted({name for pid in pids for name in _mapped(pid)})
        lines = [
            f"{name} {(SHARED_MEMORY / name).stat().st_ino}\n"
            for name in found
            if (SHARED_MEMORY / name).exists()
        ]
        (self.path / SEGMENTS).write_text("".join(lines))

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def tidy(prefix: str, parent: Path) -> None:
    """Removes this user's directories in `parent` that no living worker holds, and their shared memory."""
    for directory in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if directory.stat().st_uid == os.getuid() and (lock := try_lock(directory)) is not None:
                _remove_segments(directory / SEGMENTS)
                shutil.rmtree(directory, ignore_errors=True)
                os.close(lock)


def _mapped(pid: int) -> Iterable[str]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return
    for line in maps:
        path = Path(line.split()[-1])
        if path.parent == SHARED_MEMORY and path.name.startswith("psm_"):
            yield path.name


def _remove_segments(listed: Path) -> None:
    if not listed.exists():
        return
    for line in listed.read_text().splitlines():
        name, _, inode = line.partition(" ")
        segment = SHARED_MEMORY / Path(name).name
        if segment.exists() and str(segment.stat().st_ino) == inode:
            segment.unlink()
