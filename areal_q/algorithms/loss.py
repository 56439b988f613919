"""The loss of a micro-batch: objective, optional terms, aggregation and metrics put together."""

import torch
from torch import Tensor

from areal_q.algorithms.aggregation import count, counted_tokens, token_weights, totals_of
from areal_q.algorithms.diagnostics import diagnostics
from areal_q.algorithms.kl import kl_estimate, reference_metrics
from areal_q.algorithms.loss_types import LossInputs, LossOutputs, Totals
from areal_q.algorithms.policy_losses import policy_loss
from areal_q.algorithms.ratios import optional, ratios
from areal_q.algorithms.reducers import Sum
from areal_q.algorithms.value_loss import value_loss
from areal_q.config.objectives import (
    AggregationConfig,
    ObjectiveConfig,
    ReferenceKl,
    TokenMean,
    ValueLoss,
)


def loss_fn(
    inputs: LossInputs, objective: ObjectiveConfig, aggregation: AggregationConfig | None = None,
    totals: Totals | None = None, *, reference_kl: ReferenceKl | None = None, entropy_coef: float = 0.0,
    value: ValueLoss | None = None, balance: Tensor | None = None,
) -> LossOutputs:  # fmt: skip
    """Returns the micro-batch's share of the step's loss, and metrics. The loss aggregates over tokens

        -J + coef · KL(π_θ‖π_ref) - entropy_coef · entropy + coef · value loss

    and adds experts' load-balancing loss if `balance`, its weights [L, E], is given. `totals` are the counts of
    the whole optimizer step, None of this micro-batch. Tokens that an objective removes from the denominator
    (`kept_tokens`) are absent from every term. If no token counts, loss and gradient are 0, and
    `loss/all_masked_count` is 1. Raises RecordError for a missing input, or one not finite at a counted token.
    """
    x = ratios(inputs)
    counted = counted_tokens(x, objective)
    weights = token_weights(counted, x, aggregation or TokenMean(), totals or totals_of(counted, x))
    out = policy_loss(x, objective)
    terms = {"policy": -weights.dot(out.objective)}
    metrics = diagnostics(inputs, x, out)
    if reference_kl is not None:
        d = optional(inputs, x, "reference_logprobs").detach() - x.logprobs
        metrics |= reference_metrics(d.detach(), x.mask)
        if reference_kl.place == "loss":
            terms["reference_kl"] = reference_kl.coef * weights.dot(kl_estimate(d, reference_kl))
    if entropy_coef:
        terms["entropy"] = -entropy_coef * weights.dot(optional(inputs, x, "entropy"))
    if value is not None:
        error, measured = value_loss(inputs, x, value)
        terms["value"] = value.coef * weights.dot(error)
        metrics |= measured
    if inputs.routed is not None:
        metrics |= inputs.routed.metrics
        if balance is not None:
            terms["router"] = (balance * inputs.routed.probs).sum()
    loss = torch.stack(list(terms.values())).sum()
    parts = torch.stack([*terms.values(), loss]).detach().tolist()
    metrics |= {f"loss/{k}": Sum(v) for k, v in zip([*terms, "total"], parts, strict=True)}
    metrics["loss/all_masked_count"] = Sum(float(not counted.count_nonzero()))
    return LossOutputs(loss, metrics, out)


def whole_step(parts: list[LossInputs], objective: ObjectiveConfig) -> Totals:
    """Returns the Totals of one rank's micro-batches, needed before the first loss: see `count`."""
    return sum((count(part, objective) for part in parts), Totals(0, 0))
