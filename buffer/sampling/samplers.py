"""The samplers that choose the groups of a learner step, and Reverb's samplers that they correspond to.

| `buffer.sampler.type` | Reverb's sampler | max_times_sampled | weights                             |
|-----------------------|------------------|-------------------|-------------------------------------|
| fifo                  | Fifo             | 1                 | none                                |
| freshest              | Lifo, by lag     | 1                 | none                                |
| uniform               | Uniform          | max_uses          | none                                |
| prioritized           | Prioritized      | max_uses          | importance weights, 1 at most       |
| python                |                  | max_uses          | the user's, or none                 |

Draws are without replacement: a batch never has a group twice. To add a sampler, write a Struct in
areal_q/config/buffer.py, a class here, and a line in SAMPLERS.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from areal_q.config import (
    Fifo,
    Freshest,
    Prioritized,
    PythonSampler,
    SamplerConfig,
    Sampling,
    Uniform,
)
from areal_q.errors import TaskError
from areal_q.messages import Array, Group, Trajectory, VersionSpan
from areal_q.plugins import load_function, place_of, user_code
from areal_q.tasks import Problem


@dataclass
class PooledGroup:
    """A group that was read and is not finished."""

    entry: str
    """Id of the group in the groups stream"""
    group: Group
    nbytes: int
    """Bytes of the group's record"""
    lag: int
    """Largest version lag of its tokens at the present step"""
    uses: int = 0
    """Number of steps that have learnt from it"""

    @property
    def number(self) -> int:
        return self.group.ticket.number


class Choice(NamedTuple):
    """Indices of the groups drawn, in the order of the batch, and their weights. No weights means that all are
    1."""

    indexes: list[int]
    weights: list[float]


class Sampler(Protocol):
    max_uses: int
    min_groups: int
    """Number of groups that must be available for a draw, if that is more than a batch"""
    ahead: bool
    """True if the sampler chooses among all available groups, False if it needs no more than a batch"""

    def choose(
        self, held: Sequence[PooledGroup], count: int, progress: float, rng: np.random.Generator
    ) -> Choice:
        """Chooses `count` of the groups `held`, which are in the order of their commits and at least `count`.
        `progress` is the share of the run that is done, from 0 to 1."""
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
        """Chooses the groups with the smallest lag, and of equal ones the newest.

        Example: lags [2, 0, 1, 0] and count 3 → [3, 1, 2].
        """
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
    """A sampler by priorities p. Group i of N is in a batch of B with probability exactly π_i = min(1,
    c·p_i^alpha), where c makes Σ π = B, by systematic sampling along a random order. Its weight (N·π_i/B)^-beta
    is that of prioritized experience replay with P = π/B. At beta 1 the expected weighted mean over a batch is
    the plain mean over all available groups."""

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


class OwnSampler:
    """A function of the user's own (areal_q/plugins.py)."""

    ahead = True

    def __init__(self, cfg: PythonSampler) -> None:
        """Loads it. Raises TaskError with the user's line."""
        self.max_uses, self.min_groups = cfg.max_uses, cfg.min_groups
        self._cfg, self._function = cfg, load_function(cfg.path, "sampler")

    def choose(
        self, held: Sequence[PooledGroup], count: int, progress: float, rng: np.random.Generator
    ) -> Choice:
        """Returns what the function does. Raises TaskError, with the user's line, if it raises, or gives no
        `count` different indices, or weights that are not in (0, 1], one for each."""
        with user_code(self._cfg.path, function=self._function):
            given = self._function(held, count, progress, rng, **self._cfg.settings)
            pair = given if isinstance(given, tuple) else (given, ())
            indexes, weights = [*map(operator.index, pair[0])], [*map(float, pair[1])]
        place = place_of(self._function)
        within = all(0 <= i < len(held) for i in indexes)
        if not within or len(indexes) != count or len({*indexes}) != count:
            raise TaskError(f"{place}: {count} different indices below {len(held)} are due")
        if weights and (len(weights) != count or not all(0 < w <= 1 for w in weights)):
            raise TaskError(f"{place}: {count} weights above 0 and at most 1 are due, or none")
        return Choice(indexes, weights)


def try_out(cfg: SamplerConfig, problems: Sequence[Problem]) -> None:
    """Lets a sampler of the user's own choose among a few made-up groups of these problems. Raises TaskError as
    it does."""
    if isinstance(cfg, PythonSampler):
        held = [
            PooledGroup(f"0-{i + 1}", _made_up(i, problems[i % len(problems)]), 100, lag=i % 2)
            for i in range(6)
        ]
        OwnSampler(cfg).choose(held, 3, 0.0, np.random.default_rng(0))


def _made_up(number: int, problem: Problem) -> Group:
    """Returns a group of four responses of one token, `number` % 5 of them with reward 1."""
    ticket = problem.ticket(
        run="check", number=number, step=0, seed=number, prompt_ids=Array.of(np.zeros(1), "int32"),
        group_size=4, sampling=Sampling(),
    )  # fmt: skip
    one = (
        Array.of(np.zeros(1), "int32"),
        Array.of(np.zeros(1), "float32"),
        Array.of(np.ones(1), "uint8"),
    )
    trajectories = [
        Trajectory(
            index=i, response_ids=one[0], behavior_logprobs=one[1], loss_mask=one[2],
            spans=[VersionSpan(0, 1, "")], finish_reason="stop", reward=float(i < number % 5),
            reward_parts={"correct": float(i < number % 5)},
        )
        for i in range(4)
    ]  # fmt: skip
    return Group(
        ticket=ticket, worker="check", engine="check", weight_format="bf16", trajectories=trajectories,
        started_s=0.0, finished_s=0.0,
    )  # fmt: skip


def spread(group: Group) -> float:
    """Returns the mean |reward − mean reward| of the valid responses; it is 0 if all rewards are equal."""
    rewards = np.array([t.reward for t in group.valid_trajectories])
    return float(np.abs(rewards - rewards.mean()).mean())


def inclusion(sizes: np.ndarray, count: int) -> np.ndarray:
    """Returns inclusion probabilities, float64 [N], that sum to `count` ≤ N. They are proportional to `sizes` >
    0, except that none is above 1.

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
    """Returns distinct indices, int64 [Σ chance], in random order; index i is among them with probability
    `chance[i]`."""
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
    PythonSampler: OwnSampler,
}


def build_sampler(cfg: SamplerConfig) -> Sampler:
    return SAMPLERS[type(cfg)](cfg)
