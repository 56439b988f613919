"""The streams of a delta (areal_q/weights/delta.py): which elements moved, and by how much.

Between two learner steps few quantized codes change, and those that do mostly move by one. So a tensor's
difference is kept as *where* and *by how much*, both as streams of numbers (areal_q/weights/byte_planes.py):

- where: gaps between changed elements; where these are over a third of all, a bitmap.
- by how much: new − old modulo 2^bits of the elements' bytes read as little-endian integers, floats in the
  order of their values, where it is the distance in units in the last place. It wraps, so it is exact for
  every bit pattern. A sign bit, and |step|.

Whole numbers of any size go byte by byte: a packed 4-bit code that moves by one moves its byte by 1 or 16.

The closer a float is to zero, the closer are its neighbours: it changes more often, and by more steps. Both
sides know the base's exponents. With these elements are divided into classes, whose exponents agree in the low
four bits. Positions are counted within a class, and its steps are a stream of their own, which makes bfloat16's
deltas smaller by a third.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from areal_q.kernels import delta_blocks as blocks
from areal_q.kernels import delta_codes as kernels
from areal_q.kernels.delta_blocks import CLASSES
from areal_q.weights import byte_planes as planes

_DENSE = 3
"""Changed elements are listed only if they are at most one in _DENSE."""
_FEW = 256
"""Number of changes in a tensor below which classes cost more than they save."""


@dataclass(frozen=True)
class Classes:
    """The classes of a tensor of floats in the base, as delta_blocks.changed_floats finds them."""

    kinds: np.ndarray
    """The class of each element that changed, uint8 [N]."""
    gaps: np.ndarray
    """How many elements of its class come between it and the one that changed before it, int64 [N]."""
    sizes: np.ndarray
    """Number of elements of each class, int64 [CLASSES]."""


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
    classes: Classes | None = None
    """None for other tensors than floats"""


@dataclass(frozen=True)
class Floats:
    """A tensor of floats in the base, whose exponents sort its elements into classes."""

    codes: np.ndarray
    """The floats' bit patterns as unsigned integers, flat."""
    mantissa: int
    """Number of bits of the mantissa."""

    def sizes(self) -> np.ndarray:
        """Returns the number of elements of each class, int64 [CLASSES]."""
        sizes = np.empty(CLASSES, np.int64)
        blocks.count_classes(self.codes, self.mantissa, sizes)
        return sizes

    def kinds(self, where: np.ndarray) -> np.ndarray:
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
    """The content of a delta for its tensors, compressed."""

    changes: list[Change]
    """The tensors that differ, in the order of the manifest."""
    gaps: list[bytes]
    """Planes of the gaps between listed elements."""
    flags: bytes
    """For each change its bitmap, if it has one; then for each a sign bit per step."""
    steps: list[list[bytes]]
    """Planes of |step|: a stream for each size of elements and class that occurs, in that order."""


def encode(moves: Sequence[Moves]) -> Streams:
    """Returns the streams of `moves`; equal moves give equal bytes."""
    listed = [_listed(m) for m in moves]
    signed = [m.step.view(f"<i{m.step.itemsize}") for m in moves]
    flags = [a.bitmap for a in listed] + [np.packbits(step < 0).tobytes() for step in signed]
    return Streams(
        [a.change for a in listed],
        planes.planes_of(_concatenated([a.gaps for a in listed], np.int64).view(np.uint64)),
        planes.compress(b"".join(flags)),
        [planes.planes_of(size) for size in _grouped_sizes(moves, signed)],
    )


def decode(
    streams: Streams, tensors: Sequence[tuple[int, int]], floats_of: FloatsOf
) -> list[Moves]:
    """Returns the moves; `tensors` has (elements, bytes of an element) for all tensors of the manifest.

    Raises ValueError or ZstdError if the streams are not what the changes need.
    """
    indexes = [change.index for change in streams.changes]
    if any(after <= before for before, after in pairwise(indexes)):
        raise ValueError("its tensors are not in order, each once")
    parts = [_part(change, tensors, floats_of) for change in streams.changes]
    gaps = planes.numbers_of(streams.gaps, sum(int(p.counts.sum()) for p in parts))
    gap = planes.Reader(gaps.view(np.int64))
    flags = planes.Reader(planes.exactly(streams.flags, sum(p.flag_bytes for p in parts)))
    places = [_places(p, gap, flags) for p in parts]
    keys = [_keys(p.itemsize, kinds, len(w)) for p, (w, kinds) in zip(parts, places, strict=True)]
    size, at = _sizes(streams, keys)
    moves = []
    for part, key, (where, _) in zip(parts, keys, places, strict=True):
        step = np.empty(len(where), f"<u{part.itemsize}")
        kernels.ungrouped(key, size, at, flags.take(-(-len(where) // 8)), step)
        moves.append(Moves(part.change.index, part.elements, where, step))
    return moves


@dataclass(frozen=True)
class _Part:
    """What is known about a change before its streams are read."""

    change: Change
    elements: int
    itemsize: int
    floats: Floats | None
    counts: np.ndarray
    """Number of listed elements, in all or of each class; none where there is a bitmap."""
    sizes: np.ndarray
    """Number of elements, in all or of each class."""
    bitmap: bool
    """True if a bitmap gives the positions, since changed elements are not rare"""

    @property
    def flag_bytes(self) -> int:
        return -(-self.change.count // 8) + (-(-self.elements // 8) if self.bitmap else 0)


def _part(change: Change, tensors: Sequence[tuple[int, int]], floats_of: FloatsOf) -> _Part:
    if not 0 <= change.index < len(tensors):
        raise ValueError("a tensor that does not exist")
    elements, itemsize = tensors[change.index]
    floats = floats_of(change.index) if change.count >= _FEW else None
    counts = np.atleast_1d(np.array(change.counts, np.int64))
    by_class = floats is not None and _rare(change.count, elements)
    sizes = floats.sizes() if floats and by_class else np.array([elements])
    if len(counts) != len(sizes) or (counts > sizes).any():
        raise ValueError(f"{change} of {elements} elements")
    bitmap = not _rare(change.count, elements)
    return _Part(change, elements, itemsize, floats, counts * (not bitmap), sizes, bitmap)


def _rare(count: int, elements: int) -> bool:
    return _DENSE * count <= elements


@dataclass(frozen=True)
class _Listed:
    """How the positions of a tensor's moves are told."""

    change: Change
    gaps: np.ndarray
    """Numbers of elements between one listed and the next, in each class from its start, int64."""
    bitmap: bytes = b""
    """The positions, if they are not listed since changed elements are not rare"""


def _listed(m: Moves) -> _Listed:
    count, kinds = len(m.where), _kinds(m)
    change = Change(m.index, count)
    if m.classes is not None and kinds is not None and _rare(count, m.elements):
        counts = _tally([kinds])[:CLASSES]
        gaps = np.empty_like(m.classes.gaps)
        kernels.grouped(kinds, m.classes.gaps, np.cumsum(counts) - counts, gaps)
        return _Listed(Change(m.index, counts.tolist()), gaps)
    if not _rare(count, m.elements):
        moved = np.zeros(m.elements, np.uint8)
        moved[m.where] = 1
        return _Listed(change, np.empty(0, np.int64), np.packbits(moved).tobytes())
    return _Listed(change, np.diff(m.where, prepend=-1) - 1)


def _kinds(m: Moves) -> np.ndarray | None:
    """Returns the classes of the changed elements, uint8, if classes are used."""
    return m.classes.kinds if m.classes is not None and len(m.where) >= _FEW else None


def _grouped_sizes(moves: Sequence[Moves], signed: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields the |step| of each stream that occurs, in the order in which `_keys` numbers them."""
    # The size of the least number has no sign to lose: it wraps to itself, which is right unsigned.
    sizes = [np.abs(step).view(m.step.dtype) for step, m in zip(signed, moves, strict=True)]
    keys = [_keys(m.step.itemsize, _kinds(m), len(m.where)) for m in moves]
    count = _tally(keys)
    at = np.cumsum(count) - count
    grouped = np.empty(int(count.sum()), np.result_type(np.uint8, *sizes))
    for key, size in zip(keys, sizes, strict=True):
        kernels.grouped(key, size, at, grouped)
    for key in np.flatnonzero(count):
        yield grouped[at[key] - count[key] : at[key]]


def _places(
    part: _Part, gaps: "planes.Reader", flags: "planes.Reader"
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the positions of the changed elements, int64, rising, and their classes, uint8, if these are
    used.

    Raises ValueError for an element beyond the last, or where their number is not the announced one.
    """
    if part.bitmap:
        where = np.flatnonzero(
            np.unpackbits(flags.take(-(-part.elements // 8)), count=part.elements)
        )
    else:
        gap = gaps.take(int(part.counts.sum()))
        beyond = len(gap) > 0 and gap.view(np.uint64).max() >= part.elements
        if len(part.counts) > 1 and not beyond:
            return _places_by_class(part, gap)
        where = np.cumsum(gap + 1) - 1
        if beyond or (len(where) > 0 and where[-1] >= part.elements):
            raise ValueError(f"an element beyond the {part.elements} of tensor {part.change.index}")
    if len(where) != part.change.count:
        raise ValueError(f"{len(where)} changes instead of {part.change.count}")
    return where, part.floats.kinds(where) if part.floats else None


def _places_by_class(part: _Part, gap: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    assert part.floats is not None
    codes, mantissa = part.floats.codes, part.floats.mantissa
    starts = np.concatenate(([0], np.cumsum(part.counts)))
    where, kinds = np.empty(len(gap), np.int64), np.empty(len(gap), np.uint8)
    found = blocks.places(codes, mantissa, gap, starts, where, kinds)
    if found != len(gap):
        raise ValueError(f"{found} changes instead of {len(gap)}")
    return where, kinds


def _keys(itemsize: int, kinds: np.ndarray | None, count: int) -> np.ndarray:
    """Returns which stream each of `count` steps is in, uint8; one-byte elements come first. `kinds`
    are the elements' classes, if classes are used."""
    first = (itemsize.bit_length() - 1) * (CLASSES + 1)
    if kinds is None:
        return np.full(count, first, np.uint8)
    return kinds + np.uint8(first + 1)


def _tally(keys: Sequence[np.ndarray]) -> np.ndarray:
    """Returns how often each key occurs in all arrays together, int64 [256]."""
    count = np.zeros(256, np.int64)
    for some in keys:
        kernels.tally(some, count)
    return count


def _sizes(streams: Streams, keys: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns |step| of all elements, uint64, grouped by the stream that each is in, as `keys` says for each
    tensor; and where in them each stream begins, int64 [256]."""
    count = _tally(keys)
    found = np.flatnonzero(count)
    if len(found) != len(streams.steps):
        raise ValueError(f"{len(streams.steps)} streams of steps instead of {len(found)}")
    pairs = zip(streams.steps, count[found], strict=True)
    size = _concatenated([planes.numbers_of(step, int(n)) for step, n in pairs], np.uint64)
    return size, np.cumsum(count) - count


def _concatenated(arrays: Sequence[np.ndarray], dtype: npt.DTypeLike) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype)
