"""Quantizing a weight on a CPU while each of its numbers is read from memory once.

A row, or a block of 128×128, is small enough to stay in the cache between the search for its largest
magnitude and the division by the scale that follows from it. Along the way the weight is multiplied by
smoothing's factors of its rows and columns.
Codes and scales are, to the bit, those of the torch operations in areal_q/quant/formats.

Arrays are C contiguous. `given` are ranges to use in place of the measured ones; they and the factors may have
no elements. The result is the largest magnitude seen as the bits of a float32 (without their sign floats are
ordered like integers, with infinity and NaN above all). Compiled when this module is first imported, and read
from disk afterwards.
"""

import numpy as np
from numba import types as nt
from numba import void

from areal_q.kernels.jit import MAGNITUDE, ROUND, ROUND_E4M3, TINY, kernel
from areal_q.kernels.quantize.nibbles import nibbles as nibbles

float32, int32, uint8 = np.float32, np.int32, np.uint8
F1, F2, U2 = nt.Array(nt.float32, 1, "C"), nt.Array(nt.float32, 2, "C"), nt.Array(nt.uint8, 2, "C")
_ROUND_E4M3_BITS = int32(np.float32(1.5 * 2**14).view(np.int32))
_SMALLEST_NORMAL_E4M3 = int32(np.float32(2**-6).view(np.int32))
_LARGEST_E4M3 = int32(np.float32(448).view(np.int32))


@kernel()
def _scale(x, of_columns, of_row, out):
    """out [K] = x [K] · of_columns [K] · of_row."""
    for i in range(x.shape[0]):
        out[i] = float32(x[i] * of_columns[i]) * of_row


@kernel()
def _raise_to(tops, x):
    """tops [K]: bits of the largest magnitude of x [K] and of what it held."""
    for i in range(x.shape[0]):
        tops[i] = max(tops[i], int32(float32(x[i]).view(int32) & MAGNITUDE))


@kernel()
def _largest(tops):
    top = int32(0)
    for i in range(tops.shape[0]):
        top = max(top, tops[i])
    return top


@kernel()
def _int8(x, scale, codes):
    """Nearest whole numbers within ±127 of x / scale."""
    for i in range(x.shape[0]):
        y = x[i] / scale
        y = min(max(y, float32(-127.0)), float32(127.0))
        codes[i] = uint8(float32(y + ROUND).view(int32))


@kernel()
def _e4m3(x, scale, codes):
    """Nearest E4M3 numbers (4 exponent bits of bias 7, 3 mantissa bits) within ±448 of x / scale."""
    for i in range(x.shape[0]):
        bits = float32(x[i] / scale).view(int32)
        magnitude = min(int32(bits & MAGNITUDE), _LARGEST_E4M3)
        rounded = magnitude + int32(0x7FFFF) + ((magnitude >> int32(20)) & int32(1))
        normal = (rounded >> int32(20)) - int32(120 << 3)
        shifted = float32(int32(magnitude).view(float32) + ROUND_E4M3)
        subnormal = int32(shifted.view(int32) - _ROUND_E4M3_BITS)
        code = subnormal if magnitude < _SMALLEST_NORMAL_E4M3 else normal
        codes[i] = uint8(code | ((bits >> int32(24)) & int32(0x80)))


@kernel(nt.int64(F2, F1, F1, nt.float32, nt.int64, nt.int64, F2, U2, F2))
def quantize(w, of_rows, of_columns, largest, height, width, given, codes, scales):
    """w [out, in] → codes (int8 where `largest` is 127, else E4M3) and scales of blocks [height, width]."""
    worst, tops = int32(0), np.empty(w.shape[1], int32)
    scaled = np.empty((height, of_columns.shape[0]), float32)
    for p in range(scales.shape[0]):
        rows = range(p * height, min((p + 1) * height, w.shape[0]))
        # Whole rows, not block after block: jumps from row to row defeat prefetching and the caches' sets.
        tops[:] = 0
        for o in rows:
            x = w[o]
            if of_columns.shape[0]:
                x = scaled[o - p * height]
                _scale(w[o], of_columns, of_rows[o], x)
            _raise_to(tops, x)
        for q in range(scales.shape[1]):
            top = _largest(tops[q * width : (q + 1) * width])
            worst = max(worst, top)
            covered = given[p, q] if given.shape[0] else int32(top).view(float32)
            scales[p, q] = max(float32(covered / largest), TINY)
        for o in rows:
            x = scaled[o - p * height] if of_columns.shape[0] else w[o]
            for q in range(scales.shape[1]):
                start, end = q * width, min((q + 1) * width, w.shape[1])
                if largest == float32(127.0):
                    _int8(x[start:end], scales[p, q], codes[o, start:end])
                else:
                    _e4m3(x[start:end], scales[p, q], codes[o, start:end])
    return np.int64(worst)


@kernel(void(F2, nt.int64, F2))
def ranges(w, width, out):
    """Largest magnitude of every `width` numbers of a row: w [out, in] → [out, ⌈in / width⌉]; NaN stays."""
    for o in range(w.shape[0]):
        for q in range(out.shape[1]):
            top = int32(0)
            for x in w[o, q * width : (q + 1) * width]:
                top = max(top, int32(float32(x).view(int32) & MAGNITUDE))
            out[o, q] = int32(top).view(float32)
