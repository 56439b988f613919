"""Payloads in memory that other processes of this host can read, by way of /proc.

The memory is a file that no directory names (memfd): it is gone with the last process that has it open, also
after a kill. Only processes of the same user that see each other's process numbers can open it; for all others,
as in another container, and on systems other than Linux, the bytes travel by socket.
"""

import mmap
import os
import re
import uuid
import weakref

import torch

from areal_q.messages import SharedFile

PIECE_BYTES = 256 << 10
"""Bytes that are copied at once, so that they are still in the processor's cache when they are hashed."""
_NAME = re.compile(r"areal-q-[0-9a-f]{32}")
_files: dict[int, SharedFile] = {}
"""The files of this process by the address of their memory"""


def allocate(nbytes: int) -> torch.Tensor:
    """Returns zeros of uint8 [nbytes], at least 1. Other processes can read them where the system has memfd,
    and the process may open another file."""
    name = f"areal-q-{uuid.uuid4().hex}"
    try:
        fd = os.memfd_create(name)
    except (AttributeError, OSError):  # the bytes will travel by socket
        return torch.zeros(nbytes, dtype=torch.uint8)
    try:
        os.ftruncate(fd, nbytes)
        memory = mmap.mmap(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    _files[tensor.data_ptr()] = SharedFile(pid=os.getpid(), fd=fd, name=name)
    # The map lives as long as the last tensor that views it.
    weakref.finalize(memory, _forget, tensor.data_ptr(), fd).atexit = False
    return tensor


def file_of(payload: torch.Tensor) -> SharedFile | None:
    """Returns where other processes find `payload`; None if it is not in shared memory of this process."""
    return _files.get(payload.data_ptr())


class SharedReader:
    """Reads another process's payload. What it reads must be hashed, for that process may reuse the memory."""

    def __init__(self, file: SharedFile) -> None:
        """Raises OSError if the file cannot be opened, or is another one."""
        path = f"/proc/{file.pid}/fd/{file.fd}"
        # A file of another process namespace may have the same numbers, but not the name.
        if not _NAME.fullmatch(file.name) or os.readlink(path) != f"/memfd:{file.name} (deleted)":
            raise OSError(f"{path} is not {file.name}")
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)

    def read_into(self, place: memoryview, offset: int) -> int:
        """Reads `place` from `offset` on; returns the number of bytes that were there."""
        return os.preadv(self._fd, [place], offset)


def _forget(address: int, fd: int) -> None:
    # Memory is free before this is called, so that another thread's file may have the address by now.
    if (file := _files.get(address)) and file.fd == fd:
        del _files[address]
    os.close(fd)
