"""FP8 products with block scales: a · bᵀ of E4M3 codes, accumulated in float32.

A scale stands for 128 numbers along the contraction, of one row (1×128) or of a block of 128 rows (128×128).
On a Hopper GPU the first of these that can be had is taken, and logged: deep_gemm, the copy that vLLM ships,
torch's own scaled_mm; anywhere else the codes are dequantized and multiplied in float32, which is what the
kernels compute up to the order of sums. The kernels' adapters have not run on a GPU yet.
"""

import importlib
import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_q.quant.fp8 import expanded
from areal_q.quant.rows import dequantize_groups

logger = logging.getLogger(__name__)


class Operand(NamedTuple):
    """codes float8_e4m3fn [R, K], scale float32 [R, ⌈K/128⌉], or [⌈R/128⌉, ⌈K/128⌉] where `blocks`."""

    codes: Tensor
    scale: Tensor
    blocks: bool = False

    def numbers(self) -> Tensor:
        """float32 [R, K]"""
        if self.blocks:
            return self.codes.float() * expanded(self.scale, self.codes.shape)
        return dequantize_groups(self.codes, self.scale)


Gemm = Callable[[Operand, Operand], Tensor]
"""a [M, K] by rows, b [N, K] → float32 [M, N]"""


def emulated(a: Operand, b: Operand) -> Tensor:
    return F.linear(a.numbers(), b.numbers())


def fp8_gemm(device: torch.device) -> Gemm:
    """The fastest product there is on `device`."""
    index = None if device.type == "cpu" else device.index or 0
    return _chosen(device.type, index)


@cache
def _chosen(kind: str, index: int | None) -> Gemm:
    if kind == "cuda" and torch.cuda.get_device_capability(index)[0] == 9:
        for module in ("deep_gemm", "vllm.third_party.deep_gemm"):
            try:
                found = importlib.import_module(module)
            except ImportError:
                continue
            logger.info("FP8 products: %s", module)
            return _deep_gemm(found)
        if hasattr(F, "scaled_mm"):
            logger.info("FP8 products: torch.nn.functional.scaled_mm")
            return _scaled_mm
    logger.info("FP8 products: emulated in float32 on %s", kind)
    return emulated


def _deep_gemm(module) -> Gemm:
    def product(a: Operand, b: Operand) -> Tensor:
        if a.codes.shape[1] % 128:
            return emulated(a, b)
        out = a.codes.new_empty(a.codes.shape[0], b.codes.shape[0], dtype=torch.float32)
        recipe = (1, 128, 128) if b.blocks else (1, 1, 128)
        module.fp8_gemm_nt((a.codes, a.scale), (b.codes, b.scale), out, recipe=recipe)
        return out

    return product


def _scaled_mm(a: Operand, b: Operand) -> Tensor:
    if a.codes.shape[1] % 128 or b.codes.shape[0] % 16:
        return emulated(a, b)
    kinds = F.ScalingType
    of_b = kinds.BlockWise128x128 if b.blocks else kinds.BlockWise1x128
    out = F.scaled_mm(
        a.codes, b.codes.t(), a.scale, kinds.BlockWise1x128, b.scale.t(), of_b,
        output_dtype=torch.bfloat16,
    )  # fmt: skip
    return out.float()
