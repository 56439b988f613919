"""The operations of a decoder's layer on a CPU in bfloat16, with their gradients.

Products are of bfloat16 factors, accumulated in float32, by oneDNN. What lies between two products is one
kernel each way (areal_q/kernels/training). The residual stream, the weights and the gradients of weights are
float32; a product's result and the gradient of an activation are bfloat16. Weights are rounded again in the
backward pass, as copies that waited for it would take half as much memory as the model.

Notation: as in areal_q/kernels/training/pointwise.py.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from areal_q.kernels.training import attention
from areal_q.kernels.training import pointwise as kernels
from areal_q.models.packed_layout import PackedLayout

_ROWS = 32
"""Operands have a multiple of so many rows: oneDNN compiles its products for each number of rows, which takes
longer than a small product does, and keeps a thousand of them."""


def added_rows(count: int) -> int:
    """Returns the number of rows to add to an operand of `count` rows."""
    return -count % _ROWS


def arrays(*tensors: Tensor) -> list[np.ndarray]:
    """Returns contiguous tensors as the arrays that the kernels take, in the same memory."""
    return [
        (t.view(torch.uint16) if t.dtype == torch.bfloat16 else t).detach().numpy() for t in tensors
    ]


def cast(weights: Sequence[Tensor]) -> Tensor:
    """Returns float32 weights [out, in], one above the other, in bfloat16."""
    rows = [len(weight) for weight in weights]
    joined = torch.empty(sum(rows), weights[0].shape[1], dtype=torch.bfloat16)
    for part, weight in zip(joined.split(rows), weights, strict=True):
        part.copy_(weight)
    return joined


def weight_gradients(grad: Tensor, x: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """Returns gradᵀ · x in float32, cut into parts of so many rows. The sums over tokens are float32, and are
    rounded to bfloat16 once."""
    return [part.float() for part in (grad.t() @ x).split(list(rows))]


class AddNorm(torch.autograd.Function):
    """x float32 [T, D], delta bfloat16 [T, D] or None → x + delta, float32, and its RMSNorm, bfloat16."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        added = x.new_empty((0, 1), dtype=torch.bfloat16) if delta is None else delta
        total, y = torch.empty_like(x), torch.empty_like(x, dtype=torch.bfloat16)
        scale = x.new_empty(len(x))
        x_, added_, weight_, total_, y_, scale_ = arrays(x, added, weight, total, y, scale)
        kernels.add_norm(x_, added_, weight_, eps, total_, y_, scale_)
        ctx.save_for_backward(total, scale, weight)
        ctx.adds = delta is not None
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # type: ignore[override]
        total, scale, weight = ctx.saved_tensors
        onward, grad = grads
        if grad is None:
            delta = onward.to(torch.bfloat16) if ctx.adds and onward is not None else None
            return onward, delta, None, None
        onward = total.new_empty((0, 1)) if onward is None else onward.contiguous()
        grad_x, grad_weight = torch.empty_like(total), torch.zeros_like(weight)
        grad_delta = torch.empty(total.shape if ctx.adds else (0, 1), dtype=torch.bfloat16)
        kernels.add_norm_backward(
            *arrays(
                onward, grad.contiguous(), total, scale, weight, grad_x, grad_delta, grad_weight
            )
        )
        return grad_x, grad_delta if ctx.adds else None, grad_weight, None


class Projections(torch.autograd.Function):
    """x bfloat16 [T, D] → its products with several weights, side by side, bfloat16 [T, out].

    The arguments are x, the weights and then as many biases, all float32; a bias may be None.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor | None) -> Tensor:
        count = len(parameters) // 2
        weights = [w for w in parameters[:count] if w is not None]
        ctx.rows = [len(w) for w in weights]
        given = [b for b in parameters[count:] if b is not None]
        bias = torch.cat(given).to(torch.bfloat16) if given else None
        ctx.save_for_backward(x, *weights)
        return torch.nn.functional.linear(x, cast(weights), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        grad = grads[0].contiguous()
        count = len(ctx.rows)
        of_weights: list[Tensor | None] = [None] * count
        of_biases: list[Tensor | None] = [None] * count
        if any(ctx.needs_input_grad[1 : 1 + count]):
            of_weights = list(weight_gradients(grad, x, ctx.rows))
        if any(ctx.needs_input_grad[1 + count :]):
            of_biases = list(grad.sum(0, dtype=torch.float32).split(ctx.rows))
        grad_x = grad @ cast(weights) if ctx.needs_input_grad[0] else None
        needed = zip([*of_weights, *of_biases], ctx.needs_input_grad[1:], strict=True)
        return grad_x, *(g if needs else None for g, needs in needed)


class SwigluMlp(torch.autograd.Function):
    """x bfloat16 [T, D] → down · (silu(gate · x) · (up · x)), bfloat16 [T, D]. The product that `down` takes is
    not kept but computed again, in the pass over the same memory that computes its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gate_up = x @ cast([gate, up]).t()
        y = gate_up.new_empty(len(x), down.shape[1])
        kernels.swiglu(*arrays(gate_up, y))
        ctx.save_for_backward(x, gate, up, down, gate_up)
        return y @ cast([down]).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        x, gate, up, down, gate_up = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_gate_up = torch.empty_like(gate_up)
        y = gate_up.new_empty(len(x), down.shape[1])
        kernels.swiglu_backward(*arrays(grad @ cast([down]), gate_up, grad_gate_up, y))
        of_gate = of_up = of_down = None
        if any(ctx.needs_input_grad[1:]):
            (of_down,) = weight_gradients(grad, y, [len(down)])
            of_gate, of_up = weight_gradients(grad_gate_up, x, [len(gate)] * 2)
        return grad_gate_up @ cast([gate, up]), of_gate, of_up, of_down


class Rotate(torch.autograd.Function):
    """qkv bfloat16 [T, H, dim] → the same with RoPE, after an RMSNorm if there are norms, on its first `turned`
    heads. `norms` is float32 [turned, dim], the weight of each head's norm, or None."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        norms: Tensor | None,
        turned: int,
        eps: float,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        weights = cos.new_empty((0, 1)) if norms is None else norms
        scale = cos.new_empty((len(qkv), turned) if norms is not None else (0, 1))
        out = torch.empty_like(qkv)
        qkv_, weights_, cos_, sin_, out_, scale_ = arrays(qkv, weights, cos, sin, out, scale)
        kernels.rotate(qkv_, turned, weights_, eps, cos_, sin_, out_, scale_)
        kept = qkv if norms is not None else qkv.new_empty((0, 1, 1))
        ctx.save_for_backward(kept, weights, scale, cos, sin)
        ctx.turned = turned
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        qkv, norms, scale, cos, sin = ctx.saved_tensors
        grad = grads[0].contiguous()
        out, grad_norms = torch.empty_like(grad), torch.zeros_like(norms)
        grad_, qkv_, norms_, scale_, cos_, sin_, out_, sums = arrays(
            grad, qkv, norms, scale, cos, sin, out, grad_norms
        )
        kernels.rotate_backward(grad_, qkv_, ctx.turned, norms_, scale_, cos_, sin_, out_, sums)
        return out, grad_norms if len(norms) else None, None, None, None, None


class Attend(torch.autograd.Function):
    """qkv bfloat16 [T, H, dim] → causal attention within each sequence of `layout`, bfloat16 [T, heads, dim].
    q has `heads` of the H heads, k and v share the others."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, layout: PackedLayout) -> Tensor:
        out = qkv.new_zeros(len(qkv), heads, qkv.shape[2])  # also rows of no sequence
        lse = torch.empty(len(qkv), heads)
        shared, scale = (qkv.shape[1] - heads) // 2, qkv.shape[2] ** -0.5
        qkv_, out_, lse_ = arrays(qkv, out, lse)
        for b in layout.buckets:
            columns = b.rows.numpy(), b.begins, b.ends
            attention.attend(qkv_, heads, shared, *columns, scale, out_, lse_)
        ctx.save_for_backward(qkv, out, lse)
        ctx.heads, ctx.layout = heads, layout
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        qkv, out, lse = ctx.saved_tensors
        shared, scale = (qkv.shape[1] - ctx.heads) // 2, qkv.shape[2] ** -0.5
        grad_qkv = torch.zeros(qkv.shape)
        grad_, qkv_, out_, lse_, sums = arrays(grads[0].contiguous(), qkv, out, lse, grad_qkv)
        for b in ctx.layout.buckets:
            columns = b.rows.numpy(), b.begins, b.ends
            attention.attend_backward(
                grad_, qkv_, out_, lse_, ctx.heads, shared, *columns, scale, sums
            )
        return grad_qkv.to(torch.bfloat16), None, None
