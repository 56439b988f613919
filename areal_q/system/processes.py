"""Child processes that import this project's modules, never a file of the same name, and end with their
parent; and what a process keeps of the memory that it frees."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
# It is loaded before any fork, as only calls that take no lock are safe between fork and exec.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's mallopt"""
_KEPT_BYTES, _LARGEST_BYTES = (2 << 30) - 1, 32 << 20
"""Free memory that is kept, and the largest block of it; glibc accepts no more of either."""


def module_command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module of this project. With -P no file of the current directory, such as
    `buffer.py` or `random.py`, is imported in place of ours; with -X utf8 files are UTF-8 in every locale."""
    return [sys.executable, "-P", "-X", "utf8", "-m", module, *arguments]


def die_with_parent(signum: int = signal.SIGTERM) -> Callable[[], None]:
    """Returns a `preexec_fn` with which the kernel sends `signum` to the child when its parent ends.

    This works even if the parent is killed with SIGKILL, which it cannot handle itself. Start children from the
    main thread: the kernel acts at the end of the thread, not of the process. It does nothing except on Linux.
    """
    parent = os.getpid()

    def in_child() -> None:
        if _libc is None:
            return
        _libc.prctl(_PR_SET_PDEATHSIG, int(signum))
        if os.getppid() != parent:  # the parent ended before prctl was called
            os._exit(1)

    return in_child


def end_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends, for one that another program started. It does
    nothing except on Linux."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def keep_freed_memory() -> None:
    """Makes blocks of up to 32 MiB come from memory that this process has used before. By default glibc gives
    it back to the system, whose fresh pages take longer than much of what is computed in them. It does nothing
    where the C library has no mallopt."""
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
