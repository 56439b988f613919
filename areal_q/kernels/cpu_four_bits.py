"""Products of int8 activations with weights of four bits on a CPU, from the codes as they were published.

    y[t, o] = Σ_n s[t, o, n] · scale[n, o] · x_scale[t] + add[t, o]
    s[t, o, n] = Σ_{k in block n} x[t, k] · number(code[o, k])

The sums s are whole and exact, those over n are float32. A register of 64 bytes holds the codes of eight
channels of 16 outputs: two masks and two looks into a table of 16 bytes make numbers of all of them, so that
only four bits come from memory. The instruction multiplies unsigned by signed numbers (AVX512-VNNI), so the
table holds numbers plus an offset, and s begins with what takes it back: -offset · Σ x.

Notation: T rows, P panels of 64 outputs, W words of four channels of x, filled up with 0 to whole blocks, N
blocks of channels with a scale of their own. Compiled when this module is first imported, and read from disk
afterwards.
"""

from typing import Any

import numpy as np
import torch.nn.functional as F
from llvmlite import ir
from numba import types, void
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from areal_q.kernels.cpu_gemm import F1, F2, I2, I3, ROWS, write_panel
from areal_q.kernels.cpu_tile import (
    FLOATS,
    INT8_DOT,
    LANES,
    PANEL,
    VECTORS,
    WORDS,
    Sums,
    has,
    has_int8,
    in_registers,
    multiply_and_add,
    operand_of,
    prefetch,
    spread,
)
from areal_q.kernels.jit import kernel

float32, int32 = np.float32, np.int32
_I64, _I32, _F32 = ir.IntType(64), ir.IntType(32), ir.FloatType()
_BYTES, _TABLE = ir.VectorType(ir.IntType(8), 64), ir.VectorType(ir.IntType(8), 16)
_LOOK_UP = "llvm.x86.avx512.pshuf.b.512"
_AHEAD = 4096
"""Bytes between the codes that are multiplied and those that are fetched meanwhile"""
_I8_2, _U8_1 = types.Array(types.int8, 2, "C"), types.Array(types.uint8, 1, "C")
_F3 = types.Array(types.float32, 3, "C")


def has_four_bits() -> bool:
    """Returns True if the processor has what `gemm` is made of."""
    return has_int8() and has("avx512bw")


def pack_codes(words: Tensor, per_block: int) -> Tensor:
    """Returns codes in panels, int32 [P, W / 2, PANEL], of words of eight codes, the first in the lowest bits,
    int32 [out, ⌈K / 8⌉]; `per_block` words make a block. In each word, the low halves of the bytes become the
    first four codes, since they meet the same word of x."""
    padded = F.pad(words, (0, -words.shape[1] % per_block, 0, -words.shape[0] % PANEL))
    for distance, mask in ((8, 0x0000FF00), (4, 0x00F000F0)):
        moved = (padded ^ padded >> distance) & mask
        padded = padded ^ moved ^ moved << distance
    return padded.view(-1, PANEL, padded.shape[1]).transpose(1, 2).contiguous()


@kernel(void(_I8_2, types.int64, I2))
def block_sums(x, factor, out):
    """Writes factor · Σ x over each block into out [T, N], of x [T, 4 W]."""
    size = x.shape[1] // out.shape[1]
    for t in range(x.shape[0]):
        for n in range(out.shape[1]):
            # Of a slice LLVM knows that it is contiguous, and adds eight times as fast.
            block, total = x[t, n * size : n * size + size], int32(0)
            for i in range(block.shape[0]):
                total += int32(block[i])
            out[t, n] = total * factor


def _plus(builder: Any, address: Any, step: Any, count: int = 1) -> Any:
    """Returns address + step · count."""
    return builder.add(address, builder.mul(step, ir.Constant(_I64, count)))


def _load(builder: Any, address: Any, kind: Any, offset: int = 0) -> Any:
    place = builder.add(address, ir.Constant(_I64, offset))
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=1)


def _table(builder: Any, address: Any) -> Any:
    """Returns the 16 bytes at an address, in each quarter of a register."""
    numbers = _load(builder, address, _TABLE)
    lanes = [ir.Constant(_I32, i % 16) for i in range(64)]
    places = ir.Constant(ir.VectorType(_I32, 64), lanes)
    return builder.shuffle_vector(numbers, numbers, places)


def _numbers(builder: Any, codes: Any, table: Any, high: bool) -> Any:
    """Returns what the codes in the low or high halves of bytes stand for."""
    kind = ir.FunctionType(_BYTES, [_BYTES, _BYTES])
    look_up = cgutils.get_or_insert_function(builder.module, kind, _LOOK_UP)
    if high:
        codes = builder.lshr(codes, ir.Constant(WORDS, [4] * LANES))
    halves = builder.and_(codes, ir.Constant(WORDS, [0x0F0F0F0F] * LANES))
    return builder.call(look_up, [table, builder.bitcast(halves, _BYTES)])


def _tile(rows: int) -> Any:
    """Returns an intrinsic that adds the products of a block, scaled, for `rows` rows of x and one panel.

    It takes addresses, and distances between rows in bytes: x, its distance, the codes, their number of words
    of eight channels, the sums' beginnings, their distance, the scales, the table, the sums [rows, PANEL]."""

    @intrinsic
    def emitted(
        typing: Any,
        x: Any,
        x_step: Any,
        codes: Any,
        words: Any,
        begin: Any,
        begin_step: Any,
        scale: Any,
        table: Any,
        sums: Any,
    ) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, x_step, codes, words, begin, begin_step, scale, table, sums = args
            begins = [
                spread(builder, _load(builder, _plus(builder, begin, begin_step, r), _I32), WORDS)
                for r in range(rows)
            ]
            xs = [_plus(builder, x, x_step, r) for r in range(rows)]
            totals = _emit_totals(builder, begins, xs, codes, words, _table(builder, table))
            _emit_scaled(builder, totals, scale, sums)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9), emit

    return emitted


def _emit_totals(
    builder: Any, begins: list[Any], xs: list[Any], codes: Any, words: Any, table: Any
) -> Sums:
    """Emits the loop over a block's words; returns each row's VECTORS vectors of whole sums."""
    operand, fetch = operand_of(INT8_DOT, WORDS), prefetch(builder)
    kind = ir.FunctionType(WORDS, [WORDS, operand, operand])
    dot = cgutils.get_or_insert_function(builder.module, kind, INT8_DOT)

    def step(index: Any, totals: Sums) -> Sums:
        line = _plus(builder, codes, index, 4 * PANEL)
        packed = [_load(builder, line, WORDS, 64 * v) for v in range(VECTORS)]
        for v in range(VECTORS):
            fetch(builder.add(line, ir.Constant(_I64, _AHEAD + 64 * v)))
        for half in range(2):
            numbers = [_numbers(builder, p, table, high=half == 1) for p in packed]
            columns = [builder.bitcast(n, operand) for n in numbers]
            after = []
            for start, row in zip(xs, totals, strict=True):
                word = _load(builder, _plus(builder, start, index, 8), _I32, 4 * half)
                of_x = builder.bitcast(spread(builder, word, WORDS), operand)
                after.append(
                    [builder.call(dot, [t, c, of_x]) for t, c in zip(row, columns, strict=True)]
                )
            totals = after
        return totals

    return in_registers(builder, [[begin] * VECTORS for begin in begins], words, step)


def _emit_scaled(builder: Any, totals: Sums, scale: Any, sums: Any) -> None:
    """Emits sums += totals · scale."""
    fused = multiply_and_add(builder)
    scales = [_load(builder, scale, FLOATS, 64 * v) for v in range(VECTORS)]
    for r, row in enumerate(totals):
        for v, total in enumerate(row):
            offset = ir.Constant(_I64, 4 * PANEL * r + 64 * v)
            place = builder.inttoptr(builder.add(sums, offset), FLOATS.as_pointer())
            numbers = [builder.sitofp(total, FLOATS), scales[v], builder.load(place, align=4)]
            builder.store(builder.call(fused, numbers), place, align=4)


_TILE_4, _TILE_2, _TILE_1 = (_tile(rows) for rows in (4, 2, 1))


@kernel()
def _add_block(x, x_step, codes, words, begin, begin_step, scale, table, sums, rows):
    """Adds a block's products for `rows` rows to the sums at an address; all others are addresses, too."""
    # With six rows a tile needs all registers, and is slower for short blocks by a tenth.
    r = 0
    while r + 4 <= rows:
        _TILE_4(x, x_step, codes, words, begin, begin_step, scale, table, sums)
        x, begin, sums, r = x + 4 * x_step, begin + 4 * begin_step, sums + 4 * 256, r + 4
    if r + 2 <= rows:
        _TILE_2(x, x_step, codes, words, begin, begin_step, scale, table, sums)
        x, begin, sums, r = x + 2 * x_step, begin + 2 * begin_step, sums + 2 * 256, r + 2
    if r < rows:
        _TILE_1(x, x_step, codes, words, begin, begin_step, scale, table, sums)


_SIGNATURE = void(I2, I3, _U8_1, _F3, I2, F1, F2, F2, types.int64, types.int64)


@kernel(_SIGNATURE if has_four_bits() else None)  # else it is never called, nor could be compiled
def gemm(x, w, table, scale, begins, x_scale, add, y, first, last):
    """Computes y, as above, for the panels `first` … `last` - 1.

    x int32 [T, W], w int32 [P, W / 2, PANEL], table uint8 [16], scale [P, N, PANEL], begins int32 [T, N]; add
    is [T, out] or [1, out]."""
    sums, outs = np.empty((ROWS, 64), float32), 64 * w.shape[0]
    nothing, ones = np.zeros(outs, float32), np.ones(outs, float32)
    words, blocks = x.shape[1], scale.shape[1]
    per_block = words // blocks
    for p in range(first, last):
        for t in range(0, x.shape[0], ROWS):
            rows = min(ROWS, x.shape[0] - t)
            sums[:rows] = float32(0.0)
            for n in range(blocks):
                _add_block(
                    x.ctypes.data + (t * words + n * per_block) * 4,
                    words * 4,
                    w.ctypes.data + (p * words + n * per_block) * 128,
                    per_block // 2,
                    begins.ctypes.data + (t * blocks + n) * 4,
                    blocks * 4,
                    scale.ctypes.data + (p * blocks + n) * 256,
                    table.ctypes.data,
                    sums.ctypes.data,
                    rows,
                )
            write_panel(sums, nothing, ones, x_scale, add, y, p, t, rows)
