"""Packing of groups of trajectories into tensors: no padding, one row per token.

Notation: N tokens of all sequences (prompts and responses), T response tokens, S sequences.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain

import numpy as np
import torch

from areal_q.algorithms import group_advantages
from areal_q.config import AdvantageConfig, Gae
from areal_q.messages import Array, FinishReason, Group, Trajectory, mean_of_turns, parts
from areal_q.models import DecoderConfig, PackedLayout
from areal_q.models.layers.moe import UNRECORDED
from areal_q.models.packed_layout import Segment, ranges
from buffer.sampling.replay_pool import SampledGroups
from learner.data.staleness import VersionHistory
from learner.data.turn_rewards import has_turns, turn_advantages

PATHS = 4
"""How many times the most tokens of a micro-batch its whole paths may have: a branch's queries are its own
tokens, but attention lays out the keys and values of all of its path"""


def paths_of(shape: DecoderConfig) -> int:
    """Returns PATHS; 1 for a model of transformers, which computes each path whole."""
    return PATHS if shape.foreign is None else 1


@dataclass(frozen=True)
class Sample:
    """One sequence to learn from."""

    ticket: int
    """Number of the group's ticket; neighbours of the same number share what their prompts begin with."""
    prompt_ids: np.ndarray
    """int32 [P]"""
    trajectory: Trajectory
    advantage: float | np.ndarray
    """The advantage of all tokens or, where turns have rewards, of each, [T]: from rewards alone (for GAE,
    reward - mean reward), times `weight`. If it needs the critic's values or the distance to the reference,
    learner/policy_advantages.py replaces it before the update."""
    lag: np.ndarray
    """int64 [T] number of versions by which the weights that drew each token are behind the learner's."""
    weight: float = 1.0
    """The sampler's weight of the group."""
    source: str = ""
    """The task of a mixture that asked it."""
    shared: int = 0
    """Number of leading tokens of its path, the prompt's included, that are those of the path that it branches
    off: they are neither computed nor learnt from again."""
    branch: int = 0
    """Number of the path in its episode: 0 is the first, k that of branch k, counted from 1."""
    share: float = 1.0
    """Share of the episode's tokens that count, in which this sample stands for the episode"""
    of_turns: float = 0.0
    """How much of the episode's reward is that of its turns, and not the episode's own"""
    masked: bool = False
    """True if none of its tokens counts, though its reward does in the baseline of its group"""

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens of its path: the prompt's and the response's."""
        return len(self.prompt_ids) + self.trajectory.num_tokens

    @property
    def own_tokens(self) -> int:
        """Returns the number of tokens of its path that are its own."""
        return self.num_tokens - self.shared

    @property
    def learns(self) -> bool:
        """Returns True if any of its tokens has an advantage."""
        return bool(np.any(self.advantage))

    @property
    def counted(self) -> np.ndarray:
        """Returns which tokens of the response count, bool [T]."""
        return (self.trajectory.loss_mask.numpy() != 0) & (not self.masked)

    @property
    def advantages(self) -> np.ndarray:
        """Returns the advantage of each token of the response, [T]."""
        return np.broadcast_to(self.advantage, self.trajectory.num_tokens)

    @cached_property
    def path(self) -> np.ndarray:
        """Returns the tokens of the prompt and of the response, int32 [P + T]."""
        return np.concatenate((self.prompt_ids, self.trajectory.response_ids.numpy()))


@dataclass(frozen=True)
class PackedBatch:
    """Whole sequences of a forest, one after the other: each has its own tokens alone, and shares those before
    with an earlier one of its group.

    The last token of a response is among the inputs only if another sequence continues after it, as else it
    predicts nothing. A token that several sequences share may predict a token of each.
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
    """bool [T]: True on tokens that count, in the one sequence whose own they are."""
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
    sampling_mask: torch.Tensor | None = None
    """int64 [T, K]: the ids that each token was drawn from, -1 for none; one that was not drawn has itself
    alone. None where all ids could be drawn."""
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
    prompts = [group.ticket.prompt_ids.numpy() for group in groups]
    advantages = _advantages(groups, advantage)
    weights = batch.weights or [1.0] * len(groups)
    spans = [span for t in trajectories for span in t.all_spans]
    lags = np.repeat([history.lag(span, version) for span in spans], [s.tokens for s in spans])
    by_response = np.split(lags, np.cumsum([t.all_tokens for t in trajectories])[:-1])
    samples: list[Sample] = []
    columns = zip(of_group, trajectories, advantages, by_response, strict=True)
    for i, t, own, lag in columns:
        ticket, weight = groups[i].ticket, weights[i]
        of_turns = mean_of_turns(len(prompts[i]), t) if has_turns(t) else 0.0
        fields = ticket.number, prompts[i], t, own * weight, lag, weight, ticket.source
        samples += _paths(Sample(*fields, of_turns=of_turns), mask)
    return [masked(s) if s.trajectory.finish_reason in mask else s for s in samples]


def _advantages(groups: Sequence[Group], cfg: AdvantageConfig) -> Sequence[float | np.ndarray]:
    """Returns `Sample.advantage` of each valid trajectory, not weighted."""
    valid = [
        (i, group.ticket, t) for i, group in enumerate(groups) for t in group.valid_trajectories
    ]
    ids, sources = [i for i, _, _ in valid], [ticket.source for _, ticket, _ in valid]
    rewards = torch.tensor([t.reward for _, _, t in valid])
    if isinstance(cfg, Gae):
        return (rewards - rewards.mean()).tolist()
    if any(has_turns(t) for _, _, t in valid):
        episodes = [(ticket.prompt_ids.shape[0], t, 0.0) for _, ticket, t in valid]
        return turn_advantages(episodes, ids, cfg, sources=sources)
    return group_advantages(rewards, torch.tensor(ids), cfg, sources=sources).tolist()


def _paths(whole: Sample, mask: Sequence[FinishReason] = ()) -> list[Sample]:
    """Returns a sample for each path of an episode, of which `whole` has all lags and advantages. Those that
    ended for a reason in `mask` stand for nothing."""
    if not whole.trajectory.branches:
        return [whole]
    found = list(parts(whole.prompt_ids, whole.trajectory))
    ends = np.cumsum([t.num_tokens for _, t in found])[:-1]
    lags = np.split(whole.lag, ends)
    advantages = np.split(np.broadcast_to(whole.advantage, len(whole.lag)), ends)
    counted = [int(np.count_nonzero(t.loss_mask.numpy())) for _, t in found]
    counted = [
        0 if t.finish_reason in mask else n for n, (_, t) in zip(counted, found, strict=True)
    ]
    return [
        replace(
            whole,
            prompt_ids=before,
            trajectory=t,
            advantage=advantages[branch] if np.ndim(whole.advantage) else whole.advantage,
            lag=lags[branch],
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
        prompt = group.ticket.prompt_ids.numpy()
        for t in group.trajectories:
            lag = np.zeros(t.all_tokens, np.int64)
            whole = Sample(group.ticket.number, prompt, t, 0.0, lag)
            samples += _paths(whole)
    return samples


def masked(sample: Sample) -> Sample:
    """Returns `sample` with all tokens masked, so that it has no influence on the loss."""
    return replace(sample, masked=True, advantage=0.0)


def microbatches(
    samples: Sequence[Sample], max_tokens: int, paths: int = PATHS
) -> Iterator[Sequence[Sample]]:
    """Yields consecutive slices of `samples` with at most `max_tokens` tokens, and at most `paths` times as
    many if each path is counted with all that it shares; a longer sequence stands alone.

    A slice may begin within a tree: what its samples share with earlier ones is then computed again.
    """
    start, tokens, whole = 0, 0, 0
    for i, sample in enumerate(samples):
        saved = min(fork(samples, i, start)[1], sample.shared) if sample.shared else 0
        most = max(tokens + sample.num_tokens - saved, -(-(whole + sample.num_tokens) // paths))
        if i > start and most > max_tokens:
            yield samples[start:i]
            start, tokens, whole, saved = i, 0, 0, 0
        tokens += sample.num_tokens - saved
        whole += sample.num_tokens
    if start < len(samples):
        yield samples[start:]


def fork(samples: Sequence[Sample], place: int, start: int = 0) -> tuple[int | None, int]:
    """Returns the place in `samples`, not before `start`, of the sample off which that at `place` hangs, and
    the number of leading tokens of their paths that they share; (None, 0) if there is none.

    It is the earlier one of the same group that shares most, up to the end of the prompt or of the tokens that
    are its parent's, whichever is later: also a sibling will do. So any samples may be packed together.
    """
    sample, owner, most = samples[place], None, 0
    limit = max(len(sample.prompt_ids), sample.shared)
    for i in range(place - 1, start - 1, -1):
        if samples[i].ticket != sample.ticket or most == limit:
            break
        if limit == len(sample.prompt_ids) and samples[i].prompt_ids is sample.prompt_ids:
            return i, limit
        ours, theirs = sample.path[:limit], samples[i].path[:limit]
        shorter = min(len(ours), len(theirs))
        differ = ours[:shorter] != theirs[:shorter]
        same = int(differ.argmax()) if differ.any() else shorter
        if same > most:
            owner, most = i, same
    return owner, most


def pack_samples(
    samples: Sequence[Sample], device: str = "cpu", learns: bool = False, counts: bool = True
) -> PackedBatch:
    """Returns `samples` as one batch on `device`. The result of a step does not depend on how they are batched.

    `learns` is True if they have a gradient whatever their advantages; `counts` is PackedBatch.counts.
    """
    trajectories = [sample.trajectory for sample in samples]
    lengths = np.array([t.num_tokens for t in trajectories])
    prompts = np.array([len(sample.prompt_ids) for sample in samples])
    segments = _segments(samples)
    layout = PackedLayout.of_forest(segments, device)
    firsts = np.cumsum(layout.lengths) - np.array(layout.lengths) + prompts - 1
    taught = all(t.teacher_logprobs is not None for t in trajectories)
    shares = [sample.share for sample in samples]
    spread = partial(np.repeat, repeats=lengths)

    def tensor(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(values).to(device, dtype, non_blocking=True)

    def joined(name: str) -> np.ndarray:
        return Array.concatenate([getattr(t, name) for t in trajectories])

    own = ranges(prompts, lengths) >= spread([sample.shared for sample in samples])
    return PackedBatch(
        layout=layout, num_sequences=len(samples), counts=counts,
        token_ids=tensor(_inputs(samples, prompts + lengths, segments), torch.int64),
        predict=tensor(layout.paths[ranges(firsts, lengths)], torch.int64),
        targets=tensor(joined("response_ids"), torch.int64),
        behavior_logprobs=tensor(joined("behavior_logprobs"), torch.float32),
        advantages=tensor(np.concatenate([s.advantages for s in samples]), torch.float32),
        mask=tensor(np.concatenate([s.counted for s in samples]) & own, torch.bool),
        version_lag=tensor(np.concatenate([sample.lag for sample in samples]), torch.int64),
        sequence_ids=tensor(spread(np.arange(len(samples))), torch.int64),
        responses=tuple((s.ticket, s.trajectory.index, s.branch) for s in samples),
        learns=learns or any(sample.learns for sample in samples),
        routes=_routes(samples, layout, device), sampling_mask=_sampling_mask(trajectories, device),
        teacher_logprobs=tensor(joined("teacher_logprobs"), torch.float32) if taught else None,
        share=tensor(spread(shares), torch.float32) if any(x != 1 for x in shares) else None,
    )  # fmt: skip


def _segments(samples: Sequence[Sample]) -> list[Segment]:
    """Returns the inputs of each sample that are its own: those that predict one of its tokens, and those after
    which another sample continues."""
    forks: list[tuple[int | None, int]] = []
    for place in range(len(samples)):
        parent, at = fork(samples, place)
        while parent is not None and at <= forks[parent][1]:  # its parent shares these tokens too
            parent = forks[parent][0]
        forks.append((parent, at))
    needed = [max(s.num_tokens - 1, at) for s, (_, at) in zip(samples, forks, strict=True)]
    for parent, at in forks:
        if parent is not None:
            needed[parent] = max(needed[parent], at)
    return [Segment(n - at, parent, at) for n, (parent, at) in zip(needed, forks, strict=True)]


def _inputs(
    samples: Sequence[Sample], lengths: np.ndarray, segments: Sequence[Segment]
) -> np.ndarray:
    """Returns the tokens of `segments`, int32 [N], of the samples' paths, which have `lengths` [S] tokens."""
    prompts = [s.prompt_ids.astype("<i4", copy=False).data for s in samples]
    pairs = zip(prompts, (s.trajectory.response_ids.data for s in samples), strict=True)
    paths = np.frombuffer(bytearray().join(chain(*pairs)), "<i4")
    own, at = (np.array(x) for x in zip(*((s.tokens, s.at) for s in segments), strict=True))
    return paths[ranges(lengths.cumsum() - lengths + at, own)]


def _sampling_mask(trajectories: Sequence[Trajectory], device: str) -> torch.Tensor | None:
    """Returns PackedBatch.sampling_mask of these trajectories; None if none of them tells it."""
    if not any(t.sampling_mask for t in trajectories):
        return None
    arrays = [
        t.sampling_mask.numpy() if t.sampling_mask else np.full((t.num_tokens, 1), -1)
        for t in trajectories
    ]
    widest = max(array.shape[1] for array in arrays)
    rows = [np.pad(a, ((0, 0), (0, widest - a.shape[1])), constant_values=-1) for a in arrays]
    kept = np.concatenate(rows).astype(np.int64)
    ids = Array.concatenate([t.response_ids for t in trajectories])
    kept[:, 0] = np.where(kept[:, 0] < 0, ids, kept[:, 0])
    return torch.from_numpy(kept).to(device, non_blocking=True)


def _routes(samples: Sequence[Sample], layout: PackedLayout, device: str) -> torch.Tensor | None:
    """Returns the routes, int16 [N, L, K], of the packed tokens; None if no routes were recorded. A shared
    token has those of the first sample that recorded them, and one without any has UNRECORDED."""
    shapes = {s.trajectory.routes.shape[1:] for s in samples if s.trajectory.routes}
    if not shapes:
        return None
    (shape,) = shapes
    out = np.full((len(layout.positions), *shape), UNRECORDED, np.int16)
    paths = np.split(layout.paths, np.cumsum(layout.lengths)[:-1])
    for sample, path in reversed(list(zip(samples, paths, strict=True))):
        if sample.trajectory.routes:
            known = sample.trajectory.routes.numpy()[: len(path)]
            out[path[: len(known)]] = known
    return torch.from_numpy(out).to(device, non_blocking=True)
