"""Packing of groups of trajectories into tensors: no padding, one row per token.

Notation: N tokens of all sequences (prompts and responses), T response tokens, S sequences.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import get_args

import msgspec
import numpy as np
import torch

from areal_q.algorithms import group_advantages
from areal_q.config import AdvantageConfig, Gae
from areal_q.messages import Array, FailureCause, FinishReason, Group, Trajectory
from areal_q.models import PackedLayout
from areal_q.models.layers.moe import UNRECORDED
from learner.data.staleness import VersionHistory

CAUSES: tuple[FailureCause, ...] = get_args(FailureCause)


@dataclass(frozen=True)
class Sample:
    """One sequence to learn from."""

    ticket: int
    """Number of the group's ticket; neighbours of the same number share their prompt."""
    prompt_ids: np.ndarray
    """int32 [P]"""
    trajectory: Trajectory
    advantage: float
    """The advantage from rewards alone (for GAE, reward - mean reward), times `weight`. If it needs the
    critic's values or the distance to the reference, learner/policy_advantages.py replaces it before the
    update."""
    lag: np.ndarray
    """int64 [T] number of versions by which the weights that drew each token are behind the learner's."""
    weight: float = 1.0
    """The sampler's weight of the group."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + self.trajectory.num_tokens


@dataclass(frozen=True)
class PackedBatch:
    """Whole sequences, one after the other. Those of a group share their prompt's tokens.

    The last token of a response predicts nothing and is therefore not among the inputs.
    Example: prompt [5, 6], responses [7, 8] and [9]: token_ids [5, 6, 7], predict [1, 2, 1] (the
    position whose output predicts each response token), targets [7, 8, 9].
    """

    layout: PackedLayout
    token_ids: torch.Tensor
    """int64 [N]: the input tokens."""
    predict: torch.Tensor
    """int64 [T]: the index among the N inputs whose output predicts each response token."""
    targets: torch.Tensor
    """int64 [T]: the response tokens."""
    behavior_logprobs: torch.Tensor
    """float32 [T]: log π_behav in nats."""
    advantages: torch.Tensor
    """float32 [T]: the advantage of each token."""
    mask: torch.Tensor
    """bool [T]: True on tokens that count."""
    version_lag: torch.Tensor
    """int64 [T]: the learner's version minus that of the weights that drew the token."""
    sequence_ids: torch.Tensor
    """int64 [T] in 0 … S-1: the sequence of each token."""
    num_sequences: int
    responses: tuple[tuple[int, int], ...]
    """[S] (ticket, index) of each sequence."""
    learns: bool
    """False if every advantage is 0: then the tokens are counted and measured, but have no gradient."""
    routes: torch.Tensor | None = None
    """int16 [N, L, K]: the experts to which the rollout sent each token, or UNRECORDED; None if all are."""
    counts: bool = True
    """False for a filler that a rank computes only because the other ranks have a micro-batch more."""


def samples_of(
    groups: Sequence[Group],
    advantage: AdvantageConfig,
    history: VersionHistory,
    version: int,
    weights: Sequence[float] = (),
    mask: Sequence[FinishReason] = (),
) -> list[Sample]:
    """Returns every valid trajectory of `groups` with its advantage and its tokens' lags, in the groups' order.
    Invalid trajectories have no influence on the others. Responses that ended for a reason in `mask` have no
    token that counts, though their reward is part of their group's baseline.

    `weights` multiply the groups' advantages; none means that all are 1. For a given sign of A every objective
    is linear in A, so that this weights a sample's policy loss, whatever the objective.
    """
    rewards = torch.tensor([t.reward for g in groups for t in g.valid_trajectories])
    ids = torch.tensor([i for i, g in enumerate(groups) for _ in g.valid_trajectories])
    if isinstance(advantage, Gae):
        advantages = rewards - rewards.mean()
    else:
        advantages = group_advantages(rewards, ids, advantage)
    each = iter(advantages.tolist())
    samples = [
        Sample(
            ticket=group.ticket.number,
            prompt_ids=group.ticket.prompt_ids.numpy(),
            trajectory=t,
            advantage=next(each) * weight,
            weight=weight,
            lag=np.repeat([history.lag(s, version) for s in t.spans], [s.tokens for s in t.spans]),
        )
        for group, weight in zip(groups, weights or [1.0] * len(groups), strict=True)
        for t in group.valid_trajectories
    ]
    return [masked(s) if s.trajectory.finish_reason in mask else s for s in samples]


def masked(sample: Sample) -> Sample:
    """Returns `sample` with all tokens masked, so that it has no influence on the loss."""
    none = Array.of(np.zeros(sample.trajectory.num_tokens), "uint8")
    trajectory = msgspec.structs.replace(sample.trajectory, loss_mask=none)
    return replace(sample, trajectory=trajectory, advantage=0.0)


def failure_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Returns `reward/invalid`, the number of responses that are left out because their reward failed, the same
    by cause, and `reward/errors`, the number of rewards that failed, including those that count as 0."""
    everyone = [t for group in groups for t in group.trajectories]
    causes = Counter(t.failure for t in everyone if not t.valid)
    errors = sum(not t.valid or t.reward_parts.get("error", 0.0) > 0 for t in everyone)
    by_cause = {f"reward/invalid/{cause}": float(causes[cause]) for cause in CAUSES}
    return {"reward/errors": float(errors), "reward/invalid": float(causes.total()), **by_cause}


def lag_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns the mean over tokens, and the largest, of the versions by which tokens lag behind the learner."""
    lags = np.concatenate([sample.lag for sample in samples])
    return {"lag/mean": float(lags.mean()), "lag/max": int(lags.max())}


def part_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns `reward/part_NAME`: the mean over responses of each part of the reward; a missing part is 0."""
    sums: Counter[str] = Counter()
    for sample in samples:
        sums.update(sample.trajectory.reward_parts)
    return {f"reward/part_{name}": total / len(samples) for name, total in sorted(sums.items())}


def microbatches(samples: Sequence[Sample], max_tokens: int) -> Iterator[Sequence[Sample]]:
    """Yields consecutive slices of `samples` with at most `max_tokens` tokens; a longer sequence stands
    alone."""
    start, tokens = 0, 0
    for i, sample in enumerate(samples):
        if i > start and tokens + sample.num_tokens > max_tokens:
            yield samples[start:i]
            start, tokens = i, 0
        tokens += sample.num_tokens
    if start < len(samples):
        yield samples[start:]


def pack_samples(
    samples: Sequence[Sample], device: str = "cpu", learns: bool = False, counts: bool = True
) -> PackedBatch:
    """Returns `samples` as one batch on `device`. The result of a step does not depend on how they are batched.

    `learns` is True if they have a gradient whatever their advantages; `counts` is PackedBatch.counts.
    """
    rows: list[np.ndarray] = []
    predict: list[np.ndarray] = []
    groups: list[tuple[int, list[int]]] = []
    origins: list[tuple[Trajectory, int, int]] = []
    end = 0
    for _, members in groupby(samples, key=lambda sample: sample.ticket):
        members = list(members)
        prompt = members[0].prompt_ids
        rows.append(prompt)
        origins.append((members[0].trajectory, 0, len(prompt)))
        end += len(prompt)
        last = end - 1
        for sample in members:
            inputs = sample.trajectory.response_ids.numpy()[:-1]
            rows.append(inputs)
            origins.append((sample.trajectory, len(prompt), len(prompt) + len(inputs)))
            predict.append(np.concatenate(([last], np.arange(end, end + len(inputs)))))
            end += len(inputs)
        groups.append((len(prompt), [sample.trajectory.num_tokens - 1 for sample in members]))
    lengths = [sample.trajectory.num_tokens for sample in samples]
    routes = _routes(origins)

    def tensor(values: Sequence[np.ndarray] | np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        array = values if isinstance(values, np.ndarray) else np.concatenate(values)
        return torch.from_numpy(array.copy()).to(device, dtype, non_blocking=True)

    def joined(name: str) -> list[np.ndarray]:
        return [getattr(sample.trajectory, name).numpy() for sample in samples]

    return PackedBatch(
        layout=PackedLayout.of_groups(groups, device),
        token_ids=tensor(rows, torch.int64),
        predict=tensor(predict, torch.int64),
        targets=tensor(joined("response_ids"), torch.int64),
        behavior_logprobs=tensor(joined("behavior_logprobs"), torch.float32),
        advantages=tensor(np.repeat([s.advantage for s in samples], lengths), torch.float32),
        mask=tensor(joined("loss_mask"), torch.bool),
        version_lag=tensor([sample.lag for sample in samples], torch.int64),
        sequence_ids=tensor(np.repeat(np.arange(len(samples)), lengths), torch.int64),
        num_sequences=len(samples),
        responses=tuple((sample.ticket, sample.trajectory.index) for sample in samples),
        learns=learns or any(sample.advantage for sample in samples),
        routes=None if routes is None else torch.from_numpy(routes).to(device, non_blocking=True),
        counts=counts,
    )


def _routes(origins: Sequence[tuple[Trajectory, int, int]]) -> np.ndarray | None:
    """Returns the routes, int16 [N, L, K], of packed tokens. `origins` are (trajectory, start, stop): the
    packed tokens are those from start to before stop of each trajectory. None if no routes were recorded."""
    shapes = {t.routes.shape[1:] for t, _, _ in origins if t.routes}
    if not shapes:
        return None
    (shape,) = shapes
    total = sum(stop - start for _, start, stop in origins)
    out, end = np.full((total, *shape), UNRECORDED, np.int16), 0
    for trajectory, start, stop in origins:
        if trajectory.routes:
            known = trajectory.routes.numpy()[start:stop]
            out[end : end + len(known)] = known
        end += stop - start
    return out
