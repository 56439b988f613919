"""Quantizing activations on a CPU in one pass over rows that stay in the cache, and scaling the sums of
products.

What is quantized is, to the bit, what the torch operations of areal_q/quant/activations.py compute, NaN
and infinity included. Arrays are C contiguous: T tokens, K channels. Compiled when this module is first
imported, and read from disk afterwards.
"""

import numpy as np
from numba import types as nt
from numba import void

from areal_q.kernels.jit import FMA, MAGNITUDE, ROUND, ROUND_E4M3, TINY, kernel

float32, int32 = np.float32, np.int32
F1, F2 = nt.Array(nt.float32, 1, "C"), nt.Array(nt.float32, 2, "C")
U8 = nt.Array(nt.uint8, 2, "C")
# Those of areal_q/quant/activations.py
_SMALLEST_ROW_SCALE = float32(1 / (448 * 512))
_SMALLEST_GROUP_RANGE = float32(1e-10)


@kernel()
def _top(bits):
    """Returns the largest magnitude, NaN above all: without their sign bit floats are ordered like integers."""
    top = int32(0)
    for i in range(bits.shape[0]):
        top = max(top, int32(bits[i] & MAGNITUDE))
    return int32(top).view(float32)


@kernel(void(F2, nt.int32, U8, F1))
def int8_rows(x, offset, codes, scales):
    """Quantizes x [T, K] as activations.quantize_rows does, with `offset`, 0 or 128, added to each code: codes
    [T, at least K], scales [T]."""
    bits = x.view(int32)
    for t in range(x.shape[0]):
        scale = _top(bits[t]) / float32(127.0)
        scale = TINY if scale < TINY else scale
        scales[t] = scale
        for i in range(x.shape[1]):
            codes[t, i] = np.uint8(float32(x[t, i] / scale + ROUND).view(int32) + offset)


@kernel()
def _e4m3(x):
    """Returns the E4M3 number next to x, ties to even, as float32; beyond ±448 it saturates, NaN stays.
    The weights' loop in quantize/eight_bits.py makes codes of the same numbers, with NaN as 448."""
    y = float32(448.0) if x > float32(448.0) else x
    y = float32(-448.0) if y < float32(-448.0) else y
    if abs(y) < float32(2.0**-6):
        return (y + ROUND_E4M3) - ROUND_E4M3
    bits = float32(y).view(int32)
    # 20 of 23 bits of the fraction go; what is added carries where they are more than half, or half and odd.
    bits += int32(0x7FFFF) + ((bits >> int32(20)) & int32(1))
    return int32(bits & int32(-0x100000)).view(float32)


@kernel(void(F2, F2, F1))
def e4m3_rows(x, numbers, scales):
    """Quantizes x [T, K] as activations.quantize_rows_e4m3 does: the numbers that its codes stand for, scales
    [T]."""
    bits = x.view(int32)
    for t in range(x.shape[0]):
        scale = _top(bits[t]) / float32(448.0)
        scale = _SMALLEST_ROW_SCALE if scale < _SMALLEST_ROW_SCALE else scale
        scales[t] = scale
        for i in range(x.shape[1]):
            numbers[t, i] = _e4m3(x[t, i] / scale)


@kernel(void(F2, F2, F2))
def e4m3_group_numbers(x, numbers, scales):
    """Quantizes x [T, K] as activations.quantize_groups_e4m3 does: the numbers that its codes stand for, scales
    [⌈K / 128⌉, T]."""
    bits = x.view(int32)
    for t in range(x.shape[0]):
        for g in range(scales.shape[0]):
            start, end = g * 128, min(g * 128 + 128, x.shape[1])
            top = _top(bits[t, start:end])
            top = _SMALLEST_GROUP_RANGE if top < _SMALLEST_GROUP_RANGE else top
            scale = top / float32(448.0)
            scales[g, t] = scale
            for i in range(start, end):
                numbers[t, i] = _e4m3(x[t, i] / scale)


@kernel(void(F2, F2))
def e4m3_groups(x, y):
    """Rounds x [T, K] to what activations.quantize_groups_e4m3 and back makes of it."""
    bits = x.view(int32)
    for t in range(x.shape[0]):
        for start in range(0, x.shape[1], 128):
            end = min(start + 128, x.shape[1])
            top = _top(bits[t, start:end])
            top = _SMALLEST_GROUP_RANGE if top < _SMALLEST_GROUP_RANGE else top
            scale = top / float32(448.0)
            for i in range(start, end):
                y[t, i] = _e4m3(x[t, i] / scale) * scale


@kernel(void(F2, F1, F1, F2, F2), fastmath=FMA)
def rescale(sums, w_scale, x_scale, add, y):
    """Computes y[t, o] = sums[t, o] · w_scale[o] · x_scale[t] + add[t, o], where add is [T, out] or [1,
    out]."""
    for t in range(sums.shape[0]):
        row = add[t if add.shape[0] > 1 else 0]
        for o in range(sums.shape[1]):
            y[t, o] = sums[t, o] * w_scale[o] * x_scale[t] + row[o]
