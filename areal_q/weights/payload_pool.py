"""Buffers for payloads, reused without ever overwriting one that is still viewed."""

import weakref
from collections import deque

import torch


class PayloadPool:
    """Lends buffers. One comes back by itself, when the last tensor that views it is gone.

    So nobody has to hand anything back, and an engine may keep its views as long as it likes: a new
    buffer is made when none is free. At most `spare` free ones are kept. First touch of fresh
    memory is many times slower than copying, and giving it back holds the interpreter lock (25 ms
    for 256 MiB): buffers are touched once, when made, and reused.
    Thread-safe: tensors may die on any thread.
    """

    def __init__(self, spare: int = 2) -> None:
        self._free: deque[torch.Tensor] = deque(maxlen=spare)
        self.made = 0
        """Buffers allocated so far"""

    def lend(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], with arbitrary content."""
        if nbytes == 0:  # torch.from_numpy gives an empty array a stride that no view accepts
            return torch.empty(0, dtype=torch.uint8)
        memory = self._take(nbytes)
        # torch.from_numpy keeps exactly this array alive as long as a view of its storage exists.
        array = memory.numpy()
        weakref.finalize(array, self._free.append, memory).atexit = False
        return torch.from_numpy(array)

    def _take(self, nbytes: int) -> torch.Tensor:
        while self._free:
            try:
                memory = self._free.popleft()
            except IndexError:
                break
            if memory.numel() == nbytes:
                return memory
        self.made += 1
        return torch.empty(nbytes, dtype=torch.uint8).zero_()
