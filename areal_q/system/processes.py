"""Child processes that import this project's modules, never a file of the same name, and end with their
parent; how much memory a process may take, and what it keeps of what it frees.

    a parent ──SIGTERM──▶ supervisor ──SIGKILL──▶ the module's process, and all that this has started

`python -m areal_q.system.processes MODULE …` is a supervisor: it forks, its child runs `MODULE.main(…)`, and
when the child ends, the parent ends, or the parent sends SIGTERM, it kills every descendant and then ends,
with the child's exit code (128 + N for signal N, as a shell says it) if that has ended by itself.
A process that detaches itself becomes the supervisor's own child, since this is their subreaper (prctl(2)).
"""

import ctypes
import importlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

READY = ".areal-q-is-ready"
"""A file that an environment of `areal-q setup` has once it is whole"""
BEGAN = "AREAL_Q_BEGAN"
"""Environment variable by which a launcher tells its children when it was started, by time.monotonic"""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# It is loaded before any fork, as only calls that take no lock are safe between fork and exec.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's mallopt"""
_LEAVE_AFTER_S = 5.0
"""Seconds after which a supervisor leaves what cannot be killed, such as a process of another user"""
_KEPT_BYTES, _LARGEST_BYTES = (2 << 30) - 1, 32 << 20
"""Free memory that is kept, and the largest block of it; glibc accepts no more of either."""


def module_command(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Returns the command that runs a module of this project, by `python`, which may be another environment's.
    With -P no file of the current directory, such as `buffer.py` or `random.py`, is imported in place of ours;
    with -X utf8 files are UTF-8 in every locale."""
    return [python, "-P", "-X", "utf8", "-m", module, *arguments]


def become(module: str, *arguments: str, python: str = sys.executable) -> None:
    """Replaces this process by a module of ours, so that signals and exit codes are the module's own."""
    os.execv(python, module_command(module, *arguments, python=python))


def environment_at(name: str) -> Path:
    """Returns where `areal-q setup NAME` makes its environment: below AREAL_Q_ENVIRONMENTS, or among the data
    of the user."""
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    root = os.environ.get("AREAL_Q_ENVIRONMENTS") or f"{data}/areal-q"
    return Path(root).expanduser() / name


def supervised_command(module: str, *arguments: str) -> list[str]:
    """Returns the command of a supervisor that runs `main(*arguments)` of a module of this project. Its parent
    ends both with SIGTERM, in a session of their own, and waits for it: then no process of them is left."""
    return module_command("areal_q.system.processes", module, *arguments)


def supervised_program(*command: str) -> list[str]:
    """Returns the command of such a supervisor of another program: what it runs is `main` below."""
    return supervised_command("areal_q.system.processes", *command)


def main(*command: str) -> None:
    """Becomes another program. Exits with one line where that cannot be run."""
    try:
        os.execv(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: cannot be run: {error.strerror}")


def command_began() -> float:
    """Returns when the command that a user typed was started, in seconds of time.monotonic: that of the
    launcher, or this process, imports included. Where the system does not say so in Linux's way, it is now."""
    if told := os.environ.get(BEGAN):
        return float(told)
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # "starttime" of proc(5)
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, AttributeError):
        age_s = 0.0
    return time.monotonic() - max(0.0, age_s)


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


def end_with_parent(signum: int = signal.SIGKILL) -> None:
    """Makes the kernel send `signum` to this process when its parent ends, for one that another program
    started. What replaces this process by exec gets it too. It does nothing except on Linux."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signum))


def keep_freed_memory() -> None:
    """Makes blocks of up to 32 MiB come from memory that this process has used before. By default glibc gives
    it back to the system, whose fresh pages take longer than much of what is computed in them. It does nothing
    where the C library has no mallopt."""
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


def use_huge_pages() -> None:
    """Makes torch lay tensors of 2 MiB and more in pages of that size, if it is imported afterwards. Attention
    to a KV cache, which reads from all over hundreds of megabytes, then waits less for addresses to be looked
    up: in a virtual machine it takes 14 to 22 % less time (bench/README.md)."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def limit_memory(more: int) -> None:
    """Limits this process to `more` bytes of address space beyond what it has now; 0 means no limit. The memory
    that libraries reserve on import, for some of them tens of gigabytes, does not count."""
    held = Path("/proc/self/statm")
    if not more or not held.exists():
        return
    now = int(held.read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    bound = now + more if most == resource.RLIM_INFINITY else min(now + more, most)
    resource.setrlimit(resource.RLIMIT_AS, (bound, most))


def _supervise(module: str, *arguments: str) -> int:
    """Forks. The child runs the module; the parent waits for the end of either, leaves no descendant, and
    returns the child's exit code. It imports nothing of the module, so that it stays as small as an
    interpreter."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # its parent may have ignored it
    awaited = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    child = os.fork()
    # Each of the two does this for itself: nobody knows which comes first, or whether exec has come already.
    with suppress(PermissionError):
        os.setpgid(child, child)
    if child == 0:
        end_with_parent()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        importlib.import_module(module).main(*arguments)
        return 0
    code = None
    while code is None and signal.sigwait(awaited) == signal.SIGCHLD:
        code = _waited_for().get(child)
    deadline = time.monotonic() + _LEAVE_AFTER_S
    while (left := _children_of(os.getpid())) and time.monotonic() < deadline:
        for group in {group for group, _ in left.values()}:  # at once, so that none of it can fork
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        time.sleep(0.001)
        _waited_for()  # their own children are ours now
    return code or 0


def _waited_for() -> dict[int, int]:
    """Waits for the children that have ended, and returns their exit codes by their ids."""
    ended = {}
    with suppress(ChildProcessError):  # there are no others
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(found[1])
            ended[found[0]] = 128 - code if code < 0 else code
    return ended


def others_alive() -> set[int]:
    """Returns the ids of the processes that this one has started and that go on, detached ones included: those
    are its supervisor's children, which ends all of them with it."""
    found = _children_of(os.getpid(), os.getppid())
    return {child for child, (_, ended) in found.items() if not ended} - {os.getpid()}


def _children_of(*parents: int) -> dict[int, tuple[int, bool]]:
    """Returns the process group of each child of `parents`, and whether it has ended and nobody has waited for
    it yet."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state, parent, group, *_ = stat.read_bytes().rpartition(b")")[2].split()
            if int(parent) in parents:
                found[int(stat.parent.name)] = (int(group), state == b"Z")
    return found


if __name__ == "__main__":
    sys.exit(_supervise(*sys.argv[1:]))
