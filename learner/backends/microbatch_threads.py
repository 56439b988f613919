"""Threads that compute micro-batches side by side.

On a CPU two threads divide the products of a small model badly: at the end of each, one waits for the other.
Whole micro-batches need no such wait. Each thread takes the next one as soon as it is free, so that a core that
another process needs for a while costs a step no more than that while.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")

_GIVES_WAY = 5
"""The priority of further threads is lower by so much: a busy worker on the same core gets three times as much
of it."""


class MicrobatchThreads:
    """Computes micro-batches in `count` threads of one core each, or in the caller's if it is 1."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._begun = itertools.count()
        self._pool = (
            ThreadPoolExecutor(count, "microbatch", initializer=self._begin) if count > 1 else None
        )

    def _begin(self) -> None:
        """Prepares a thread. All but the first give way to the workers, since a learner that waits for groups
        gains nothing by them."""
        torch.set_num_threads(1)
        if next(self._begun) and sys.platform == "linux":
            os.nice(_GIVES_WAY)  # elsewhere this would be the whole process's priority

    def map(self, compute: Callable[[int], Result], number: int) -> Iterable[Result]:
        """Yields compute(0), …, compute(number - 1) in this order, each computed with gradients if the caller
        computes with gradients. An exception of `compute` is raised where its result would be yielded."""
        if self._pool is None or number < 2:
            return map(compute, range(number))
        enabled = torch.is_grad_enabled()

        def one(place: int) -> Result:
            with torch.set_grad_enabled(enabled):
                return compute(place)

        return self._pool.map(one, range(number))
