"""What a number format is: how a weight is stored, what it stands for, and how a GEMM runs on it.

Shapes: a weight is [out, in]; `parts` are the tensors published for it, by the suffix that
follows the parameter's prefix. So `model.layers.0.mlp.up_proj` in int8 is {"weight": codes,
"weight_scale": scales}, published as `….up_proj.weight` and `….up_proj.weight_scale`.

To add a format: one file with `quantize` and `dequantize` side by side and its range, granularity
and error bound in the docstring; then its line in `formats.py` and its name in
`areal_q.config.run.Format`.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from areal_q.errors import QuantizationError
from areal_q.quant.linear import Linear

Parts = dict[str, Tensor]


class Format(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Keys of the parts; "weight", the codes, comes first."""
        ...

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        """Stored bits per weight, scales included."""
        ...

    def quantize(self, weight: Tensor, name: str) -> Parts:
        """Parts of a float `weight` [out, in]. Raises QuantizationError naming the tensor."""
        ...

    def dequantize(self, parts: Parts) -> Tensor:
        """The real numbers that `parts` stand for, float32 [out, in]."""
        ...

    def error_bound(self, parts: Parts) -> Tensor:
        """Largest |weight - dequantize(parts)|, float32, broadcastable to [out, in]."""
        ...

    def linear(self, parts: Sequence[Parts]) -> Linear:
        """x ↦ x · Wᵀ as the engine runs it; W: the weights of `parts`, stacked over outputs."""
        ...


def checked_float32(weight: Tensor, name: str) -> Tensor:
    """`weight` as float32 [out, in]. Raises QuantizationError for another rank, NaN or infinity."""
    if weight.dim() != 2 or not weight.is_floating_point():
        raise QuantizationError(
            f"{name}: {weight.dtype} {list(weight.shape)} is not a float [out, in]"
        )
    if not weight.isfinite().all():
        raise QuantizationError(f"{name}: holds NaN or an infinity")
    return weight.detach().to(torch.float32)
