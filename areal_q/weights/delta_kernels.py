"""Compiled loops of areal_q/weights/delta_codec.py over elements and bits. Arrays are C contiguous.

An element's class is the low four bits of its exponent: its bits, unsigned, shifted down by the length of its
mantissa.
"""

import numpy as np

from areal_q.quant.kernels.jit import kernel

CLASSES = 16
"""Number of classes that the exponents of floats fall into."""
int64, uint8, uint64 = np.int64, np.uint8, np.uint64


@kernel()
def ranks(codes, mantissa, where, rank, sizes):
    """Writes into rank, int64 [N], how many elements of its class come before each of the positions `where`
    (rising), and into sizes, int64 [CLASSES] and zero at first, the number of elements of each class."""
    j = 0
    for i in range(codes.shape[0]):
        c = (int64(codes[i]) >> mantissa) & 15
        if j < where.shape[0] and where[j] == i:
            rank[j] = sizes[c]
            j += 1
        sizes[c] += 1


@kernel()
def count_classes(codes, mantissa, sizes):
    """Writes into sizes, int64 [CLASSES] and zero at first, the number of elements of each class."""
    for i in range(codes.shape[0]):
        sizes[(int64(codes[i]) >> mantissa) & 15] += 1


@kernel()
def places(codes, mantissa, rank, starts, where):
    """Writes into where, rising, the positions whose ranks are given, grouped by class: those of class c are
    rank[starts[c]] to rank[starts[c + 1]]. Returns how many were found. The inverse of `ranks`."""
    following, seen, target = starts[:-1].copy(), np.zeros(16, int64), np.full(16, -1, int64)
    for c in range(16):
        if starts[c] < starts[c + 1]:
            target[c] = rank[starts[c]]
    found = 0
    for i in range(codes.shape[0]):
        c = (int64(codes[i]) >> mantissa) & 15
        if seen[c] == target[c]:
            where[found] = i
            found += 1
            following[c] += 1
            target[c] = rank[following[c]] if following[c] < starts[c + 1] else -1
        seen[c] += 1
    return found


@kernel()
def pack_bits(values, widths, out):
    """Writes the low widths[i] bits of values[i] (uint64), one after the other, lowest first, into `out`
    (uint8, zeros)."""
    at = 0
    for i in range(values.shape[0]):
        value, left = values[i], int64(widths[i])
        while left > 0:
            take = min(8 - (at & 7), left)
            part = value & ((uint64(1) << uint64(take)) - uint64(1))
            out[at >> 3] |= uint8(part << uint64(at & 7))
            value >>= uint64(take)
            at += take
            left -= take


@kernel()
def unpack_bits(packed, widths, values):
    """Writes the values again, uint64: the inverse of `pack_bits`. `packed` must be long enough."""
    at = 0
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


@kernel()
def symbols(values, symbol, widths):
    """Writes a symbol for each value ≥ 1, and how many of its low bits that leaves open. Symbols 0 … 6 are the
    values 1 … 7; from 7 on four symbols share the values of one bit length by their second and third highest
    bit."""
    for i in range(values.shape[0]):
        value, bits = values[i], 0
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
