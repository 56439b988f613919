"""Files that are whole or absent, tensors that others may read, and names that hold numbers.

A file or a directory is written under a hidden name beside its place, made durable, and renamed. A directory
cannot be renamed onto one that has files, so the old one steps aside first. A crash leaves hidden names:

    .tmp-NAME   half written, or about to be removed   `clear_leftovers` removes it
    .old-NAME   about to be replaced                   … puts it back, unless NAME is there again
"""

import glob
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SCRATCH, REPLACED = ".tmp-", ".old-"
"""The hidden names begin with these."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a hidden name beside `path`, for a file or a directory that becomes `path` when the block ends.

    After an error `path` is what it was. For one writer at a time; what a killed one left is cleared first.
    """
    clear_leftovers(path.parent, glob.escape(path.name))
    scratch = path.with_name(SCRATCH + path.name)
    try:
        yield scratch
        move_into_place(scratch, path)
    finally:
        clear_leftovers(path.parent, glob.escape(path.name))


def move_into_place(scratch: Path, final: Path) -> None:
    """Makes `scratch`, a file or a directory of files, durable as `final`, replacing what is there.

    A directory that was replaced is left under its hidden name: see `clear_leftovers`.
    """
    for path in (*scratch.iterdir(), scratch) if scratch.is_dir() else (scratch,):
        sync(path)
    if final.is_dir():
        final.rename(final.with_name(REPLACED + final.name))
    scratch.replace(final)
    sync(final.parent)


def clear_leftovers(directory: Path, pattern: str = "*") -> None:
    """Removes what killed writers in `directory` left, and puts back what they were about to replace."""
    for replaced in directory.glob(REPLACED + pattern):
        final = directory / replaced.name.removeprefix(REPLACED)
        if not final.exists():
            replaced.rename(final)
    for leftover in (*directory.glob(REPLACED + pattern), *directory.glob(SCRATCH + pattern)):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def sync(path: Path) -> None:
    """Waits until the file or directory `path` is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_tensors(
    tensors: "Mapping[str, Tensor]", path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Writes `path` with the permissions that `open` would give it: safetensors renames a temporary file of its
    own, which nobody else may read. Raises OSError and SafetensorError."""
    from safetensors.torch import save_file  # torch takes seconds to import; other users need none

    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata)
    path.chmod(mode)


def by_number(paths: Iterable[Path]) -> list[Path]:
    """Returns `paths` in the order of their names, in which a run of digits counts as one number.

    Example: step-999950 stands before step-1000000, which as text it does not.
    """
    return sorted(paths, key=lambda path: _words_and_numbers(path.name))


def _words_and_numbers(name: str) -> list[tuple[int, str]]:
    """Digits as their value, then all as text, so that any two names compare."""
    found = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(int(one), one) if one.isdecimal() and one.isascii() else (-1, one) for one in found]
