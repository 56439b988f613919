"""Takes away from this process, for good, all that a computation does not need: files, network, other
processes.

| wall         | what it closes                                                     | where it is missing |
|--------------|--------------------------------------------------------------------|---------------------|
| seccomp      | every system call that is not in _ALLOWED: sockets, new processes, | refused             |
|              | threads, signals, programs, links, shared memory, io_uring …       |                     |
| Landlock     | the content of every file but those of libraries, to be read only  | refused             |
| rlimits      | memory, CPU seconds, written bytes, open files                     | refused             |
| namespaces   | the network, System V IPC and root's capabilities once more        | goes on without     |

Neither root nor the code itself can lift them, and none needs root. Linux 5.13 or newer
has the first two, also inside Docker and Kubernetes, where new namespaces are mostly forbidden.
"""

import ctypes
import os
import resource
import sys
import sysconfig
from collections.abc import Callable, Iterable
from errno import ENOSYS

from areal_q.system.processes import limit_memory

_ALLOWED = """
    read readv pread64 preadv preadv2 write writev pwrite64 lseek close close_range fstat stat lstat newfstatat
    statx open openat openat2 access faccessat faccessat2 getdents64 readlink readlinkat getcwd statfs fstatfs
    dup dup2 dup3 pipe pipe2 poll ppoll select pselect6
    epoll_create1 epoll_ctl epoll_wait epoll_pwait eventfd2 recvfrom shutdown
    mmap munmap mprotect mremap brk madvise futex set_robust_list rseq set_tid_address membarrier
    rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack setitimer getitimer alarm restart_syscall
    getpid gettid getppid getuid geteuid getgid getegid uname sysinfo getcpu sched_yield sched_getaffinity
    clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time times getrusage getrandom
    exit exit_group wait4
"""
"""What an interpreter needs to compute. A call that is not here fails as one that the kernel does not have."""
_BY_ARGUMENT = {
    "prlimit64": (2, [0]),
    "fcntl": (1, [0, 1, 2, 3, 4, 1030]),
    "sendto": (4, [0]),
}
"""Calls that are allowed if an argument is one of these numbers: no new limit; duplicates and flags of open
files, but not F_SETOWN and F_SETSIG, by which the kernel sends any process of the user any signal; no address,
by which a datagram socket, even one of a pair, reaches any server with a path"""
_ACT_ERRNO, _ACT_ALLOW = 0x00050000, 0x7FFF0000
_NAMESPACES = 0x10000000 | 0x40000000 | 0x08000000 | 0x04000000
"""CLONE_NEWUSER, NEWNET, NEWIPC and NEWUTS of unshare(2)"""
_PR_SET_NO_NEW_PRIVS = 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Landlock's system calls, of the same numbers on every architecture"""
_READ = 1 << 2 | 1 << 3
"""Landlock's right to read files and to list directories"""
_RIGHTS = {0: 0, 1: 13, 2: 14, 3: 15, 4: 15}
"""Number of rights over files that Landlock has at each version; 16 from version 5 on"""
_MOST_OPEN_FILES = 64


class NotIsolated(Exception):
    """A wall is missing on this machine; says which, and what brings it."""


class _Compared(ctypes.Structure):
    """libseccomp's scmp_arg_cmp, whose operator 4 is equality."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("values", ctypes.c_uint64 * 2),
    )


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("rights", ctypes.c_uint64), ("directory", ctypes.c_int32))


def confine(memory_mib: int, cpu_s: int | None, site_packages: bool) -> None:
    """Leaves this process its open files, `memory_mib` MiB beyond what it has, `cpu_s` seconds of CPU if it is
    given, and the right to read Python's own library and the system's, with `site_packages` the installed ones
    too. Raises NotIsolated where the kernel has no such walls, for 0 MiB, and for a process that has other
    threads, which would stay as they are; OSError for a library that cannot be read. Nothing may run then."""
    if sys.platform != "linux":
        raise NotIsolated("a model's code is run only on Linux, which has seccomp and Landlock")
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise NotIsolated(f"the process has {threads} threads, of which one could be confined")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    limit_memory(memory_mib << 20)
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        raise NotIsolated("there is no bound on its memory: memory_mib is 0, or no /proc is there")
    if cpu_s is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(_MOST_OPEN_FILES, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    load_filter = _filter()
    readable = _readable(site_packages)  # as root sees it, who may read less in a new namespace
    libc.unshare(_NAMESPACES)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise NotIsolated(f"no_new_privs: {os.strerror(ctypes.get_errno())}")
    _landlock(libc, readable)
    load_filter()


def _readable(site_packages: bool) -> set[str]:
    """Returns the directories of Python's library and of the libraries that its modules are linked with."""
    # A virtual environment's `platstdlib` is its own directory, with all that is installed.
    names = ("lib-dynload", *["site-packages", "dist-packages"] * site_packages)
    paths = {path for path in sys.path if path.endswith(names)}
    paths.add(sysconfig.get_path("stdlib"))
    paths |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"}
    return {path for path in paths if os.path.isdir(path)}


def _landlock(libc: ctypes.CDLL, readable: Iterable[str]) -> None:
    version = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        why = os.strerror(ctypes.get_errno())
        raise NotIsolated(
            f"the kernel has no Landlock: {why}; Linux 5.13 with `landlock` in lsm= has"
        )
    handled = ctypes.c_uint64((1 << _RIGHTS.get(version, 16)) - 1)
    rules = libc.syscall(_CREATE_RULESET, ctypes.byref(handled), 8, 0)
    failed = rules < 0
    for path in readable:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        beneath = ctypes.byref(_Beneath(_READ, directory))
        failed = failed or libc.syscall(_ADD_RULE, rules, 1, beneath, 0) != 0
        os.close(directory)
    if failed or libc.syscall(_RESTRICT_SELF, rules, 0):
        raise NotIsolated(f"Landlock: {os.strerror(ctypes.get_errno())}")
    os.close(rules)


def _filter() -> Callable[[], None]:
    """Returns the function that loads a filter of the system calls, from libseccomp, which knows their numbers
    on every architecture."""
    try:
        lib = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise NotIsolated("libseccomp is missing: apt-get install libseccomp2") from error
    lib.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(lib.seccomp_init(_ACT_ERRNO | ENOSYS))
    failed = not context
    rules: list[tuple[str, list[_Compared]]] = [(name, []) for name in _ALLOWED.split()]
    for name, (argument, values) in _BY_ARGUMENT.items():
        rules += [(name, [_Compared(argument, 4, (value, 0))]) for value in values]
    for name, compared in rules:
        number = lib.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # an older libseccomp, or another architecture, does not know all
            array = (_Compared * len(compared))(*compared)
            rule = (context, _ACT_ALLOW, number, len(compared), array)
            failed |= lib.seccomp_rule_add_array(*rule) != 0

    def load() -> None:
        if failed or lib.seccomp_load(context):
            raise NotIsolated("the kernel takes no seccomp filter")

    return load
