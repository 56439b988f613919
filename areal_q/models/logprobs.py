"""Log-probs and entropies of the output head's distribution, with or without the [T, V] logits in memory.

With the logits in memory it is plain torch, with several tensors of [T, V] at once. Without them the vocabulary
is cut into blocks, and the softmax is accumulated over the blocks (online softmax, arXiv 1805.02867). The
backward pass computes each block again from the hidden states and three numbers for each token, as arXiv
2411.09009 does in one kernel. Each block of the head's weight is read once in each pass, and its gradient is
written once.

Notation: T tokens, D model width, V vocabulary, B columns of a block; l = logits / temperature, in float32 or
better whatever the model's dtype. H is a token's entropy, and lse its log Σ exp l.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from areal_q.models.layers.linear import product
from areal_q.models.layers.norm import wide

BLOCK = 1 << 22
"""Number of logits in a block, which a processor's cache holds"""
_GPU_BLOCK = 1 << 27
"""The same on a GPU, where small blocks leave most of the time to the launches of kernels"""
_WHOLE = 1 << 24
"""Most logits for which plain torch is used. The choice depends on shapes alone, so that a step that is
computed again makes the same one."""


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    entropy_learns: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns the log-prob of each target and the entropies in nats, both float32 [T] (float64 for float64).

    hidden is [T, D], weight [V, D] and targets int64 [T]. Gradients flow to hidden and weight from the
    log-probs, and from the entropies if `entropy_learns`.
    """
    # Otherwise torch would round the logits to the coarser dtype.
    exact = hidden.dtype == weight.dtype == torch.promote_types(hidden.dtype, torch.float32)
    if exact and len(hidden) * len(weight) <= _WHOLE:
        return whole(hidden, weight, targets, temperature, entropy_learns)
    return blockwise(hidden, weight, targets, temperature, entropy_learns)


def whole(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, entropy_learns: bool
) -> tuple[Tensor, Tensor]:
    """Returns the same by its definition in plain torch, with memory for several tensors [T, V]."""
    logits = wide(torch.nn.functional.linear(hidden, weight)) / temperature
    return of_logits(logits, targets, entropy_learns)


def of_logits(logits: Tensor, targets: Tensor, entropy_learns: bool) -> tuple[Tensor, Tensor]:
    """Returns the same of logits [T, V]."""
    logp = torch.log_softmax(logits, dim=-1)
    with torch.set_grad_enabled(entropy_learns and torch.is_grad_enabled()):
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), entropy


def blockwise(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    entropy_learns: bool,
    block: int = 0,
) -> tuple[Tensor, Tensor]:
    """Returns the same with at most `block` logits in memory at once, but at least 256 columns. 0 means what
    suits the device."""
    chosen, lse, entropy = blocks(hidden, weight, targets, temperature, block)
    return chosen - lse, entropy if entropy_learns else entropy.detach()


def blocks(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, block: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns l of each target, lse and entropy over the rows of `weight`, each [T]. For a target that is none
    of these rows l is 0."""
    block = block or (_GPU_BLOCK if hidden.is_cuda else BLOCK)
    columns = max(256, block // max(1, len(hidden)))
    way: Any = _Blockwise.apply
    if hidden.dtype == torch.bfloat16 and weight.dtype == torch.float32 and not weight.is_cuda:
        from areal_q.models.fused.head import (
            softmax_head as way,  # compiles kernels, if none are cached
        )
    return way(hidden, weight, targets, temperature, columns)


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, columns: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Σ exp and Σ exp · l are of l minus the largest l so far, and are rescaled whenever that grows.
        largest = wide(hidden.new_full((len(hidden),), -torch.inf))
        total, weighted = torch.zeros_like(largest), torch.zeros_like(largest)
        chosen = torch.zeros_like(largest)
        for start in range(0, len(weight), columns):
            logits = _logits(hidden, weight[start : start + columns], temperature)
            inside, places = _places(targets, start, logits.shape[1])
            found = logits.gather(1, places[:, None]).squeeze(1)
            chosen = torch.where(inside, found, chosen)
            above = torch.maximum(largest, logits.amax(-1))
            grown = torch.where(total > 0, above - largest, 0.0)
            weighted = (weighted - grown * total) * (-grown).exp()
            total = total * (-grown).exp()
            logits -= above[:, None]
            exps = logits.exp()
            total += exps.sum(-1)
            weighted += exps.mul_(logits).sum(-1)
            largest = above
        lse = largest + total.log()
        entropy = total.log() - weighted / total
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.temperature, ctx.columns = temperature, columns
        return chosen, lse, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        """Uses ∂l_y/∂l_j = [j = y], ∂lse/∂l_j = p_j and ∂H/∂l_j = -p_j (log p_j + H)."""
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        of_chosen, of_lse, of_entropy = grads
        to_hidden, to_weight = ctx.needs_input_grad[:2]
        widened = wide(hidden)
        grad_hidden = torch.zeros_like(widened) if to_hidden else None
        grad_weight = torch.empty_like(weight) if to_weight else None
        entropy_learns = bool(of_entropy.any())
        for start in range(0, len(weight), ctx.columns):
            part = weight[start : start + ctx.columns]
            logp = _logits(hidden, part, ctx.temperature).sub_(lse[:, None])
            inside, places = _places(targets, start, logp.shape[1])
            if entropy_learns:
                slope = of_entropy[:, None] * (logp + entropy[:, None])
                grad = logp.exp_().mul_(of_lse[:, None] - slope)
            else:
                grad = logp.exp_().mul_(of_lse[:, None])
            mine = torch.where(inside, of_chosen, 0.0)
            grad.scatter_add_(1, places[:, None], mine[:, None])
            grad /= ctx.temperature
            if grad_hidden is not None:
                grad_hidden += _product(grad, part.t(), hidden.dtype)
            if grad_weight is not None:
                grad_weight[start : start + ctx.columns] = _product(
                    grad.t(), hidden.t(), hidden.dtype
                )
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            grad_weight,
            None,
            None,
            None,
        )


def masked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor,
    temperature: float,
    entropy_learns: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns what `head_logprobs` does, of the distribution over each token's ids `mask` int64 [T, K], of
    which -1 is none, and the target is one. Sampling was truncated to these ids, and so an importance ratio
    must be (arXiv 2512.02556, §3.1). No logits of other ids are computed."""
    way: Any = _Masked.apply
    logprobs, entropy = way(hidden, weight, targets, mask, temperature)
    return logprobs, entropy if entropy_learns else entropy.detach()


class _Masked(torch.autograd.Function):
    """Takes as many tokens at once as have BLOCK numbers in the rows of the head that they need."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature = temperature
        found = [_Masked.among(*block, weight, temperature)[1:] for block in _blocks(hidden, mask)]
        logp, entropy = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(hidden, weight, targets, mask)
        return logp.masked_fill(mask != targets[:, None], 0.0).sum(-1), entropy

    @staticmethod
    def among(
        hidden: Tensor, mask: Tensor, weight: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the rows of the head [R, K, D], log-probs [R, K], of -1 below any other, and entropies."""
        rows = wide(weight[mask.clamp(min=0)])
        logits = torch.einsum("rkd,rd->rk", rows, wide(hidden)) / temperature
        logp = torch.log_softmax(logits.masked_fill(mask < 0, -1e30), dim=-1)
        return rows, logp, -(logp.exp() * logp).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        """Uses the same derivatives as above, over the ids of the mask."""
        hidden, weight, targets, mask = ctx.saved_tensors
        to_hidden, to_weight = ctx.needs_input_grad[:2]
        grad_weight = torch.zeros_like(weight) if to_weight else None
        of_hidden, begin = [], 0
        for part, ids in _blocks(hidden, mask):
            here = slice(begin, begin := begin + len(part))
            of_logp, of_entropy = (grad[here, None] for grad in grads)
            rows, logp, entropy = _Masked.among(part, ids, weight, ctx.temperature)
            chosen = (ids == targets[here, None]).to(logp.dtype)
            p = logp.exp()
            grad = of_logp * (chosen - p) - of_entropy * p * (logp + entropy[:, None])
            grad /= ctx.temperature
            if to_hidden:
                of_hidden.append(torch.einsum("rk,rkd->rd", grad, rows))
            if grad_weight is not None:
                each = (grad[:, :, None] * wide(part)[:, None]).flatten(0, 1)
                grad_weight.index_add_(0, ids.clamp(min=0).flatten(), each.to(weight.dtype))
        grad_hidden = torch.cat(of_hidden).to(hidden.dtype) if to_hidden else None
        return grad_hidden, grad_weight, None, None, None


def _blocks(hidden: Tensor, mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    rows = max(1, BLOCK // (mask.shape[1] * hidden.shape[1]))
    return zip(hidden.split(rows), mask.split(rows), strict=True)


def _logits(hidden: Tensor, part: Tensor, temperature: float) -> Tensor:
    return _product(hidden, part, hidden.dtype).div_(temperature)


def _product(x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x [n, k] · w [m, k]ᵀ, [n, m], accumulated in float32 or better. On a GPU the factors are of
    `dtype`."""
    if x.is_cuda and dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x.to(dtype), w.to(dtype).t(), out_dtype=torch.float32)
    return product(wide(x), wide(w))


def _places(targets: Tensor, start: int, columns: int) -> tuple[Tensor, Tensor]:
    """Returns bool [T], True for targets in the block, and int64 [T], their columns in it; the others' are
    arbitrary."""
    places = targets - start
    return (places >= 0) & (places < columns), places.clamp(0, columns - 1)
