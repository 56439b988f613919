"""Linear layers on published weights: the engine's GEMMs, and the learner's quantized forward.

W8A8 (`Int8Linear`): the activation row x_t is quantized on the fly with the formula of the
weights, and

    y[t, o] = (Σ_i a[t, i] · w[o, i]) · w_scale[o] · x_scale[t]

where the sum is over whole numbers, hence exact in any order and on any device. So a row's result
does not depend on what else is in the batch. `torch._int_mm` (oneDNN on a CPU, cuBLASLt on a GPU)
is 7 to 9 times as fast as a float32 linear on a CPU with VNNI; without (where it saturates or takes 25
times as long), and for a shape that it refuses, pieces are multiplied in float32 that holds them exactly.

FP8 W8A8 (`Fp8RowLinear`, `Fp8GroupLinear`) has no GEMM on a CPU: the numbers that E4M3 codes stand for
are multiplied in float32, which is also what the tensor cores accumulate in. Results agree with theirs
up to the order of sums; fp8_gemm.py has the kernels. Weight-only formats (`FloatLinear`) are dequantized
once, when loaded.
"""

from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_q.quant.activations import (
    INT8_MAX,
    dequantize_groups,
    quantize_groups_e4m3,
    quantize_rows,
    quantize_rows_e4m3,
)

EXACT = (1 << 24) // INT8_MAX**2
"""Products of int8 numbers whose sum float32 holds exactly: whole numbers up to 2²⁴"""


class Linear(Protocol):
    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """x float32 [T, in] → x · Wᵀ + add, float32 [T, out]; add: bias [out] or residual [T,
        out]."""
        ...


class Stacked(Linear, Protocol):
    def rows(self, index: Tensor) -> Linear:
        """Returns the same, of the outputs `index` alone: int64 [out′], in that order."""
        ...


class FloatLinear:
    """weight float32 [out, in]."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        y = F.linear(x, self.weight)
        return y if add is None else y.add_(add)

    def rows(self, index: Tensor) -> "FloatLinear":
        return type(self)(self.weight[index])


class Int8Linear:
    """codes int8 [out, in], scale float32 [out, 1]."""

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes_t = codes.contiguous().t()
        self.scale = scale.reshape(-1).contiguous()

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        codes, x_scale = quantize_rows(x)
        y = int8_matmul(codes, self.codes_t).to(torch.float32).mul_(self.scale)
        return y.mul_(x_scale) if add is None else torch.addcmul(add, y, x_scale)

    def rows(self, index: Tensor) -> "Int8Linear":
        return Int8Linear(self.codes_t.t()[index], self.scale[index])


class Fp8RowLinear:
    """Activations in E4M3 with a scale per token; the weight is codes float32 [out, in] · scale [out,
    1]. Products of codes are exact in float32, and the scales multiply the sum."""

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes = codes
        self.scale = scale.reshape(-1).contiguous()

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        codes, x_scale = quantize_rows_e4m3(x)
        y = F.linear(codes.to(torch.float32), self.codes).mul_(self.scale)
        return y.mul_(x_scale) if add is None else torch.addcmul(add, y, x_scale)

    def rows(self, index: Tensor) -> "Fp8RowLinear":
        return Fp8RowLinear(self.codes[index], self.scale[index])


class Fp8GroupLinear(FloatLinear):
    """Activations in E4M3 with a scale per 128 channels of a token; weight: dequantized float32 [out,
    in]. fp8_gemm.Fp8KernelLinear scales each group's partial sum instead."""

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return super().__call__(dequantize_groups(*quantize_groups_e4m3(x)), add)


def int8_matmul(a: Tensor, b: Tensor) -> Tensor:
    """int8 [M, K] · int8 [K, N] → int32 [M, N] without any rounding."""
    if _int_mm_takes(a, b):
        # cuBLASLt wants more than 16 rows; oneDNN takes any number.
        rows = a.shape[0] if a.device.type == "cpu" else max(a.shape[0], 32)
        enough = F.pad(a, (0, 0, 0, rows - a.shape[0])) if rows > a.shape[0] else a
        product = torch._int_mm(enough, b)  # pyright: ignore[reportPrivateImportUsage]
        return product[: a.shape[0]]
    pieces = zip(a.split(EXACT, 1), b.split(EXACT, 0), strict=True)
    with torch.autocast(a.device.type, enabled=False):  # in bfloat16 the sums would be rounded
        first, *rest = ((x.float() @ y.float()).to(torch.int32) for x, y in pieces)
    return sum(rest, first)


def _int_mm_takes(a: Tensor, b: Tensor) -> bool:
    if not has_int_mm(a.device.type):
        return False
    # cuBLASLt wants multiples of 8.
    return a.device.type == "cpu" or (a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0)


@cache
def has_int_mm(device: str) -> bool:
    """Returns True if `_int_mm` exists, is fast, and does not saturate (x86 without VNNI adds products in
    int16, or one after the other)."""
    if not hasattr(torch, "_int_mm") or device not in ("cpu", "cuda"):
        return False
    if device == "cpu":
        from areal_q.kernels.cpu_tile import has  # numba, which reading a model does not need

        if not (has("avx512vnni") or has("avxvnni")):
            return False
    a = torch.full((32, 64), INT8_MAX, dtype=torch.int8, device=device)
    a[1::2] = -INT8_MAX
    # In a forward pass in bfloat16 a product of float32 would be rounded.
    exact = a.double() @ a.double().t()
    product = torch._int_mm(a, a.t())  # pyright: ignore[reportPrivateImportUsage]
    return torch.equal(product.double(), exact)
