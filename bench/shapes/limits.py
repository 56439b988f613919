"""What the machine can do: the speed of a copy, and of products at the very shapes of a model's linears.

The rate of a product is that of the fastest kernel there is here: torch's, oneDNN's with a packed weight, and
ours. A step can be no faster than its products at these rates, nor than its weights come from memory.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from areal_q.kernels import cpu_gemm
from areal_q.kernels.cpu_tile import PANEL, has_int8
from areal_q.plan.hardware import best_seconds
from bench.common import number, table
from bench.shapes.shapes import Shape

_COPIED = 64 << 20
_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_STORED = {**_BYTES, "four bits": 0.5}
"""Bytes of a weight; those of four bits can be multiplied as int8"""


@cache
def copy_bytes_per_s() -> float:
    """Returns the bytes that a copy reads and writes in a second of CPU."""
    source, target = torch.ones(_COPIED, dtype=torch.uint8), torch.empty(_COPIED, dtype=torch.uint8)
    return 2 * _COPIED / best_seconds(lambda: target.copy_(source))


@cache
def product_seconds(kind: str, rows: int, inputs: int, outs: int) -> float:
    """Returns the CPU seconds of the fastest product [rows, inputs] · [inputs, outs]."""
    torch.manual_seed(0)
    # A head is as many times this one; a part of it needs less memory, and no cache holds it either.
    part = min(outs, 16_384)
    runs = {"float32": _float32, "bfloat16": _bfloat16, "int8": _int8}[kind](rows, inputs, part)
    return min(map(best_seconds, runs)) * outs / part


def _float32(rows: int, inputs: int, outs: int) -> list[Callable[[], Any]]:
    x, w = torch.randn(rows, inputs), torch.randn(outs, inputs)
    numbers, packed = x[None].numpy(), cpu_gemm.pack_words(w).numpy()
    rest = np.zeros(len(packed) * PANEL, np.float32), *_rest(rows, outs)
    return [
        lambda: F.linear(x, w),
        lambda: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""),
        lambda: cpu_gemm.gemm(numbers, packed, *rest, 0, len(packed)),
    ]


def _bfloat16(rows: int, inputs: int, outs: int) -> list[Callable[[], Any]]:
    x, w = torch.randn(rows, inputs).bfloat16(), torch.randn(outs, inputs).bfloat16()
    words, packed = x[None].view(torch.int32).numpy(), cpu_gemm.pack_words(w).numpy()
    rest = np.zeros(len(packed) * PANEL, np.float32), *_rest(rows, outs)
    runs: list[Callable[[], Any]] = [
        lambda: F.linear(x, w),
        lambda: cpu_gemm.gemm(words, packed, *rest, 0, len(packed)),
    ]
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        oned = torch.ops.mkldnn._reorder_linear_weight(w, rows)
        runs.append(lambda: torch.ops.mkldnn._linear_pointwise(x, oned, None, "none", [], ""))
    return runs


def _int8(rows: int, inputs: int, outs: int) -> list[Callable[[], Any]]:
    x = torch.randint(-127, 128, (rows, inputs), dtype=torch.int8)
    w = torch.randint(-127, 128, (outs, inputs), dtype=torch.int8)
    runs: list[Callable[[], Any]] = [lambda: torch._int_mm(x, w.t())]  # pyright: ignore[reportPrivateImportUsage]
    if has_int8():
        codes = x.view(torch.uint8)
        words, packed = codes[None].view(torch.int32).numpy(), cpu_gemm.pack_words(w).numpy()
        shift, rest = np.zeros(len(packed) * PANEL, np.int32), _rest(rows, outs)
        runs.append(lambda: cpu_gemm.gemm(words, packed, shift, *rest, 0, len(packed)))
    return runs


def _rest(rows: int, outs: int) -> tuple[np.ndarray, ...]:
    def ones(*shape: int) -> np.ndarray:
        return np.ones(shape, np.float32)

    return ones(outs), ones(rows), ones(1, outs), ones(rows, outs)


class Limits:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def step_seconds(self, linears: str, rows: int) -> float:
        """Returns the least CPU seconds of a decoding step, the head being bfloat16."""
        layers = self.shape.config.num_hidden_layers
        products = [(linears, *size, layers) for size in self.shape.linears.values()]
        products.append(("bfloat16", *self.shape.head, 1))
        return sum(count * self._least_seconds(kind, rows, i, o) for kind, i, o, count in products)

    def _least_seconds(self, kind: str, rows: int, inputs: int, outs: int) -> float:
        operands = "int8" if kind == "four bits" else kind
        from_memory = _STORED[kind] * inputs * outs / copy_bytes_per_s()
        return max(product_seconds(operands, rows, inputs, outs), from_memory)

    def linears_seconds(self, kind: str, rows: int) -> float:
        """Returns the least CPU seconds of all layers' products."""
        layers = self.shape.config.num_hidden_layers
        return layers * sum(product_seconds(kind, rows, *s) for s in self.shape.linears.values())

    def head_seconds(self, kind: str, rows: int) -> float:
        """Returns the least CPU seconds of the output head's product."""
        return product_seconds(kind, rows, *self.shape.head)

    def table(self, sequences: list[int]) -> str:
        """Returns the rates measured, GFLOP/s."""
        sizes = {**self.shape.linears, "head": self.shape.head}
        rows = []
        for n in sequences:
            for name, (i, o) in sizes.items():
                rates = [2e-9 * n * i * o / product_seconds(k, n, i, o) for k in _BYTES]
                rows.append([f"{n}, {i}, {o} ({name})", *map(number, rates)])
        header = [f"{self.shape.name}: rows, inputs, outputs", *[f"{k}, GFLOP/s" for k in _BYTES]]
        return table(header, rows)
