"""The optimizer: AdamW with linear warm-up, gradient clipping, and refusal of non-finite steps."""

import math

import torch
from torch import nn

from areal_q.config.run import AdamW


def build_optimizer(model: nn.Module, cfg: AdamW) -> torch.optim.Optimizer:
    """Weight decay acts on matrices only, not on norms and biases."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": cfg.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=cfg.lr,
        betas=cfg.betas,
        eps=cfg.eps,
        fused=True,
    )


def learning_rate(cfg: AdamW, update: int) -> float:
    """Of optimizer step `update`: a linear rise, then a half cosine from lr to final · lr, if any."""
    if update < cfg.warmup_steps:
        return cfg.lr * (update + 1) / (cfg.warmup_steps + 1)
    if cfg.decay_steps == 0:
        return cfg.lr
    progress = min(1.0, (update - cfg.warmup_steps) / cfg.decay_steps)
    return cfg.lr * (1 - (1 - cfg.final) * (1 - math.cos(math.pi * progress)) / 2)


def optimizer_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, lr: float, max_grad_norm: float
) -> tuple[float, bool]:
    """Clips and steps. Returns the gradient norm before clipping, and whether the step was taken:
    one whose gradient is not finite is skipped, so that a single bad batch cannot poison the weights."""
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm))
    taken = torch.isfinite(torch.tensor(norm)).item()
    if taken:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, bool(taken)
