"""The loss of a micro-batch: objective, optional terms, aggregation and metrics put together."""

import torch
from torch import Tensor

from areal_q.algorithms.aggregation import count, counted_tokens, token_weights
from areal_q.algorithms.diagnostics import diagnostics
from areal_q.algorithms.kl import kl_estimate
from areal_q.algorithms.objectives import surrogate
from areal_q.algorithms.ratios import Ratios, ratios, require_finite
from areal_q.algorithms.reducers import Metrics, Sum
from areal_q.algorithms.types import LossInputs, LossOutputs, Totals
from areal_q.config.objectives import (
    AggregationConfig,
    ObjectiveConfig,
    ReferenceKl,
    TokenMean,
    ValueLoss,
)
from areal_q.errors import RecordError


def loss_fn(
    inputs: LossInputs,
    objective: ObjectiveConfig,
    aggregation: AggregationConfig | None = None,
    totals: Totals | None = None,
    *,
    reference_kl: ReferenceKl | None = None,
    entropy_coef: float = 0.0,
    value: ValueLoss | None = None,
) -> LossOutputs:
    """-J + coef · KL(π_θ‖π_ref) - entropy_coef · entropy + coef · value loss, aggregated.

    `totals` are the counts of the whole optimizer step; None: this micro-batch is the whole step.
    Tokens that an objective takes out of the denominator (`kept_tokens`) are out of every term. With no
    token that counts, the loss is 0 with zero gradient, and `loss/all_masked_count` is 1.
    Raises RecordError where an input of a counted token is not finite, or one that a term needs is missing.
    """
    x = ratios(inputs)
    totals = totals or count(inputs, objective)
    counted = counted_tokens(x, objective)
    weights = token_weights(counted, x, aggregation or TokenMean(), totals)
    out = surrogate(x, objective)
    terms = {"policy": -weights.dot(out.objective)}
    if reference_kl is not None and reference_kl.place == "loss":
        d = _given(inputs, x, "reference_logprobs").detach() - x.logprobs
        terms["reference_kl"] = reference_kl.coef * weights.dot(kl_estimate(d, reference_kl))
    if entropy_coef:
        terms["entropy"] = -entropy_coef * weights.dot(_given(inputs, x, "entropy"))
    if value is not None:
        terms["value"] = value.coef * weights.dot(value_loss(inputs, x, value))
    loss = torch.stack(list(terms.values())).sum()
    metrics = diagnostics(inputs, x, out) | _parts(terms, loss, empty=not bool(counted.any()))
    return LossOutputs(loss, metrics, out)


def value_loss(inputs: LossInputs, x: Ratios, cfg: ValueLoss) -> Tensor:
    """[T] ½ max((V - ret)², (V_old + clip(V - V_old, ±clip) - ret)²), 0 where masked (PPO's code)."""
    values = _given(inputs, x, "values")
    returns = _given(inputs, x, "returns").detach()
    error = (values - returns).square()
    if cfg.clip is not None:
        old = _given(inputs, x, "old_values").detach()
        clipped = old + (values - old).clamp(-cfg.clip, cfg.clip)
        error = torch.maximum(error, (clipped - returns).square())
    return error / 2


def whole_step(parts: list[LossInputs], objective: ObjectiveConfig) -> Totals:
    """Totals of one rank's micro-batches, before the first loss: see `count`."""
    return sum((count(part, objective) for part in parts), Totals(0, 0))


def _given(inputs: LossInputs, x: Ratios, name: str) -> Tensor:
    """An optional input that a term needs: checked, 0 where masked, of the ratios' dtype."""
    tensor: Tensor | None = getattr(inputs, name)
    if tensor is None:
        raise RecordError(f"the loss needs {name}, which was not given")
    require_finite(inputs, name)
    return torch.where(x.mask, tensor, 0.0).to(x.advantages.dtype)


def _parts(terms: dict[str, Tensor], loss: Tensor, empty: bool) -> Metrics:
    values = torch.stack([*terms.values(), loss]).detach().tolist()
    metrics: Metrics = {
        f"loss/{name}": Sum(v) for name, v in zip([*terms, "total"], values, strict=True)
    }
    metrics["loss/all_masked_count"] = Sum(float(empty))
    return metrics
