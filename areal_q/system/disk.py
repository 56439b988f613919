"""Room on the disk of a run, without which its parts wait or end in many ways."""

import shutil
import time
from pathlib import Path

LOOK_EVERY_S = 5.0
NO_ROOM_BYTES = 1 << 20
"""Writers fail where fewer bytes are free, though small ones may still succeed."""


def size(nbytes: float) -> str:
    """Returns bytes as text. Example: 1_500_000 → "1.5 MB"."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"


class DiskWatch:
    """Looks now and then whether the disk of `directory` has room left.

    A learner waits for a Redis that cannot write its file, and what its log says of that is not written either:
    only the launcher can tell.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._next_look = 0.0
        self._full = False

    def complaint(self) -> str:
        """Returns a sentence once for each time that the disk has become full; else an empty text."""
        if time.monotonic() < self._next_look:
            return ""
        self._next_look = time.monotonic() + LOOK_EVERY_S
        was_full = self._full
        self._full = shutil.disk_usage(self._directory).free < NO_ROOM_BYTES
        if was_full or not self._full:
            return ""
        return f"the disk is full: {self._directory}; the run waits or ends until there is room"
