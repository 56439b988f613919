"""Quantized linear layers on a CPU, without the chains of small operations around their products.

Each has the activations of its plain twin (quantized_linear.py) to the bit. INT8 sums are exact, whether
cpu_gemm.py computes them, from weights that are packed when they are loaded, or torch does. Products of
floats are torch's, with their weights in float32.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areal_q.quant.kernels import cpu_activations, cpu_gemm
from areal_q.quant.kernels.cpu_tile import PANEL, has_int8
from areal_q.quant.quantized_linear import (
    Fp8GroupLinear,
    Fp8RowLinear,
    Int8Linear,
    Linear,
    int8_matmul,
)

_OFFSET = 128
"""What is added to activations, since the processor multiplies uint8 by int8"""
_WORK_OF_A_THREAD = 1 << 22
"""Products for which another thread takes as long as its start"""


def cpu_linear(linear: Linear) -> Linear:
    """Returns a layer on a CPU with the results of `linear`, or `linear` itself where there is none."""
    match linear:
        case Int8Linear():
            return PackedInt8Linear(linear) if has_int8() else FusedInt8Linear(linear)
        case Fp8RowLinear():
            return FusedFp8RowLinear(linear)
        case Fp8GroupLinear():
            return FusedFp8GroupLinear(linear)
        case _:
            return linear


class PackedInt8Linear:
    """An Int8Linear whose weight is packed for cpu_gemm.int8_gemm."""

    def __init__(self, linear: Int8Linear) -> None:
        codes = linear.codes_t.t()
        self.words = cpu_gemm.pack_words(codes).numpy()
        shift = codes.sum(1, dtype=torch.int32).mul_(-_OFFSET)
        self.shift = F.pad(shift, (0, -len(shift) % PANEL)).numpy()
        self.scale = linear.scale.numpy()
        self.nothing = np.zeros((1, len(self.scale)), np.float32)

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        rows, outs = len(x), len(self.scale)
        codes = np.empty((rows, 4 * self.words.shape[1]), np.uint8)
        x_scale, y = np.empty(rows, np.float32), np.empty((rows, outs), np.float32)
        cpu_activations.uint8_rows(x.numpy(), codes, x_scale)
        added = self.nothing if add is None else add.view(-1, outs).numpy()
        words = codes.view(np.int32)
        over_panels(
            cpu_gemm.int8_gemm, words, self.words, self.shift, self.scale, x_scale, added, y
        )
        return torch.from_numpy(y)


def over_panels(gemm: Any, x: np.ndarray, words: np.ndarray, *rest: np.ndarray) -> None:
    """Calls `gemm` for all panels of `words`, on as many threads as torch has where that pays."""
    panels, work = len(words), x.shape[0] * words.size
    threads = min(torch.get_num_threads(), panels, max(1, work // _WORK_OF_A_THREAD))
    borders = [panels * i // threads for i in range(threads + 1)]
    others = [
        _pool().submit(gemm, x, words, *rest, first, last) for first, last in pairwise(borders[1:])
    ]
    gemm(x, words, *rest, 0, borders[1])
    for other in others:
        other.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="gemm")


class FusedInt8Linear:
    """An Int8Linear with the same codes to the bit. The GEMM is torch's, and the steps around it are
    kernels."""

    def __init__(self, linear: Int8Linear) -> None:
        self.codes_t = linear.codes_t
        self.scale = linear.scale.numpy()
        self.nothing = np.zeros((1, len(self.scale)), np.float32)

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        codes, x_scale = np.empty(x.shape, np.int8), np.empty(len(x), np.float32)
        cpu_activations.int8_rows(x.numpy(), codes, x_scale)
        sums = int8_matmul(torch.from_numpy(codes), self.codes_t).to(torch.int32).numpy()
        y = np.empty(sums.shape, np.float32)
        added = self.nothing if add is None else add.view(-1, sums.shape[1]).numpy()
        cpu_activations.dequantize(sums, self.scale, x_scale, added, y)
        return torch.from_numpy(y)


class FusedFp8RowLinear:
    """An Fp8RowLinear with the same rounded activations to the bit."""

    def __init__(self, linear: Fp8RowLinear) -> None:
        self.codes = linear.codes
        self.scale = linear.scale.numpy()
        self.nothing = np.zeros((1, len(self.scale)), np.float32)

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        numbers, x_scale = np.empty(x.shape, np.float32), np.empty(len(x), np.float32)
        cpu_activations.e4m3_rows(x.numpy(), numbers, x_scale)
        sums = F.linear(torch.from_numpy(numbers), self.codes).numpy()
        y = np.empty(sums.shape, np.float32)
        added = self.nothing if add is None else add.view(-1, sums.shape[1]).numpy()
        cpu_activations.rescale(sums, self.scale, x_scale, added, y)
        return torch.from_numpy(y)


class FusedFp8GroupLinear:
    """An Fp8GroupLinear with the same rounded activations to the bit."""

    def __init__(self, linear: Fp8GroupLinear) -> None:
        self.weight = linear.weight

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        rounded = np.empty(x.shape, np.float32)
        cpu_activations.e4m3_groups(x.numpy(), rounded)
        y = F.linear(torch.from_numpy(rounded), self.weight)
        return y if add is None else y.add_(add)
