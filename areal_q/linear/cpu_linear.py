"""Quantized linear layers on a CPU, without the chains of small operations around their products.

Each has the activations of its plain twin (quantized_linear.py) to the bit. INT8 sums are exact, whether
kernels/cpu_gemm.py computes them, from weights that are packed when they are loaded, or torch does. Products
of floats are torch's or those of that file, with weights in float32, or with bfloat16 operands, float32 sums,
and weights of half the size.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areal_q.kernels import cpu_activations, cpu_gemm
from areal_q.kernels.cpu_tile import PANEL, has, has_int8
from areal_q.linear.bf16_weight import Bf16Weight
from areal_q.linear.quantized_linear import (
    EXACT,
    FloatLinear,
    Fp8GroupLinear,
    Fp8RowLinear,
    Int8Linear,
    Linear,
    has_int_mm,
)

_OFFSET = 128
"""What is added to activations, since the processor multiplies uint8 by int8"""
_WORK_OF_A_THREAD = 1 << 16
"""Words of x, once for each panel, with which another thread takes as long as its start"""


def cpu_linear(linear: Linear) -> Linear:
    """Returns a layer on a CPU with the results of `linear`, or `linear` itself where there is none."""
    match linear:
        case Int8Linear():
            if has_int8():
                return PackedInt8Linear(linear)
            return linear if has_int_mm("cpu") else FusedInt8Linear(linear)
        case Fp8RowLinear():
            return FusedFp8RowLinear(linear)
        case Fp8GroupLinear():
            return FusedFp8GroupLinear(linear.weight)
        case FloatLinear() if has(
            "avx512f"
        ):  # others have too few registers for the sums of a tile
            return Float32Linear(linear.weight, torch.ones(len(linear.weight)))
        case _:
            return linear


def bf16_linear(weight: Bf16Weight, parts: int = 1) -> Linear:
    """Returns x ↦ x · Wᵀ with products of bfloat16 numbers and sums in float32. Activations that are no codes
    are the sum of so many `parts` (cpu_gemm.bf16_parts). Weights that bfloat16 does not hold are rounded to
    it if there is one part, else the products are float32."""
    match weight.activations:
        case "e4m3 rows":
            return Bf16RowLinear(weight)
        case "e4m3 groups":
            return Bf16GroupLinear(weight)
        case _ if len(weight.scale) > 1:
            return Bf16GroupLinear(weight, parts)
        case _ if parts > 1 and weight.numbers.dtype == torch.float32:
            return Float32Linear(weight.numbers, weight.scale[0])
        case _:
            return Bf16Linear(weight, parts)


class PanelLinear:
    """A layer whose weight is packed for cpu_gemm.gemm, with a scale for each output."""

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.words = cpu_gemm.pack_words(numbers).numpy()
        self.shift = np.zeros(PANEL * len(self.words), np.float32)
        self.scale = scale.numpy()
        self.nothing = np.zeros((1, len(self.scale)), np.float32)

    def product(self, words: np.ndarray, x_scale: np.ndarray, add: Tensor | None) -> Tensor:
        """Returns the layer's result for `words` of activations [parts, T, W], times `x_scale`."""
        y = np.empty((len(x_scale), len(self.scale)), np.float32)
        added = self.nothing if add is None else add.view(-1, y.shape[1]).numpy()
        weight = self.words, self.shift, self.scale
        over_panels(cpu_gemm.gemm, words, *weight, x_scale, added, y)
        return torch.from_numpy(y)


class PackedInt8Linear(PanelLinear):
    """An Int8Linear whose weight is packed."""

    def __init__(self, linear: Int8Linear) -> None:
        codes = linear.codes_t.t()
        super().__init__(codes, linear.scale)
        shift = codes.sum(1, dtype=torch.int32).mul_(-_OFFSET)
        self.shift = F.pad(shift, (0, -len(shift) % PANEL)).numpy()

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        codes = np.empty((len(x), 4 * self.words.shape[1]), np.uint8)
        x_scale = np.empty(len(x), np.float32)
        cpu_activations.int8_rows(x.numpy(), _OFFSET, codes, x_scale)
        return self.product(codes.view(np.int32)[None], x_scale, add)


class Float32Linear(PanelLinear):
    """A layer whose weights are float32. Where bfloat16 does not hold them, this takes two thirds of the time
    of weights and activations in two bfloat16 parts each, and no more memory."""

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return self.product(x.numpy()[None], _ones(len(x)), add)


class Bf16Linear(PanelLinear):
    """A layer whose weights are bfloat16, and whose activations are a sum of bfloat16 numbers."""

    def __init__(self, weight: Bf16Weight, parts: int = 1) -> None:
        super().__init__(weight.numbers.to(torch.bfloat16), weight.scale[0])
        self.parts = parts

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        words = cpu_gemm.bf16_parts(x.numpy(), self.parts)
        return self.product(words, _ones(len(x)), add)


class Bf16RowLinear(Bf16Linear):
    """A layer whose activations are E4M3 codes with a scale per row. Products are exact."""

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        numbers, x_scale = np.empty(x.shape, np.float32), np.empty(len(x), np.float32)
        cpu_activations.e4m3_rows(x.numpy(), numbers, x_scale)
        return self.product(cpu_gemm.bf16_parts(numbers, self.parts), x_scale, add)


class Bf16GroupLinear:
    """A layer whose weight has a scale per 128 channels of an output; activations are a sum of bfloat16
    numbers, or E4M3 codes with scales of the same groups."""

    def __init__(self, weight: Bf16Weight, parts: int = 1) -> None:
        self.words, self.parts = cpu_gemm.pack_words(weight.numbers).numpy(), parts
        self.scale, self.fp8 = weight.scale.numpy(), weight.activations == "e4m3 groups"

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        groups, outs = self.scale.shape
        x_scale, y = np.ones((groups, len(x)), np.float32), np.zeros((len(x), outs), np.float32)
        if add is not None:
            y[:] = add.numpy()
        numbers = x.numpy()
        if self.fp8:
            numbers = np.empty(x.shape, np.float32)
            cpu_activations.e4m3_group_numbers(x.numpy(), numbers, x_scale)
        words = cpu_gemm.bf16_parts(numbers, self.parts)
        over_panels(cpu_gemm.group_gemm, words, self.words, self.scale, x_scale, y)
        return torch.from_numpy(y)


class Bf16Table:
    """An embedding, or an output head, or both, packed once: bfloat16 [V, D]."""

    def __init__(self, weight: Tensor, parts: int) -> None:
        self.outs, self.width = weight.shape
        self.linear = Bf16Linear(Bf16Weight(weight, torch.ones(1, self.outs)), parts)

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the rows of `tokens` int64 [T], float32 [T, D]."""
        found = np.empty((len(tokens), self.width), np.float32)
        cpu_gemm.embed(self.linear.words, tokens.numpy(), found)
        return torch.from_numpy(found)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns the logits, float32 [R, V], of hidden states [R, D]."""
        return self.linear(hidden)


def over_panels(gemm: Any, x: np.ndarray, words: np.ndarray, *rest: np.ndarray) -> None:
    """Calls `gemm` for all panels of `words`, on as many threads as torch has where that pays."""
    panels = len(words)
    threads = min(panels, x.size * panels // _WORK_OF_A_THREAD)
    if threads < 2 or (threads := min(threads, torch.get_num_threads())) < 2:
        return gemm(x, words, *rest, 0, panels)
    borders = [panels * i // threads for i in range(threads + 1)]
    others = [
        _pool().submit(gemm, x, words, *rest, first, last) for first, last in pairwise(borders[1:])
    ]
    gemm(x, words, *rest, 0, borders[1])
    for other in others:
        other.result()


@lru_cache(64)
def _ones(rows: int) -> np.ndarray:
    """Returns the scales of rows that have none. For one row, making them takes half as long as a product."""
    return np.ones(rows, np.float32)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="gemm")


class FusedInt8Linear:
    """An Int8Linear with the same sums, which are exact in float32, where no instruction multiplies int8."""

    def __init__(self, linear: Int8Linear) -> None:
        self.codes = linear.codes_t.t().float().split(EXACT, 1)
        self.scale = linear.scale.numpy()
        self.nothing = np.zeros((1, len(self.scale)), np.float32)

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        codes, x_scale = np.empty(x.shape, np.int8), np.empty(len(x), np.float32)
        cpu_activations.int8_rows(x.numpy(), 0, codes.view(np.uint8), x_scale)
        parts = torch.from_numpy(codes).float().split(EXACT, 1)
        first, *rest = (F.linear(a, b) for a, b in zip(parts, self.codes, strict=True))
        # Of several parts the sum may be more than float32 holds.
        sums = sum((part.int() for part in rest), first.int()).float() if rest else first
        y = np.empty(sums.shape, np.float32)
        added = self.nothing if add is None else add.view(-1, sums.shape[1]).numpy()
        cpu_activations.rescale(sums.numpy(), self.scale, x_scale, added, y)
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


class FusedFp8GroupLinear(FloatLinear):
    """An Fp8GroupLinear with the same rounded activations to the bit."""

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        rounded = np.empty(x.shape, np.float32)
        cpu_activations.e4m3_groups(x.numpy(), rounded)
        return super().__call__(torch.from_numpy(rounded), add)
