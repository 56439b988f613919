"""The streams of a delta (areal_q/weights/delta.py): which elements moved, and by how much.

Between two learner steps few quantized codes change, and those that do mostly move by one. So a tensor's
difference is kept as *where* and *by how much*, both chosen so that a plain entropy coder
(areal_q/weights/bit_packing.py) comes close to the bound of log2(1/p) + 1.44 bits a position at a share p of
changed codes:

- where: gaps between changed elements, or between unchanged ones where these are fewer; where neither is
  below a third of all, a bitmap. Where changes are independent, gaps are geometric. Of a gap with mean
  2^k · m, 4 ≤ m < 8, the low k bits are as good as uniform; the rest has nearly the same distribution for
  every tensor, so that one Huffman table serves all.
- by how much: new − old modulo 2^bits of the elements' bytes read as little-endian integers, floats in the
  order of their values, where it is the distance in units in the last place. It wraps, so it is exact for
  every bit pattern, and steps of several deltas can be added. A sign bit; of |step| the three highest bits
  and its length as a symbol, the bits below as they are. Steps of single bytes are symbols themselves.

Whole numbers of any size go byte by byte: a packed 4-bit code that moves by one moves its byte by 1 or 16.

The closer a float is to zero, the closer are its neighbours: it changes more often, and by more steps. Both
sides know the base's exponents. With these (`Floats`) elements are divided into classes, whose exponents agree
in the low four bits. Positions are counted within a class, each class has its own mean gap, and its symbols are
a stream of their own. The receiver then needs the base to decode. Without them (`floats_of` None on both sides)
it does not, and deltas can be added up.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from areal_q.weights import bit_packing as bits
from areal_q.weights import delta_kernels as kernels
from areal_q.weights.delta_kernels import CLASSES

_DENSE = 3
"""Changed elements are listed only if they are at most one in _DENSE."""
_FEW = 256
"""Number of changes in a tensor below which classes cost more than they save."""


@dataclass(frozen=True)
class Moves:
    """The changes of one tensor. For elements 3 and 7 of 10 int8 codes, by +1 and −1, they are
    Moves(0, 10, where=[3, 7], step=uint8 [1, 255])."""

    index: int
    """Index of the tensor in the manifest"""
    elements: int
    """Number of elements of the whole tensor."""
    where: np.ndarray
    """Positions of the changed elements, int64 [N], rising."""
    step: np.ndarray
    """New − old, wrapped, never 0: unsigned [N] of the elements' size."""


@dataclass(frozen=True)
class Floats:
    """A tensor of floats in the base, whose exponents sort its elements into classes."""

    codes: np.ndarray
    """The floats' bit patterns as unsigned integers, flat."""
    mantissa: int
    """Number of bits of the mantissa."""

    def sizes(self) -> np.ndarray:
        """Returns the number of elements of each class, int64 [CLASSES]."""
        sizes = np.zeros(CLASSES, np.int64)
        kernels.count_classes(self.codes, self.mantissa, sizes)
        return sizes

    def classes(self, where: np.ndarray) -> np.ndarray:
        """Returns the classes of the elements at the positions `where`, uint8."""
        return (self.codes[where] >> self.codes.dtype.type(self.mantissa)).astype(np.uint8) & 15


FloatsOf = Callable[[int], Floats | None]
"""Function from an index of the manifest to the base's tensor, or None if that has no floats"""

_Amount = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
"""A count or an index, bounded since it comes from the network"""


class Change(msgspec.Struct, frozen=True, array_like=True):
    """Tensor `index` of the manifest differs in `counts` elements: in all, or of each class."""

    index: _Amount
    counts: _Amount | list[_Amount]

    @property
    def count(self) -> int:
        """Number of elements that differ, over all classes."""
        return self.counts if isinstance(self.counts, int) else sum(self.counts)


class Streams(msgspec.Struct, frozen=True, array_like=True):
    """The content of a delta for its tensors; everything except `low` is compressed."""

    changes: list[Change]
    """The tensors that differ, in the order of the manifest."""
    gaps: bytes
    """High parts of the gaps between listed elements, escaped."""
    flags: bytes
    """For each change its bitmap, if it has one; then for each a sign bit per step."""
    steps: list[bytes]
    """Symbols of |step|: a stream for each size of elements and class that occurs, in that order."""
    low: bytes
    """Low bits of the gaps, then those of the steps."""
    based: bool = False
    """True if the base is needed to decode, since classes are used for floats with at least _FEW changes"""


def encode(moves: Sequence[Moves], floats_of: FloatsOf | None = None) -> Streams:
    """Returns the streams of `moves`; equal moves give equal bytes.

    With `floats_of` the classes of the base's floats are used, and the base is needed to decode.
    """
    changes, gaps, shifts, flags, keys = [], [], [], [], []
    based = False
    for m in moves:
        floats = floats_of(m.index) if floats_of and len(m.where) >= _FEW else None
        based = based or floats is not None
        kinds = floats.classes(m.where) if floats else None
        listed, counts, sizes = _listed(m, floats, kinds)
        changes.append(Change(m.index, counts.tolist() if len(counts) > 1 else len(m.where)))
        keys.append(_keys(m.step.itemsize, kinds, len(m.where)))
        if listed is None:
            moved = np.zeros(m.elements, np.uint8)
            moved[m.where] = 1
            flags.append(np.packbits(moved).tobytes())
        else:
            gaps.append(_gaps(listed, counts))
            shifts.append(np.repeat(bits.shifts(sizes, counts), counts))
    signed = [m.step.view(f"<i{m.step.itemsize}") for m in moves]
    flags += [np.packbits(step < 0).tobytes() for step in signed]
    # The size of the least number has no sign to lose: it wraps to itself, which is right unsigned.
    sizes = [np.abs(step).view(m.step.dtype) for step, m in zip(signed, moves, strict=True)]
    gap, shift = _concatenated(gaps, np.int64), _concatenated(shifts, np.uint8)
    key, count = _concatenated(keys, np.uint8), np.zeros(256, np.int64)
    size = _concatenated(sizes, np.result_type(np.uint8, *sizes))
    kernels.grouped(key, size.copy(), count, size)
    symbols, low = [], [(gap, shift)]
    for k, value in _groups(count, size):
        symbol, width = bits.split_sizes(value, exact=k < CLASSES + 1)
        symbols.append(bits.compress(symbol.tobytes()))
        low.append((value, width))
    return Streams(
        changes,
        bits.compress(bits.escape_bytes(gap >> shift)),
        bits.compress(b"".join(flags)),
        symbols,
        bits.packed(low),
        based,
    )


def decode(
    streams: Streams, tensors: Sequence[tuple[int, int]], floats_of: FloatsOf | None = None
) -> list[Moves]:
    """Returns the moves; `tensors` has (elements, bytes of an element) for all tensors of the manifest.

    Raises ValueError or ZstdError if the streams are not what the changes need.
    """
    if streams.based and floats_of is None:
        raise ValueError("it cannot be read without its base")
    indexes = [change.index for change in streams.changes]
    if any(after <= before for before, after in pairwise(indexes)):
        raise ValueError("its tensors are not in order, each once")
    parts = [
        _part(change, tensors, floats_of if streams.based else None) for change in streams.changes
    ]
    # Each gap takes at least a byte, so that no memory is allocated for gaps that the stream cannot have.
    if bits.size_of(streams.gaps) < sum(int(p.counts.sum()) for p in parts):
        raise ValueError("fewer gaps than changes")
    shift = _concatenated(
        [np.repeat(bits.shifts(p.sizes, p.counts), p.counts) for p in parts], np.uint8
    )
    tops = bits.decompress(streams.gaps, sum(elements for elements, _ in tensors) + 64)
    high = bits.unescaped(tops, len(shift))
    flags = bits.Reader(bits.exactly(streams.flags, sum(p.flag_bytes for p in parts)))
    low = bits.LowBits(streams.low)
    gap = bits.Reader((high << shift) | low.take(shift).view(np.int64))
    where = [_where(p, gap, flags) for p in parts]
    keys = [
        _keys(p.itemsize, p.floats.classes(w) if p.floats else None, len(w))
        for p, w in zip(parts, where, strict=True)
    ]
    size = bits.Reader(_sizes(streams, _concatenated(keys, np.uint8), low))
    moves = []
    for part, places in zip(parts, where, strict=True):
        count = len(places)
        negative = np.unpackbits(flags.take(-(-count // 8)), count=count)
        value = size.take(count).astype(f"<u{part.itemsize}")
        step = np.where(negative, 0 - value, value)
        moves.append(Moves(part.change.index, part.elements, places, step))
    return moves


def add_up(moves: Sequence[Moves]) -> Moves:
    """Returns one tensor's successive moves as one, without the elements that come back to where they were."""
    where = np.concatenate([m.where for m in moves])
    order = np.argsort(where, kind="stable")
    where, step = where[order], np.concatenate([m.step for m in moves])[order]
    first = np.flatnonzero(np.diff(where, prepend=-1))
    total = np.add.reduceat(step, first, dtype=step.dtype) if len(first) else step
    stays = total != 0
    return Moves(moves[0].index, moves[0].elements, where[first][stays], total[stays])


@dataclass(frozen=True)
class _Part:
    """What is known about a change before its streams are read."""

    change: Change
    elements: int
    itemsize: int
    floats: Floats | None
    counts: np.ndarray
    """Number of listed elements, in all or of each class: changed ones, or unchanged ones, or none."""
    sizes: np.ndarray
    """Number of elements, in all or of each class."""
    bitmap: bool
    """True if a bitmap gives the positions, since neither changed nor unchanged elements are rare"""

    @property
    def flag_bytes(self) -> int:
        return -(-self.change.count // 8) + (-(-self.elements // 8) if self.bitmap else 0)


def _part(change: Change, tensors: Sequence[tuple[int, int]], floats_of: FloatsOf | None) -> _Part:
    if not 0 <= change.index < len(tensors):
        raise ValueError("a tensor that does not exist")
    elements, itemsize = tensors[change.index]
    floats = floats_of(change.index) if floats_of and change.count >= _FEW else None
    counts = np.atleast_1d(np.array(change.counts, np.int64))
    by_class = floats is not None and _rare(change.count, elements)
    sizes = floats.sizes() if floats and by_class else np.array([elements])
    if len(counts) != len(sizes) or (counts > sizes).any():
        raise ValueError(f"{change} of {elements} elements")
    bitmap = False
    if not _rare(change.count, elements):
        bitmap = not _rare(elements - change.count, elements)
        counts = np.array([0 if bitmap else elements - change.count])
    return _Part(change, elements, itemsize, floats, counts, sizes, bitmap)


def _rare(count: int, elements: int) -> bool:
    return _DENSE * count <= elements


def _listed(
    m: Moves, floats: Floats | None, kinds: np.ndarray | None
) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    """Returns the positions listed, counted within their class and grouped by it, then `counts` and `sizes` as
    in `_Part`; `kinds` are the classes of the changed elements, uint8. There are no positions, but None, where
    a bitmap is smaller."""
    elements = np.array([m.elements])
    if not _rare(len(m.where), m.elements):
        if not _rare(m.elements - len(m.where), m.elements):
            return None, np.array([0]), elements
        stays = np.ones(m.elements, bool)
        stays[m.where] = False
        listed = np.flatnonzero(stays)
        return listed, np.array([len(listed)]), elements
    if floats is None or kinds is None:
        return m.where, np.array([len(m.where)]), elements
    rank, sizes = np.empty(len(m.where), np.int64), np.zeros(CLASSES, np.int64)
    kernels.ranks(floats.codes, floats.mantissa, m.where, rank, sizes)
    listed, counts = np.empty_like(rank), np.zeros(256, np.int64)
    kernels.grouped(kinds, rank, counts, listed)
    return listed, counts[:CLASSES], sizes


def _gaps(listed: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns the number of elements between one listed and the next, in each class from its start."""
    gaps = np.diff(listed, prepend=-1) - 1
    first = (np.cumsum(counts) - counts)[counts > 0]
    gaps[first] = listed[first]
    return gaps


def _where(part: _Part, gaps: "bits.Reader", flags: "bits.Reader") -> np.ndarray:
    """Returns the positions of the changed elements, int64, rising.

    Raises ValueError where their number is not the announced one.
    """
    if part.bitmap:
        where = np.flatnonzero(
            np.unpackbits(flags.take(-(-part.elements // 8)), count=part.elements)
        )
    else:
        rank = _ranks(part, gaps.take(int(part.counts.sum())))
        if len(part.counts) > 1:
            assert part.floats is not None
            starts = np.concatenate(([0], np.cumsum(part.counts)))
            where = np.empty(len(rank), np.int64)
            f = part.floats
            where = where[: kernels.places(f.codes, f.mantissa, rank, starts, where)]
        elif len(rank) == part.change.count:
            where = rank
        else:
            moved = np.ones(part.elements, bool)
            moved[rank] = False
            where = np.flatnonzero(moved)
    if len(where) != part.change.count:
        raise ValueError(f"{len(where)} changes instead of {part.change.count}")
    return where


def _ranks(part: _Part, gaps: np.ndarray) -> np.ndarray:
    """Returns the listed positions again: the inverse of `_gaps`.

    Raises ValueError for an element that a class does not have.
    """
    ends = np.cumsum(part.counts)
    rank = np.cumsum(gaps + 1) - 1
    before = np.concatenate(([-1], rank))[ends - part.counts]
    rank -= np.repeat(before + 1, part.counts)
    some = part.counts > 0
    strange = (gaps < 0) | (gaps >= part.elements)
    if strange.any() or (rank[ends[some] - 1] >= part.sizes[some]).any():
        raise ValueError(f"an element beyond the {part.elements} of tensor {part.change.index}")
    return rank


def _keys(itemsize: int, kinds: np.ndarray | None, count: int) -> np.ndarray:
    """Returns which stream of symbols each of `count` steps is in, uint8; one-byte elements come first. `kinds`
    are the elements' classes, if classes are used."""
    first = (itemsize.bit_length() - 1) * (CLASSES + 1)
    if kinds is None:
        return np.full(count, first, np.uint8)
    return kinds + np.uint8(first + 1)


def _sizes(streams: Streams, key: np.ndarray, low: "bits.LowBits") -> np.ndarray:
    """Returns |step| of each element, uint64, given the stream that it is in."""
    count = np.bincount(key, minlength=256)
    found = np.flatnonzero(count)
    if len(found) != len(streams.steps):
        raise ValueError(f"{len(streams.steps)} streams of steps instead of {len(found)}")
    sizes = []
    for k, stream in zip(found, streams.steps, strict=True):
        symbol, exact = bits.exactly(stream, int(count[k])), bool(k < CLASSES + 1)
        sizes.append(bits.join_sizes(symbol, low.take(bits.widths(symbol, exact)), exact))
    low.finish()
    size = np.empty(len(key), np.uint64)
    kernels.ungrouped(key, _concatenated(sizes, np.uint64), count, size)
    return size


def _groups(counts: np.ndarray, values: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields each key that occurs with its part of `values`, which are in the order of their keys."""
    ends = np.cumsum(counts)
    for k in np.flatnonzero(counts):
        yield int(k), values[ends[k] - counts[k] : ends[k]]


def _concatenated(arrays: Sequence[np.ndarray], dtype: npt.DTypeLike) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype)
