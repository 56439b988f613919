"""Advantages that need more than rewards: the critic's values, or the distance to the reference policy.

They are computed over the whole batch at once, from values and log-probs of before the first update.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from areal_q.algorithms import LossInputs, gae, group_advantages, reward_penalty, segment_sum
from areal_q.algorithms.advantages import Combine, alone
from areal_q.config import Gae, LearnerConfig
from learner.data.packing import Sample
from learner.data.turn_rewards import has_turns, turn_advantages


def with_advantages(
    inputs: Sequence[LossInputs],
    samples: Sequence[Sample],
    cfg: LearnerConfig,
    combine: Combine = alone,
) -> list[LossInputs]:
    """Returns `inputs`, the micro-batches of all `samples` in their order, with advantages and, for GAE, the
    critic's targets. On several ranks each has whole groups of its own, and `combine` sums over the ranks.

    The reward of a token is -coef · KL if the KL is part of the reward, plus that of the turn that it ends,
    plus the response's own at the last token that counts. GAE takes the rewards of tokens, and each path of an
    episode for itself, so that each ends with the episode's own reward; for the other estimators this one is
    less by the sum of all paths' penalties. Advantages are multiplied by the samples' weights.
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
        own = torch.tensor([s.trajectory.reward - s.of_turns for s in samples], device=mask.device)
        per_token = at_last_token(own, mask, ids) + _of_turns(samples, mask) - penalty
        values = _joined(inputs, "old_values")
        advantages, returns = gae(per_token, values, mask, ids, cfg.advantage, combine)
    else:
        of_paths = segment_sum(penalty, ids, len(samples))
        advantages, returns = _of_episodes(samples, ids, of_paths, cfg, combine), None
    weights = torch.tensor([s.weight for s in samples], device=mask.device)
    sizes = [len(x.mask) for x in inputs]
    parts = (advantages * weights[ids]).split(sizes)
    targets = returns.split(sizes) if returns is not None else [None] * len(sizes)
    columns = zip(inputs, parts, targets, strict=True)
    return [replace(x, advantages=part, returns=target) for x, part, target in columns]


def _of_turns(samples: Sequence[Sample], mask: Tensor) -> Tensor:
    """Returns the rewards of turns, float32 [T], each at its turn's last token."""
    begins = accumulate((s.trajectory.num_tokens for s in samples), initial=0)
    rewards = torch.zeros(len(mask))
    for s, begin in zip(samples, begins, strict=False):
        for one in s.trajectory.turn_rewards:
            rewards[begin + one.token] = one.reward
    return rewards.to(mask.device)


def _of_episodes(
    samples: Sequence[Sample], ids: Tensor, penalty: Tensor, cfg: LearnerConfig, combine: Combine
) -> Tensor:
    """Returns the advantages, float32 [T], by the rewards of episodes and of their turns. `ids` [T] say of
    which sample each token is, `penalty` [S] is what the KL takes from each path's reward."""
    # An episode has one reward, whatever the number of its paths, and the penalties of all of them.
    firsts = [s for s in samples if not s.branch]
    places = {(s.ticket, s.trajectory.index): place for place, s in enumerate(firsts)}
    of = [places[s.ticket, s.trajectory.index] for s in samples]
    episode = torch.tensor(of, device=penalty.device)
    penalties, sources = segment_sum(penalty, episode, len(firsts)), [s.source for s in firsts]
    if any(has_turns(s.trajectory) for s in firsts):
        pairs = zip(firsts, penalties.tolist(), strict=True)
        episodes = [(len(s.prompt_ids), s.trajectory, less) for s, less in pairs]
        tickets, device = [s.ticket for s in firsts], penalty.device
        columns = turn_advantages(episodes, tickets, cfg.advantage, combine, sources, device)
        # The samples are all paths of each episode, one after the other, as the columns are.
        return torch.tensor(np.concatenate(columns), dtype=torch.float32, device=device)
    rewards = torch.tensor([s.trajectory.reward for s in firsts], device=penalty.device)
    rewards -= penalties
    groups = torch.tensor([s.ticket for s in firsts], device=penalty.device)
    of_group = groups.unique(return_inverse=True)[1]
    return group_advantages(rewards, of_group, cfg.advantage, combine, sources)[episode][ids]


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
