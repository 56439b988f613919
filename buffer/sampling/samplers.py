"""Selection of the groups that a learner step draws: Reverb's selectors, in the terms of this buffer.

| `buffer.sampler.type` | Reverb's sampler | max_times_sampled | weights                             |
|-----------------------|------------------|-------------------|-------------------------------------|
| fifo                  | Fifo             | 1                 | none                                |
| freshest              | Lifo, by lag     | 1                 | none                                |
| uniform               | Uniform          | max_uses          | none                                |
| prioritized           | Prioritized      | max_uses          | importance weights, 1 at most       |

A draw is without replacement: a step never holds a group twice. To add one: a Struct in
areal_q/config/buffer.py, a class here, a line in SAMPLERS.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from areal_q.config import Fifo, Freshest, Prioritized, SamplerConfig, Uniform
from areal_q.messages import Group


@dataclass
class PooledGroup:
    """A group that was read and is not finished."""

    entry: str
    """Id of the group in the groups stream"""
    group: Group
    nbytes: int
    """Bytes of the group's record"""
    lag: int
    """Largest lag of its tokens, in versions behind the learner, as of the present step"""
    uses: int = 0
    """Number of steps that learnt from it"""

    @property
    def number(self) -> int:
        return self.group.ticket.number


class Choice(NamedTuple):
    """Indexes of the groups drawn, in the batch's order, and their weights; no weights: all are 1."""

    indexes: list[int]
    weights: list[float]


class Sampler(Protocol):
    max_uses: int
    min_groups: int
    """Groups to wait for before a draw, where that is more than a step needs"""
    ahead: bool
    """True to choose among all groups that are there, False to read no more than a step needs."""

    def choose(
        self, held: Sequence[PooledGroup], count: int, progress: float, rng: np.random.Generator
    ) -> Choice:
        """`count` of `held`, which are in the order of their commits and at least so many; `progress` is the
        share of the run that is over."""
        ...


class FifoSampler:
    max_uses, min_groups, ahead = 1, 0, False

    def __init__(self, cfg: Fifo) -> None:
        pass

    def choose(
        self, held: Sequence[PooledGroup], count: int, progress: float, rng: np.random.Generator
    ) -> Choice:
        return Choice(list(range(count)), [])


class FreshestSampler:
    max_uses, min_groups, ahead = 1, 0, True

    def __init__(self, cfg: Freshest) -> None:
        pass

    def choose(
        self, held: Sequence[PooledGroup], count: int, progress: float, rng: np.random.Generator
    ) -> Choice:
        """Example: lags [2, 0, 1, 0] and count 3 → [3, 1, 2]."""
        order = sorted(range(len(held)), key=lambda i: (held[i].lag, -i))
        return Choice(order[:count], [])


class UniformSampler:
    ahead = True

    def __init__(self, cfg: Uniform) -> None:
        self.max_uses, self.min_groups = cfg.max_uses, cfg.min_groups

    def choose(
        self, held: Sequence[PooledGroup], count: int, progress: float, rng: np.random.Generator
    ) -> Choice:
        return Choice(rng.choice(len(held), count, replace=False).tolist(), [])


class PrioritizedSampler:
    """Draws so that group i of N is in a batch of B with chance exactly π_i = min(1, c·p_i^alpha), Σ π = B:
    systematic sampling along a random order. Its weight (N·π_i/B)^-beta is PER's, P = π/B; at beta 1 the
    weighted mean over batches is the plain mean over the groups that are there."""

    ahead = True

    def __init__(self, cfg: Prioritized) -> None:
        self.max_uses, self.min_groups = cfg.max_uses, cfg.min_groups
        self._cfg = cfg

    def choose(
        self, held: Sequence[PooledGroup], count: int, progress: float, rng: np.random.Generator
    ) -> Choice:
        cfg = self._cfg
        priorities = np.array([spread(item.group) for item in held]) + cfg.floor
        chance = inclusion(priorities**cfg.alpha, count)
        chosen = systematic(chance, rng)
        beta = cfg.beta + (cfg.beta_final - cfg.beta) * min(1.0, progress)
        weights = (chance[chosen] * len(held) / count) ** -beta
        return Choice(chosen.tolist(), (weights / weights.max()).tolist())


def spread(group: Group) -> float:
    """Mean |reward − mean reward| over the valid responses: 0 where a group says nothing."""
    rewards = np.array([t.reward for t in group.valid_trajectories])
    return float(np.abs(rewards - rewards.mean()).mean())


def inclusion(sizes: np.ndarray, count: int) -> np.ndarray:
    """float64 [N] chances ∝ `sizes` > 0, none above 1, that add up to `count` ≤ N.

    Example: sizes [8, 1, 1], count 2 → [1, 0.5, 0.5].
    """
    chance = np.ones(len(sizes))
    free = np.ones(len(sizes), bool)
    while free.any():
        scaled = sizes[free] * ((count - (~free).sum()) / sizes[free].sum())
        chance[free] = np.minimum(scaled, 1.0)
        certain = free & (chance >= 1.0)
        if not certain.any():
            break
        free &= ~certain
    return chance


def systematic(chance: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Indexes int64 [Σ chance], each once, index i with probability `chance[i]`; in random order."""
    certain = np.flatnonzero(chance >= 1.0)
    rest = rng.permutation(np.flatnonzero(chance < 1.0))
    count = round(float(chance[rest].sum()))
    edges = np.cumsum(chance[rest])
    edges[-1:] = count
    picks = np.searchsorted(edges, rng.random() + np.arange(count), side="right")
    return rng.permutation(np.concatenate((certain, rest[picks])))


SAMPLERS: dict[type, Callable[[Any], Sampler]] = {
    Fifo: FifoSampler,
    Freshest: FreshestSampler,
    Uniform: UniformSampler,
    Prioritized: PrioritizedSampler,
}


def build_sampler(cfg: SamplerConfig) -> Sampler:
    return SAMPLERS[type(cfg)](cfg)
