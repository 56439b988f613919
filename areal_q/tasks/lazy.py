"""A sequence of problems that are generated on access, so that a billion of them take no memory."""

from collections.abc import Callable, Sequence
from itertools import count
from math import gcd
from typing import overload

from areal_q.errors import TaskError
from areal_q.tasks.base import Problem

_TRIES = 1000
"""Problems that are looked at, after which all there are seem to be held out"""


class Lazy(Sequence[Problem]):
    """The sequence of `make(place)` for every place of a range. A slice is lazy too."""

    def __init__(self, make: Callable[[int], Problem], places: range) -> None:
        self._make, self._places = make, places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | Sequence[Problem]:
        if isinstance(index, slice):
            return Lazy(self._make, self._places[index])
        return self._make(self._places[index])


def without(
    held_out: set[str], make: Callable[[int], Problem], size: int, none_left: str
) -> Sequence[Problem]:
    """Returns the problems `make(0)` … `make(size - 1)`, with others of them in the places of those whose
    prompts are `held_out`: which ones follows from the place alone. Raises TaskError, which says `none_left`,
    if there is none."""
    # Tries go round by a step that meets every place, and leaves a run of places that are held out at once.
    step = next(step for step in count(max(1, round(0.618 * size))) if gcd(step, size) == 1)

    def train(place: int) -> Problem:
        for again in range(min(size, _TRIES)):
            problem = make((place + again * step) % size)
            if problem.prompt not in held_out:
                return problem
        raise TaskError(none_left)

    train(0)
    return Lazy(train, range(size))
