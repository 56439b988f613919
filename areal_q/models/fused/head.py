"""The softmax over the vocabulary of a decoder that computes in bfloat16 on a CPU.

It is blockwise as areal_q/models/logprobs.py is. Logits have bfloat16 hidden states as factors and stay
float32, in which log-probs and ratios are computed. The weight is rounded to bfloat16 as well, as it is in
published versions, where the processor multiplies bfloat16 into float32. In the backward pass the products are
of bfloat16 factors, with results in bfloat16, but for the share of the target, usually the largest, which is
added in float32. The forward pass keeps all exponentials in bfloat16 for it, unless they are very many; then
each block is computed again. So it is for the gradient of an entropy, of which the forward pass does not know.

Notation: T tokens, D model width, V vocabulary; l = logits / temperature.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from areal_q.kernels.cpu_tile import has_bf16
from areal_q.kernels.training import pointwise as kernels
from areal_q.linear.bf16_weight import Bf16Weight
from areal_q.linear.cpu_linear import Bf16Linear
from areal_q.models.fused.functions import added_rows, arrays
from areal_q.models.layers.linear import product

_KEPT = 1 << 29
"""Most exponentials that are kept, which take 1 GiB"""
_packs = cache(has_bf16)


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Returns hidden [T, D] · weight [B, D]ᵀ, all float32; `hidden` has bfloat16 numbers."""
    if not _packs():
        return product(hidden, weight)
    rounded = Bf16Weight(weight.to(torch.bfloat16), torch.ones(1, len(weight)))
    return Bf16Linear(rounded)(hidden)


def softmax_head(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what SoftmaxHead does, which is given rows of zeros as well, whose gradient is 0."""
    rows = added_rows(len(hidden))
    padded, labels = pad(hidden, (0, 0, 0, rows)), pad(targets, (0, rows))
    keeps = torch.is_grad_enabled() and len(padded) * len(weight) <= _KEPT
    out: Any = SoftmaxHead.apply(padded, weight, labels, temperature, columns, keeps)
    chosen, lse, entropy = (each[: len(hidden)] for each in out)
    return chosen, lse, entropy


class SoftmaxHead(torch.autograd.Function):
    """hidden bfloat16 [T, D], weight float32 [V, D], targets int64 [T] → l of the targets, log Σ exp l and the
    entropy, float32 [T] each, with `columns` logits of a token in memory at once. If it `keeps` exponentials,
    the backward pass needs no logits but for the gradient of an entropy."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        columns: int,
        keeps: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide, scale = hidden.float(), 1 / temperature
        chosen, total, weighted = (wide.new_zeros(len(hidden)) for _ in range(3))
        largest, top = wide.new_full((len(hidden),), -torch.inf), torch.zeros_like(targets)
        sums, ctx.kept = arrays(targets, chosen, largest, total, weighted, top), []
        for start in range(0, len(weight), columns):
            logits = _logits(wide, weight[start : start + columns])
            exps = torch.empty(logits.shape if keeps else (0, 1), dtype=torch.bfloat16)
            kernels.softmax_sums(*arrays(logits), start, scale, *sums, *arrays(exps))
            if keeps:
                ctx.kept.append((exps, largest.clone()))
        lse = largest + total.log()
        entropy = total.log() - weighted / total
        places, exact = (
            torch.stack((targets, top), 1),
            torch.stack((chosen, largest, lse, entropy), 1),
        )
        ctx.save_for_backward(hidden, weight, places, exact)
        ctx.scale, ctx.columns = scale, columns
        return chosen, lse, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        hidden, weight, places, exact = ctx.saved_tensors
        slopes = torch.stack(grads, 1)
        of_hidden = torch.zeros(hidden.shape)
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        kept = ctx.kept and not grads[2].any()
        for number, start in enumerate(range(0, len(weight), ctx.columns)):
            part = weight[start : start + ctx.columns].to(torch.bfloat16)
            if kept:
                grad, largest = ctx.kept[number]
                factor = (slopes[:, 1] * ctx.scale * (largest - exact[:, 2]).exp())[:, None]
                rows = (factor * hidden).to(torch.bfloat16)
            else:
                logits, factor, rows = hidden @ part.t(), 1, hidden
                grad = torch.empty_like(logits)
                logits_, *given = arrays(logits, places, exact, slopes, grad)
                kernels.softmax_gradient(logits_, start, ctx.scale, *given)
            of_hidden += factor * (grad @ part)
            if of_weight is not None:
                of_weight[start : start + ctx.columns] = grad.t() @ rows
        targets, own = places[:, 0].clamp(0, len(weight) - 1), _of_targets(exact, slopes)
        own *= ctx.scale * (targets == places[:, 0])
        of_hidden += own[:, None] * weight[targets]
        if of_weight is not None:
            of_weight.index_add_(0, targets, own[:, None] * hidden)
        return of_hidden.to(torch.bfloat16), of_weight, None, None, None, None


def _of_targets(exact: Tensor, slopes: Tensor) -> Tensor:
    """Returns the gradient of each target's l, [T], from what SoftmaxHead saves and from its slopes."""
    chosen, _, lse, entropy = exact.unbind(1)
    of_chosen, of_lse, of_entropy = slopes.unbind(1)
    logprob = chosen - lse
    return of_chosen + logprob.exp() * (of_lse - of_entropy * (logprob + entropy))
