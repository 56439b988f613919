"""A sequence of problems that are generated on access, so that a billion of them take no memory."""

from collections.abc import Callable, Sequence
from typing import overload

from areal_q.tasks.base import Problem


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
