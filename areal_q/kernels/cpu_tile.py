"""Inner loops of matrix products on a CPU, as LLVM instructions that numba compiles for the processor at hand.

A tile is R rows of x times PANEL columns of W. Its sums stay in vector registers while the loop runs over K.
Each number of W is read once and meets all R rows; each number of x is spread over a whole register.
W lies in panels of PANEL columns (cpu_gemm.py), in which the STEP numbers of a column that one instruction
multiplies stand next to each other and fill 32 bits.

| operands | sums | STEP | instruction | without it |
|---|---|---|---|---|
| float32, float32 | float32 | 1 | multiply and add | |
| bfloat16, bfloat16 | float32 | 2 | AVX512-BF16's dot product | shifts to float32, multiply and add |
| uint8, int8 | int32 | 4 | AVX512-VNNI's dot product | no tile: `has_int8` is False |

Which instructions exist is asked of numba's target, so that NUMBA_CPU_FEATURES applies. AVX512-BF16 takes
subnormal numbers as 0.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

PANEL = 64
LANES, VECTORS = 16, 4
_ROW = 4 * PANEL
"""Bytes of a row of sums, and of a row of a panel's words"""
_I64, _I32, _F32 = ir.IntType(64), ir.IntType(32), ir.FloatType()
FLOATS, WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_UPPER = -(1 << 16)
_BF16_DOT = "llvm.x86.avx512bf16.dpbf16ps.512"
INT8_DOT = "llvm.x86.avx512.vpdpbusd.512"

Sums = list[list[Any]]
"""Vectors of the sums of each row"""
Product = Callable[[Any, Any, list[Any], list[Any]], list[Any]]
"""Function that emits sums + word · column: (builder, word i32 of x, words of W, sums) → sums, each a list of
VECTORS vectors. It is called once for each row."""


def has(feature: str) -> bool:
    target: Any = cpu_target.target_context
    _, _, features = target.codegen().magic_tuple()
    return f"+{feature}" in str(features).split(",")


def has_bf16() -> bool:
    """Returns True if the processor multiplies bfloat16 numbers by itself, and LLVM knows how."""
    return has("avx512bf16") and operand_of(_BF16_DOT, FLOATS) is not None


def has_int8() -> bool:
    """Returns True if the processor adds up products of int8 numbers without saturating, and LLVM knows how."""
    return has("avx512vnni") and operand_of(INT8_DOT, WORDS) is not None


def spread(builder: Any, word: Any, kind: ir.VectorType) -> Any:
    """Returns a vector of `kind` whose lanes all hold `word`."""
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, word, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, kind.count), [0] * kind.count)
    return builder.shuffle_vector(first, nothing, zeros)


def in_registers(builder: Any, before: Sums, count: Any, step: Callable[[Any, Sums], Sums]) -> Sums:
    """Emits a loop of `count` rounds, at least one, over sums that never leave the registers: `step` (index,
    sums) emits a round. Returns the sums after the last one."""
    entry, loop = builder.block, builder.append_basic_block("rounds")
    done = builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(_I64)
    held = [[builder.phi(total.type) for total in row] for row in before]
    after = step(index, held)
    following = builder.add(index, ir.Constant(_I64, 1))
    incoming = [(index, ir.Constant(_I64, 0), following)]
    for rows in zip(held, before, after, strict=True):
        incoming += zip(*rows, strict=True)
    for phi, first, new in incoming:
        phi.add_incoming(first, entry)
        phi.add_incoming(new, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    builder.position_at_end(done)
    return after


def _instruction(name: str, sums: ir.VectorType) -> Product:
    """Returns the product that is one instruction of the processor."""
    operand = operand_of(name, sums)

    def emit(builder: Any, word: Any, columns: list[Any], rows: list[Any]) -> list[Any]:
        kind = ir.FunctionType(sums, [sums, operand, operand])
        dot = cgutils.get_or_insert_function(builder.module, kind, name)
        x = builder.bitcast(spread(builder, word, WORDS), operand)
        return [
            builder.call(dot, [row, x, builder.bitcast(column, operand)])
            for row, column in zip(rows, columns, strict=True)
        ]

    return emit


class _Bfloat16(ir.Type):
    """LLVM's bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash("bfloat")


@cache
def operand_of(name: str, sums: ir.VectorType) -> ir.VectorType | None:
    """Returns the type of the operands of LLVM's function `name`, which depends on its version; None if it has
    no such function. LLVM accepts any name, but gives attributes only to a function that it knows."""
    for kind in (WORDS, ir.VectorType(_Bfloat16(), 32), ir.VectorType(ir.IntType(8), 64)):
        try:
            module = llvm.parse_assembly(f"declare {sums} @{name}({sums}, {kind}, {kind})")
            module.verify()
        except RuntimeError:
            continue
        return kind if list(module.get_function(name).attributes) else None
    return None


def _float32(builder: Any, word: Any, columns: list[Any], rows: list[Any]) -> list[Any]:
    add = multiply_and_add(builder)
    x = spread(builder, builder.bitcast(word, _F32), FLOATS)
    return [
        builder.call(add, [x, builder.bitcast(column, FLOATS), row])
        for row, column in zip(rows, columns, strict=True)
    ]


def multiply_and_add(builder: Any) -> Any:
    """Returns LLVM's function a · b + c of FLOATS."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")


def bf16_by_shifts(builder: Any, word: Any, columns: list[Any], rows: list[Any]) -> list[Any]:
    """The product without an instruction of its own."""
    add = multiply_and_add(builder)
    shift, upper = ir.Constant(WORDS, [16] * LANES), ir.Constant(WORDS, [_UPPER] * LANES)
    low = builder.bitcast(builder.shl(word, ir.Constant(_I32, 16)), _F32)
    high = builder.bitcast(builder.and_(word, ir.Constant(_I32, _UPPER)), _F32)
    low, high = spread(builder, low, FLOATS), spread(builder, high, FLOATS)
    sums = []
    for row, column in zip(rows, columns, strict=True):
        first = builder.bitcast(builder.shl(column, shift), FLOATS)
        second = builder.bitcast(builder.and_(column, upper), FLOATS)
        sums.append(builder.call(add, [high, second, builder.call(add, [low, first, row])]))
    return sums


def _product(operands: Any, sums: ir.VectorType) -> Product:
    if sums is WORDS:
        return _instruction(INT8_DOT, WORDS)
    if operands.dtype == types.float32:
        return _float32
    return _instruction(_BF16_DOT, FLOATS) if has_bf16() else bf16_by_shifts


def _sums(array: Any) -> ir.VectorType:
    return FLOATS if array.dtype == types.float32 else WORDS


def _address(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    return builder.ptrtoint(context.make_array(kind)(context, builder, array).data, _I64)


def tile(rows: int, product: Callable[[Any, ir.VectorType], Product] = _product) -> Any:
    """Returns an intrinsic that computes sums += x · W for `rows` rows of x and one panel of W.

    It takes an array of the operands' dtype, float32 or int32 for several in a word; addresses, and distances
    between rows in bytes: x, its distance, W, the number of words in a row of x, at least 1; the array of sums
    [at least row + rows, PANEL], whose dtype and that of the operands say which product is meant, and its
    first row; and what of W to fetch into the cache meanwhile: an address and the bytes to go on with every
    word, since a processor left alone waits for memory at every new panel.
    """

    @intrinsic
    def emitted(
        typing: Any,
        operands: Any,
        x: Any,
        x_step: Any,
        w: Any,
        words: Any,
        sums: Any,
        row: Any,
        ahead: Any,
        ahead_step: Any,
    ) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = _sums(sums)
            start = builder.mul(args[6], ir.Constant(_I64, _ROW))
            out = builder.add(_address(context, builder, sums, args[5]), start)
            addresses = [*args[1:5], out, *args[7:]]
            _emit(builder, rows, kind, product(operands, kind), *addresses)
            return context.get_dummy_value()

        return types.void(operands, *[types.intp] * 4, sums, *[types.intp] * 3), emit

    return emitted


def prefetch(builder: Any) -> Callable[[Any], Any]:
    """Returns a function that emits the fetching of an address into the second-level cache."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    how = [ir.Constant(_I32, n) for n in (0, 2, 1)]  # for reading, moderate locality, data
    return lambda address: builder.call(function, [builder.inttoptr(address, byte), *how])


@intrinsic
def _scaled(
    typing: Any,
    sums: Any,
    rows: Any,
    shift: Any,
    w_scale: Any,
    x_scale: Any,
    add: Any,
    add_step: Any,
    y: Any,
    y_step: Any,
) -> Any:
    """Computes y[t] = (sums[t] + shift) · w_scale · x_scale[t] + add[t] for a panel. Sums of floats have no
    shift.

    It takes the array of sums and the number of its rows, at least 1; then addresses, and distances between
    rows in bytes: shift, w_scale, x_scale, add, its distance, y, its distance.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit_scaled(builder, _sums(sums), _address(context, builder, sums, args[0]), *args[1:])
        return context.get_dummy_value()

    return types.void(sums, *[types.intp] * 8), emit


def _emit_scaled(
    builder: Any,
    sums: ir.VectorType,
    found: Any,
    rows: Any,
    shift: Any,
    w_scale: Any,
    x_scale: Any,
    add: Any,
    add_step: Any,
    y: Any,
    y_step: Any,
) -> None:
    fused = multiply_and_add(builder)

    def read(start: Any, vector: int, kind: ir.VectorType = FLOATS) -> Any:
        address = builder.add(start, ir.Constant(_I64, 64 * vector))
        return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)

    scales = [read(w_scale, v) for v in range(VECTORS)]
    shifts = [read(shift, v, WORDS) for v in range(VECTORS)] if sums is WORDS else []
    with cgutils.for_range(builder, rows) as loop:
        row = loop.index

        def of_row(start: Any, step: Any) -> Any:
            return builder.add(start, builder.mul(step, row))

        address = of_row(x_scale, ir.Constant(_I64, 4))
        x = builder.load(builder.inttoptr(address, _F32.as_pointer()), align=4)
        x_scales = spread(builder, x, FLOATS)
        mine, added, out = (
            of_row(found, ir.Constant(_I64, _ROW)),
            of_row(add, add_step),
            of_row(y, y_step),
        )
        for v in range(VECTORS):
            value = read(mine, v, sums)
            if shifts:
                value = builder.sitofp(builder.add(value, shifts[v]), FLOATS)
            value = builder.call(fused, [builder.fmul(value, scales[v]), x_scales, read(added, v)])
            target = builder.add(out, ir.Constant(_I64, 64 * v))
            builder.store(value, builder.inttoptr(target, FLOATS.as_pointer()), align=4)


def _emit(
    builder: Any,
    rows: int,
    sums: ir.VectorType,
    product: Product,
    x: Any,
    x_step: Any,
    w: Any,
    words: Any,
    out: Any,
    ahead: Any,
    ahead_step: Any,
) -> None:
    fetch = prefetch(builder)

    def place(start: Any, *offsets: Any) -> Any:
        for offset in offsets:
            start = builder.add(start, offset)
        return start

    def at(address: Any, kind: Any) -> Any:
        return builder.inttoptr(address, kind.as_pointer())

    def times(step: Any, count: int) -> Any:
        return builder.mul(step, ir.Constant(_I64, count))

    starts = [
        [place(out, ir.Constant(_I64, _ROW * r + 64 * v)) for v in range(VECTORS)]
        for r in range(rows)
    ]
    before = [[builder.load(at(start, sums), align=4) for start in row] for row in starts]

    def step(index: Any, held: Sums) -> Sums:
        panel = place(w, times(index, _ROW))
        columns = [
            builder.load(at(place(panel, ir.Constant(_I64, 64 * v)), WORDS), align=4)
            for v in range(VECTORS)
        ]
        line = place(ahead, builder.mul(ahead_step, index))
        fetch(line)
        fetch(place(line, ir.Constant(_I64, 64)))
        first, after = place(x, times(index, 4)), []
        for r in range(rows):
            word = builder.load(at(place(first, times(x_step, r)), _I32), align=4)
            after.append(product(builder, word, columns, held[r]))
        return after

    after = in_registers(builder, before, words, step)
    for row, places in zip(after, starts, strict=True):
        for value, start in zip(row, places, strict=True):
            builder.store(value, at(start, sums), align=4)


TILE_6, TILE_4, TILE_2, TILE_1 = (tile(rows) for rows in (6, 4, 2, 1))
SCALED: Any = _scaled
