"""Optimizers and their learning rate over time: a tagged union, `learner.optimizer.type`."""

from typing import Literal

from areal_q.config.struct_types import (
    BelowOne,
    Fraction,
    NonNegative,
    Positive,
    TaggedSettings,
    WholeNumber,
)


class _Optimizer(TaggedSettings, frozen=True, kw_only=True):
    lr: NonNegative = 1.5e-4
    """Learning rate after the warm-up."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Decay rates of the first and the second moment."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegative = 0.0
    """Weight decay of matrices; norms and biases have none."""
    warmup_steps: WholeNumber = 10
    """Optimizer steps over which lr rises linearly from 0."""
    decay_steps: WholeNumber = 0
    """Optimizer steps after the warm-up over which lr falls; 0: it stays."""
    decay: Literal["cosine", "linear"] = "cosine"
    """Shape of the decay: half a cosine, or a line."""
    final: Fraction = 0.1
    """Share of lr that is left after the decay."""


class AdamW(_Optimizer, frozen=True, kw_only=True, tag="adamw"):
    """torch's, with moments in float32 (arXiv 1711.05101)."""


class AdamW8bit(_Optimizer, frozen=True, kw_only=True, tag="adamw8bit"):
    """AdamW with moments of 8 bits in blocks (arXiv 2110.02861): 2 bytes a weight instead of 8."""

    small: WholeNumber = 4096
    """Parameters of fewer elements keep moments in float32."""


class Muon(_Optimizer, frozen=True, kw_only=True, tag="muon"):
    """Orthogonalised momentum for the matrices of the hidden layers, AdamW for all else; updates are scaled to
    AdamW's usual size, so that one lr serves both (arXiv 2502.16982)."""

    momentum: BelowOne = 0.95
    """Decay rate of the momentum."""


OptimizerConfig = AdamW | AdamW8bit | Muon
