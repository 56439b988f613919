"""How a delta says which elements moved and by how much: the streams inside areal_q/delta.py.

Between two learner steps few quantized codes change, and those that do mostly move by one. So a tensor's
difference is kept as *where* and *by how much*, both chosen so that a plain entropy coder (zstd's Huffman
stage) comes close to the bound of log2(1/p) + 1.44 bits a position at a share p of changed codes:

- where: gaps between changed elements. A gap is split at a byte border: the low `8·shift` bits go to
  one stream as they are (all but uniform), the rest to another as bytes, 255 meaning "255 more, and
  go on". Where changes are independent, gaps are geometric, and this split loses nothing: each part
  is again geometric or uniform. Above a third of all elements a bitmap is smaller.
- by how much: new − old modulo 2^bits of the elements' bytes read as little-endian integers: |step| − 1
  byte plane by byte plane, and a sign bit. For floats this is the distance in units in the last
  place. It wraps, so it is exact for every bit pattern, and steps of several deltas can be added.

Packed codes need nothing of their own: a 4-bit code that moves by one moves its byte by 1 or 16.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import msgspec
import numpy as np
import zstandard

ESCAPE = 255
BITMAP = -1
"""In place of `shift`: a bit per element instead of gaps."""
LEVEL = 1


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


class Change(msgspec.Struct, frozen=True, array_like=True):
    """Tensor `index` of the manifest differs in `count` elements."""

    index: int
    count: int
    shift: int


class Streams(msgspec.Struct, frozen=True, array_like=True):
    changes: list[Change]
    gaps: bytes
    """Escaped high parts of the gaps"""
    bits: bytes
    """For each change: bitmap, or planes of the gaps' low bytes; then a sign bit per step"""
    steps: bytes
    """For each change: byte planes of |step| − 1"""


def encode(moves: Sequence[Moves]) -> Streams:
    """Equal moves give equal bytes."""
    changes, gaps, bits, steps = [], [], [], []
    for m in moves:
        shift = _shift_for(m.elements, len(m.where))
        if shift == BITMAP:
            moved = np.zeros(m.elements, np.uint8)
            moved[m.where] = 1
            bits.append(np.packbits(moved).tobytes())
        else:
            tops, lows = _split(np.diff(m.where, prepend=-1) - 1, shift)
            gaps.append(tops)
            bits.append(lows)
        size, sign = _size_and_sign(m.step)
        bits.append(sign)
        steps.append(size)
        changes.append(Change(m.index, len(m.where), shift))
    return Streams(
        changes, compress(b"".join(gaps)), compress(b"".join(bits)), compress(b"".join(steps))
    )


def decode(streams: Streams, tensors: Sequence[tuple[int, int]]) -> list[Moves]:
    """The moves; `tensors` are (elements, bytes of an element) of all tensors of the manifest.

    Raises ValueError or ZstdError if the streams are not what the changes need.
    """
    if any(not 0 <= c.index < len(tensors) for c in streams.changes):
        raise ValueError("a tensor that does not exist")
    pairs = [(c, *tensors[c.index]) for c in streams.changes]
    for change, elements, _ in pairs:
        if not 0 <= change.count <= elements or change.shift not in (BITMAP, 0, 1, 2):
            raise ValueError(f"{change} of {elements} elements")
    tops = decompress(streams.gaps, sum(elements for elements, _ in tensors) + 64)
    gaps = _unescape(tops, sum(c.count for c, *_ in pairs if c.shift != BITMAP))
    bits = _Reader(streams.bits, sum(_bits_nbytes(c, elements) for c, elements, _ in pairs))
    steps = _Reader(streams.steps, sum(c.count * size for c, _, size in pairs))
    moves = []
    for change, elements, size in pairs:
        if change.shift == BITMAP:
            bitmap = bits.take(-(-elements // 8))
            where = np.flatnonzero(np.unpackbits(bitmap, count=elements))
            if len(where) != change.count:
                raise ValueError(f"{len(where)} changes instead of {change.count}")
        else:
            mine, gaps = gaps[: change.count], gaps[change.count :]
            mine = _join(mine, bits.take(change.count * change.shift), change.shift)
            where = np.cumsum(mine + 1) - 1
            if change.count and where[-1] >= elements:
                raise ValueError(f"element {where[-1]} of {elements}")
        sign = bits.take(-(-change.count // 8))
        step = _step(steps.take(change.count * size), sign, np.dtype(f"<u{size}"))
        moves.append(Moves(change.index, elements, where, step))
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


def _bits_nbytes(change: Change, elements: int) -> int:
    """How much of the stream `bits` belongs to a change of a tensor of so many elements."""
    where = -(-elements // 8) if change.shift == BITMAP else change.count * change.shift
    return where + -(-change.count // 8)


class _Reader:
    """Takes one array after the other off a compressed stream whose length is known."""

    def __init__(self, compressed: bytes, nbytes: int) -> None:
        self._bytes = np.frombuffer(decompress(compressed, nbytes), np.uint8)
        self._at = 0
        if len(self._bytes) != nbytes:
            raise ValueError(f"stream of {len(self._bytes)}, not {nbytes} bytes")

    def take(self, nbytes: int) -> np.ndarray:
        self._at += nbytes
        return self._bytes[self._at - nbytes : self._at]


def _shift_for(elements: int, changed: int) -> int:
    """Bytes of a gap that are kept apart: as many as the mean gap fills."""
    if 3 * changed > elements:
        return BITMAP
    mean = elements / max(1, changed)
    return 0 if mean < 1 << 8 else 1 if mean < 1 << 16 else 2


def _split(gaps: np.ndarray, shift: int) -> tuple[bytes, bytes]:
    """Gaps (int64 [N]) as escaped high parts and as planes of `shift` low bytes."""
    high = gaps >> (8 * shift)
    ends = np.cumsum(high // ESCAPE + 1)
    tops = np.full(ends[-1] if len(ends) else 0, ESCAPE, np.uint8)
    tops[ends - 1] = high % ESCAPE
    low = b"".join((gaps >> (8 * i)).astype(np.uint8).tobytes() for i in range(shift))
    return tops.tobytes(), low


def _unescape(tops: bytes, count: int) -> np.ndarray:
    """int64 [count]: the inverse of the escaping, for all tensors at once."""
    symbols = np.frombuffer(tops, np.uint8)
    ends = np.flatnonzero(symbols != ESCAPE)
    if len(ends) != count or (len(symbols) and symbols[-1] == ESCAPE):
        raise ValueError(f"{len(ends)} gaps instead of {count}")
    return (np.diff(ends, prepend=-1) - 1) * ESCAPE + symbols[ends]


def _join(high: np.ndarray, low: np.ndarray, shift: int) -> np.ndarray:
    gaps = high << (8 * shift)
    for i, plane in enumerate(low.reshape(shift, -1) if shift else ()):
        gaps |= plane.astype(np.int64) << (8 * i)
    return gaps


def _size_and_sign(steps: np.ndarray) -> tuple[bytes, bytes]:
    """Non-zero steps (unsigned, wrapping) as byte planes of |step| − 1 and a bit for each negative one."""
    negative = steps.view(f"<i{steps.itemsize}") < 0
    size = np.where(negative, 0 - steps, steps) - 1
    planes = size.view(np.uint8).reshape(-1, size.itemsize).T
    return planes.tobytes(), np.packbits(negative).tobytes()


def _step(planes: np.ndarray, sign: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The inverse of `_size_and_sign`."""
    size = np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T).reshape(-1).view(dtype) + 1
    return np.where(np.unpackbits(sign, count=len(size)), 0 - size, size)


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
