"""The objectives, one function each: from ratios and settings to J [T], one value per token, to be maximised.

Each docstring begins with the formula of J and names its source. R = π_θ/π_prox and w = π_prox/π_behav are per
token; s and w_i are their geometric means over a response; ε_l, ε_h = clip_low, clip_high; C = cap. `ppo(R)`
stands for min(R·A, clip(R, 1-ε_l, 1+ε_h)·A), computed as A·min(R, 1+ε_h) where A > 0 and A·max(R, 1-ε_l) where
A < 0, which is the same. Aggregation over tokens is left to areal_q/algorithms/aggregation.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from areal_q.algorithms import python_code
from areal_q.algorithms.loss_types import PolicyLoss
from areal_q.algorithms.ratios import Ratios, bounded_exp
from areal_q.config.objectives import (
    Acr,
    Cispo,
    Clip,
    Decoupled,
    Gspo,
    IcePop,
    Level,
    Mis,
    Naive,
    ObjectiveConfig,
    Ppo,
    PythonObjective,
    Sapo,
    Tbpo,
    Tis,
)


def naive(x: Ratios, cfg: Naive) -> PolicyLoss:
    """J = ppo(R·w), which has π_θ/π_behav in the place of R (QuRL eq. 3)."""
    return _ppo(bounded_exp(x.log_ratio + x.log_mismatch), x, cfg)


def ppo(x: Ratios, cfg: Ppo) -> PolicyLoss:
    """J = ppo(R), without correction of the mismatch (QuRL eq. 1, arXiv 1707.06347)."""
    return _ppo(bounded_exp(x.log_ratio), x, cfg)


def decoupled(x: Ratios, cfg: Decoupled) -> PolicyLoss:
    """J = w · ppo(R), decoupled PPO (QuRL eq. 4, arXiv 2110.00641)."""
    return _ppo(bounded_exp(x.log_ratio), x, cfg, weight=bounded_exp(x.log_mismatch))


def tis(x: Ratios, cfg: Tis) -> PolicyLoss:
    """J = min(w, C) · ppo(R), truncated importance sampling (QuRL eq. 5). At a sequence level w is one number
    for the whole response."""
    w = bounded_exp(x.per_sequence(x.log_mismatch, cfg.level))
    weight, truncated = w.clamp(max=cfg.cap), x.mask & (w > cfg.cap)
    return _ppo(bounded_exp(x.log_ratio), x, cfg, weight=weight, truncated=truncated)


def mis(x: Ratios, cfg: Mis) -> PolicyLoss:
    """J = w · ppo(R) where C_low ≤ w ≤ C_high, else 0: masked importance sampling. At a sequence level w is one
    number for the whole response, which is kept or masked as a whole."""
    return _masked(x, cfg, cfg.level)


def icepop(x: Ratios, cfg: IcePop) -> PolicyLoss:
    """J = w · ppo(R) where C_low ≤ w ≤ C_high, else 0, token by token (IcePop, arXiv 2510.18855)."""
    return _masked(x, cfg, "token")


def acr(x: Ratios, cfg: Acr) -> PolicyLoss:
    """J = min(w, C) · min(R·A, clip(R, 1-ε_l, (1+ε_h)/r)·A) with r = min(1, C/w) (ACR, QuRL eq. 9).

    Where w ≤ C this is TIS. Where w > C the upper bound is (1+ε_h)·w/C, so that a token whose weight was
    truncated may move up as far as it could without truncation. The lower bound is the same as in TIS.
    """
    w = bounded_exp(x.log_mismatch)
    high = (w / cfg.cap).clamp(1.0, cfg.max_widening) * (1 + cfg.clip_high)
    weight, truncated = w.clamp(max=cfg.cap), x.mask & (w > cfg.cap)
    ratio = bounded_exp(x.log_ratio)
    return _ppo(ratio, x, cfg, high=high, weight=weight, truncated=truncated)


def gspo(x: Ratios, cfg: Gspo) -> PolicyLoss:
    """J = ppo(s), the same for all tokens of the response (GSPO, arXiv 2507.18071)."""
    return _ppo(bounded_exp(x.per_sequence(x.log_ratio)), x, cfg)


def sapo(x: Ratios, cfg: Sapo) -> PolicyLoss:
    """J = (4/τ) · sigmoid(τ(R - 1)) · A, where τ depends on the sign of A (SAPO, arXiv 2511.20347).

    The slope of J in R is A at R = 1.
    """
    ratio = bounded_exp(x.log_ratio)
    temperatures = x.advantages.new_tensor([cfg.temperature_positive, cfg.temperature_negative])
    tau = torch.where(x.advantages > 0, *temperatures)
    return PolicyLoss(torch.sigmoid(tau * (ratio - 1)) * (4 * x.advantages / tau))


def cispo(x: Ratios, cfg: Cispo) -> PolicyLoss:
    """J = sg(min(R, 1+ε_h)) · A · log π_θ, where sg stops the gradient, so that clipped tokens keep one (CISPO,
    arXiv 2506.13585)."""
    ratio = bounded_exp(x.log_ratio.detach())
    weight = ratio.clamp(max=1 + cfg.clip_high) * x.advantages
    over = x.mask & (ratio > 1 + cfg.clip_high)
    return PolicyLoss(
        weight * x.logprobs,
        clipped_up=over & (x.advantages > 0),
        clipped_dual=over & (x.advantages < 0),
    )


def tbpo(x: Ratios, cfg: Tbpo) -> PolicyLoss:
    """J = clip(w_i, 1/C, C) · J_i, the same for all tokens of the response (TBPO, QaRL §3.2 and appendix E).

    Where A ≥ 0, J_i = A·min(s, 1+ε_h). Where A < 0, J_i = A·s if s is in [1-ε⁻_l, 1+ε⁻_h]; outside, J_i has no
    gradient.
    """
    s = bounded_exp(x.per_sequence(x.log_ratio))
    w = bounded_exp(x.per_sequence(x.log_mismatch))
    up, down, over = cfg.bands
    low, high = 1 - down, 1 + over
    negative = x.advantages < 0
    bounded = torch.where(negative, s.clamp(low, high), s.clamp(max=1 + up))
    objective = bounded * (w.clamp(1 / cfg.cap, cfg.cap) * x.advantages)
    s = s.detach()
    below, above = negative & (s < low), negative & (s > high)
    kept = None
    if cfg.outside == "drop":
        kept = ~(below | above)
        objective = objective * kept
    return PolicyLoss(
        objective,
        kept=kept,
        truncated=x.mask & ((w > cfg.cap) | (w < 1 / cfg.cap)),
        clipped_up=(x.advantages > 0) & (s > 1 + up),
        clipped_down=below,
        clipped_dual=above,
    )


def kept_before_update(x: Ratios, cfg: ObjectiveConfig) -> Tensor | None:
    """Returns bool [T], False for tokens that leave the denominator because the objective masks them; None if
    none leaves it."""
    if isinstance(cfg, Mis | IcePop) and cfg.denominator == "kept_tokens":
        return _inside(x, cfg, cfg.level if isinstance(cfg, Mis) else "token")[1]
    return None


def _masked(x: Ratios, cfg: Mis | IcePop, level: Level) -> PolicyLoss:
    w, kept = _inside(x, cfg, level)
    weight, truncated = w * kept, x.mask & ~kept
    return _ppo(bounded_exp(x.log_ratio), x, cfg, weight=weight, truncated=truncated, kept=kept)


def _inside(x: Ratios, cfg: Mis | IcePop, level: Level) -> tuple[Tensor, Tensor]:
    w = bounded_exp(x.per_sequence(x.log_mismatch, level))
    return w, (w >= cfg.cap_low) & (w <= cfg.cap_high)


def _ppo(
    ratio: Tensor,
    x: Ratios,
    cfg: Clip,
    *,
    high: Tensor | float | None = None,
    weight: Tensor | None = None,
    **masks: Tensor,
) -> PolicyLoss:
    """Returns J = weight · A · ratio, where the ratio is bounded from above by `high` if A > 0, and from below
    by 1 - clip_low (and from above by `dual_clip`) if A < 0."""
    low = 1 - cfg.clip_low
    high = 1 + cfg.clip_high if high is None else high
    positive, negative = x.advantages > 0, x.advantages < 0
    value = ratio.detach()
    up, down, dual = positive & (value > high), negative & (value < low), None
    clipped, bound = up | down, value.clamp(min=low).clamp(max=high)
    if cfg.dual_clip is not None:
        dual = negative & (value > cfg.dual_clip)
        clipped, bound = clipped | dual, torch.where(dual, cfg.dual_clip, bound)
    bounded = torch.where(clipped, bound, ratio)
    return PolicyLoss(
        bounded * (x.advantages if weight is None else weight * x.advantages),
        clipped_up=up,
        clipped_down=down,
        clipped_dual=dual,
        **masks,
    )


OBJECTIVES: dict[type, Callable[[Ratios, Any], PolicyLoss]] = {
    Naive: naive,
    Ppo: ppo,
    Decoupled: decoupled,
    Tis: tis,
    Mis: mis,
    IcePop: icepop,
    Acr: acr,
    Gspo: gspo,
    Sapo: sapo,
    Cispo: cispo,
    Tbpo: tbpo,
    PythonObjective: python_code.objective,
}


def policy_loss(x: Ratios, cfg: ObjectiveConfig) -> PolicyLoss:
    """Returns the policy loss of each token under the objective that `cfg` chooses."""
    return OBJECTIVES[type(cfg)](x, cfg)
