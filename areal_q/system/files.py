"""Atomic writes of files and directories, locks of directories, tensors that others may read, and file names
ordered by number.

A file or a directory is written under a hidden name beside its place, synced to disk, and renamed. A directory
cannot be renamed onto one that has files, so the old one is renamed first. A crash leaves hidden names, which
`clear_leftovers` treats so:

    .tmp-NAME   half written, or about to be removed   is removed
    .old-NAME   about to be replaced                   becomes NAME again, unless NAME exists

A file that several processes may write at a time is half written under a name of each one's own, which stays if
that one is killed.
"""

import fcntl
import glob
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from areal_q.errors import ConfigError, os_errors_as

if TYPE_CHECKING:
    from torch import Tensor

SCRATCH, REPLACED = ".tmp-", ".old-"
"""Prefixes of the hidden names."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a hidden path; the file or directory written there becomes `path` when the block ends.

    After an error `path` is unchanged. Only one process may write it at a time; leftovers are removed first.
    """
    clear_leftovers(path.parent, glob.escape(path.name))
    scratch = path.with_name(SCRATCH + path.name)
    try:
        yield scratch
        move_into_place(scratch, path)
    finally:
        clear_leftovers(path.parent, glob.escape(path.name))


def write_whole(path: Path, data: str | bytes) -> None:
    """Writes bytes, or text in UTF-8, as all of the file `path`, in the way of `replacing`."""
    with replacing(path) as scratch:
        scratch.write_bytes(data.encode() if isinstance(data, str) else data)


@contextmanager
def replacing_among_others(path: Path) -> Iterator[Path]:
    """Does what `replacing` does for a file that other processes may write, too: the last one's stays."""
    scratch = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        yield scratch
        move_into_place(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def move_into_place(scratch: Path, final: Path) -> None:
    """Syncs `scratch`, a file or a directory of files, to disk and renames it to `final`, which it replaces.

    A directory that was replaced keeps a hidden name until `clear_leftovers`.
    """
    for path in (*scratch.iterdir(), scratch) if scratch.is_dir() else (scratch,):
        sync(path)
    if final.is_dir():
        final.rename(final.with_name(REPLACED + final.name))
    scratch.replace(final)
    sync(final.parent)


def clear_leftovers(directory: Path, pattern: str = "*") -> None:
    """Removes what killed writers left in `directory`, and restores what they had not replaced yet. Only names
    that match `pattern` count."""
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


def try_lock(directory: Path) -> int | None:
    """Returns a descriptor that locks `directory` until it is closed; None if another process has locked it, or
    it was removed or renamed meanwhile. Raises OSError if it cannot be opened."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), os.stat(directory)):  # another may have its name now
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(handle)
    return None


@contextmanager
def alone_in(directory: Path, taken: str) -> Iterator[None]:
    """Makes `directory`, if there is none, and keeps other processes out of it while the block runs. Raises
    ConfigError, which says `taken`, if one has locked it, and if it cannot be made."""
    with os_errors_as(ConfigError, directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock = try_lock(directory)
    if lock is None:
        raise ConfigError(f"{directory}: {taken}")
    try:
        yield
    finally:
        os.close(lock)


def remove_abandoned(
    parent: Path, prefix: str, before: Callable[[Path], object] = lambda directory: None
) -> None:
    """Removes those of this user's directories in `parent`, of names that begin with `prefix`, which no living
    process has locked; `before` is called with each. An OSError leaves one as it is."""
    for directory in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            if directory.stat().st_uid == os.getuid() and (lock := try_lock(directory)) is not None:
                before(directory)
                shutil.rmtree(directory, ignore_errors=True)
                os.close(lock)


def save_tensors(
    tensors: "Mapping[str, Tensor]", path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Writes a safetensors file with the permissions that `open` gives a new file; safetensors itself would let
    nobody else read it. Raises OSError or SafetensorError if it cannot be written."""
    from safetensors.torch import save_file  # torch takes seconds to import; other users need none

    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata)
    path.chmod(mode)


def by_number(paths: Iterable[Path]) -> list[Path]:
    """Returns `paths` sorted by name, where consecutive digits count as one number.

    Example: step-999950 comes before step-1000000, though not in the order of text.
    """
    return sorted(paths, key=lambda path: _words_and_numbers(path.name))


def _words_and_numbers(name: str) -> list[tuple[int, str]]:
    """Returns the parts of `name` as (value, text), with value -1 for a part that is no number."""
    found = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(int(one), one) if one.isdecimal() and one.isascii() else (-1, one) for one in found]
