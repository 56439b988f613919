"""Advantages from rewards.

Notation: N responses of a batch, K groups (prompts), T response tokens. A group-based advantage is one
number per response, the same for each of its tokens; GAE gives one per token. Rewards have no unit.

Each data-parallel rank holds whole groups and computes their advantages itself. An estimator that normalises
over the batch needs sums over all ranks, which `combine` computes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from areal_q.algorithms import python_code
from areal_q.algorithms.ratios import segment_sum
from areal_q.config.objectives import (
    AdvantageConfig,
    BySource,
    DrGrpo,
    Gae,
    Grpo,
    PythonAdvantage,
    ReinforcePlusPlus,
    Rloo,
)
from areal_q.errors import ConfigError

Combine = Callable[[Tensor], Tensor]
"""A function that sums float64 [n] over all data-parallel ranks, such as an all-reduce."""


def alone(sums: Tensor) -> Tensor:
    """Returns `sums` as they are: the `combine` of a learner with a single rank."""
    return sums


def grpo(rewards: Tensor, group_ids: Tensor, cfg: Grpo) -> Tensor:
    """Returns [N] (r - mean) / (std + eps), mean and std over the response's group (GRPO, arXiv 2402.03300)."""
    centered, sizes = _centered(rewards, group_ids)
    degrees = (sizes - 1 if cfg.std == "sample" else sizes).clamp(min=1)
    std = (segment_sum(centered.square(), group_ids, len(sizes)) / degrees).sqrt()
    return centered / (std + cfg.eps)[group_ids].clamp(min=torch.finfo(std.dtype).tiny)


def dr_grpo(rewards: Tensor, group_ids: Tensor, cfg: DrGrpo) -> Tensor:
    """Returns [N] r - mean, the mean over the response's group (Dr. GRPO, arXiv 2503.20783)."""
    return _centered(rewards, group_ids)[0]


def rloo(rewards: Tensor, group_ids: Tensor, cfg: Rloo) -> Tensor:
    """Returns [N] r - mean of the group's other G-1 rewards, which is (r - mean) · G/(G-1); 0 where G = 1
    (RLOO, arXiv 2402.14740)."""
    centered, sizes = _centered(rewards, group_ids)
    return centered * (sizes / (sizes - 1).clamp(min=1))[group_ids]


def reinforce_plus_plus(
    rewards: Tensor,
    group_ids: Tensor,
    cfg: ReinforcePlusPlus,
    combine: Combine = alone,
    weights: Tensor | None = None,
) -> Tensor:
    """Returns [N] (a - mean) / (std + eps) over the batch, where a is r or r - group mean (arXiv 2501.03262).

    Mean and std are over responses; OpenRLHF takes them over tokens, which gives long responses more weight.
    `weights` [N] are those of the rewards in them; 1 each if there are none.
    """
    raw = rewards if cfg.baseline == "none" else _centered(rewards, group_ids)[0]
    return _normalized(raw, cfg.eps, combine, weights)


GROUP_ADVANTAGES: dict[type, Callable[[Tensor, Tensor, Any], Tensor]] = {
    Grpo: grpo,
    DrGrpo: dr_grpo,
    Rloo: rloo,
    PythonAdvantage: python_code.advantage,
}
"""The estimators that need nothing from outside a group."""


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    cfg: AdvantageConfig,
    combine: Combine = alone,
    sources: Sequence[str] = (),
    weights: Tensor | None = None,
) -> Tensor:
    """Returns the advantages [N], at least float32, from rewards, float [N].

    `group_ids`, int64 [N] in 0 … K-1 in any order, says which group each response belongs to. Pass all
    responses of the step, or whole groups on each rank: a group must not be cut. `sources` [N] names the task
    of each, for advantages by source. `weights` [N] are what each counts where the whole batch is normalised.
    Raises ConfigError for GAE, which needs a critic.
    """
    if isinstance(cfg, Gae):
        raise ConfigError("learner.advantage.type = 'gae' needs a critic: call gae() on tokens")
    rewards = rewards if rewards.dtype == torch.float64 else rewards.float()
    if isinstance(cfg, BySource):
        return by_source(rewards, group_ids, cfg, combine, sources, weights)
    if isinstance(cfg, ReinforcePlusPlus):
        return reinforce_plus_plus(rewards, group_ids, cfg, combine, weights)
    return GROUP_ADVANTAGES[type(cfg)](rewards, group_ids, cfg)


def by_source(
    rewards: Tensor,
    group_ids: Tensor,
    cfg: BySource,
    combine: Combine,
    sources: Sequence[str],
    weights: Tensor | None = None,
) -> Tensor:
    """Returns [N] the advantages of each task of a mixture, as if a batch held its responses alone."""
    names = sorted(cfg.sources)
    index = {name: i for i, name in enumerate(names)}
    kinds = torch.tensor([index.get(s, len(names)) for s in sources], device=rewards.device)
    advantages = torch.zeros_like(rewards)
    for kind, one in enumerate([*(cfg.sources[name] for name in names), cfg.otherwise]):
        its = (kinds == kind).nonzero().squeeze(-1)
        # Ranks sum over their batches together, also one that has no response to this task.
        if len(its) or isinstance(one, ReinforcePlusPlus):
            ids = group_ids[its].unique(return_inverse=True)[1]
            own = None if weights is None else weights[its]
            advantages[its] = group_advantages(rewards[its], ids, one, combine, weights=own)
    return advantages


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    cfg: Gae,
    combine: Combine = alone,
) -> tuple[Tensor, Tensor]:
    """Returns the advantages and the returns, both [T] and 0 where masked (GAE, arXiv 1506.02438).

    δ_t = r_t + γ V_{t+1} - V_t, where V = 0 after a response's last token, even if the response was cut off;
    A_t = Σ_k (γλ)^k δ_{t+k}; return = A_t + V_t before `normalize`. rewards [T] hold the response's reward
    at its last counted token, and per-token penalties. values [T] are the critic's. mask, bool [T], is False
    for tokens that are skipped as if absent. sequence_ids, int64 [T], tell the responses apart.
    """
    index = mask.nonzero().squeeze(-1)
    r, v, ids = rewards[index], values.detach()[index], sequence_ids[index]
    goes_on = torch.zeros_like(v)
    goes_on[:-1] = (ids[1:] == ids[:-1]).to(v.dtype)
    following = torch.zeros_like(v)
    following[:-1] = v[1:]
    a = r + cfg.discount * goes_on * following - v
    a = _discounted_suffix_sums(a, cfg.discount * cfg.trace * goes_on)
    returns = torch.zeros_like(values).index_copy(0, index, a + v)
    a = _normalized(a, 1e-8, combine) if cfg.normalize else a
    return torch.zeros_like(values).index_copy(0, index, a), returns


def informative_groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Returns bool [K], False for groups of equal rewards (DAPO's dynamic sampling, arXiv 2503.14476).

    Example: rewards [1, 0, 1, 1], group_ids [0, 0, 1, 1] → [True, False].
    """
    k = int(group_ids.max()) + 1 if len(group_ids) else 0
    low = rewards.new_full((k,), torch.inf).scatter_reduce(0, group_ids, rewards, "amin")
    high = rewards.new_full((k,), -torch.inf).scatter_reduce(0, group_ids, rewards, "amax")
    return high > low


def _centered(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns r - group mean [N], exactly 0 in a group of equal rewards, and the group sizes [K]."""
    k = int(group_ids.max()) + 1 if len(group_ids) else 0
    sizes = segment_sum(torch.ones_like(rewards), group_ids, k)
    centered = rewards - (segment_sum(rewards, group_ids, k) / sizes.clamp(min=1))[group_ids]
    # A mean of equal numbers may be off by a rounding, which a tiny std would blow up to ±1.
    return torch.where(informative_groups(rewards, group_ids)[group_ids], centered, 0.0), sizes


def _normalized(x: Tensor, eps: float, combine: Combine, weights: Tensor | None = None) -> Tensor:
    """Returns `x` with mean 0 and population variance 1 over all ranks; zeros if only rounding differs."""
    d = x.double()
    w = torch.ones_like(d) if weights is None else weights.to(d)
    count, total = combine(torch.stack([w.sum(), (w * d).sum()]))
    mean = total / count.clamp(min=1)
    # The variance takes a second pass: E[x²] - mean² would lose a variance that is small beside the mean.
    (squares,) = combine((w * (d - mean).square()).sum()[None])
    std = (squares / count.clamp(min=1)).sqrt()
    if std <= 1e-12 * mean.abs():
        return torch.zeros_like(x)
    return ((d - mean) / (std + eps)).to(x.dtype)


def _discounted_suffix_sums(x: Tensor, decay: Tensor) -> Tensor:
    """Returns y_t = x_t + decay_t · y_{t+1} [T], by doubling: log₂ T passes over the tensor, not T steps."""
    step = 1
    while step < len(x) and bool(decay.any()):
        x = torch.cat([x[:-step] + decay[:-step] * x[step:], x[-step:]])
        decay = torch.cat([decay[:-step] * decay[step:], torch.zeros_like(decay[-step:])])
        step *= 2
    return x
