"""The groups between Redis and the learner step: read, not finished; Reverb's table, on the learner's side.

    groups stream ─▶ add ─▶ [held, in the order of their commits] ─▶ draw ─▶ used ─▶ finished
                                        └─ too old, or over a bound of buffer.removal ─▶ finished

What "counts once" means: every draw of a group by a step that is in the surviving history, and no other. A
step holds a group at most once, and a group is used by at most `max_uses` steps (1 for fifo and freshest):
uses are counted by ticket, saved with every checkpoint, and taken up again by a resumed learner, so those
before the checkpoint stay counted and those of the abandoned history do not
(test_over_a_crash_no_group_is_used_more_often_than_it_may).

Redis keeps an entry for as long as it, or one before it, is held: `position` is the last one up to which all
are finished, and what a checkpoint records and trims.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from areal_q.config import BufferConfig, LearnerConfig
from areal_q.messages import Group
from buffer.interface import START, Entry, committed_s
from buffer.sampling.samplers import PooledGroup, build_sampler


class SampledGroups(NamedTuple):
    """The groups that a step learns from, in order."""

    groups: list[Group]
    weights: list[float]
    """Weights of the groups' advantages, in (0, 1]; empty where all are 1."""


class ReplayPool:
    """The groups that were read and are not finished. It is not safe for several threads."""

    def __init__(
        self,
        cfg: BufferConfig,
        learner: LearnerConfig,
        seed: int,
        steps: int,
        position: str,
        uses: dict[int, int] | None = None,
    ) -> None:
        """Begins at `position` of the groups stream, for a run of `steps` steps with seed `seed`. `uses` are
        those of groups that a checkpoint left unfinished, by ticket."""
        self.position = position
        self._batch, self._max_ahead = learner.groups, learner.max_outstanding
        self._seed, self._steps = seed, steps
        self._sampler, self._removal = build_sampler(cfg.sampler), cfg.removal
        self.needed = max(self._batch, self._sampler.min_groups)
        self._held: dict[int, PooledGroup] = {}
        """Groups by ticket, in the order of their commits"""
        self._read: deque[tuple[str, int]] = deque()
        """Pairs (entry, ticket) behind `position`"""
        self._before = dict(uses or {})
        """Uses of groups that were not read again yet, by ticket"""
        self._drawn: list[int] = []

    def __contains__(self, number: int) -> bool:
        return number in self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def groups(self) -> list[Group]:
        return [item.group for item in self._held.values()]

    @property
    def numbers(self) -> set[int]:
        return set(self._held)

    @property
    def uses(self) -> dict[int, int]:
        """Uses by ticket of the groups that were used and are not finished."""
        held = {number: item.uses for number, item in self._held.items() if item.uses}
        return self._before | held

    @property
    def missing(self) -> int:
        """Groups to wait for before the next draw."""
        return max(0, self.needed - len(self._held))

    @property
    def ahead(self) -> int:
        """Further groups to read if they are there, so that the sampler can choose among all."""
        return self._max_ahead if self._sampler.ahead else 0

    def rewind(self) -> None:
        """The stream's ids begin anew, below those that were read: none of them may be trimmed any more."""
        self.position = START
        self._read = deque((START, number) for _, number in self._read)

    def add(self, entry: Entry) -> None:
        number = entry.group.ticket.number
        self._read.append((entry.id, number))
        uses = self._before.pop(number, 0)
        self._held[number] = PooledGroup(entry.id, entry.group, entry.nbytes, lag=0, uses=uses)

    def pass_over(self, entry: Entry) -> None:
        """A group that was read and counts for nothing."""
        self._read.append((entry.id, -1))
        self._advance()

    def remove_older(self, lag: Callable[[Group], int], max_lag: int) -> list[PooledGroup]:
        """Takes out, and returns, what some token makes too old; `lag` is of the present version."""
        for item in self._held.values():
            item.lag = lag(item.group)
        return self._finish([n for n, item in self._held.items() if item.lag > max_lag])

    def remove_excess(self, now_s: Callable[[], float] = time.time) -> list[PooledGroup]:
        """Takes out, and returns, what `buffer.removal` does not let stay, the oldest first. `now_s` is the
        clock that gave the entries their ids: those of workers and of the learner do not matter."""
        oldest, bounds = list(self._held.values()), self._removal
        since = now_s() - bounds.max_age_s if bounds.max_age_s else float("-inf")
        over = [item for item in oldest if committed_s(item.entry) < since]
        left = [item for item in oldest if committed_s(item.entry) >= since]
        nbytes = sum(item.nbytes for item in left)
        while len(left) > (bounds.max_groups or len(left)) or (
            bounds.max_bytes is not None and nbytes > bounds.max_bytes and len(left) > self.needed
        ):
            nbytes -= left[0].nbytes
            over.append(left.pop(0))
        return self._finish([item.number for item in over])

    def draw(self, step: int) -> SampledGroups | None:
        """The batch of step `step`, a function of the run's seed, the step and what is held; None while that
        is too little. Nothing counts before `used`."""
        if self.missing:
            return None
        held = list(self._held.values())
        rng = np.random.default_rng([self._seed, step])
        progress = step / max(1, self._steps - 1)
        chosen, weights = self._sampler.choose(held, self._batch, progress, rng)
        self._drawn = [held[i].number for i in chosen]
        return SampledGroups([held[i].group for i in chosen], weights)

    def used(self) -> list[PooledGroup]:
        """The step that learnt from the last draw is over. Returns the groups that this finished."""
        for number in self._drawn:
            self._held[number].uses += 1
        done = [n for n in self._drawn if self._held[n].uses >= self._sampler.max_uses]
        self._drawn = []
        return self._finish(done)

    def _finish(self, numbers: list[int]) -> list[PooledGroup]:
        finished = [self._held.pop(number) for number in numbers]
        self._advance()
        return finished

    def _advance(self) -> None:
        while self._read and self._read[0][1] not in self._held:
            self.position = self._read.popleft()[0]
