"""The decoder's linear layer. On x86 CPUs it runs in oneDNN, which torch itself uses for float32 only if
rounding to bfloat16 is allowed. On AMD's cores its float32 products are twice as fast as MKL's, with the same
error.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_linear = (
    torch.ops.mkldnn._linear_pointwise
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    else None
)


class Linear(nn.Linear):
    """An `nn.Linear` with another kernel: x [..., in] → [..., out]."""

    rounds_rest = False
    """True if the bias, or an output head's weight, is rounded in the forward pass
    (areal_q/models/low_bit/bf16_rounding.py)"""

    def forward(self, input: Tensor) -> Tensor:
        if _linear is None or not _suits(input) or torch.is_autocast_enabled("cpu"):
            return F.linear(input, self.weight, self.bias)
        out: Tensor = _OneDnn.apply(input, self.weight)  # type: ignore[assignment]
        return out if self.bias is None else out + self.bias


class _OneDnn(torch.autograd.Function):
    """Computes x · Wᵀ and the gradient of x in oneDNN. The gradient of W, for which oneDNN is no faster, is
    torch's own product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        return product(grad, weight.t()), grad.flatten(0, -2).t() @ x.flatten(0, -2)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x [..., in] · weight [out, in]ᵀ, [..., out], by the kernel that is fastest here, without
    gradient."""
    if _linear is None or not _suits(x):
        return F.linear(x, weight)
    return _linear(x, weight, None, "none", [], "")


def _suits(x: Tensor) -> bool:
    # oneDNN has no sums of no products, as a rank needs whose tokens predict nothing.
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.shape[-1] > 0
