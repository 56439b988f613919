"""Child processes: they import our modules and no file beside them, and do not outlive who started them."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
# Loaded before any fork: between fork and exec only calls that take no lock are safe.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def module_command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs one of our modules. With -P no file of the current directory, a `buffer.py`
    or a `random.py`, takes the place of ours; with -X utf8 files are read and written as UTF-8 in every
    locale."""
    return [sys.executable, "-P", "-X", "utf8", "-m", module, *arguments]


def die_with_parent(signum: int = signal.SIGTERM) -> Callable[[], None]:
    """A `preexec_fn`: the kernel sends `signum` to the child when the thread that started it ends.

    Covers a kill -9 of the parent, which no handler of its own could. Start children from the main thread,
    since the signal follows the thread, not the process. Linux only; elsewhere it does nothing.
    """
    parent = os.getpid()

    def in_child() -> None:
        if _libc is None:
            return
        _libc.prctl(_PR_SET_PDEATHSIG, int(signum))
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)

    return in_child
