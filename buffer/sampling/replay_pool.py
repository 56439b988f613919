"""The groups between Redis and the learner step, like a table of Reverb on the learner's side.

    groups stream ─▶ add ─▶ [held, in the order of their commits] ─▶ draw ─▶ used ─▶ finished
                                        └─ too old, or over a bound of buffer.removal ─▶ finished

A group is in a batch at most once, and at most `max_uses` steps use it (1 for fifo and freshest). Only steps of
the surviving history count: uses are counted by ticket and saved with every checkpoint, so that a resumed
learner knows those before the checkpoint and none of the abandoned history
(test_over_a_crash_no_group_is_used_more_often_than_it_may).

A group is finished when it will not be drawn again. `position` is the last entry of the stream up to which all
groups are finished. A checkpoint records it, and Redis deletes the entries up to it.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from areal_q.config import BufferConfig, LearnerConfig
from areal_q.messages import Group
from buffer.interface import START, Entry, committed_s
from buffer.sampling.samplers import PooledGroup, build_sampler


class SampledGroups(NamedTuple):
    """The groups that a step learns from, in order."""

    groups: Sequence[Group]
    weights: Sequence[float] = ()
    """Weights of the groups' advantages, in (0, 1]; empty if all are 1"""


class ReplayPool:
    """The groups that were read and are not finished. It is not thread-safe."""

    def __init__(
        self,
        cfg: BufferConfig,
        learner: LearnerConfig,
        seed: int,
        steps: int,
        position: str,
        uses: dict[int, int] | None = None,
    ) -> None:
        """Begins at `position` of the groups stream, for a run of `steps` steps with seed `seed`. `uses` has,
        by ticket, the number of uses of the groups that were not finished at the checkpoint."""
        self.position = position
        self._batch, self._max_ahead = learner.groups, learner.max_outstanding
        self._seed, self._steps = seed, steps
        self._sampler, self._removal = build_sampler(cfg.sampler), cfg.removal
        self.needed = max(self._batch, self._sampler.min_groups)
        self._held: dict[int, PooledGroup] = {}
        """Groups by ticket, in the order of their commits"""
        self._read: deque[tuple[str, int]] = deque()
        """Pairs (entry id, ticket number) of the groups read after `position`"""
        self._before = dict(uses or {})
        """Number of uses, by ticket, of groups that have not been read again since the checkpoint"""
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
        """Number of uses, by ticket, of the groups that were used and are not finished."""
        held = {number: item.uses for number, item in self._held.items() if item.uses}
        return self._before | held

    @property
    def missing(self) -> int:
        """Number of groups that are still needed for the next draw."""
        return max(0, self.needed - len(self._held))

    @property
    def ahead(self) -> int:
        """Number of further groups to read if they are available, for a sampler that chooses among all."""
        return self._max_ahead if self._sampler.ahead else 0

    def rewind(self) -> None:
        """Sets `position` to START, since the stream's ids have begun again below those that were read. The old
        ids must not be used for deletion any more."""
        self.position = START
        self._read = deque((START, number) for _, number in self._read)

    def add(self, entry: Entry) -> None:
        number = entry.group.ticket.number
        self._read.append((entry.id, number))
        uses = self._before.pop(number, 0)
        self._held[number] = PooledGroup(entry.id, entry.group, entry.nbytes, lag=0, uses=uses)

    def pass_over(self, entry: Entry) -> None:
        """Records a group that was read and will not be used."""
        self._read.append((entry.id, -1))
        self._advance()

    def remove_older(self, lag: Callable[[Group], int], max_lag: int) -> list[PooledGroup]:
        """Removes and returns the groups whose lag is above `max_lag`. `lag` returns the largest lag of a
        group's tokens at the present version."""
        for item in self._held.values():
            item.lag = lag(item.group)
        return self._finish([n for n, item in self._held.items() if item.lag > max_lag])

    def remove_excess(self, now_s: Callable[[], float] = time.time) -> list[PooledGroup]:
        """Removes and returns the groups beyond the bounds of `buffer.removal`, the oldest first. `now_s` is
        the clock that gave the entries their ids, so that ages do not depend on other clocks."""
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
        """Returns the batch of step `step`, or None if there are too few groups. It depends only on the run's
        seed, the step and the groups in the pool. The groups count as used only after `used`."""
        if self.missing:
            return None
        held = list(self._held.values())
        rng = np.random.default_rng([self._seed, step])
        progress = step / max(1, self._steps - 1)
        chosen, weights = self._sampler.choose(held, self._batch, progress, rng)
        self._drawn = [held[i].number for i in chosen]
        return SampledGroups([held[i].group for i in chosen], weights)

    def used(self) -> list[PooledGroup]:
        """Counts the groups of the last draw as used, when its step is done. Returns those that are finished by
        that."""
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
