"""The curriculum `learner.order.type = "pass-rate"`: a problem is in a pool by how often it was solved so far.

    new ──draw──▶ drawn ──its group is finished──▶ hard, medium or easy ──draw──▶ drawn …

| pool   | problems                                            | who is next                         |
|--------|-----------------------------------------------------|-------------------------------------|
| new    | never scored                                        | the next of one shuffled epoch      |
| medium | pass rate within `keep`: it has something to teach  | the one that has waited the longest |
| hard   | below                                               | the same                            |
| easy   | above                                               | the same                            |

The pools take turns by their weights (mixture.py); an empty one leaves its turn to the first of medium, new,
hard and easy that is not. A pass rate is a moving average in which the newest group counts half.

What a ticket drew stays with it until its group is finished, and stands in the ticket as well, so that a
learner that resumes after a crash takes up from Redis what the one before drew since the checkpoint. Imports no
torch."""

from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

from msgspec import Struct

from areal_q.config import PassRate
from areal_q.tasks.ordering.mixture import turns
from areal_q.tasks.shuffle import shuffled

Pool = Literal["medium", "new", "hard", "easy"]
POOLS: tuple[Pool, ...] = ("medium", "new", "hard", "easy")
NEWEST = 0.5
"""Share of the newest group in a pass rate"""


class DrawnProblem(NamedTuple):
    """The problem of a ticket, as its place among those of its task, and why it was drawn."""

    problem: int
    why: str


class PoolsState(Struct, frozen=True, kw_only=True):
    """All that a checkpoint keeps of a curriculum."""

    rates: dict[int, tuple[float, int]]
    """Pass rate, and the number of groups that it is of, by problem"""
    pools: dict[Pool, list[int]]
    """Problems that wait, in the order of their turns; in `new` those that were drawn and never scored"""
    walked: int
    """Number of problems of the shuffled epoch that were passed"""
    drawn: dict[int, tuple[int, str]]
    """What the tickets that are not finished drew, by number"""


class Pools:
    """The curriculum of one task. It is not thread-safe."""

    def __init__(self, cfg: PassRate, size: int, seed: int, state: PoolsState | None) -> None:
        self._cfg, self._size, self._seed = cfg, size, seed
        weights = {pool: getattr(cfg, pool) for pool in POOLS}
        self._turns: list[Pool] = [POOLS[i] for i, _ in turns(tuple(weights.values()))]
        self._rates = dict(state.rates) if state else {}
        waiting = state.pools if state else {}
        self._pools: dict[Pool, dict[int, None]] = {
            pool: dict.fromkeys(waiting.get(pool, ())) for pool in POOLS
        }
        """Ordered sets"""
        self._walked = state.walked if state else 0
        self.drawn = {n: DrawnProblem(*it) for n, it in state.drawn.items()} if state else {}
        """What each ticket drew that is not finished"""
        self._asked = Counter(it.problem for it in self.drawn.values())
        """Number of such tickets by problem"""

    def state(self) -> PoolsState:
        return PoolsState(
            rates=dict(self._rates),
            pools={pool: list(waiting) for pool, waiting in self._pools.items()},
            walked=self._walked,
            drawn={number: (it.problem, it.why) for number, it in self.drawn.items()},
        )

    def draw(self, number: int, turn: int) -> DrawnProblem:
        """Returns what ticket `number` asks for, which has `turn` tickets of its task before it: what it drew
        already, or now the problem whose turn it is."""
        if number not in self.drawn:
            pool = self._turns[turn % len(self._turns)]
            chosen = next(filter(self._has, (pool, *POOLS)), None)
            if chosen is None:
                again = "all problems are being asked"
                self.take_up(number, DrawnProblem(shuffled(turn, self._size, self._seed), again))
            else:
                problem = next(iter(self._pools[chosen]), None)
                problem = self._at(self._walked) if problem is None else problem
                self.take_up(number, DrawnProblem(problem, self._why(chosen, pool, problem)))
        return self.drawn[number]

    def take_up(self, number: int, drawn: DrawnProblem) -> None:
        """Notes what a ticket drew, so that nobody else draws it before the ticket is finished."""
        self.drawn[number] = drawn
        self._asked[drawn.problem] += 1
        for waiting in self._pools.values():
            waiting.pop(drawn.problem, None)

    def done(self, number: int, problem: int, rate: float | None) -> None:
        """Ends a ticket that asked for `problem`, with the share of right answers; None if there is none."""
        if rate is not None:
            before, groups = self._rates.get(problem, (rate, 0))
            self._rates[problem] = (before + NEWEST * (rate - before), groups + 1)
        if self.drawn.pop(number, None):
            self._asked[problem] -= 1
        if self._asked[problem] < 1:
            del self._asked[problem]
            for waiting in self._pools.values():
                waiting.pop(problem, None)
            self._pools[self._pool_of(problem)][problem] = None

    def lost(self, numbers: Iterable[int]) -> None:
        """Ends tickets that came to nothing: their problems wait for another turn."""
        for number in sorted(numbers):
            if number in self.drawn:
                self.done(number, self.drawn[number].problem, None)

    def _pool_of(self, problem: int) -> Pool:
        if problem not in self._rates:
            return "new"
        rate, (low, high) = self._rates[problem][0], self._cfg.keep
        return "hard" if rate < low else "easy" if rate > high else "medium"

    def _has(self, pool: Pool) -> bool:
        """Returns True if a problem waits in the pool; in `new`, goes on to the next that nobody has met."""
        if pool == "new":
            while self._walked < self._size and self._met(self._at(self._walked)):
                self._walked += 1
        return bool(self._pools[pool]) or (pool == "new" and self._walked < self._size)

    def _at(self, place: int) -> int:
        return shuffled(place, self._size, self._seed)

    def _met(self, problem: int) -> bool:
        return problem in self._rates or problem in self._asked or problem in self._pools["new"]

    def _why(self, pool: Pool, due: Pool, problem: int) -> str:
        """Example: "hard: pass rate 0.06 after 3 groups; no medium one waits" """
        said = f"{pool}: never scored"
        if problem in self._rates:
            rate, groups = self._rates[problem]
            said = f"{pool}: pass rate {rate:.2f} after {groups} group{'s' * (groups != 1)}"
        return said if pool == due else f"{said}; no {due} one waits"
