"""Products of a matrix with a vector on a CPU, as LLVM instructions that numba compiles for the processor:
attention of one query to keys and to values that lie row by row.

A loop in Python stores and loads the sums again for every row, since LLVM cannot know that they and the rows
lie apart, or adds up the lanes of a register for each. Here sums stay in registers, and their lanes are added
up for many rows at once.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from areal_q.kernels.cpu_math import dot
from areal_q.kernels.cpu_tile import FLOATS, LANES, has, spread
from areal_q.kernels.jit import MAGNITUDE, SUMS, kernel

float32, int32 = np.float32, np.int32
_INT = ir.IntType(64)
_AT_ONCE = 4
ROWS = 16 if has("avx512f") else 8
"""Rows whose sums fit the registers, and the numbers that one register holds."""
_CACHED = 64
"""Rows that stay in the first-level cache while all of a group's weights meet them"""
_LINE = 16
"""Numbers of a line of the cache"""
_LONG = 64
"""Numbers of a row from which on a loop over it is faster than one over ROWS rows"""
_NUMBERS, _BITS = (ir.VectorType(kind, ROWS) for kind in (ir.FloatType(), ir.IntType(32)))


def _fused(builder: Any, kind: ir.VectorType) -> Any:
    """Returns LLVM's function a · b + c for vectors of `kind`."""
    signature = ir.FunctionType(kind, [kind] * 3)
    name = f"llvm.fmuladd.v{kind.count}f32"
    return cgutils.get_or_insert_function(builder.module, signature, name)


def _lanes(builder: Any, data: Any, index: Any, kind: ir.VectorType) -> Any:
    """Returns the address of a vector of `kind` at an index of an array's data."""
    return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())


@intrinsic
def _lanes_of_sum(
    typing: Any, weights: Any, rows: Any, first: Any, last: Any, column: Any, out: Any
) -> Any:
    """Adds the rows `first` … `last` - 1, times their weights, to out, in LANES columns from `column` on."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        w = context.make_array(weights)(context, builder, args[0])
        x = context.make_array(rows)(context, builder, args[1])
        y = context.make_array(out)(context, builder, args[5])
        first, last, column, width = *args[2:5], builder.extract_value(x.shape, 1)
        fused = _fused(builder, FLOATS)
        zero = ir.Constant(FLOATS, [0.0] * LANES)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(_AT_ONCE)]

        def add(row: Any, total: Any) -> None:
            weight = spread(builder, builder.load(builder.gep(w.data, [row])), FLOATS)
            start = builder.add(builder.mul(row, width), column)
            values = builder.load(_lanes(builder, x.data, start, FLOATS), align=4)
            builder.store(builder.call(fused, [weight, values, builder.load(total)]), total)

        def constant(n: int) -> Any:
            return ir.Constant(_INT, n)

        count = builder.and_(builder.sub(last, first), constant(-_AT_ONCE))
        whole = builder.add(first, count)
        with cgutils.for_range_slice(builder, first, whole, constant(_AT_ONCE)) as (row, _):
            for i, total in enumerate(sums):
                add(builder.add(row, constant(i)), total)
        with cgutils.for_range_slice(builder, whole, last, constant(1)) as (row, _):
            add(row, sums[0])
        a, b, c, d = (builder.load(total) for total in sums)
        place = _lanes(builder, y.data, column, FLOATS)
        found = builder.fadd(builder.fadd(a, b), builder.fadd(c, d))
        builder.store(builder.fadd(builder.load(place, align=4), found), place, align=4)
        return context.get_dummy_value()

    return types.void(weights, rows, *[types.intp] * 3, out), emit


def _reduced(
    context: Any, builder: Any, rows: Any, first: Any, kind: ir.VectorType, add: Any, join: Any
) -> Any:
    """Returns one number for each of ROWS rows from `first`, over whole registers of a row, a vector of `kind`.

    `add` (total, numbers of a row, their column) returns what total becomes, which begins as 0; `join` returns
    that of two totals."""
    width = builder.extract_value(rows.shape, 1)
    totals = [cgutils.alloca_once(builder, kind) for _ in range(ROWS)]
    starts = [builder.mul(builder.add(first, ir.Constant(_INT, r)), width) for r in range(ROWS)]
    for total in totals:
        builder.store(ir.Constant(kind, None), total)
    whole, step = builder.and_(width, ir.Constant(_INT, -ROWS)), ir.Constant(_INT, ROWS)
    with cgutils.for_range_slice(builder, ir.Constant(_INT, 0), whole, step) as (column, _):
        for start, total in zip(starts, totals, strict=True):
            place = _lanes(builder, rows.data, builder.add(start, column), kind)
            numbers = builder.load(place, align=4)
            builder.store(add(builder.load(total), numbers, column), total)
    return _joined_lanes(builder, [builder.load(total) for total in totals], join)


def _joined_lanes(builder: Any, vectors: list[Any], join: Any) -> Any:
    """Returns a vector whose lane r is what joins the lanes of vectors[r]. Two vectors become one, in which
    each of both has half as many lanes, until one vector is left."""
    half = len(vectors) // 2
    while half:
        low = [r - r % (2 * half) + r % half + ROWS * (r // half % 2) for r in range(ROWS)]
        kind = ir.VectorType(ir.IntType(32), ROWS)
        places = [ir.Constant(kind, [lane + up for lane in low]) for up in (0, half)]
        vectors = [
            join(*(builder.shuffle_vector(a, b, place) for place in places))
            for a, b in zip(vectors[:half], vectors[half:], strict=True)
        ]
        half //= 2
    return vectors[0]


@intrinsic
def _rows_of_dots(typing: Any, rows: Any, first: Any, x: Any, out: Any) -> Any:
    """Computes out[r] = rows[r] · x for ROWS rows from `first`, over whole registers of x."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrix, vector, y = (
            context.make_array(kind)(context, builder, value)
            for kind, value in ((rows, args[0]), (x, args[2]), (out, args[3]))
        )
        fused = _fused(builder, _NUMBERS)

        def add(total: Any, numbers: Any, column: Any) -> Any:
            factors = builder.load(_lanes(builder, vector.data, column, _NUMBERS), align=4)
            return builder.call(fused, [numbers, factors, total])

        found = _reduced(context, builder, matrix, args[1], _NUMBERS, add, builder.fadd)
        builder.store(found, _lanes(builder, y.data, args[1], _NUMBERS), align=4)
        return context.get_dummy_value()

    return types.void(rows, types.intp, x, out), emit


@intrinsic
def _rows_of_ranges(typing: Any, rows: Any, first: Any, out: Any) -> Any:
    """Computes out[r] = max |rows[r]| for ROWS rows from `first`, over whole registers."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrix, y = (
            context.make_array(kind)(context, builder, value)
            for kind, value in ((rows, args[0]), (out, args[2]))
        )
        magnitude = ir.Constant(_BITS, [int(MAGNITUDE)] * ROWS)

        def larger(a: Any, b: Any) -> Any:
            return builder.select(builder.icmp_signed(">", a, b), a, b)

        def add(total: Any, numbers: Any, column: Any) -> Any:
            return larger(total, builder.and_(numbers, magnitude))

        found = _reduced(context, builder, matrix, args[1], _BITS, add, larger)
        builder.store(found, _lanes(builder, y.data, args[1], _BITS), align=4)
        return context.get_dummy_value()

    return types.void(rows, types.intp, out), emit


@intrinsic
def _prefetch(typing: Any, rows: Any, first: Any, last: Any) -> Any:
    """Asks for the rows `first` … `last` - 1 to be brought into the second-level cache, without waiting. The
    first has too little room for what is used later."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = context.make_array(rows)(context, builder, args[0])
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, *[ir.IntType(32)] * 3])
        fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        read, level, data = (ir.Constant(ir.IntType(32), n) for n in (0, 2, 1))
        width = builder.extract_value(x.shape, 1)
        start, stop = (builder.mul(row, width) for row in args[1:])
        line = ir.Constant(_INT, _LINE)
        with cgutils.for_range_slice(builder, start, stop, line) as (place, _):
            address = builder.bitcast(builder.gep(x.data, [place]), byte)
            builder.call(fetch, [address, read, level, data])
        return context.get_dummy_value()

    return types.void(rows, types.intp, types.intp), emit


PREFETCH: Any = _prefetch
LANES_OF_SUM: Any = _lanes_of_sum
ROWS_OF_DOTS: Any = _rows_of_dots
ROWS_OF_RANGES: Any = _rows_of_ranges


@kernel(fastmath=SUMS)
def weighted_sums(weights, rows, count, out, ahead):
    """Adds weights [G, N] · rows [N, D] to out [G, D], all float32 and C contiguous: of the first `count` of N.
    Meanwhile as many rows of `ahead` [N, D] are prefetched."""
    whole = rows.shape[1] // LANES * LANES
    for first in range(0, count, _CACHED):
        last = min(first + _CACHED, count)
        PREFETCH(ahead, first, last)
        for g in range(out.shape[0]):
            mine, total = weights[g], out[g]
            for i in range(0, whole, LANES):
                LANES_OF_SUM(mine, rows, first, last, i, total)
            for i in range(whole, rows.shape[1]):
                for r in range(first, last):
                    total[i] += mine[r] * rows[r, i]


@kernel(fastmath=SUMS)
def dots(rows, x, count, out, ahead):
    """Writes x [G, D] · rows [N, D]ᵀ into out [G, N], all float32 and C contiguous: of the first `count` of N.
    Meanwhile as many rows of `ahead` [N, D] are prefetched."""
    whole, left = count // ROWS * ROWS, rows.shape[1] // ROWS * ROWS
    for first in range(0, whole, ROWS):
        PREFETCH(ahead, first, first + ROWS)
        for g in range(out.shape[0]):
            mine, found = x[g], out[g]
            ROWS_OF_DOTS(rows, first, mine, found)
            if left < rows.shape[1]:
                for r in range(first, first + ROWS):
                    found[r] += dot(rows[r, left:], mine[left:])
    for r in range(whole, count):
        for g in range(out.shape[0]):
            out[g, r] = dot(rows[r], x[g])


@kernel()
def ranges(rows, out):
    """Writes the largest magnitude of each of rows [N, D] into out [N], NaN above all. Both are float32 and C
    contiguous."""
    whole = 0
    if rows.shape[1] % ROWS == 0 and rows.shape[1] < _LONG:
        whole = out.shape[0] // ROWS * ROWS
    for r in range(0, whole, ROWS):
        ROWS_OF_RANGES(rows, r, out)
    for r in range(whole, out.shape[0]):
        top = int32(0)
        for i in range(rows.shape[1]):
            top = max(top, int32(float32(rows[r, i]).view(int32) & MAGNITUDE))
        out[r] = int32(top).view(float32)
