"""Compiled loops of areal_q/weights/delta_codec.py over elements and bits. Arrays are C contiguous.

An element's class is the low four bits of its exponent: its bits, unsigned, shifted down by the length of its
mantissa. Elements are looked at in blocks, by loops of fixed length without branches, which LLVM turns into a
few vector instructions; what is left after the last whole block goes one by one.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from areal_q.quant.kernels.jit import kernel

CLASSES = 16
"""Number of classes that the exponents of floats fall into."""
BLOCK = 64
"""Elements looked at together: a bit of a word for each."""
NEVER = 1 << 62
int64, uint8, uint64 = np.int64, np.uint8, np.uint64


@intrinsic
def _lowest(typing: Any, members: Any) -> Any:
    """Returns the number of the lowest bit that is set in an uint64 other than 0."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), True))

    return types.int64(members), emit


LOWEST: Any = _lowest


@kernel()
def changed(old, now, floats, where, step):
    """Writes into where, int64 [N], the positions, rising, at which two arrays of N unsigned integers differ,
    and into step [N] how far each of these elements moved, modulo its size: `floats` in the order of their
    values, −0 below +0. Returns how many there are."""
    top = old.dtype.type(1 << (8 * old.itemsize - 1))
    found = 0
    for start in range(0, old.shape[0], BLOCK):
        a, b = old[start : start + BLOCK], now[start : start + BLOCK]
        differs = uint64(0)
        if a.shape[0] == BLOCK:  # a loop of fixed length becomes a few instructions
            for i in range(BLOCK):
                differs |= uint64(a[i] != b[i]) << uint64(i)
        else:
            for i in range(a.shape[0]):
                differs |= uint64(a[i] != b[i]) << uint64(i)
        while differs:
            i = LOWEST(differs)
            differs &= differs - uint64(1)
            where[found] = start + i
            if floats:
                step[found] = (b[i] + top if b[i] < top else ~b[i]) - (
                    a[i] + top if a[i] < top else ~a[i]
                )
            else:
                step[found] = b[i] - a[i]
            found += 1
    return found


@kernel()
def move(elements, where, floats, step):
    """Moves the elements at `where` by `step`: `where` and `step` as `changed` gives them."""
    kind = elements.dtype.type
    top = kind(1 << (8 * elements.itemsize - 1))
    for j in range(where.shape[0]):
        a = elements[where[j]]
        if floats:
            b = kind((a + top if a < top else ~a) + step[j])
            elements[where[j]] = b - top if b >= top else ~b
        else:
            elements[where[j]] = a + step[j]


@kernel()
def ranks(codes, mantissa, where, rank, sizes):
    """Writes into rank, int64 [N], how many elements of its class come before each of the positions `where`
    (rising), and into sizes, int64 [CLASSES] and zero at first, the number of elements of each class."""
    kinds = np.empty(BLOCK, uint8)
    whole = codes.shape[0] // BLOCK * BLOCK
    j = 0
    for start in range(0, whole, BLOCK):
        for i in range(BLOCK):
            kinds[i] = (codes[start + i] >> mantissa) & 15
        while j < where.shape[0] and where[j] < start + BLOCK:
            place = uint8(where[j] - start)
            before = uint8(0)
            for i in range(BLOCK):  # all of them, so that no branch depends on the place
                before = uint8(before + ((kinds[i] == kinds[place]) & (uint8(i) < place)))
            rank[j] = sizes[kinds[place]] + before
            j += 1
        for c in range(CLASSES):
            count = uint8(0)
            for i in range(BLOCK):
                count = uint8(count + (kinds[i] == c))
            sizes[c] += count
    for i in range(whole, codes.shape[0]):
        c = (int64(codes[i]) >> mantissa) & 15
        if j < where.shape[0] and where[j] == i:
            rank[j] = sizes[c]
            j += 1
        sizes[c] += 1


@kernel()
def count_classes(codes, mantissa, sizes):
    """Writes into sizes, int64 [CLASSES] and zero at first, the number of elements of each class."""
    ranks(codes, mantissa, np.empty(0, int64), np.empty(0, int64), sizes)


@kernel()
def places(codes, mantissa, rank, starts, where):
    """Writes into where, rising, the positions whose ranks are given, grouped by class: those of class c are
    rank[starts[c]] to rank[starts[c + 1]]. Returns how many were found. The inverse of `ranks`."""
    kinds = np.empty(BLOCK, uint8)
    following, seen = starts[:-1].copy(), np.zeros(CLASSES, int64)
    ends, target = np.zeros(CLASSES, int64), np.full(CLASSES, NEVER, int64)
    for c in range(CLASSES):
        if starts[c] < starts[c + 1]:
            target[c] = rank[starts[c]]
    whole = codes.shape[0] // BLOCK * BLOCK
    found = 0
    for start in range(0, whole, BLOCK):
        for i in range(BLOCK):
            kinds[i] = (codes[start + i] >> mantissa) & 15
        wanted = uint64(0)
        for c in range(CLASSES):
            count = uint8(0)
            for i in range(BLOCK):
                count = uint8(count + (kinds[i] == c))
            ends[c] += count
        for c in range(CLASSES):
            end = ends[c]
            if target[c] < end:
                members = uint64(0)
                for i in range(BLOCK):
                    members |= uint64(kinds[i] == c) << uint64(i)
                while target[c] < end:
                    while seen[c] < target[c]:
                        members &= members - uint64(1)
                        seen[c] += 1
                    wanted |= members & (~members + uint64(1))
                    following[c] += 1
                    target[c] = rank[following[c]] if following[c] < starts[c + 1] else NEVER
            seen[c] = end
        found = _add_places(wanted, start, where, found)
    for i in range(whole, codes.shape[0]):
        c = (int64(codes[i]) >> mantissa) & 15
        if seen[c] == target[c]:
            where[found] = i
            found += 1
            following[c] += 1
            target[c] = rank[following[c]] if following[c] < starts[c + 1] else NEVER
        seen[c] += 1
    return found


@kernel()
def _add_places(members, start, where, found):
    """Writes start + i into where, from `found` on, for each bit i of `members`. Returns how many there are."""
    while members:
        where[found] = start + LOWEST(members)
        members &= members - uint64(1)
        found += 1
    return found


@kernel()
def grouped(keys, values, counts, out):
    """Writes into out the values in the order of their keys, uint8, those of equal keys in their own order, and
    into counts, int64 [256] and zero at first, how often each key occurs."""
    for i in range(keys.shape[0]):
        counts[keys[i]] += 1
    at = np.cumsum(counts) - counts
    for i in range(keys.shape[0]):
        out[at[keys[i]]] = values[i]
        at[keys[i]] += 1


@kernel()
def ungrouped(keys, values, counts, out):
    """Writes into out the values in their first order: the inverse of `grouped`."""
    at = np.cumsum(counts) - counts
    for i in range(keys.shape[0]):
        out[i] = values[at[keys[i]]]
        at[keys[i]] += 1


@kernel()
def escape(numbers, out):
    """Writes int64 [N] ≥ 0 into out, uint8, where a byte 255 adds 255 and continues the number in the next
    byte. Returns how many bytes that takes."""
    at = 0
    for i in range(numbers.shape[0]):
        left = numbers[i]
        while left >= 255:
            out[at] = 255
            at += 1
            left -= 255
        out[at] = left
        at += 1
    return at


@kernel()
def unescape(tops, numbers):
    """Writes the numbers again into int64 [N], zeros; returns how many there are, of which those beyond N are
    not written. The inverse of `escape`."""
    found = 0
    for i in range(tops.shape[0]):
        if found < numbers.shape[0]:
            numbers[found] += tops[i]
        found += tops[i] != 255
    return found


@kernel()
def pack_bits(values, widths, out, at):
    """Writes the low widths[i] bits of values[i], one after the other, lowest first, into `out` (uint8, zeros),
    from bit `at` on. Returns the bit after them."""
    for i in range(values.shape[0]):
        value, left = uint64(values[i]), int64(widths[i])
        while left > 0:
            take = min(8 - (at & 7), left)
            part = value & ((uint64(1) << uint64(take)) - uint64(1))
            out[at >> 3] |= uint8(part << uint64(at & 7))
            value >>= uint64(take)
            at += take
            left -= take
    return at


@kernel()
def unpack_bits(packed, widths, values, at):
    """Writes the values again, uint64, and returns the bit after them: the inverse of `pack_bits`. `packed`
    must be long enough."""
    for i in range(values.shape[0]):
        value, left, done = uint64(0), int64(widths[i]), 0
        while left > 0:
            take = min(8 - (at & 7), left)
            part = uint64(packed[at >> 3]) >> uint64(at & 7)
            part &= (uint64(1) << uint64(take)) - uint64(1)
            value |= part << uint64(done)
            at += take
            done += take
            left -= take
        values[i] = value
    return at


@kernel()
def symbols(values, symbol, widths):
    """Writes a symbol for each value ≥ 1, and how many of its low bits that leaves open. Symbols 0 … 6 are the
    values 1 … 7; from 7 on four symbols share the values of one bit length by their second and third highest
    bit."""
    for i in range(values.shape[0]):
        value, bits = uint64(values[i]), 0
        while value >> uint64(bits) > uint64(7):
            bits += 1
        if bits == 0:
            symbol[i] = uint8(value - uint64(1))
        else:
            top = (value >> uint64(bits)) & uint64(3)
            symbol[i] = uint8(uint64(7 + 4 * (bits - 1)) + top)
        widths[i] = bits


@kernel()
def values_of(symbol, low, values):
    """Writes the values again: the inverse of `symbols`. `low` (uint64) has the bits that were left open."""
    for i in range(symbol.shape[0]):
        s = int64(symbol[i])
        if s < 7:
            values[i] = uint64(s + 1)
        else:
            values[i] = (uint64(4 + (s - 7) % 4) << uint64((s - 7) // 4 + 1)) | low[i]
