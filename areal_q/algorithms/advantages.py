"""Advantages from rewards.

Notation: N responses of a batch, K groups (prompts), T response tokens. A group-based advantage is one
number per response, the same for each of its tokens; GAE gives one per token.

Data-parallel ranks that hold whole groups each compute their own; what is normalised over the batch needs the
sums of all of them, which `combine` gives.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from areal_q.algorithms.ratios import segment_sum
from areal_q.config.objectives import (
    AdvantageConfig,
    DrGrpo,
    Gae,
    Grpo,
    ReinforcePlusPlus,
    Rloo,
)
from areal_q.errors import ConfigError

Combine = Callable[[Tensor], Tensor]
"""Sums over data-parallel ranks, such as an all-reduce: float64 [n] → [n]."""


def alone(sums: Tensor) -> Tensor:
    """What one rank has is all there is."""
    return sums


def grpo(rewards: Tensor, group_ids: Tensor, cfg: Grpo) -> Tensor:
    """(r - mean) / (std + eps) within the group (arXiv 2402.03300)."""
    centered, sizes = _centered(rewards, group_ids)
    degrees = (sizes - 1 if cfg.std == "sample" else sizes).clamp(min=1)
    std = (segment_sum(centered.square(), group_ids, len(sizes)) / degrees).sqrt()
    return centered / (std + cfg.eps)[group_ids].clamp(min=torch.finfo(std.dtype).tiny)


def dr_grpo(rewards: Tensor, group_ids: Tensor, cfg: DrGrpo) -> Tensor:
    """r - mean within the group (arXiv 2503.20783)."""
    return _centered(rewards, group_ids)[0]


def rloo(rewards: Tensor, group_ids: Tensor, cfg: Rloo) -> Tensor:
    """r - mean of the others = (r - mean) · G/(G-1); 0 in a group of one (arXiv 2402.14740)."""
    centered, sizes = _centered(rewards, group_ids)
    return centered * (sizes / (sizes - 1).clamp(min=1))[group_ids]


def reinforce_plus_plus(
    rewards: Tensor, group_ids: Tensor, cfg: ReinforcePlusPlus, combine: Combine = alone
) -> Tensor:
    """(a - mean) / (std + eps) over the batch, a = r or r - group mean (arXiv 2501.03262).

    The mean is over responses; OpenRLHF's is over tokens, which gives long responses more weight.
    """
    raw = rewards if cfg.baseline == "none" else _centered(rewards, group_ids)[0]
    return _normalized(raw, cfg.eps, combine)


GROUP_ADVANTAGES: dict[type, Callable[[Tensor, Tensor, Any], Tensor]] = {
    Grpo: grpo,
    DrGrpo: dr_grpo,
    Rloo: rloo,
}
"""Those that look at nothing outside a group."""


def group_advantages(
    rewards: Tensor, group_ids: Tensor, cfg: AdvantageConfig, combine: Combine = alone
) -> Tensor:
    """rewards float [N], group_ids int64 [N] in 0 … K-1 (any order) → advantages [N], at least float32.

    Pass the whole step's responses, or whole groups on each rank: a group must not be cut. Raises ConfigError
    for GAE, which needs a critic.
    """
    if isinstance(cfg, Gae):
        raise ConfigError("learner.advantage.type = 'gae' needs a critic: call gae() on tokens")
    rewards = rewards if rewards.dtype == torch.float64 else rewards.float()
    if isinstance(cfg, ReinforcePlusPlus):
        return reinforce_plus_plus(rewards, group_ids, cfg, combine)
    return GROUP_ADVANTAGES[type(cfg)](rewards, group_ids, cfg)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    cfg: Gae,
    combine: Combine = alone,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both [T] and 0 where masked (arXiv 1506.02438).

    δ_t = r_t + γ V_{t+1} - V_t with V = 0 after the last token, also of a response that was cut off;
    A_t = Σ_k (γλ)^k δ_{t+k}; return = A_t + V_t before `normalize`. rewards [T] hold the response's reward
    at its last counted token, and per-token penalties; masked tokens are stepped over as if absent.
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
    """bool [K]: groups whose rewards are not all equal (DAPO's dynamic sampling, arXiv 2503.14476).

    Example: rewards [1, 0, 1, 1], group_ids [0, 0, 1, 1] → [True, False].
    """
    k = int(group_ids.max()) + 1 if len(group_ids) else 0
    low = rewards.new_full((k,), torch.inf).scatter_reduce(0, group_ids, rewards, "amin")
    high = rewards.new_full((k,), -torch.inf).scatter_reduce(0, group_ids, rewards, "amax")
    return high > low


def _centered(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """r - group mean [N], exactly 0 in a group of equal rewards; group sizes [K]."""
    k = int(group_ids.max()) + 1 if len(group_ids) else 0
    sizes = segment_sum(torch.ones_like(rewards), group_ids, k)
    centered = rewards - (segment_sum(rewards, group_ids, k) / sizes.clamp(min=1))[group_ids]
    # A mean of equal numbers may be off by a rounding, which a tiny std would blow up to ±1.
    return torch.where(informative_groups(rewards, group_ids)[group_ids], centered, 0.0), sizes


def _normalized(x: Tensor, eps: float, combine: Combine) -> Tensor:
    """Zero mean and unit (population) variance over all ranks; 0 where all are equal but for rounding."""
    d = x.double()
    count, total = combine(torch.stack([torch.ones_like(d).sum(), d.sum()]))
    mean = total / count.clamp(min=1)
    # In two passes: a difference of squares would lose what is small beside the mean.
    (squares,) = combine((d - mean).square().sum()[None])
    std = (squares / count.clamp(min=1)).sqrt()
    if std <= 1e-12 * mean.abs():
        return torch.zeros_like(x)
    return ((d - mean) / (std + eps)).to(x.dtype)


def _discounted_suffix_sums(x: Tensor, decay: Tensor) -> Tensor:
    """y_t = x_t + decay_t · y_{t+1} by doubling: log₂ T passes over the tensor instead of T steps."""
    step = 1
    while step < len(x) and bool(decay.any()):
        x = torch.cat([x[:-step] + decay[:-step] * x[step:], x[-step:]])
        decay = torch.cat([decay[:-step] * decay[step:], torch.zeros_like(decay[-step:])])
        step *= 2
    return x
