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
from areal_q.messages import Array, FailureCause, FinishReason, Group, Trajectory, parts
from areal_q.models import PackedLayout
from areal_q.models.layers.moe import UNRECORDED
from buffer.sampling.replay_pool import SampledGroups
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
    source: str = ""
    """The task of a mixture that asked it."""
    parent: int | None = None
    """Index of the sample that this one hangs off, among its group's samples, which stand consecutively; None
    for the first path of an episode."""
    shared: int = 0
    """Number of leading tokens, the prompt's included, that are that one's"""
    branch: int = 0
    """Number of the path in its episode: 0 is the first, k that of branch k, counted from 1."""
    share: float = 1.0
    """Share of the episode's tokens that count, in which this sample stands for the episode"""

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
    responses: tuple[tuple[int, int, int], ...]
    """[S] (ticket, index, branch) of each sequence."""
    learns: bool
    """False if every advantage is 0: then the tokens are counted and measured, but have no gradient."""
    routes: torch.Tensor | None = None
    """int16 [N, L, K]: the experts to which the rollout sent each token, or UNRECORDED; None if all are."""
    teacher_logprobs: torch.Tensor | None = None
    """float32 [T]: log π_T in nats; None unless a teacher scored all the responses."""
    counts: bool = True
    """False for a filler that a rank computes only because the other ranks have a micro-batch more."""
    share: torch.Tensor | None = None
    """float32 [T]: Sample.share of each token's sequence; None where each is 1."""


def samples_of(
    batch: SampledGroups,
    advantage: AdvantageConfig,
    history: VersionHistory,
    version: int,
    mask: Sequence[FinishReason] = (),
) -> list[Sample]:
    """Returns every path of every valid trajectory of `batch` with the trajectory's advantage and its tokens'
    lags, in the groups' order: a first path, then its branches. Each has its own tokens only, behind all that
    they were drawn after. A reward counts once in its group's baseline, however many paths its episode has.

    Invalid trajectories have no influence on the others. Paths whose last turn ended for a reason in `mask`
    have no token that counts, though their reward is part of their group's baseline.

    The sampler's weights multiply the groups' advantages. For a given sign of A every objective of ours is
    linear in A, so that this weights a sample's policy loss, whichever it is.
    """
    groups = batch.groups
    of_group = [i for i, group in enumerate(groups) for _ in group.valid_trajectories]
    trajectories = [t for group in groups for t in group.valid_trajectories]
    rewards = torch.tensor([t.reward for t in trajectories])
    if isinstance(advantage, Gae):
        advantages = rewards - rewards.mean()
    else:
        sources = [groups[i].ticket.source for i in of_group]
        ids = torch.tensor(of_group)
        advantages = group_advantages(rewards, ids, advantage, sources=sources)
    prompts = [group.ticket.prompt_ids.numpy() for group in groups]
    weights = batch.weights or [1.0] * len(groups)
    spans = [span for t in trajectories for span in t.all_spans]
    lags = np.repeat([history.lag(span, version) for span in spans], [s.tokens for s in spans])
    by_response = np.split(lags, np.cumsum([t.all_tokens for t in trajectories])[:-1])
    samples: list[Sample] = []
    first = 0  # the place of the group's first sample
    columns = zip(of_group, trajectories, advantages.tolist(), by_response, strict=True)
    for place, (i, t, own, lag) in enumerate(columns):
        if place and of_group[place - 1] != i:
            first = len(samples)
        ticket, weight = groups[i].ticket, weights[i]
        whole = Sample(ticket.number, prompts[i], t, own * weight, lag, weight, ticket.source)
        samples += _paths(whole, len(samples) - first, mask)
    return [masked(s) if s.trajectory.finish_reason in mask else s for s in samples]


def _paths(whole: Sample, place: int, mask: Sequence[FinishReason] = ()) -> list[Sample]:
    """Returns a sample for each path of an episode, of which `whole` has all lags, and the first path this
    `place` among the samples of its group. Those that ended for a reason in `mask` stand for nothing."""
    if not whole.trajectory.branches:
        return [whole]
    found = list(parts(whole.prompt_ids, whole.trajectory))
    lags = np.split(whole.lag, np.cumsum([t.num_tokens for _, t in found])[:-1])
    counted = [int(np.count_nonzero(t.loss_mask.numpy())) for _, t in found]
    counted = [
        0 if t.finish_reason in mask else n for n, (_, t) in zip(counted, found, strict=True)
    ]
    parents = [None, *(place + branch.parent for branch in whole.trajectory.branches)]
    return [
        replace(
            whole,
            prompt_ids=before,
            trajectory=t,
            lag=lags[branch],
            parent=parents[branch],
            shared=len(before) if branch else 0,
            branch=branch,
            share=counted[branch] / max(1, sum(counted)),
        )
        for branch, (before, t) in enumerate(found)
    ]


def unlearnt_samples(groups: Sequence[Group]) -> list[Sample]:
    """Returns every path of every trajectory, in order, without an advantage: for its log-probs."""
    samples: list[Sample] = []
    for group in groups:
        first, prompt = len(samples), group.ticket.prompt_ids.numpy()
        for t in group.trajectories:
            lag = np.zeros(t.all_tokens, np.int64)
            whole = Sample(group.ticket.number, prompt, t, 0.0, lag)
            samples += _paths(whole, len(samples) - first)
    return samples


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


def response_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Returns the mean length of the valid responses, the share of those that were cut off before their end,
    and the share of the groups with several valid responses whose rewards are all equal, if there are any."""
    valid = [t for group in groups for t in group.valid_trajectories]
    values = {
        "response/tokens_mean": sum(t.all_tokens for t in valid) / len(valid),
        "response/cut_off_share": sum(t.finish_reason != "stop" for t in valid) / len(valid),
    }
    if several := [group for group in groups if len(group.valid_trajectories) > 1]:
        values["reward/uniform_share"] = sum(map(is_uniform, several)) / len(several)
    return values


def source_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Returns for each task of a mixture its share of the groups, the mean reward of its responses, and the
    share of uniform groups among those of several valid responses; nothing for a run of one task."""
    values: dict[str, float] = {}
    for source in sorted({group.ticket.source for group in groups} - {""}):
        its = [group for group in groups if group.ticket.source == source]
        rewards = [t.reward for group in its for t in group.valid_trajectories]
        several = [group for group in its if len(group.valid_trajectories) > 1]
        values[f"source/{source}/share"] = len(its) / len(groups)
        if rewards:
            values[f"source/{source}/reward_mean"] = sum(rewards) / len(rewards)
        if several:
            values[f"source/{source}/uniform_share"] = sum(map(is_uniform, several)) / len(several)
    return values


def is_uniform(group: Group) -> bool:
    """Returns True if all rewards of the group are equal, so that every advantage would be 0 (DAPO's dynamic
    sampling, arXiv 2503.14476 §3.2)."""
    return len({t.reward for t in group.valid_trajectories}) == 1


def lag_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns the mean over tokens, and the largest, of the versions by which tokens lag behind the learner."""
    lags = np.concatenate([sample.lag for sample in samples])
    return {"lag/mean": float(lags.mean()), "lag/max": int(lags.max())}


def part_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns `reward/part_NAME`: the mean over responses of each part of the reward; a missing part is 0."""
    sums: dict[str, float] = {}
    samples = [sample for sample in samples if not sample.branch]
    for sample in samples:
        for name, value in sample.trajectory.reward_parts.items():
            sums[name] = sums.get(name, 0.0) + value
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
    groups = [list(members) for _, members in groupby(samples, key=_prompt_of)]
    trajectories = [sample.trajectory for sample in samples]
    lengths = np.array([t.num_tokens for t in trajectories])
    targets = Array.concatenate([t.response_ids for t in trajectories])
    token_ids, predict = _inputs(groups, lengths, targets)
    routes = _routes(groups)
    given = [t.teacher_logprobs for t in trajectories]

    def tensor(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(values).to(device, dtype, non_blocking=True)

    sizes = [
        (len(members[0].prompt_ids), [s.trajectory.num_tokens - 1 for s in members])
        for members in groups
    ]
    return PackedBatch(
        layout=PackedLayout.of_groups(sizes, device),
        token_ids=tensor(token_ids, torch.int64),
        predict=tensor(predict, torch.int64),
        targets=tensor(targets, torch.int64),
        behavior_logprobs=tensor(
            Array.concatenate([t.behavior_logprobs for t in trajectories]), torch.float32
        ),
        advantages=tensor(np.repeat([s.advantage for s in samples], lengths), torch.float32),
        mask=tensor(Array.concatenate([t.loss_mask for t in trajectories]), torch.bool),
        version_lag=tensor(np.concatenate([sample.lag for sample in samples]), torch.int64),
        sequence_ids=tensor(np.repeat(np.arange(len(samples)), lengths), torch.int64),
        num_sequences=len(samples),
        responses=tuple((s.ticket, s.trajectory.index, s.branch) for s in samples),
        learns=learns or any(sample.advantage for sample in samples),
        routes=None if routes is None else torch.from_numpy(routes).to(device, non_blocking=True),
        teacher_logprobs=None
        if None in given
        else tensor(Array.concatenate([array for array in given if array]), torch.float32),
        counts=counts,
        share=None
        if all(sample.share == 1 for sample in samples)
        else tensor(np.repeat([sample.share for sample in samples], lengths), torch.float32),
    )


def _prompt_of(sample: Sample) -> tuple[int, ...]:
    """Returns what neighbours that share their whole prompt have in common: the ticket, of first paths. Others
    compute what they share again."""
    first = sample.parent is None
    return (sample.ticket,) if first else (sample.ticket, sample.trajectory.index, sample.branch)


def _inputs(
    groups: Sequence[Sequence[Sample]], lengths: np.ndarray, targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns `token_ids` and `predict` of a PackedBatch, int64 [N] and [T]. `lengths` [S] are the numbers of
    response tokens, which `targets` [T] are."""
    sizes = [len(members) for members in groups]
    prompts = [members[0].prompt_ids for members in groups]
    begins = np.cumsum(lengths) - lengths  # the place of each response's first token among the T
    before = np.repeat(np.cumsum([len(prompt) for prompt in prompts], dtype=np.int64), sizes)
    places = before + begins - np.arange(len(lengths))  # the same among the N inputs
    inputs = np.arange(len(targets)) + np.repeat(places - begins, lengths)
    predict = inputs - 1
    predict[begins] = np.repeat(places[np.cumsum(sizes, dtype=np.int64) - sizes], sizes) - 1
    is_input = np.ones(len(targets), bool)
    is_input[begins + lengths - 1] = False
    inputs = inputs[is_input]
    token_ids = np.empty(len(inputs) + sum(map(len, prompts)), np.int64)
    is_prompt = np.ones(len(token_ids), bool)
    is_prompt[inputs] = False
    token_ids[inputs] = targets[is_input]
    token_ids[is_prompt] = np.concatenate(prompts)
    return token_ids, predict


def _routes(groups: Sequence[Sequence[Sample]]) -> np.ndarray | None:
    """Returns the routes, int16 [N, L, K], of the packed tokens of `groups`; None if no routes were
    recorded."""
    shapes = {
        s.trajectory.routes.shape[1:] for group in groups for s in group if s.trajectory.routes
    }
    if not shapes:
        return None
    (shape,) = shapes
    parts: list[np.ndarray] = []
    for group in groups:
        prompt = len(group[0].prompt_ids)
        parts.append(_known(group[0].trajectory, 0, prompt, shape))
        for sample in group:
            stop = prompt + sample.trajectory.num_tokens - 1
            parts.append(_known(sample.trajectory, prompt, stop, shape))
    return np.concatenate(parts)


def _known(trajectory: Trajectory, start: int, stop: int, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the routes of the tokens from `start` to before `stop`, UNRECORDED where there is none."""
    out = np.full((stop - start, *shape), UNRECORDED, np.int16)
    if trajectory.routes:
        known = trajectory.routes.numpy()[start:stop]
        out[: len(known)] = known
    return out
