"""The order of problems: which one a ticket asks for, the same over a crash, a resumption, a replay.

| `learner.order.type` | problem of ticket n                                                        |
|----------------------|----------------------------------------------------------------------------|
| shuffled             | by n alone: each epoch has all of them, in another order                   |
| python               | by n alone: the index that the user's `order(number, problems, seed, …)` gives |
| pass-rate            | by the pass rates seen so far, remembered while the ticket is open: pass_rates.py |

In a mixture the weights say whose turn ticket n is (mixture.py), and the order is that of this task, with the
number of tickets that it had before in place of n. Imports no torch.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from areal_q.config import OrderConfig, PassRate, PythonOrder, Shuffled
from areal_q.errors import RecordError, TaskError
from areal_q.messages import Group, Ticket
from areal_q.plugins import load_function, place_of, user_code
from areal_q.tasks.base import Problem
from areal_q.tasks.ordering.mixture import MixedProblems, parts_of
from areal_q.tasks.ordering.pass_rates import DrawnProblem, Pools, PoolsState
from areal_q.tasks.shuffle import shuffled

_load = cache(lambda path, digest: load_function(path, "order"))
"""The function of these, loaded once for each digest of its files."""


def own_order(cfg: PythonOrder, number: int, problems: Sequence[Problem], seed: int) -> int:
    """Returns the index that the user's function gives. Raises TaskError, with the user's line, if it raises or
    gives something else."""
    function = _load(cfg.path, cfg.digest)
    with user_code(cfg.path, function=function):
        given = function(number, problems, seed, **cfg.settings)
    try:
        index = operator.index(given)
    except TypeError:
        index = -1
    if not 0 <= index < len(problems):
        raise TaskError(
            f"{place_of(function)}: gave {given!r} for ticket {number} where an index below "
            f"{len(problems)} is due"
        )
    return index


BY_NUMBER: dict[type, Callable[[Any, int, Sequence[Problem], int], int]] = {
    Shuffled: lambda cfg, number, problems, seed: shuffled(number, len(problems), seed),
    PythonOrder: own_order,
}


class Chosen(NamedTuple):
    """The problem of a ticket; place and reason as in the ticket."""

    problem: Problem
    place: int = -1
    why: str = ""


class Order:
    """The order of a run's problems. It remembers what tickets drew, and how often each problem was solved,
    only where the settings ask for that."""

    def __init__(
        self,
        cfg: OrderConfig,
        problems: Sequence[Problem],
        seed: int,
        state: Mapping[str, PoolsState] | None = None,
    ) -> None:
        """`state` is that of a checkpoint, by the name of the task."""
        self._cfg, self._problems, self._seed = cfg, problems, seed
        self._parts, state = parts_of(problems), state or {}
        self._pools = {
            name: Pools(cfg, len(part), seed, state.get(name))
            for name, part in self._parts.items()
            if isinstance(cfg, PassRate)
        }

    @property
    def remembers(self) -> bool:
        """True if the number alone does not say which problem a ticket asks for."""
        return bool(self._pools)

    def state(self) -> dict[str, PoolsState]:
        """Returns what a checkpoint keeps, which does not change any more."""
        return {name: pools.state() for name, pools in self._pools.items()}

    def chosen(self, number: int) -> Chosen:
        """Returns what ticket `number` asks for, drawn now if it is new. Raises TaskError as `own_order`
        does."""
        name, turn = self._turn(number)
        part = self._parts[name]
        if not self._pools:
            return Chosen(part[BY_NUMBER[type(self._cfg)](self._cfg, turn, part, self._seed)])
        drawn = self._pools[name].draw(number, turn)
        return Chosen(part[drawn.problem], *drawn)

    def admitted(self, ticket: Ticket) -> Chosen:
        """Returns what a ticket that came back may ask for. What it drew is in the ticket itself, if this
        learner knows nothing of it. Raises RecordError if there is no such problem."""
        name, _ = self._turn(ticket.number)
        if not self._pools or ticket.number in self._pools[name].drawn:
            return self.chosen(ticket.number)
        if not 0 <= ticket.problem < len(self._parts[name]):
            raise RecordError(f"ticket {ticket.number} asks for problem {ticket.problem}")
        return Chosen(self._parts[name][ticket.problem], ticket.problem, ticket.why)

    def take_up(self, number: int, problem: int, why: str) -> None:
        """Notes what another learner drew for a ticket that is open."""
        name, _ = self._turn(number)
        pools = self._pools[name]
        if number not in pools.drawn and 0 <= problem < len(self._parts[name]):
            pools.take_up(number, DrawnProblem(problem, why))

    def done(self, group: Group) -> None:
        """Ends a ticket whose group is finished, and counts the right answers among those that were scored."""
        if self._pools:
            right = [t.reward_parts.get("correct", 0.0) for t in group.valid_trajectories]
            rate = sum(right) / len(right) if right else None
            name, _ = self._turn(group.ticket.number)
            self._pools[name].done(group.ticket.number, group.ticket.problem, rate)

    def lost(self, numbers: Iterable[int]) -> None:
        """Ends tickets that came to nothing."""
        for number in sorted(numbers) if self._pools else ():
            self._pools[self._turn(number)[0]].lost([number])

    def _turn(self, number: int) -> tuple[str, int]:
        return (
            self._problems.turn(number)
            if isinstance(self._problems, MixedProblems)
            else ("", number)
        )


def try_out(cfg: OrderConfig, problems: Sequence[Problem], seed: int) -> None:
    """Calls an order of the user's own for the first tickets. Raises TaskError as `own_order` does."""
    order = Order(cfg, problems, seed)
    for number in range(min(8, len(problems)) if isinstance(cfg, PythonOrder) else 0):
        order.chosen(number)
