"""Several tasks as one: whose problem each ticket asks for, and the problems of all as one sequence.

Which task is whose turn follows from the weights and the ticket's number alone, as exactly as can be: after any
number of tickets each task has had its share of them to within one ticket. Imports no torch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from itertools import chain, zip_longest
from math import gcd
from typing import overload

from msgspec.structs import replace

from areal_q.errors import TaskError
from areal_q.tasks.base import Problem, Task
from areal_q.tasks.lazy import Lazy, without


class MixedProblems(Sequence[Problem]):
    """The problems of several tasks, one task after the other by name. Each problem names its own."""

    def __init__(self, parts: Mapping[str, Sequence[Problem]], weights: Mapping[str, int]) -> None:
        self.parts = {name: _named(parts[name], name) for name in sorted(parts)}
        self.weights = weights

    def turn(self, number: int) -> tuple[str, int]:
        """Returns whose turn ticket `number` is, and how many tickets before it were that task's."""
        names = list(self.parts)
        which, count = turn(tuple(self.weights[name] for name in names), number)
        return names[which], count

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | Sequence[Problem]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        for part in self.parts.values():
            if place < len(part):
                return part[place]
            place -= len(part)
        raise IndexError(index)


class Mixture:
    """A Task of several. Held out are the problems of each task in turn, so that any beginning of them has
    equally many of each that has enough. What one of them holds out, none trains on: a task whose problems are
    generated has another one in its place."""

    def __init__(self, tasks: Mapping[str, Task], weights: Mapping[str, int]) -> None:
        """Raises TaskError if nothing of a task is left to train on."""
        heldout = {name: _named(tasks[name].heldout, name) for name in sorted(tasks)}
        in_turn = chain.from_iterable(zip_longest(*heldout.values()))
        self.heldout: Sequence[Problem] = tuple(p for p in in_turn if p is not None)
        kept = {problem.prompt for problem in self.heldout}
        train = {name: _without(kept, task.train, name) for name, task in tasks.items()}
        self.train: Sequence[Problem] = MixedProblems(train, weights)


def parts_of(problems: Sequence[Problem]) -> Mapping[str, Sequence[Problem]]:
    """Returns the problems of each task by its name, which is "" where there is one."""
    return problems.parts if isinstance(problems, MixedProblems) else {"": problems}


def turn(weights: tuple[int, ...], number: int) -> tuple[int, int]:
    """Returns whose turn it is at `number`, as an index of `weights`, and how many turns it had before."""
    order = turns(weights)
    rounds, place = divmod(number, len(order))
    which, before = order[place]
    return which, rounds * weights[which] // gcd(*weights) + before


@cache
def turns(weights: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns one period of turns, in which i has weights[i] / gcd of them: whose each is, and how many it had
    before. After n turns i has had n · weights[i] / Σ weights to within less than one.

    Of those who are due, the one whose next turn must come first (Tijdeman, The chairman assignment problem,
    Discrete Mathematics 32, 1980). Weights are at least 0, and one above.

    Example: weights (2, 1) → [(0, 0), (1, 0), (0, 1)].
    """
    shares = {i: weight // gcd(*weights) for i, weight in enumerate(weights) if weight}
    total, had = sum(shares.values()), Counter[int]()
    slack = Fraction(1, 2 * len(shares) - 2) if len(shares) > 1 else Fraction(0)
    found = []
    for n in range(1, total + 1):
        due = {i: Fraction(n * share, total) - had[i] for i, share in shares.items()}
        ready = [i for i in due if due[i] >= slack]
        chosen = min(ready, key=lambda i: (1 - slack - due[i]) / shares[i])
        found.append((chosen, had[chosen]))
        had[chosen] += 1
    return found


def _named(problems: Sequence[Problem], source: str) -> Sequence[Problem]:
    if isinstance(problems, Lazy):
        return Lazy(lambda i: replace(problems[i], source=source), range(len(problems)))
    return tuple(replace(problem, source=source) for problem in problems)


def _without(prompts: set[str], problems: Sequence[Problem], source: str) -> Sequence[Problem]:
    """Returns the problems without those of `prompts`; of generated ones as many as before, with another in the
    place of such a one, by the place alone. Raises TaskError if none is left."""
    none_left = f"task.sources.{source}: others hold out all that it trains on"
    if not isinstance(problems, Lazy):
        if left := [p for p in problems if p.prompt not in prompts]:
            return left
        raise TaskError(none_left)
    return without(prompts, problems.__getitem__, len(problems), none_left)
