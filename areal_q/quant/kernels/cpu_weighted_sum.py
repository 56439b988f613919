"""The sum of rows times their weights on a CPU, as LLVM instructions that numba compiles for the processor.

A loop in Python stores and loads the sums again for every row, since LLVM cannot know that they and the rows
lie apart. Here they stay in vector registers, four of them, so that no addition waits for the one before it.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from areal_q.quant.kernels.cpu_tile import FLOATS, LANES, spread
from areal_q.quant.kernels.jit import SUMS, kernel

_INT = ir.IntType(64)
_AT_ONCE = 4


@intrinsic
def _lanes_of_sum(typing: Any, weights: Any, rows: Any, column: Any, out: Any) -> Any:
    """Computes out[c : c + LANES] = weights · rows[:, c : c + LANES] at c = `column`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        w = context.make_array(weights)(context, builder, args[0])
        x = context.make_array(rows)(context, builder, args[1])
        y = context.make_array(out)(context, builder, args[3])
        count, width = builder.extract_value(w.shape, 0), builder.extract_value(x.shape, 1)
        kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
        fused = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")
        zero = ir.Constant(FLOATS, [0.0] * LANES)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(_AT_ONCE)]

        def lanes(data: Any, index: Any) -> Any:
            return builder.bitcast(builder.gep(data, [index]), FLOATS.as_pointer())

        def add(row: Any, total: Any) -> None:
            weight = spread(builder, builder.load(builder.gep(w.data, [row])), FLOATS)
            start = builder.add(builder.mul(row, width), args[2])
            values = builder.load(lanes(x.data, start), align=4)
            builder.store(builder.call(fused, [weight, values, builder.load(total)]), total)

        def constant(n: int) -> Any:
            return ir.Constant(_INT, n)

        whole = builder.and_(count, constant(-_AT_ONCE))
        with cgutils.for_range_slice(builder, constant(0), whole, constant(_AT_ONCE)) as (row, _):
            for i, total in enumerate(sums):
                add(builder.add(row, constant(i)), total)
        with cgutils.for_range_slice(builder, whole, count, constant(1)) as (row, _):
            add(row, sums[0])
        a, b, c, d = (builder.load(total) for total in sums)
        found = builder.fadd(builder.fadd(a, b), builder.fadd(c, d))
        builder.store(found, lanes(y.data, args[2]), align=4)
        return context.get_dummy_value()

    return types.void(weights, rows, types.intp, out), emit


LANES_OF_SUM: Any = _lanes_of_sum


@kernel(fastmath=SUMS)
def weighted_sum(weights, rows, out):
    """Writes weights [N] · rows [N, D] into out [D], all float32 and C contiguous."""
    whole = rows.shape[1] // LANES * LANES
    for i in range(0, whole, LANES):
        LANES_OF_SUM(weights, rows, i, out)
    for i in range(whole, rows.shape[1]):
        total = np.float32(0.0)
        for p in range(weights.shape[0]):
            total += weights[p] * rows[p, i]
        out[i] = total
