"""Compiled loops over all elements of a tensor of floats: which changed, and their classes.

An element's class is the low four bits of its exponent: its bits, unsigned, shifted down by the length of its
mantissa. Arrays are C contiguous.
"""

import numpy as np

from areal_q.kernels.jit import kernel

CLASSES = 16
"""Number of classes that the exponents of floats fall into."""
_BLOCK = 64
"""Elements that are compared together: where none differs, none is looked at by itself."""
int64, uint8, uint64 = np.int64, np.uint8, np.uint64


@kernel(inline="always")
def _differ(a, b):
    differs = False
    for i in range(a.shape[0]):
        differs |= a[i] != b[i]
    return differs


@kernel()
def _count(codes, mantissa, sizes):
    """Adds the numbers of elements of each class, of a block, which are counted in the bytes of two words."""
    low, high = uint64(0), uint64(0)
    for i in range(codes.shape[0]):
        c = (uint64(codes[i]) >> uint64(mantissa)) & uint64(15)
        one = uint64(1) << ((c & uint64(7)) << uint64(3))
        low += one if c < uint64(8) else uint64(0)
        high += one if c >= uint64(8) else uint64(0)
    for c in range(8):
        sizes[c] += int64((low >> uint64(8 * c)) & uint64(255))
        sizes[c + 8] += int64((high >> uint64(8 * c)) & uint64(255))


@kernel()
def changed_floats(old, now, mantissa, where, step, kinds, gaps, sizes):
    """Writes into where, int64 [N], the positions, rising, at which two arrays of N floats differ, given as
    unsigned integers of their bits, and returns how many there are. Writes also, for each that changed, into
    step [N] the difference in the order of their values, −0 below +0, modulo their size; into kinds, uint8 [N],
    its class in `old`; and into gaps, int64 [N], how many elements of this class come between it and the one
    that changed before it, or the first; and into sizes, int64 [CLASSES], the number of elements of each
    class."""
    top = old.dtype.type(1 << (8 * old.itemsize - 1))
    following, found = np.zeros(CLASSES, int64), 0
    sizes[:] = 0
    for start in range(0, old.shape[0], _BLOCK):
        end = min(start + _BLOCK, old.shape[0])
        if not _differ(old[start:end], now[start:end]):
            _count(old[start:end], mantissa, sizes)
            continue
        for i in range(start, end):
            a, b = old[i], now[i]
            c = (int64(a) >> mantissa) & 15
            if a != b:
                where[found] = i
                step[found] = (b + top if b < top else ~b) - (a + top if a < top else ~a)
                kinds[found] = c
                gaps[found] = sizes[c] - following[c]
                following[c] = sizes[c] + 1
                found += 1
            sizes[c] += 1
    return found


@kernel()
def count_classes(codes, mantissa, sizes):
    """Writes into sizes, int64 [CLASSES], the number of elements of each class."""
    sizes[:] = 0
    for start in range(0, codes.shape[0], _BLOCK):
        _count(codes[start : start + _BLOCK], mantissa, sizes)


@kernel()
def places(codes, mantissa, gaps, starts, where, kinds):
    """Writes into where and kinds, [N], what `changed_floats` wrote there, given its gaps, grouped by class:
    those of class c are gaps[starts[c]] to gaps[starts[c + 1]]. They must be from 0 to the number of codes.
    Returns how many were found, which are fewer where a class is too small."""
    at, left = starts[:-1].copy(), np.full(CLASSES, -1, int64)
    for c in range(CLASSES):
        if starts[c] < starts[c + 1]:
            left[c] = gaps[starts[c]]
    found = 0
    for i in range(codes.shape[0]):
        c = (int64(codes[i]) >> mantissa) & 15
        if left[c] == 0:
            where[found], kinds[found] = i, c
            found += 1
            at[c] += 1
            left[c] = 1 + gaps[at[c]] if at[c] < starts[c + 1] else 0
        left[c] -= 1
    return found
