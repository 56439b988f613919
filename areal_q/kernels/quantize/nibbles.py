"""Four-bit codes on a CPU, two in a byte."""

from typing import Any

import numpy as np
from numba import types, void
from numba.np.unsafe.ndarray import to_fixed_tuple

from areal_q.kernels.jit import MAGNITUDE, ROUND, kernel

float32, int32, uint8 = np.float32, np.int32, np.uint8
F1, F2 = types.Array(types.float32, 1, "C"), types.Array(types.float32, 2, "C")
U2 = types.Array(types.uint8, 2, "C")
FIXED_TUPLE: Any = to_fixed_tuple
_ONE, _SIX, _EXPONENT = (int32(float32(x).view(int32)) for x in (1, 6, np.inf))


@kernel()
def _int4(x, scale, codes):
    """The nearest whole numbers within -8 … 7, plus 8."""
    for i in range(x.shape[0]):
        y = x[i] / scale
        y = float32(-8.0) if y < float32(-8.0) else y
        y = float32(7.0) if y > float32(7.0) else y
        codes[i] = uint8((float32(y + ROUND).view(int32) + int32(8)) & int32(15))


@kernel()
def _e2m1(x, scale, codes):
    """The codes of E2M1. Between two powers of two, and below 1, codes are the multiples of half the power
    below: added to 3 · 2²² times that half, a number is rounded to one, in the low bits of the sum."""
    for i in range(x.shape[0]):
        bits = float32(x[i] / scale).view(int32)
        magnitude = min(int32(bits & MAGNITUDE), _SIX)
        power = int32(max(magnitude, _ONE) & _EXPONENT)
        large = int32(power + int32((22 << 23) + (1 << 22))).view(float32)
        rounded = float32(int32(magnitude).view(float32) + large).view(int32)
        # Each power has two codes more than the one before, and that of 1 has the exponent 127.
        code = (rounded + (power >> int32(22)) - int32(254)) & int32(7)
        codes[i] = uint8(code | ((bits >> int32(28)) & int32(8)))


@kernel()
def _of_table(x, scale, borders, codes):
    """The numbers of borders below x · (1 / scale)."""
    inverse = float32(float32(1.0) / scale)
    for i in range(x.shape[0]):
        y, code = x[i] * inverse, uint8(0)
        for border in borders:
            code += uint8(y > border)
        codes[i] = code


@kernel(void(F2, F2, types.int64, F1, types.boolean, U2))
def nibbles(w, scales, width, borders, whole_numbers, packed):
    """w [out, in] with a scale for every `width` numbers → two codes in a byte.

    Those of the table between whose values the `borders` are, where there are any, the first in the high half;
    else int4 or E2M1, the first in the low half. What a row of `packed` has room for beyond the row of `w` is
    filled with zeros.
    """
    codes = np.zeros(2 * packed.shape[1], uint8)
    # As a tuple they are numbers that stay in registers; a store might have changed those of an array.
    t = FIXED_TUPLE(borders if borders.shape[0] else np.zeros(15, float32), 15)
    first, second = (4, 0) if borders.shape[0] else (0, 4)
    for o in range(w.shape[0]):
        for q in range(scales.shape[1]):
            start, end = q * width, min((q + 1) * width, w.shape[1])
            x, found = w[o, start:end], codes[start:end]
            if borders.shape[0]:
                _of_table(x, scales[o, q], t, found)
            elif whole_numbers:
                _int4(x, scales[o, q], found)
            else:
                _e2m1(x, scales[o, q], found)
        for i in range(packed.shape[1]):
            packed[o, i] = uint8(codes[2 * i] << first | codes[2 * i + 1] << second)
