"""Loops of areal_q/weights/delta_codec.py over the elements that changed, and over their bits; and their count.

Arrays are C contiguous. Bits are written into words of 64, lowest first: on little-endian machines, into bytes.
"""

import numpy as np

from areal_q.kernels.jit import kernel

int64, uint8, uint64 = np.int64, np.uint8, np.uint64
_AT_ONCE = 96
"""Elements counted at a time, whose halves a byte can count"""


@kernel()
def tally(keys, count):
    """Adds to count, int64 [256], how often each key occurs, uint8 [N]."""
    for i in range(keys.shape[0]):
        count[keys[i]] += 1


@kernel()
def grouped(keys, values, at, out):
    """Writes the values into out in the order of their keys, uint8, those of equal keys in their own order: at,
    int64, has the place of each key's next value, and is moved on."""
    for i in range(keys.shape[0]):
        out[at[keys[i]]] = values[i]
        at[keys[i]] += 1


@kernel()
def ungrouped(keys, values, at, negative, out):
    """Writes the values into out in their first order, those that have a bit in `negative`, uint8, highest
    first, with the other sign: the inverse of `grouped`."""
    kind = out.dtype.type
    for i in range(keys.shape[0]):
        value = kind(values[at[keys[i]]])
        at[keys[i]] += 1
        sign = kind((negative[i >> 3] >> (7 - (i & 7))) & 1)
        out[i] = (value ^ (kind(0) - sign)) + sign


@kernel()
def escape(numbers, shifts, out):
    """Writes int64 [N] ≥ 0, each shifted down, into out, uint8, where a byte 255 adds 255 and continues the
    number in the next byte. Returns how many bytes that takes."""
    at = 0
    for i in range(numbers.shape[0]):
        left = numbers[i] >> int64(shifts[i])
        while left >= 255:
            out[at] = 255
            at += 1
            left -= 255
        out[at] = left
        at += 1
    return at


@kernel()
def unescape(tops, shifts, numbers):
    """Adds to int64 [N], which has their low bits, what `escape` wrote of the numbers. Returns how many were
    found, of which those beyond N are not written."""
    found = 0
    for i in range(tops.shape[0]):
        if found < numbers.shape[0]:
            numbers[found] += int64(tops[i]) << int64(shifts[found])
        found += tops[i] != 255
    return found


@kernel()
def total(widths):
    """Returns the sum of uint8 [N]."""
    found = 0
    for i in range(widths.shape[0]):
        found += int64(widths[i])
    return found


@kernel()
def pack_bits(values, widths, out, at):
    """Writes the low widths[i] bits of values[i], one after the other, into out, uint64 and zero at first, from
    bit `at` on. Returns the bit after them, which out must have a word for."""
    word, fill, place = out[at >> 6], uint64(at & 63), at >> 6
    for i in range(values.shape[0]):
        width = uint64(widths[i])
        value = uint64(values[i]) & ((uint64(1) << width) - uint64(1))
        word |= value << fill
        fill += width
        if fill >= uint64(64):
            out[place] = word
            place += 1
            fill -= uint64(64)
            word = value >> (width - fill) if fill else uint64(0)
    out[place] = word
    return (place << 6) + int64(fill)


@kernel()
def unpack_bits(packed, widths, values, at):
    """Writes the values again, uint64, and returns the bit after them: the inverse of `pack_bits`. `packed`
    must have a word more than they take."""
    for i in range(values.shape[0]):
        width, value = int64(widths[i]), uint64(0)
        if width > 0:
            low = uint64(at & 63)
            value = packed[at >> 6] >> low | packed[(at >> 6) + 1] << uint64(1) << (
                uint64(63) - low
            )
            value &= (uint64(1) << uint64(width)) - uint64(1)
            at += width
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
def widths_of(symbol, widths):
    """Writes how many low bits each symbol leaves open, uint8."""
    for i in range(symbol.shape[0]):
        widths[i] = 0 if symbol[i] < 7 else ((symbol[i] - uint8(7)) >> 2) + 1


@kernel()
def values_of(symbol, low, values):
    """Writes the values again: the inverse of `symbols`. `low` (uint64) has the bits that were left open."""
    for i in range(symbol.shape[0]):
        s = int64(symbol[i])
        if s < 7:
            values[i] = uint64(s + 1)
        else:
            values[i] = (uint64(4 + (s - 7) % 4) << uint64((s - 7) // 4 + 1)) | low[i]


@kernel()
def differing(old, new, halves):
    """Returns how many elements differ, or how many of their halves of 4 bits."""
    found = 0
    for start in range(0, old.shape[0], _AT_ONCE):
        a, b = old[start : start + _AT_ONCE], new[start : start + _AT_ONCE]
        count = np.uint8(0)  # one byte, so that 32 and more are counted by one instruction
        for i in range(a.shape[0]):
            if halves:
                count = np.uint8(count + ((a[i] ^ b[i]) & 15 != 0) + ((a[i] ^ b[i]) > 15))
            else:
                count = np.uint8(count + (a[i] != b[i]))
        found += count
    return found
