"""FP8 products with block scales: a · bᵀ of E4M3 codes, accumulated in float32.

A scale stands for 128 numbers along the contraction, of one row (1×128) or of a block of 128 rows (128×128).
On a Hopper GPU torch's scaled_mm is taken if it agrees with the emulation on a small product; anywhere else the
codes are dequantized and multiplied in float32, which is what the kernel computes up to the order of sums.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_q.quant.activations import GROUP, dequantize_groups, expanded, quantize_groups_e4m3

logger = logging.getLogger(__name__)


class Operand(NamedTuple):
    """codes float8_e4m3fn [R, K], scale float32 [R, ⌈K/128⌉], or [⌈R/128⌉, ⌈K/128⌉] where `blocks`."""

    codes: Tensor
    scale: Tensor
    blocks: bool = False

    def numbers(self) -> Tensor:
        """float32 [R, K]."""
        if self.blocks:
            return self.codes.float() * expanded(self.scale, self.codes.shape)
        return dequantize_groups(self.codes, self.scale)

    def rows(self, index: Tensor) -> "Operand":
        """Returns the operand of these rows alone, int64 [R′], wherever blocks begin."""
        scale = self.scale.repeat_interleave(GROUP, 0) if self.blocks else self.scale
        codes = self.codes.view(torch.uint8)[index]
        return Operand(codes.view(torch.float8_e4m3fn), scale[index])

    @staticmethod
    def stacked(operands: "Sequence[Operand]") -> "Operand":
        """One below the other; by rows where a block would hold rows of two."""
        if any(len(x.codes) % GROUP for x in operands[:-1]):
            operands = [x.rows(torch.arange(len(x.codes), device=x.codes.device)) for x in operands]
        codes = torch.cat([x.codes.view(torch.uint8) for x in operands])
        scales = torch.cat([x.scale for x in operands])
        return Operand(codes.view(torch.float8_e4m3fn), scales, operands[0].blocks)


Gemm = Callable[[Operand, Operand], Tensor]
"""a [M, K] by rows, b [N, K] → float32 [M, N]."""


class Fp8KernelLinear:
    """linear.Fp8GroupLinear by a kernel: equal to the rounding of sums."""

    def __init__(self, weight: Operand, gemm: Gemm) -> None:
        self.weight, self.gemm = weight, gemm

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        y = self.gemm(Operand(*quantize_groups_e4m3(x)), self.weight)
        return y if add is None else y.add_(add)

    def rows(self, index: Tensor) -> "Fp8KernelLinear":
        return Fp8KernelLinear(self.weight.rows(index), self.gemm)


def emulated(a: Operand, b: Operand) -> Tensor:
    return F.linear(a.numbers(), b.numbers())


def fp8_gemm(device: torch.device) -> Gemm:
    """Returns the product to use on `device`."""
    index = None if device.type == "cpu" else device.index or 0
    return _chosen(device.type, index)


@cache
def _chosen(kind: str, index: int | None) -> Gemm:
    hopper = kind == "cuda" and torch.cuda.get_device_capability(index)[0] == 9
    if hopper and agrees(scaled_mm, torch.device(f"{kind}:{index}")):
        logger.info("FP8 products: torch's scaled_mm")
        return scaled_mm
    logger.info("FP8 products: emulated in float32 on %s", kind)
    return emulated


def agrees(gemm: Gemm, device: torch.device) -> bool:
    """Returns True if products of both kinds of scales, of whole blocks and of parts, are the emulation's
    within bfloat16's rounding; a kernel that refuses this GPU, or a shape, or reads the scales in another
    order, is logged and passed over."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for rows, outputs, inputs in ((256, 256, 384), (101, 40, 200)):
        a, b = (torch.randn(n, inputs, generator=generator).exp() for n in (rows, outputs))
        left, right = (Operand(*quantize_groups_e4m3(x.to(device))) for x in (a, b))
        down, across = -(-outputs // GROUP), -(-inputs // GROUP)
        scale = 1.0 + torch.arange(float(down * across), device=device).view(down, across)
        pairs += [(left, right), (left, Operand(right.codes, scale, blocks=True))]
    for left, other in pairs:
        want = emulated(left, other)
        try:
            got = gemm(left, other)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            logger.warning("FP8 products: a kernel refuses: %s", error)
            return False
        if not torch.allclose(got, want, rtol=1e-2, atol=1e-2 * float(want.abs().mean())):
            logger.warning("FP8 products: a kernel disagrees with the emulation")
            return False
    return True


def _padded(operand: Operand, rows: int = 1) -> Tensor:
    """Codes [R′, K′], contiguous: zeros up to a multiple of `rows`, and of 128 along the contraction."""
    height, width = operand.codes.shape
    codes = operand.codes.view(torch.uint8)  # padding FP8 itself is not implemented everywhere
    codes = F.pad(codes, (0, -width % 128, 0, -height % rows)).contiguous()
    return codes.view(torch.float8_e4m3fn)


def scaled_mm(a: Operand, b: Operand) -> Tensor:
    """Returns a · bᵀ by cuBLAS, rounded to bfloat16."""
    kinds = F.ScalingType
    left, right = _padded(a, 16), _padded(b, GROUP if b.blocks else 16)
    out = F.scaled_mm(
        left, right.t(),
        scales_for_cublas(a.scale, len(left), a.blocks), kinds.BlockWise1x128,
        scales_for_cublas(b.scale, len(right), b.blocks),
        kinds.BlockWise128x128 if b.blocks else kinds.BlockWise1x128,
        output_dtype=torch.bfloat16,
    )  # fmt: skip
    return out[: len(a.codes), : len(b.codes)].float()


def scales_for_cublas(scale: Tensor, rows: int, blocks: bool) -> Tensor:
    """Scales in the order in which cuBLAS reads them (its manual: element 1D and 128×128 2D block scaling).

    1×128: [rows, K/128], with the rows next to each other in memory. 128×128: [L, ⌈rows/128⌉] where L is
    K/128 up to a multiple of 4, and runs fastest.
    """
    if blocks:
        return F.pad(scale, (0, -scale.shape[1] % 4)).contiguous().t()
    return F.pad(scale, (0, 0, 0, rows - scale.shape[0])).t().contiguous().t()
