"""Advantages that need more than rewards: the critic's values, or the distance to the reference policy.

They are computed over the whole batch at once, from values and log-probs of before the first update.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from areal_q.algorithms import LossInputs, gae, group_advantages, reward_penalty, segment_sum
from areal_q.algorithms.advantages import Combine, alone
from areal_q.config import Gae, LearnerConfig
from learner.data.packing import Sample


def needs_policy(cfg: LearnerConfig) -> bool:
    """Returns True if advantages can be computed only after the learner's own forward pass."""
    in_reward = cfg.reference_kl is not None and cfg.reference_kl.place == "reward"
    return in_reward or isinstance(cfg.advantage, Gae)


def with_advantages(
    inputs: Sequence[LossInputs],
    samples: Sequence[Sample],
    cfg: LearnerConfig,
    combine: Combine = alone,
) -> list[LossInputs]:
    """Returns `inputs`, the micro-batches of all `samples` in their order, with advantages and, for GAE, the
    critic's targets. On several ranks each has whole groups of its own, and `combine` sums over the ranks.

    The reward of a token is -coef · KL if the KL is part of the reward, plus the response's reward at the last
    token that counts. GAE takes the rewards of tokens, and each path of an episode for itself, so that each
    ends with the episode's reward; the other estimators take their sum over all paths.
    Advantages are multiplied by the samples' weights.
    """
    starts = accumulate((x.num_sequences for x in inputs), initial=0)
    ids = torch.cat([x.sequence_ids + start for x, start in zip(inputs, starts, strict=False)])
    mask = torch.cat([x.mask for x in inputs])
    penalty = torch.zeros(len(ids), device=mask.device)
    if cfg.reference_kl is not None and cfg.reference_kl.place == "reward":
        names = ("proximal_logprobs", "reference_logprobs")
        proximal, reference = (_joined(inputs, name) for name in names)
        penalty = reward_penalty(proximal, reference, mask, cfg.reference_kl)
    if isinstance(cfg.advantage, Gae):
        rewards = torch.tensor([s.trajectory.reward for s in samples], device=mask.device)
        per_token = at_last_token(rewards, mask, ids) - penalty
        values = _joined(inputs, "old_values")
        advantages, returns = gae(per_token, values, mask, ids, cfg.advantage, combine)
    else:
        of_path = _of_paths(samples, segment_sum(penalty, ids, len(samples)), cfg, combine)
        advantages, returns = of_path[ids], None
    weights = torch.tensor([s.weight for s in samples], device=mask.device)
    sizes = [len(x.mask) for x in inputs]
    parts = (advantages * weights[ids]).split(sizes)
    targets = returns.split(sizes) if returns is not None else [None] * len(sizes)
    columns = zip(inputs, parts, targets, strict=True)
    return [replace(x, advantages=part, returns=target) for x, part, target in columns]


def _of_paths(
    samples: Sequence[Sample], penalty: Tensor, cfg: LearnerConfig, combine: Combine
) -> Tensor:
    """Returns the advantage of each path, float32 [S], by its episode's reward. `penalty` [S] is what the KL
    takes from each path's."""
    # An episode has one reward, whatever the number of its paths, and the penalties of all of them.
    firsts = [s for s in samples if not s.branch]
    places = {(s.ticket, s.trajectory.index): place for place, s in enumerate(firsts)}
    of = [places[s.ticket, s.trajectory.index] for s in samples]
    episode = torch.tensor(of, device=penalty.device)
    rewards = torch.tensor([s.trajectory.reward for s in firsts], device=penalty.device)
    rewards -= segment_sum(penalty, episode, len(firsts))
    groups = torch.tensor([s.ticket for s in firsts], device=penalty.device)
    ids = groups.unique(return_inverse=True)[1]
    sources = [s.source for s in firsts]
    return group_advantages(rewards, ids, cfg.advantage, combine, sources)[episode]


def at_last_token(rewards: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Returns `rewards` [S] spread over tokens [T]: each at the last counted token of its sequence, 0
    elsewhere. The reward of a sequence without a counted token is dropped.

    Example: rewards [1, 5], mask [1, 1, 0, 1], sequence_ids [0, 0, 0, 1] → [0, 1, 0, 5].
    """
    places = torch.arange(len(mask), device=mask.device).where(mask, -1)
    last = torch.full((len(rewards),), -1, device=mask.device)
    last = last.scatter_reduce(0, sequence_ids, places, "amax")
    counted = last >= 0
    return rewards.new_zeros(len(mask)).index_copy(0, last[counted], rewards[counted])


def _joined(inputs: Sequence[LossInputs], name: str) -> Tensor:
    return torch.cat([getattr(x, name) for x in inputs])
