"""TIS as a user writes it, from the formula: J = min(w, C) · min(R·A, clip(R, 1-ε, 1+ε)·A)."""

import torch

from areal_q.algorithms import PolicyLoss, bounded_exp


def objective(x, cap=2.0, low=0.2, high=0.2):
    w, ratio = bounded_exp(x.log_mismatch), bounded_exp(x.log_ratio)
    up = (x.advantages > 0) & (ratio > 1 + high)
    down = (x.advantages < 0) & (ratio < 1 - low)
    clipped = torch.where(up | down, ratio.detach().clamp(1 - low, 1 + high), ratio)
    return PolicyLoss(
        clipped * (w.clamp(max=cap) * x.advantages),
        truncated=w > cap,
        clipped_up=up,
        clipped_down=down,
    )
