"""Four-bit codes on a CPU, LANES at once, as LLVM instructions that numba compiles for the processor.

A loop in Python takes two to three times as long: it needs an array with the scale of every number, and a byte
for each code before two of them share one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types, void
from numba.extending import intrinsic
from numba.np.unsafe.ndarray import to_fixed_tuple

from areal_q.kernels.cpu_tile import FLOATS, LANES, spread
from areal_q.kernels.jit import MAGNITUDE, ROUND, kernel

float32 = np.float32
F1, F2 = types.Array(types.float32, 1, "C"), types.Array(types.float32, 2, "C")
U2 = types.Array(types.uint8, 2, "C")
BORDERS = 15
"""Borders between the 16 values of a table"""
_WORDS, _BYTES, _PAIRS, _PACKED = (
    ir.VectorType(ir.IntType(bits), lanes)
    for bits, lanes in ((32, LANES), (8, LANES), (16, LANES // 2), (8, LANES // 2))
)

Codes = Callable[[Any, Any, list[Any]], Any]
"""Function that emits the codes 0 … 15, LANES words, of LANES floats: (builder, floats, borders) → words"""


def _all(kind: ir.VectorType, number: float) -> ir.Constant:
    """Returns a vector of `kind` whose lanes all hold `number`."""
    return ir.Constant(kind, [number] * kind.count)


def _bits(number: float) -> ir.Constant:
    """Returns the bits of a float32 in all lanes of a vector of words."""
    return _all(_WORDS, int(np.float32(number).view(np.int32)))


def _int4(builder: Any, y: Any, borders: list[Any]) -> Any:
    """The nearest whole number within -8 … 7, plus 8."""
    low, high = _all(FLOATS, -8.0), _all(FLOATS, 7.0)
    y = builder.select(builder.fcmp_ordered("<", y, low), low, y)
    y = builder.select(builder.fcmp_ordered(">", y, high), high, y)
    rounded = builder.bitcast(builder.fadd(y, _all(FLOATS, float(ROUND))), _WORDS)
    return builder.and_(builder.add(rounded, _all(_WORDS, 8)), _all(_WORDS, 15))


def _e2m1(builder: Any, y: Any, borders: list[Any]) -> Any:
    """The code of E2M1. Between two powers of two, and below 1, codes are the multiples of half the power
    below: added to 3 · 2²² times that half, a number is rounded to one, in the low bits of the sum."""
    bits = builder.bitcast(y, _WORDS)
    magnitude, most = builder.and_(bits, _all(_WORDS, int(MAGNITUDE))), _bits(6.0)
    magnitude = builder.select(builder.icmp_signed("<", magnitude, most), magnitude, most)
    normal = builder.select(builder.icmp_signed("<", magnitude, _bits(1.0)), _bits(1.0), magnitude)
    power = builder.and_(normal, _bits(float("inf")))
    large = builder.bitcast(builder.add(power, _all(_WORDS, (22 << 23) + (1 << 22))), FLOATS)
    rounded = builder.bitcast(builder.fadd(builder.bitcast(magnitude, FLOATS), large), _WORDS)
    # Each power has two codes more than the one before, and that of 1 has the exponent 127.
    twice = builder.sub(builder.lshr(power, _all(_WORDS, 22)), _all(_WORDS, 254))
    code = builder.and_(builder.add(rounded, twice), _all(_WORDS, 7))
    sign = builder.and_(builder.lshr(bits, _all(_WORDS, 28)), _all(_WORDS, 8))
    return builder.or_(code, sign)


def _of_table(builder: Any, y: Any, borders: list[Any]) -> Any:
    """The number of borders below y, bit by bit: four comparisons, each with a border that the ones before
    choose."""
    code = _all(_WORDS, 0)
    for bit in (8, 4, 2, 1):
        above = builder.fcmp_ordered(">", y, borders[len(borders) // 2])
        half = len(borders) // 2
        borders = [
            builder.select(above, high, low)
            for low, high in zip(borders[:half], borders[half + 1 :], strict=True)
        ]
        code = builder.select(above, builder.or_(code, _all(_WORDS, bit)), code)
    return code


def _nibbles_of(codes: Codes, *, inverse: bool = False, first_high: bool = False) -> Any:
    """Returns an intrinsic that writes the codes of x / scale, or of x · (1 / scale), for LANES numbers of x
    from `start` on, into half as many bytes of `out` from start / 2 on."""

    @intrinsic
    def emitted(typing: Any, x: Any, scale: Any, borders: Any, start: Any, out: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            numbers = context.make_array(x)(context, builder, args[0]).data
            target = context.make_array(out)(context, builder, args[4]).data
            place = builder.gep(numbers, [args[3]])
            y = builder.load(builder.bitcast(place, FLOATS.as_pointer()), align=4)
            scales = spread(builder, args[1], FLOATS)
            y = builder.fmul(y, scales) if inverse else builder.fdiv(y, scales)
            table = [
                spread(builder, builder.extract_value(args[2], i), FLOATS) for i in range(BORDERS)
            ]
            bytes = builder.trunc(codes(builder, y, table), _BYTES)
            pairs = builder.bitcast(bytes, _PAIRS)
            up, down = (4, 8) if first_high else (0, 4)
            packed = builder.or_(
                builder.shl(pairs, _all(_PAIRS, up)), builder.lshr(pairs, _all(_PAIRS, down))
            )
            half = builder.gep(target, [builder.lshr(args[3], ir.Constant(ir.IntType(64), 1))])
            half = builder.bitcast(half, _PACKED.as_pointer())
            builder.store(builder.trunc(packed, _PACKED), half, align=1)
            return context.get_dummy_value()

        return types.void(x, types.float32, borders, types.intp, out), emit

    return emitted


FIXED_TUPLE: Any = to_fixed_tuple
INT4, E2M1 = _nibbles_of(_int4), _nibbles_of(_e2m1)
OF_TABLE = _nibbles_of(_of_table, inverse=True, first_high=True)


@kernel()
def _sixteen(x, scale, borders, start, whole_numbers, inverse, packed):
    if inverse:
        OF_TABLE(x, float32(float32(1.0) / scale), borders, start, packed)
    elif whole_numbers:
        INT4(x, scale, borders, start, packed)
    else:
        E2M1(x, scale, borders, start, packed)


@kernel()
def _rest(x, scale, borders, whole_numbers, inverse, packed):
    """The same for fewer than LANES numbers; what `packed` has room for beyond them is filled with zeros."""
    numbers, found = np.zeros(LANES, float32), np.zeros(LANES // 2, np.uint8)
    numbers[: x.shape[0]] = x
    _sixteen(numbers, scale, borders, 0, whole_numbers, inverse, found)
    used = x.shape[0] // 2
    if x.shape[0] % 2:
        found[used] &= np.uint8(240 if inverse else 15)
        used += 1
    packed[:] = np.uint8(0)
    packed[:used] = found[:used]


@kernel(void(F2, F2, types.int64, F1, types.boolean, U2))
def nibbles(w, scales, width, borders, whole_numbers, packed):
    """w [out, in] with a scale for every `width` numbers, a multiple of LANES → two codes in a byte.

    Those of the table between whose values the `borders` are, where there are any, the first in the high half;
    else int4 or E2M1, the first in the low half. What a row of `packed` has room for beyond the row of `w` is
    filled with zeros.
    """
    inverse = borders.shape[0] > 0
    b = borders if inverse else np.zeros(BORDERS, float32)
    # As a tuple they are numbers that stay in registers; a store might have changed those of an array.
    t = FIXED_TUPLE(b, BORDERS)
    whole = w.shape[1] // LANES * LANES
    for o in range(w.shape[0]):
        x, out = w[o], packed[o]
        for q in range(scales.shape[1]):
            for i in range(q * width, min((q + 1) * width, whole), LANES):
                _sixteen(x, scales[o, q], t, i, whole_numbers, inverse, out)
        if whole // 2 < packed.shape[1]:
            last = scales[o, scales.shape[1] - 1]
            _rest(x[whole:], last, t, whole_numbers, inverse, out[whole // 2 :])
