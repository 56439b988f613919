"""Products of small float32 matrices on a CPU, as LLVM instructions that numba compiles for the processor.

A block is ROWS rows times LANES columns of the result. Its sums stay in vector registers while the loop runs
over the inner dimension: a row of `b` is read once and meets all rows of `a`, whose numbers are spread over a
register. A sum is taken in the order of the inner dimension, so that each number of the result has the same
bits in a matrix of any size.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from areal_q.kernels.cpu_tile import FLOATS, LANES, has, spread
from areal_q.kernels.jit import FMA, kernel

ROWS = 8 if has("avx512f") else 4
"""Rows whose sums fit the registers: with AVX-512 a row of LANES numbers is one register of 32, otherwise it is
two of 16."""
_INT, _BYTE = ir.IntType(64), ir.IntType(8)


@intrinsic
def _block(typing: Any, a: Any, b: Any, out: Any, row: Any, column: Any) -> Any:
    """Computes out += a · b for ROWS rows from `row` and LANES columns from `column`. Arrays are float32 of two
    dimensions; the columns of b and of out lie next to each other."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        arrays = [
            context.make_array(kind)(context, builder, value)
            for kind, value in zip((a, b, out), args[:3], strict=True)
        ]
        row, column = args[3:]

        def place(array: Any, first: Any, second: Any, kind: Any) -> Any:
            """Returns the address of array[first, second], as one of `kind`. It is a step from the array's own
            pointer: LLVM does not know that a number made of one still points there, and drops stores."""
            address = builder.bitcast(array.data, _BYTE.as_pointer())
            for axis, index in enumerate((first, second)):
                step = builder.extract_value(array.strides, axis)
                address = builder.gep(address, [builder.mul(step, index)])
            return builder.bitcast(address, kind.as_pointer())

        of_a, of_b, of_out = arrays
        rows = [builder.add(row, ir.Constant(_INT, r)) for r in range(ROWS)]
        places = [place(of_out, r, column, FLOATS) for r in rows]
        sums = [cgutils.alloca_once(builder, FLOATS) for _ in rows]
        for total, start in zip(sums, places, strict=True):
            builder.store(builder.load(start, align=4), total)
        kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
        fused = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")
        with cgutils.for_range(builder, builder.extract_value(of_b.shape, 0)) as loop:
            values = builder.load(place(of_b, loop.index, column, FLOATS), align=4)
            for total, r in zip(sums, rows, strict=True):
                number = builder.load(place(of_a, r, loop.index, ir.FloatType()), align=4)
                factors = [spread(builder, number, FLOATS), values, builder.load(total)]
                builder.store(builder.call(fused, factors), total)
        for total, start in zip(sums, places, strict=True):
            builder.store(builder.load(total), start, align=4)
        return context.get_dummy_value()

    return types.void(a, b, out, types.intp, types.intp), emit


BLOCK: Any = _block


@kernel(fastmath=FMA)
def add_product(a, b, out):
    """Computes out [M, N] += a [M, K] · b [K, N], all float32. M is a multiple of ROWS and N of LANES; a row of
    b and of out is contiguous."""
    for column in range(0, out.shape[1], LANES):
        for row in range(0, out.shape[0], ROWS):
            BLOCK(a, b, out, row, column)
