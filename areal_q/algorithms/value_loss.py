"""The critic's loss and its metrics.

V is the critic's value of the state before a token, V_old its value before the updates on this batch, and
`returns` (ret) are the targets from GAE, A + V_old (arXiv 1506.02438, 1707.06347).
"""

import torch
from torch import Tensor

from areal_q.algorithms.loss_types import LossInputs
from areal_q.algorithms.ratios import Ratios, optional
from areal_q.algorithms.reducers import ExplainedVariance, Mean, Metrics
from areal_q.config.objectives import ValueLoss


def value_loss(inputs: LossInputs, x: Ratios, cfg: ValueLoss) -> tuple[Tensor, Metrics]:
    """Returns ½ max((V - ret)², (V_old + clip(V - V_old, ±clip) - ret)²) [T], 0 where masked, and metrics. The
    clipping is that of OpenAI's PPO code; `cfg.clip` 0 turns it off.

    Raises RecordError if values, old_values or returns are missing or not finite at a token that counts.
    """
    values = optional(inputs, x, "values")
    old = optional(inputs, x, "old_values").detach()
    returns = optional(inputs, x, "returns").detach()
    error = (values - returns).square()
    clipped = torch.zeros_like(x.mask)
    if cfg.clip:
        step = values - old
        bounded = (old + step.clamp(-cfg.clip, cfg.clip) - returns).square()
        # Inside the band the two errors are equal up to rounding, so the larger one alone does not tell.
        clipped = ((step.abs() > cfg.clip) & (bounded > error)).detach()
        error = torch.maximum(error, bounded)
    return error / 2, _metrics(old, returns, clipped, x.mask)


@torch.no_grad()
def _metrics(old: Tensor, returns: Tensor, clipped: Tensor, mask: Tensor) -> Metrics:
    """Returns the value/… metrics of tensors [T], which are 0 where masked."""
    old, returns = old.double(), returns.double()
    error = returns - old
    columns = [mask.double(), old, returns, returns.square(), error, error.square()]
    *sums, clips = torch.stack([*(c.sum() for c in columns), clipped.double().sum()]).tolist()
    tokens, sum_old, sum_returns, *_ = sums
    return {
        "value/mean": Mean(sum_old, tokens),
        "value/return_mean": Mean(sum_returns, tokens),
        "value/explained_variance": ExplainedVariance(tokens, *sums[2:]),
        "value/clip_fraction": Mean(clips, tokens),
    }
