"""Advantages, objectives, their aggregation and diagnostics: pure functions of tensors and settings."""

from areal_q.algorithms.advantages import (
    gae,
    group_advantages,
    informative_groups,
)
from areal_q.algorithms.aggregation import count
from areal_q.algorithms.kl import reward_penalty
from areal_q.algorithms.loss import loss_fn, whole_step
from areal_q.algorithms.loss_types import LossInputs, LossOutputs, PolicyLoss, Routed, Totals
from areal_q.algorithms.policy_losses import OBJECTIVES
from areal_q.algorithms.python_code import learns_without_advantage
from areal_q.algorithms.ratios import Ratios, bounded_exp, segment_sum
from areal_q.algorithms.reducers import Metrics, merge_metrics, reduce_metrics

__all__ = [
    "OBJECTIVES",
    "LossInputs",
    "LossOutputs",
    "Metrics",
    "PolicyLoss",
    "Ratios",
    "Routed",
    "Totals",
    "bounded_exp",
    "count",
    "gae",
    "group_advantages",
    "informative_groups",
    "learns_without_advantage",
    "loss_fn",
    "merge_metrics",
    "reduce_metrics",
    "reward_penalty",
    "segment_sum",
    "whole_step",
]
