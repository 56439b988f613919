"""Optimizers: their construction from settings, the learning rate, clipping, and skipping of non-finite
steps."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from areal_q.config.learner import AdamW, AdamW8bit, Muon, OptimizerConfig
from areal_q.models.low_bit.lora import A, B
from areal_q.quant import is_quantized
from learner.optim import adamw_8bit, uncompiled


def build_optimizer(model: nn.Module, cfg: OptimizerConfig) -> torch.optim.Optimizer:
    """Returns an optimizer of the trainable parameters. Weight decay acts on matrices, not on norms and
    biases."""
    return OPTIMIZERS[type(cfg)](model, cfg)


def in_order(shapes: Mapping[str, torch.Size]) -> list[str]:
    """Returns the names of a model's parameters in the order in which its AdamW numbers them."""
    return sorted(shapes, key=lambda name: len(shapes[name]) < 2)


def _groups(model: nn.Module, cfg: OptimizerConfig, without: set[nn.Parameter]) -> list[dict]:
    learning = [p for p in model.parameters() if p.requires_grad and p not in without]
    return [
        {"params": [p for p in learning if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in learning if p.ndim < 2], "weight_decay": 0.0},
    ]


def _adamw(model: nn.Module, cfg: AdamW) -> torch.optim.Optimizer:
    groups = _groups(model, cfg, set())
    return uncompiled.AdamW(groups, lr=cfg.rate, betas=cfg.betas, eps=cfg.eps, fused=True)


def _adamw8bit(model: nn.Module, cfg: AdamW8bit) -> torch.optim.Optimizer:
    groups = _groups(model, cfg, set())
    return adamw_8bit.AdamW8bit(groups, cfg.rate, cfg.betas, cfg.eps, cfg.small)


def _muon(model: nn.Module, cfg: Muon) -> torch.optim.Optimizer:
    # What number formats apply to, and its adapters: no embedding, head or router, whose rows are classes.
    hidden = [
        p
        for name, p in model.named_parameters()
        if p.requires_grad and (is_quantized(name) or name.endswith((A, B)))
    ]
    kind = torch.optim.Muon
    if hasattr(hidden[0], "to_local"):
        from learner.optim.sharded_muon import ShardedMuon as kind
    muon = kind(
        hidden,
        lr=cfg.rate,
        weight_decay=cfg.weight_decay,
        momentum=cfg.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    others = _groups(model, cfg, set(hidden))
    adamw = uncompiled.AdamW(others, lr=cfg.rate, betas=cfg.betas, eps=cfg.eps, fused=True)
    return Several(muon, adamw)


OPTIMIZERS: dict[type, Callable[[nn.Module, Any], torch.optim.Optimizer]] = {
    AdamW: _adamw,
    AdamW8bit: _adamw8bit,
    Muon: _muon,
}


class Several(torch.optim.Optimizer):
    """Several optimizers of different parameters as one, which shares their groups and state."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self._parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()


def learning_rate(cfg: OptimizerConfig, update: int) -> float:
    """Returns the learning rate of optimizer step `update`: a linear rise to lr, then, if `decay_steps` are
    set, half a cosine or a line down to final · lr."""
    if update < cfg.warmup_steps:
        return cfg.rate * (update + 1) / (cfg.warmup_steps + 1)
    if cfg.decay_steps == 0:
        return cfg.rate
    progress = min(1.0, (update - cfg.warmup_steps) / cfg.decay_steps)
    fallen = progress if cfg.decay == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return cfg.rate * (1 - (1 - cfg.final) * fallen)


def optimizer_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, lr: float, max_grad_norm: float
) -> tuple[float, bool]:
    """Clips the gradient, takes an optimizer step, and clears the gradient. Returns the gradient's norm before
    clipping, and True if the step was taken: one with a gradient that is not finite is skipped, so that a
    single bad batch cannot spoil the weights."""
    total = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    # A sharded model's norm is a DTensor, whose class is not imported here because that takes a second.
    norm = float(total.full_tensor() if hasattr(total, "full_tensor") else total)  # type: ignore[attr-defined]
    taken = math.isfinite(norm)
    if taken:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, taken
