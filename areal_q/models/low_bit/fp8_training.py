"""FP8 training (Jet-RL): the three products of forward and backward pass are all of E4M3 codes.

    FProp   y  = x · Wᵀ      x 1×128 along in    W 128×128
    DGrad   ∂x = ∂y · W      ∂y 1×128 along out  W 128×128, the same codes
    WGrad   ∂W = ∂yᵀ · x     ∂y 1×128 along T    x 128×1 along T, requantized from what was saved

The weights are the codes and scales of format `fp8` that are published (quantized_forward.py). Only the FP8
codes of the activations are saved for the backward pass. Gradients between operators are rounded to bfloat16;
∂W stays float32, for the master weights.
"""

from typing import Any

import torch
from torch import Tensor

from areal_q.linear.fp8_gemm import Operand, fp8_gemm
from areal_q.models.low_bit.quantized_forward import QuantLinear
from areal_q.quant.activations import quantize_groups_e4m3
from areal_q.quant.format import Parts


class Fp8TrainingLinear(QuantLinear):
    """A linear layer whose three products are all in FP8. Its `format` must be `fp8`."""

    def take(self, parts: Parts) -> None:
        self.parts = parts
        self.rows, self.columns = operands(parts)

    def forward(self, input: Tensor) -> Tensor:
        x = input.flatten(0, -2)  # transformers' own layers hand over padded rows
        y: Tensor = _Fp8Flow.apply(x, self.weight, self.rows, self.columns)  # type: ignore[assignment]
        bias = self.acting_bias
        return (y if bias is None else y + bias).unflatten(0, input.shape[:-1])


class _Fp8Flow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: Operand, columns: Operand) -> Tensor:
        saved = Operand(*quantize_groups_e4m3(x.float()))
        ctx.save_for_backward(saved.codes, saved.scale)
        ctx.columns = columns
        return fprop(saved, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0].contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = dgrad(grad, ctx.columns)
        if ctx.needs_input_grad[1]:
            dw = wgrad(grad, Operand(*ctx.saved_tensors).numbers())
        return dx, dw, None, None


def operands(parts: Parts) -> tuple[Operand, Operand]:
    """Returns W as the operand of FProp, by rows [out, in], and as that of DGrad, by columns [in, out]."""
    codes, scale = parts["weight"], parts["weight_scale_inv"]
    columns = Operand(codes.t().contiguous(), scale.t().contiguous(), blocks=True)
    return Operand(codes, scale, blocks=True), columns


def fprop(x: Operand, rows: Operand) -> Tensor:
    """Returns y, float32 [T, out], for x [T, in] and W's rows [out, in]."""
    with torch.autocast(x.codes.device.type, enabled=False):
        return fp8_gemm(x.codes.device)(x, rows)


def dgrad(grad: Tensor, columns: Operand) -> Tensor:
    """Returns ∂x [T, in], rounded to bfloat16, for ∂y [T, out] and W's columns [in, out]."""
    dx = fp8_gemm(grad.device)(Operand(*quantize_groups_e4m3(grad)), columns)
    return dx.to(torch.bfloat16).to(grad.dtype)


def wgrad(grad: Tensor, x: Tensor) -> Tensor:
    """Returns ∂W, float32 [out, in], for ∂y [T, out] and x [T, in]."""
    along_tokens = (Operand(*quantize_groups_e4m3(t.t().contiguous())) for t in (grad, x))
    return fp8_gemm(grad.device)(*along_tokens)
