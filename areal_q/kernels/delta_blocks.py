"""Compiled loops over all elements of a tensor, in blocks of 64: which changed, and the classes of floats.

An element's class is the low four bits of its exponent: its bits, unsigned, shifted down by the length of its
mantissa. Of a block there is a word with a bit for each element that differs, and one for each class with the
bits of its members, so that these are counted at once. Vector instructions of LLVM make the words, which numba
compiles for the processor; what is left after the last whole block goes one by one. Arrays are C contiguous.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from areal_q.kernels.cpu_tile import spread
from areal_q.kernels.jit import kernel

CLASSES = 16
"""Number of classes that the exponents of floats fall into."""
BLOCK = 64
"""Elements looked at together: a bit of a word for each."""
NEVER = 1 << 62
int64, uint8, uint64 = np.int64, np.uint8, np.uint64
ONE = uint64(1)
_I64 = ir.IntType(64)
_BYTES, _WORDS = ir.VectorType(ir.IntType(8), BLOCK), ir.VectorType(_I64, CLASSES)
IN_BYTE = np.array(
    [
        [([i for i in range(8) if byte >> i & 1] + 8 * [0])[k] for k in range(8)]
        for byte in range(256)
    ],
    np.uint8,
)
"""Number of the bit of a byte that is its k-th, from 0 on, of those that are set"""


def _words(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    """Returns the address of an array's CLASSES words, as that of a vector."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(data, _WORDS.as_pointer())


def _block(context: Any, builder: Any, kind: Any, array: Any, start: Any) -> Any:
    """Returns BLOCK elements of an array, from `start` on."""
    vector = ir.VectorType(ir.IntType(kind.dtype.bitwidth), BLOCK)
    place = builder.gep(context.make_array(kind)(context, builder, array).data, [start])
    return builder.load(builder.bitcast(place, vector.as_pointer()), align=1)


@intrinsic
def _lowest(typing: Any, members: Any) -> Any:
    """Returns the number of the lowest bit that is set in an uint64 other than 0."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), True))

    return types.int64(members), emit


@intrinsic
def _count(typing: Any, members: Any) -> Any:
    """Returns how many bits are set in an uint64."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(members), emit


@intrinsic
def _unequal(typing: Any, a: Any, b: Any, start: Any) -> Any:
    """Returns a bit for each of BLOCK elements from `start` on, set where two arrays differ."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = _block(context, builder, a, args[0], args[2])
        y = _block(context, builder, b, args[1], args[2])
        return builder.bitcast(builder.icmp_unsigned("!=", x, y), _I64)

    return types.uint64(a, b, types.intp), emit


@intrinsic
def _by_class(typing: Any, codes: Any, start: Any, mantissa: Any, members: Any) -> Any:
    """Writes into members, uint64 [CLASSES], which of BLOCK codes from `start` on are in each class."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = _block(context, builder, codes, args[0], args[1])
        width = x.type.element
        shift = args[2] if width == _I64 else builder.trunc(args[2], width)
        x = builder.lshr(x, spread(builder, shift, x.type))
        x = x if x.type == _BYTES else builder.trunc(x, _BYTES)
        found = ir.Constant(_WORDS, [-1] * CLASSES)
        for bit in range(4):  # of the class: its elements have all four as it has them
            mask = builder.and_(x, ir.Constant(_BYTES, [1 << bit] * BLOCK))
            word = builder.icmp_unsigned("!=", mask, ir.Constant(_BYTES, [0] * BLOCK))
            words = spread(builder, builder.bitcast(word, _I64), _WORDS)
            flip = ir.Constant(_WORDS, [0 if c >> bit & 1 else -1 for c in range(CLASSES)])
            found = builder.and_(found, builder.xor(words, flip))
        builder.store(found, _words(context, builder, members, args[3]), align=8)
        return context.get_dummy_value()

    return types.void(codes, types.intp, types.int64, members), emit


@intrinsic
def _pass(typing: Any, members: Any, left: Any) -> Any:
    """Takes the number of members of each class off left, int64 [CLASSES]. Returns a bit for each class, set
    where less than none is left."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_WORDS, [_WORDS])
        count = cgutils.get_or_insert_function(builder.module, kind, f"llvm.ctpop.v{CLASSES}i64")
        found = builder.load(_words(context, builder, members, args[0]), align=8)
        place = _words(context, builder, left, args[1])
        rest = builder.sub(builder.load(place, align=8), builder.call(count, [found]))
        builder.store(rest, place, align=8)
        below = builder.icmp_signed("<", rest, ir.Constant(_WORDS, [0] * CLASSES))
        return builder.zext(builder.bitcast(below, ir.IntType(CLASSES)), _I64)

    return types.uint64(members, left), emit


LOWEST: Any = _lowest
COUNT: Any = _count
UNEQUAL: Any = _unequal
BY_CLASS: Any = _by_class
PASS: Any = _pass


@kernel(inline="always")
def _differing(a, b, start):
    """Returns a bit for each element of the block at `start`, set where two arrays differ."""
    if start + BLOCK <= a.shape[0]:
        return UNEQUAL(a, b, start)
    differs = uint64(0)
    for i in range(a.shape[0] - start):
        differs |= uint64(a[start + i] != b[start + i]) << uint64(i)
    return differs


@kernel(inline="always")
def _divide(codes, start, mantissa, members):
    """Writes into members, uint64 [CLASSES], which elements of the block at `start` are in each class."""
    if start + BLOCK <= codes.shape[0]:
        BY_CLASS(codes, start, mantissa, members)
    else:
        members[:] = uint64(0)
        for i in range(codes.shape[0] - start):
            members[(int64(codes[start + i]) >> mantissa) & 15] |= ONE << uint64(i)


@kernel(inline="always")
def _select(members, k):
    """Returns the number of the bit that is the k-th, from 0 on, of those that are set: first its byte, by the
    number of bits in all bytes up to each, side by side in one word."""
    count = members - ((members >> uint64(1)) & uint64(0x5555555555555555))
    pairs = uint64(0x3333333333333333)
    count = (count & pairs) + ((count >> uint64(2)) & pairs)
    count = (count + (count >> uint64(4))) & uint64(0x0F0F0F0F0F0F0F0F)
    upto = count * uint64(0x0101010101010101)
    top = uint64(0x8080808080808080)
    before = ((k * uint64(0x0101010101010101)) | top) - upto  # a byte keeps its top where upto ≤ k
    start = uint64(COUNT(before & top)) << uint64(3)
    k -= ((upto << uint64(8)) >> start) & uint64(255)
    return start + uint64(IN_BYTE[(members >> start) & uint64(255), k])


@kernel()
def changed(old, now, where, step):
    """Writes into where, int64 [N], the positions, rising, at which two arrays of N unsigned integers differ,
    and into step [N] the difference, modulo their size. Returns how many there are."""
    found = 0
    for start in range(0, old.shape[0], BLOCK):
        differs = _differing(old, now, start)
        while differs:
            i = start + LOWEST(differs)
            differs &= differs - ONE
            where[found] = i
            step[found] = now[i] - old[i]
            found += 1
    return found


@kernel()
def changed_floats(old, now, mantissa, where, step, kinds, gaps, sizes):
    """The same for floats, whose steps are counted in the order of their values, −0 below +0. Writes also, for
    each that changed, into kinds, uint8 [N], its class in `old`, and into gaps, int64 [N], how many elements of
    this class come between it and the one that changed before it, or the first; and into sizes, int64
    [CLASSES], the number of elements of each class."""
    top = old.dtype.type(1 << (8 * old.itemsize - 1))
    members, left = np.empty(CLASSES, uint64), np.zeros(CLASSES, int64)
    following = np.zeros(CLASSES, int64)
    found = 0
    for start in range(0, old.shape[0], BLOCK):
        differs = _differing(old, now, start)
        _divide(old, start, mantissa, members)
        while differs:
            bit = differs & (~differs + ONE)
            differs ^= bit
            i = start + LOWEST(bit)
            a, b = old[i], now[i]
            where[found] = i
            step[found] = (b + top if b < top else ~b) - (a + top if a < top else ~a)
            c = (int64(a) >> mantissa) & 15
            kinds[found] = c
            rank = COUNT(members[c] & (bit - ONE)) - left[c]
            gaps[found] = rank - following[c]
            following[c] = rank + 1
            found += 1
        PASS(members, left)
    sizes[:] = -left
    return found


@kernel()
def count_classes(codes, mantissa, sizes):
    """Writes into sizes, int64 [CLASSES], the number of elements of each class."""
    members, left = np.empty(CLASSES, uint64), np.zeros(CLASSES, int64)
    for start in range(0, codes.shape[0], BLOCK):
        _divide(codes, start, mantissa, members)
        PASS(members, left)
    sizes[:] = -left


@kernel()
def places(codes, mantissa, gaps, starts, where, kinds):
    """Writes into where and kinds, [N], what `changed_floats` wrote there, given its gaps, grouped by class:
    those of class c are gaps[starts[c]] to gaps[starts[c + 1]]. They must be from 0 to the number of codes.
    Returns how many were found, which are fewer where a class is too small."""
    members, left = np.empty(CLASSES, uint64), np.full(CLASSES, NEVER, int64)
    at = starts[:-1].copy()
    for c in range(CLASSES):
        if starts[c] < starts[c + 1]:
            left[c] = gaps[starts[c]]
    found = 0
    for start in range(0, codes.shape[0], BLOCK):
        _divide(codes, start, mantissa, members)
        due = PASS(members, left)
        wanted = uint64(0)
        while due:
            c = LOWEST(due)
            due &= due - ONE
            count = COUNT(members[c])
            k = left[c] + count
            while k < count:
                wanted |= ONE << _select(members[c], uint64(k))
                at[c] += 1
                k = k + 1 + gaps[at[c]] if at[c] < starts[c + 1] else NEVER
            left[c] = k - count
        while wanted:
            i = start + LOWEST(wanted)
            wanted &= wanted - ONE
            where[found] = i
            kinds[found] = (int64(codes[i]) >> mantissa) & 15
            found += 1
    return found


@kernel()
def move(elements, where, floats, step):
    """Moves the elements at `where` by `step`, as `changed` gives them, or `changed_floats` if `floats`."""
    kind = elements.dtype.type
    top = kind(1 << (8 * elements.itemsize - 1))
    for j in range(where.shape[0]):
        a = elements[where[j]]
        if floats:
            b = kind((a + top if a < top else ~a) + step[j])
            elements[where[j]] = b - top if b >= top else ~b
        else:
            elements[where[j]] = a + step[j]
