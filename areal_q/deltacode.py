"""How a delta says which elements moved and by how much: the streams inside areal_q/delta.py.

Between two learner steps few quantized codes change, and those that do mostly move by one. So a tensor's
difference is kept as *where* and *by how much*, both chosen so that a plain entropy coder (zstd's Huffman
stage) comes close to the bound of log2(1/p) + 1.44 bits a position at a share p of changed codes:

- where: gaps between changed elements. Where changes are independent, gaps are geometric. Of a gap with
  mean 2^k · m, 4 ≤ m < 8, the low k bits are as good as uniform and kept as they are; the rest is a byte
  (255 meaning "255 more, and go on") whose distribution is nearly the same for every tensor, so that one
  Huffman table serves all. Above a third of all elements a bitmap is smaller.
- by how much: new − old modulo 2^bits of the elements' bytes read as little-endian integers, floats in the
  order of their values, where it is the distance in units in the last place. It wraps, so it is exact for
  every bit pattern, and steps of several deltas can be added. A sign bit; of |step| the three highest bits
  and its length as a symbol, the bits below as they are: the sizes of steps have a smooth density.

Packed codes need nothing of their own: a 4-bit code that moves by one moves its byte by 1 or 16.

Floats change the oftener the closer to zero they are, as their neighbours are closer there. Base and new
version share the base's exponents: given these, positions are counted among the elements of the same
exponent only (`Classes`), each class with its own mean gap. Who decodes needs the base then; without
classes (`classes_of` None on both sides) nobody does, which is what lets deltas be added up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import msgspec
import numpy as np
import zstandard

from areal_q import deltakernels as kernels

ESCAPE = 255
DENSE = 3
"""One changed element in so many, or more: a bitmap."""
FEW = 256
"""Changes in a tensor below which classes cost more than they save"""
LEVEL = 1
SIZES = (1, 2, 4, 8)
"""Bytes of an element"""
LARGEST_SYMBOL = 250


@dataclass(frozen=True)
class Moves:
    """What changes in one tensor. Example: elements 3 and 7 of 10 int8 codes, by +1 and −1:
    Moves(0, 10, where=[3, 7], step=uint8 [1, 255])."""

    index: int
    """Of the tensor in the manifest"""
    elements: int
    """Of the whole tensor"""
    where: np.ndarray
    """int64 [N], rising"""
    step: np.ndarray
    """Unsigned [N] of the elements' size, never 0: new − old, wrapped"""


@dataclass(frozen=True)
class Classes:
    """The elements of a tensor of the base, and the class of each bit pattern (uint8 [2^bits])."""

    codes: np.ndarray
    table: np.ndarray

    @property
    def number(self) -> int:
        return int(self.table[-1]) + 1

    def sizes(self) -> np.ndarray:
        sizes = np.zeros(self.number, np.int64)
        kernels.count(self.codes, self.table, sizes)
        return sizes


ClassesOf = Callable[[int], Classes | None]
"""Of the tensor at an index; None: its positions are counted among all elements"""


class Change(msgspec.Struct, frozen=True, array_like=True):
    """Tensor `index` of the manifest differs in `counts` elements: in all, or of each class."""

    index: int
    counts: list[int]

    @property
    def count(self) -> int:
        return sum(self.counts)


class Streams(msgspec.Struct, frozen=True, array_like=True):
    changes: list[Change]
    gaps: bytes
    """The gaps' high parts, escaped"""
    flags: bytes
    """For each change: a bitmap, if it has one; a sign bit per step"""
    steps: list[bytes]
    """Symbols of |step|, of the changes in elements of each of SIZES"""
    bits: bytes
    """Low bits of the gaps, then those of the steps; not compressed"""


def encode(moves: Sequence[Moves], classes_of: ClassesOf | None = None) -> Streams:
    """Equal moves give equal bytes."""
    changes, gaps, shifts, flags = [], [], [], []
    steps: dict[int, list[np.ndarray]] = {size: [] for size in SIZES}
    for m in moves:
        worth = len(m.where) >= FEW and _sparse(m)
        classes = classes_of(m.index) if classes_of and worth else None
        rank, counts, sizes = _ranked(m, classes)
        changes.append(Change(m.index, counts.tolist()))
        if _sparse(m):
            begins = np.cumsum(counts) - counts
            gap = np.diff(rank, prepend=-1) - 1
            first = begins[counts > 0]
            gap[first] = rank[first]
            gaps.append(gap)
            shifts.append(np.repeat(_shifts(sizes, counts), counts))
        else:
            moved = np.zeros(m.elements, np.uint8)
            moved[m.where] = 1
            flags.append(np.packbits(moved).tobytes())
        negative = m.step.view(f"<i{m.step.itemsize}") < 0
        flags.append(np.packbits(negative).tobytes())
        steps[m.step.itemsize].append(np.where(negative, 0 - m.step, m.step))
    gap, shift = _joined(gaps, np.int64), _joined(shifts, np.uint8)
    symbols, values, widths = [], [gap], [shift]
    for size in SIZES:
        value = _joined(steps[size], np.uint64)
        symbol, width = np.empty(len(value), np.uint8), np.empty(len(value), np.uint8)
        kernels.symbols(value, symbol, width)
        symbols.append(compress(symbol.tobytes()))
        values.append(value)
        widths.append(width)
    return Streams(
        changes,
        compress(_escaped(gap >> shift)),
        compress(b"".join(flags)),
        symbols,
        _packed(np.concatenate([v.astype(np.uint64) for v in values]), np.concatenate(widths)),
    )


def decode(
    streams: Streams, tensors: Sequence[tuple[int, int]], classes_of: ClassesOf | None = None
) -> list[Moves]:
    """The moves; `tensors` are (elements, bytes of an element) of all tensors of the manifest.

    Raises ValueError or ZstdError if the streams are not what the changes need.
    """
    parts = [_part(change, tensors, classes_of) for change in streams.changes]
    sparse = [p for p in parts if p.sparse]
    counts = [p.counts for p in sparse]
    shift = np.repeat(
        _joined([_shifts(p.sizes, p.counts) for p in sparse], np.uint8), _joined(counts, np.int64)
    )
    tops = decompress(streams.gaps, sum(elements for elements, _ in tensors) + 64)
    high = _unescaped(tops, len(shift))
    each = [sum(p.change.count for p in parts if p.itemsize == size) for size in SIZES]
    symbols = [_exactly(s, count) for s, count in zip(streams.steps, each, strict=True)]
    widths = [_widths(symbol) for symbol in symbols]
    low = _unpacked(streams.bits, np.concatenate([shift, *widths]))
    gap = _Reader((high << shift.astype(np.int64)) | low[: len(shift)].astype(np.int64))
    ends = np.cumsum([len(shift), *map(len, widths)])
    values = {
        size: _Reader(_values(symbol, part))
        for size, symbol, part in zip(SIZES, symbols, np.split(low, ends[:-1])[1:], strict=True)
    }
    nbytes = sum(p.flag_bytes for p in parts)
    flags = _Reader(_exactly(streams.flags, nbytes))
    moves = []
    for p in parts:
        where = _where(p, gap.take(p.change.count) if p.sparse else None, flags)
        negative = np.unpackbits(flags.take(-(-p.change.count // 8)), count=p.change.count)
        value = values[p.itemsize].take(p.change.count).astype(f"<u{p.itemsize}")
        step = np.where(negative, 0 - value, value)
        moves.append(Moves(p.change.index, p.elements, where, step))
    return moves


def add_up(moves: Sequence[Moves]) -> Moves:
    """Moves of one tensor one after the other, as one. What comes back to where it was is left out."""
    where = np.concatenate([m.where for m in moves])
    order = np.argsort(where, kind="stable")
    where, step = where[order], np.concatenate([m.step for m in moves])[order]
    first = np.flatnonzero(np.diff(where, prepend=-1))
    total = np.add.reduceat(step, first, dtype=step.dtype) if len(first) else step
    stays = total != 0
    return Moves(moves[0].index, moves[0].elements, where[first][stays], total[stays])


def ordered(codes: np.ndarray) -> np.ndarray:
    """Bit patterns of floats (unsigned) as unsigned integers in the order of their values, −0 below +0."""
    top = codes.dtype.type(1 << (8 * codes.itemsize - 1))
    return np.where(codes < top, codes + top, ~codes)


def unordered(numbers: np.ndarray) -> np.ndarray:
    """The inverse of `ordered`."""
    top = numbers.dtype.type(1 << (8 * numbers.itemsize - 1))
    return np.where(numbers >= top, numbers - top, ~numbers)


@cache
def tables() -> Mapping[str, np.ndarray]:
    """By the name of a dtype: the class of each bit pattern. Sixteen binades; bfloat16's from 2^-16 on."""
    fp8, bf16 = np.arange(1 << 8), np.arange(1 << 16)
    found = {
        "float8_e4m3fn": fp8 >> 3 & 15,
        "bfloat16": np.clip((bf16 >> 7 & 255) - 111, 0, 15),
    }
    return {name: table.astype(np.uint8) for name, table in found.items()}


@dataclass(frozen=True)
class _Part:
    """What is known of a change before its streams are read."""

    change: Change
    elements: int
    itemsize: int
    classes: Classes | None
    counts: np.ndarray
    sizes: np.ndarray
    """Elements of each class"""
    sparse: bool

    @property
    def flag_bytes(self) -> int:
        return -(-self.change.count // 8) + (0 if self.sparse else -(-self.elements // 8))


def _part(
    change: Change, tensors: Sequence[tuple[int, int]], classes_of: ClassesOf | None
) -> _Part:
    if not 0 <= change.index < len(tensors):
        raise ValueError("a tensor that does not exist")
    elements, itemsize = tensors[change.index]
    counts = np.array(change.counts, np.int64)
    classes = classes_of(change.index) if classes_of and len(counts) > 1 else None
    sizes = classes.sizes() if classes else np.array([elements])
    if len(sizes) != len(counts) or (counts < 0).any() or (counts > sizes).any():
        raise ValueError(f"{change} of {elements} elements")
    sparse = DENSE * change.count <= elements
    return _Part(change, elements, itemsize, classes, counts, sizes, sparse)


def _sparse(m: Moves) -> bool:
    return DENSE * len(m.where) <= m.elements


def _ranked(m: Moves, classes: Classes | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(positions among the elements of the same class, grouped by class; their number; elements) by class."""
    if classes is None:
        return m.where, np.array([len(m.where)]), np.array([m.elements])
    sizes = np.zeros(classes.number, np.int64)
    rank, kind = np.empty(len(m.where), np.int64), np.empty(len(m.where), np.uint8)
    kernels.ranks(classes.codes, classes.table, m.where, rank, kind, sizes)
    counts = np.bincount(kind, minlength=classes.number)
    return rank[np.argsort(kind, kind="stable")], counts, sizes


def _shifts(sizes: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """uint8: k of each class, from the mean gap."""
    mean = sizes // np.maximum(1, counts)
    return np.maximum(0, np.frexp(mean.astype(np.float64))[1] - 3).astype(np.uint8)


def _where(part: _Part, gap: np.ndarray | None, flags: "_Reader") -> np.ndarray:
    count = part.change.count
    if gap is None:
        bitmap = flags.take(-(-part.elements // 8))
        where = np.flatnonzero(np.unpackbits(bitmap, count=part.elements))
        if len(where) != count:
            raise ValueError(f"{len(where)} changes instead of {count}")
        return where
    starts = np.concatenate(([0], np.cumsum(part.counts)))
    rank = np.cumsum(gap + 1) - 1
    before = np.concatenate(([-1], rank))[starts[:-1]]
    rank -= np.repeat(before + 1, part.counts)
    ends = starts[1:][part.counts > 0] - 1
    wide = (gap < 0) | (gap >= part.elements)
    if wide.any() or (rank[ends] >= part.sizes[part.counts > 0]).any():
        raise ValueError(f"an element beyond the {part.elements} of tensor {part.change.index}")
    if part.classes is None:
        return rank
    where = np.empty(count, np.int64)
    found = kernels.places(part.classes.codes, part.classes.table, rank, starts, where)
    if found != count:
        raise ValueError(f"{found} changes instead of {count}")
    return where


class _Reader:
    """Takes one array after the other."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self._at = array, 0

    def take(self, length: int) -> np.ndarray:
        self._at += length
        return self._array[self._at - length : self._at]


def _exactly(stream: bytes, nbytes: int) -> np.ndarray:
    """uint8 [nbytes]. Raises ValueError where the stream has more or fewer."""
    found = np.frombuffer(decompress(stream, nbytes), np.uint8)
    if len(found) != nbytes:
        raise ValueError(f"stream of {len(found)}, not {nbytes} bytes")
    return found


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *(a.astype(dtype) for a in arrays)])


def _escaped(high: np.ndarray) -> bytes:
    ends = np.cumsum(high // ESCAPE + 1)
    tops = np.full(ends[-1] if len(ends) else 0, ESCAPE, np.uint8)
    tops[ends - 1] = high % ESCAPE
    return tops.tobytes()


def _unescaped(tops: bytes, count: int) -> np.ndarray:
    """int64 [count]: the inverse of `_escaped`."""
    symbols = np.frombuffer(tops, np.uint8)
    ends = np.flatnonzero(symbols != ESCAPE)
    if len(ends) != count or (len(symbols) and symbols[-1] == ESCAPE):
        raise ValueError(f"{len(ends)} gaps instead of {count}")
    return (np.diff(ends, prepend=-1) - 1) * ESCAPE + symbols[ends]


def _packed(values: np.ndarray, widths: np.ndarray) -> bytes:
    out = np.zeros(-(-int(widths.sum(dtype=np.int64)) // 8), np.uint8)
    kernels.pack(values, widths, 0, out)
    return out.tobytes()


def _unpacked(packed: bytes, widths: np.ndarray) -> np.ndarray:
    """uint64, one for each of `widths` (uint8)."""
    nbytes = -(-int(widths.sum(dtype=np.int64)) // 8)
    if len(packed) != nbytes:
        raise ValueError(f"{len(packed)} bytes of low bits instead of {nbytes}")
    values = np.empty(len(widths), np.uint64)
    kernels.unpack(np.frombuffer(packed, np.uint8), widths, 0, values)
    return values


def _widths(symbol: np.ndarray) -> np.ndarray:
    """Bits left open by each symbol, uint8."""
    if len(symbol) and symbol.max() > LARGEST_SYMBOL:
        raise ValueError(f"a step of symbol {symbol.max()}")
    return np.where(symbol < 7, 0, (symbol.astype(np.int16) - 7) // 4 + 1).astype(np.uint8)


def _values(symbol: np.ndarray, low: np.ndarray) -> np.ndarray:
    values = np.empty(len(symbol), np.uint64)
    kernels.values_of(symbol, low, values)
    return values


@cache
def _parameters() -> zstandard.ZstdCompressionParameters:
    # Matches in noise are chance and cost more than they save: make them rare.
    return zstandard.ZstdCompressionParameters.from_level(LEVEL, min_match=7)


def compress(data: bytes, dictionary: zstandard.ZstdCompressionDict | None = None) -> bytes:
    if dictionary is not None:
        return zstandard.ZstdCompressor(19, dictionary, write_checksum=True).compress(data)
    return zstandard.ZstdCompressor(compression_params=_parameters()).compress(data)


def decompress(
    data: bytes, limit: int, dictionary: zstandard.ZstdCompressionDict | None = None
) -> bytes:
    """Raises ValueError or ZstdError for what is no frame or unpacks to more than `limit` bytes."""
    if not 0 <= zstandard.frame_content_size(data) <= limit:
        raise zstandard.ZstdError(f"frame of {zstandard.frame_content_size(data)} bytes")
    return zstandard.ZstdDecompressor(dict_data=dictionary).decompress(data)
