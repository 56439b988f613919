"""Matrix products of few rows with a weight that was packed before, on a CPU: y = x · Wᵀ, scaled, plus `add`.

The weight is packed once a version. Blocks of rows of x go over it panel by panel, so that a panel comes from
memory once for a whole block, and its sums are scaled while they are still in the cache. Sums of bfloat16
products are float32 and are never rounded to bfloat16; sums of int8 products are int32.

Notation: T rows, K channels, P panels of 64 outputs, W words of 32 bits (1, 2 or 4 channels, filled up with
0), G groups of channels. x and w of fewer bits are viewed as int32, since numba knows no bfloat16; arrays are C
contiguous. Compiled when this module is first imported, and read from disk afterwards.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numba import types as nt
from numba import void
from numba.extending import overload
from torch import Tensor

from areal_q.kernels.cpu_math import nearest_bf16, of_bf16
from areal_q.kernels.cpu_tile import (
    PANEL,
    SCALED,
    TILE_1,
    TILE_2,
    TILE_4,
    TILE_6,
    has_int8,
)
from areal_q.kernels.jit import FMA, SUMS, kernel

float32, int32 = np.float32, np.int32
F1, F2 = nt.Array(nt.float32, 1, "C"), nt.Array(nt.float32, 2, "C")
I1, I2, I3 = (nt.Array(nt.int32, n, "C") for n in (1, 2, 3))
F3 = nt.Array(nt.float32, 3, "C")
I1_64 = nt.Array(nt.int64, 1, "C")
ROWS = 96
"""Rows of a block, whose words of x stay in the cache while panels pass"""
_WORDS = 512
"""Words of a panel that are multiplied with all rows of a block before the next ones"""
_GROUP_WORDS = 64
_UPPER = int32(-(1 << 16))


def pack_words(weight: Tensor) -> Tensor:
    """Returns a weight in panels [P, W, PANEL]: float32 of float32 [out, K], int32 of bfloat16 or int8."""
    per_word = 4 // weight.element_size()
    rest = (0, -weight.shape[1] % per_word, 0, -weight.shape[0] % PANEL)
    words = F.pad(weight, rest)
    words = words if per_word == 1 else words.view(torch.int32)
    return words.view(-1, PANEL, words.shape[1]).transpose(1, 2).contiguous()


def bf16_parts(x: np.ndarray, parts: int) -> np.ndarray:
    """Returns the words of bfloat16 numbers whose sum over `parts` is nearly x float32 [T, K]: int32 [parts, T,
    W]. One part is x rounded, 2⁻⁹ of it off at most, and a second one leaves 2⁻¹⁷."""
    rows, width = x.shape
    found = np.empty((parts, rows, width + width % 2), np.uint16)
    _split(x, found)
    return found.view(np.int32)


@kernel(void(F2, nt.Array(nt.uint16, 3, "C")))
def _split(x, parts):
    for t in range(x.shape[0]):
        if x.shape[1] < parts.shape[2]:
            parts[:, t, x.shape[1]] = 0
        for i in range(x.shape[1]):
            first = nearest_bf16(x[t, i])
            parts[0, t, i] = first
            if parts.shape[0] > 1:
                parts[1, t, i] = nearest_bf16(x[t, i] - of_bf16(first))


@kernel(void(I3, I1_64, F2))
def embed(words, tokens, out):
    """Reads the rows `tokens` of a packed bfloat16 weight, [T, K]."""
    for t in range(len(tokens)):
        panel, column = words[tokens[t] // 64], tokens[t] % 64
        for i in range(out.shape[1]):
            word = panel[i // 2, column]
            bits = int32(word & _UPPER) if i % 2 else int32(word << int32(16))
            out[t, i] = int32(bits).view(float32)


@kernel()
def _add_products(operands, x, x_step, w, words, sums, rows):
    ahead, step = w + words * 256, np.int64(256 // ((rows + 5) // 6))
    r = 0
    while r + 6 <= rows:
        TILE_6(operands, x + r * x_step, x_step, w, words, sums, r, ahead, step)
        ahead += step * words
        r += 6
    if r + 4 <= rows:
        TILE_4(operands, x + r * x_step, x_step, w, words, sums, r, ahead, step)
        ahead += step * words
        r += 4
    if r + 2 <= rows:
        TILE_2(operands, x + r * x_step, x_step, w, words, sums, r, ahead, step)
        ahead += step * words
        r += 2
    if r < rows:
        TILE_1(operands, x + r * x_step, x_step, w, words, sums, r, ahead, step)
        ahead += step * words


@kernel(fastmath=FMA)
def _write_slowly(sums, shift, start, first, rows, w_scale, x_scale, add, y):
    """Writes the block's rows from `first` on, and the panel's columns from `start` on."""
    end = min(start + 64, y.shape[1])
    scale, offset = w_scale[start:end], shift[start:]
    for r in range(rows):
        t = first + r
        row, added, found = y[t, start:end], add[t if add.shape[0] > 1 else 0, start:end], sums[r]
        for c in range(end - start):
            row[c] = float32(found[c] + offset[c]) * scale[c] * x_scale[t] + added[c]


@kernel()
def write_panel(sums, shift, w_scale, x_scale, add, y, p, t, rows):
    """Writes y[t, o] = (sums + shift[o]) · w_scale[o] · x_scale[t] + add[t, o] for panel p and `rows` rows from
    t on. Sums of floats have a shift of 0."""
    if p * 64 + 64 > y.shape[1]:
        return _write_slowly(sums, shift, p * 64, t, rows, w_scale, x_scale, add, y)
    add_step = y.shape[1] if add.shape[0] > 1 else 0
    SCALED(
        sums,
        rows,
        shift.ctypes.data + p * 256,
        w_scale.ctypes.data + p * 256,
        x_scale.ctypes.data + t * 4,
        add.ctypes.data + (t * add_step + p * 64) * 4,
        add_step * 4,
        y.ctypes.data + (t * y.shape[1] + p * 64) * 4,
        y.shape[1] * 4,
    )


_KINDS = [(F3, F1), (I3, F1), *[(I3, I1)] * has_int8()]


@kernel([void(x, x, shift, F1, F1, F2, F2, nt.int64, nt.int64) for x, shift in _KINDS])
def gemm(x, w, shift, w_scale, x_scale, add, y, first, last):
    """Computes y[t, o] = (Σ x[i, t] · w[o] + shift[o]) · w_scale[o] · x_scale[t] + add[t, o] for the panels
    `first` … `last` - 1. The sum is over the parts i of x too; add is [T, out] or [1, out].

    If shift [P · 64] is float32, x and w are float32, or bfloat16 if viewed as int32, and it is 0. If it is
    int32, x is uint8 and w is int8, sums are whole, and the shift takes back what an offset of x adds."""
    sums = np.empty((ROWS, 64), shift.dtype)
    words = x.shape[2]
    for p in range(first, last):
        for t in range(0, x.shape[1], ROWS):
            rows = min(ROWS, x.shape[1] - t)
            sums[:rows] = 0
            for k in range(0, words, _WORDS):
                for part in range(x.shape[0]):
                    _add_products(
                        x,
                        x[part].ctypes.data + (t * words + k) * 4,
                        words * 4,
                        w.ctypes.data + (p * words + k) * 256,
                        min(_WORDS, words - k),
                        sums,
                        rows,
                    )
            write_panel(sums, shift, w_scale, x_scale, add, y, p, t, rows)


@kernel(fastmath=FMA)
def _group_added(sums, start, first, rows, scale, x_scale, y):
    end = min(start + 64, y.shape[1])
    mine = scale[start:end]
    for r in range(rows):
        row, found = y[first + r, start:end], sums[r]
        for c in range(end - start):
            row[c] += found[c] * mine[c] * x_scale[r]


@kernel(void(I3, I3, F2, F2, F2, nt.int64, nt.int64))
def group_gemm(x, w, w_scale, x_scale, y, first, last):
    """Adds Σ_g (Σ x[i, t] · w[o]) · w_scale[g, o] · x_scale[g, t] to y[t, o] for the panels `first` …
    `last` - 1. The inner sum is over the parts i of x and over group g, which is 128 channels."""
    sums = np.empty((ROWS, 64), float32)
    words = x.shape[2]
    for p in range(first, last):
        for t in range(0, x.shape[1], ROWS):
            rows = min(ROWS, x.shape[1] - t)
            for g in range(w_scale.shape[0]):
                k = g * _GROUP_WORDS
                sums[:rows] = float32(0.0)
                for part in range(x.shape[0]):
                    _add_products(
                        x,
                        x[part].ctypes.data + (t * words + k) * 4,
                        words * 4,
                        w.ctypes.data + (p * words + k) * 256,
                        min(_GROUP_WORDS, words - k),
                        sums,
                        rows,
                    )
                _group_added(sums, p * 64, t, rows, w_scale[g], x_scale[g, t:], y)


def _number(code: int) -> float:
    """Returns the number of a code, int8 or E4M3's given as uint8: `_as_declared` tells numba how."""
    raise NotImplementedError


def _whole(code):
    return float32(code)


def _e4m3(code):
    """Moves the bits to those of a float32, which are 2⁻¹²⁰ of the number, subnormal ones included."""
    wide = int32(code)
    bits = int32(int32(wide & int32(128)) << int32(24)) | int32(
        int32(wide & int32(127)) << int32(20)
    )
    return int32(bits).view(float32) * float32(2.0**120)


@overload(_number)
def _as_declared(code):
    return {nt.int8: _whole, nt.uint8: _e4m3}[code]


@kernel(
    [
        void(F2, nt.Array(code, 3, "C"), F1, F2, F2, nt.int64, nt.int64)
        for code in (nt.int8, nt.uint8)
    ],
    fastmath=SUMS,
)
def few_rows(x, w, scale, add, y, first, last):
    """Computes y[t, o] = (Σ x[t] · number(w[o])) · scale[o] + add[t, o] for the panels `first` … `last` - 1;
    x [T, K], w codes [P, 64, K], add [T, out] or [1, out].

    Each code is read from memory once and becomes a number in a register, for four rows of x at a time. For
    many rows a product with numbers that were made before is faster."""
    rows, each = x.shape[0], 1 if add.shape[0] > 1 else 0
    for o in range(first * 64, min(last * 64, y.shape[1])):
        codes, factor, t = w[o // 64, o % 64], scale[o], 0
        while t + 4 <= rows:
            a, b, c, d = x[t], x[t + 1], x[t + 2], x[t + 3]
            sum_a = sum_b = sum_c = sum_d = float32(0)
            for i in range(codes.shape[0]):
                weight = _number(codes[i])
                sum_a += weight * a[i]
                sum_b += weight * b[i]
                sum_c += weight * c[i]
                sum_d += weight * d[i]
            y[t, o] = sum_a * factor + add[t * each, o]
            y[t + 1, o] = sum_b * factor + add[(t + 1) * each, o]
            y[t + 2, o] = sum_c * factor + add[(t + 2) * each, o]
            y[t + 3, o] = sum_d * factor + add[(t + 3) * each, o]
            t += 4
        while t < rows:
            a, sum_a = x[t], float32(0)
            for i in range(codes.shape[0]):
                sum_a += _number(codes[i]) * a[i]
            y[t, o] = sum_a * factor + add[t * each, o]
            t += 1
