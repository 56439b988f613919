"""The private directory for the sockets of a run, whose processes are all on this machine."""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from areal_q.errors import ConfigError
from areal_q.system.files import remove_abandoned, try_lock

MAX_SOCKET_BYTES = 100
"""Longest path of a socket, which the kernel takes up to 108 bytes"""
SOCKETS_PREFIX = "areal-q-sockets-"
_REMOVED_S = 5.0
"""Seconds that another launcher may take to remove what it holds for abandoned"""


def sockets_of(run_dir: Path) -> Path:
    """Returns the run's private directory for sockets, whose path is short enough for their addresses. It
    exists while the run goes on.

    The path is the same at every launch, so that the endpoints that an earlier launch wrote into Redis are
    still right when the run is resumed.
    """
    digest = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:12]
    name = f"{SOCKETS_PREFIX}{os.getuid()}-{digest}"
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent / name / "announce")) > MAX_SOCKET_BYTES:
        parent = Path("/tmp")
    return parent / name


@contextmanager
def socket_dir(run_dir: Path) -> Iterator[Path]:
    """Makes and locks the directory of `sockets_of`, and removes it at the end. Raises ConfigError if it cannot
    be made."""
    directory, lock = sockets_of(run_dir), None
    remove_abandoned(directory.parent, SOCKETS_PREFIX)
    deadline = time.monotonic() + _REMOVED_S
    while lock is None:  # until then another launcher may take the directory for abandoned
        try:
            directory.mkdir(mode=0o700)
        except OSError as error:
            if not isinstance(error, FileExistsError) or time.monotonic() > deadline:
                raise ConfigError(f"TMPDIR: {error.strerror} - {directory}") from error
            time.sleep(0.01)  # the other one is about to remove it
            continue
        with suppress(FileNotFoundError):
            lock = try_lock(directory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)
