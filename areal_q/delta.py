"""The difference between two versions of the weights, in a few bits per code that changed.

Between two learner steps few quantized codes change, and those that do mostly move by one. So a tensor's
difference is kept as *where* and *by how much*, both chosen so that a plain entropy coder (zstd's Huffman
stage) comes close to the bound of log2(1/p) + 1.44 bits a position at a share p of changed codes:

- where: gaps between changed elements. A gap is split at a byte border: the low `8·shift` bits go to
  one stream as they are (all but uniform), the rest to another as bytes, 255 meaning "255 more, and
  go on". Where changes are independent, gaps are geometric, and this split loses nothing: each part
  is again geometric or uniform. Above a third of all elements a bitmap is smaller.
- by how much: new − old modulo 2^bits of the elements' bytes read as little-endian integers: |step| − 1
  byte plane by byte plane, and a sign bit. For floats this is the distance in units in the last
  place. It wraps, so it is exact for every bit pattern.

Tensors with equal digests cost nothing. The new manifest is compressed with the old one as dictionary, and
has a checksum: its own digest covers the tensors only.
Pure: no socket here. Tensors are bytes; every format of a given element size is treated alike.
"""

from functools import cache
from typing import Any

import msgspec
import numpy as np
import torch
import zstandard

from areal_q import messages
from areal_q.errors import RecordError, WeightVersionError
from areal_q.messages import Manifest, TensorSpec
from areal_q.weights import DTYPES, WeightVersion, unpack

ESCAPE = 255
BITMAP = -1
"""In place of `shift`: a bit per element instead of gaps."""
LEVEL = 1


class _Change(msgspec.Struct, frozen=True, array_like=True):
    """Tensor `index` of the manifest differs in `count` elements."""

    index: int
    count: int
    shift: int


class _Body(msgspec.Struct, frozen=True, array_like=True):
    manifest: bytes
    changes: list[_Change]
    gaps: bytes
    """Escaped high parts of the gaps"""
    bits: bytes
    """For each change: bitmap, or planes of the gaps' low bytes; then a sign bit per step"""
    steps: bytes
    """For each change: byte planes of |step| − 1"""


_decode_body: messages.Decoder[_Body] = messages.Decoder(_Body)


def diff(base: WeightVersion, new: WeightVersion) -> bytes | None:
    """What `apply` needs to turn `base` into `new`; None where their tensors are not laid out alike.

    Needs temporary memory of one byte per element of the largest tensor and about 20 bytes per
    changed element; numpy and zstd release the interpreter lock for most of the time.
    """
    specs = list(zip(base.manifest.tensors, new.manifest.tensors, strict=False))
    if not _same_layout(base.manifest, new.manifest):
        return None
    changes: list[_Change] = []
    gaps, bits, steps = [], [], []
    for index, (old_spec, new_spec) in enumerate(specs):
        if old_spec.digest == new_spec.digest:
            continue
        old, now = _elements(base.payload, old_spec), _elements(new.payload, new_spec)
        where = _changed(old, now)
        shift = _shift_for(len(old), len(where))
        if shift == BITMAP:
            bits.append(np.packbits(old != now).tobytes())
        else:
            tops, lows = _split(np.diff(where, prepend=-1) - 1, shift)
            gaps.append(tops)
            bits.append(lows)
        size, sign = _size_and_sign(now[where] - old[where])
        bits.append(sign)
        steps.append(size)
        changes.append(_Change(index, len(where), shift))
    return messages.encode(
        _Body(
            manifest=_compress(messages.encode(new.manifest), _dictionary(base.manifest)),
            changes=changes,
            gaps=_compress(b"".join(gaps)),
            bits=_compress(b"".join(bits)),
            steps=_compress(b"".join(steps)),
        )
    )


def apply(base: WeightVersion, delta: bytes, payload: torch.Tensor) -> WeightVersion:
    """The new version, written into `payload` (uint8 [base.manifest.nbytes]), with all hashes verified.

    Raises WeightVersionError for a delta that is malformed, of another base, or gives other bytes.
    """
    try:
        body = _decode_body(delta)
        limit = messages.MAX_RECORD_BYTES
        plain = _decompress(body.manifest, limit, _dictionary(base.manifest))
        manifest = messages.decode_manifest(plain)
    except (RecordError, zstandard.ZstdError) as error:
        raise WeightVersionError(f"delta refused: {error}") from error
    if not _same_layout(base.manifest, manifest):
        raise WeightVersionError(f"delta to version {manifest.version}: of another layout")
    payload.copy_(base.payload)
    try:
        _add(manifest, body, payload)
    except (ValueError, zstandard.ZstdError) as error:
        raise WeightVersionError(f"delta to version {manifest.version}: {error}") from error
    return unpack(manifest, payload)


def _add(manifest: Manifest, body: _Body, payload: torch.Tensor) -> None:
    """Raises ValueError or ZstdError if the streams are not what the changes need."""
    if any(not 0 <= c.index < len(manifest.tensors) for c in body.changes):
        raise ValueError("a tensor that does not exist")
    targets = [_elements(payload, manifest.tensors[c.index]) for c in body.changes]
    pairs = list(zip(body.changes, targets, strict=True))
    for change, target in pairs:
        if not 0 <= change.count <= len(target) or change.shift not in (BITMAP, 0, 1, 2):
            raise ValueError(f"{change} of {len(target)} elements")
    tops = _decompress(body.gaps, manifest.nbytes + 64)
    gaps = _unescape(tops, sum(c.count for c in body.changes if c.shift != BITMAP))
    bits = _Reader(body.bits, sum(_bits_nbytes(c, len(t)) for c, t in pairs))
    steps = _Reader(body.steps, sum(c.count * t.itemsize for c, t in pairs))
    for change, target in pairs:
        if change.shift == BITMAP:
            bitmap = bits.take(-(-len(target) // 8))
            where = np.flatnonzero(np.unpackbits(bitmap, count=len(target)))
            if len(where) != change.count:
                raise ValueError(f"{len(where)} changes instead of {change.count}")
        else:
            mine, gaps = gaps[: change.count], gaps[change.count :]
            mine = _join(mine, bits.take(change.count * change.shift), change.shift)
            where = np.cumsum(mine + 1) - 1
            if change.count and where[-1] >= len(target):
                raise ValueError(f"element {where[-1]} of {len(target)}")
        sign = bits.take(-(-change.count // 8))
        target[where] += _step(steps.take(change.count * target.itemsize), sign, target.dtype)


def _bits_nbytes(change: _Change, elements: int) -> int:
    """How much of the stream `bits` belongs to a change of a tensor of so many elements."""
    where = -(-elements // 8) if change.shift == BITMAP else change.count * change.shift
    return where + -(-change.count // 8)


class _Reader:
    """Takes one array after the other off a compressed stream whose length is known."""

    def __init__(self, compressed: bytes, nbytes: int) -> None:
        self._bytes = np.frombuffer(_decompress(compressed, nbytes), np.uint8)
        self._at = 0
        if len(self._bytes) != nbytes:
            raise ValueError(f"stream of {len(self._bytes)}, not {nbytes} bytes")

    def take(self, nbytes: int) -> np.ndarray:
        self._at += nbytes
        return self._bytes[self._at - nbytes : self._at]


def _same_layout(a: Manifest, b: Manifest) -> bool:
    def layout(spec: TensorSpec) -> tuple[Any, ...]:
        return spec.name, spec.dtype, spec.shape, spec.offset, spec.nbytes

    same_size = a.nbytes == b.nbytes
    return same_size and [layout(s) for s in a.tensors] == [layout(s) for s in b.tensors]


def _elements(payload: torch.Tensor, spec: TensorSpec) -> np.ndarray:
    """A flat view of the tensor's bytes as unsigned integers of its element size."""
    raw = payload[spec.offset : spec.offset + spec.nbytes].numpy()
    return raw.view(f"<u{DTYPES[spec.dtype].itemsize}")


def _changed(old: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Positions, int64, at which two arrays differ. Few differences are found word by word: 3× faster."""
    per_word = 8 // old.itemsize
    whole = len(old) // per_word * per_word
    words = np.flatnonzero(old[:whole].view(np.uint64) != now[:whole].view(np.uint64))
    if 8 * len(words) > whole // per_word:
        return np.flatnonzero(old != now)
    inside = _rows(old[:whole], per_word, words) != _rows(now[:whole], per_word, words)
    row, column = np.nonzero(inside)
    tail = np.flatnonzero(old[whole:] != now[whole:]) + whole
    return np.concatenate((words[row] * per_word + column, tail))


def _rows(values: np.ndarray, per_row: int, rows: np.ndarray) -> np.ndarray:
    return values.reshape(-1, per_row)[rows]


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


def _compress(data: bytes, dictionary: zstandard.ZstdCompressionDict | None = None) -> bytes:
    if dictionary is not None:
        return zstandard.ZstdCompressor(19, dictionary, write_checksum=True).compress(data)
    return zstandard.ZstdCompressor(compression_params=_parameters()).compress(data)


def _decompress(
    data: bytes, limit: int, dictionary: zstandard.ZstdCompressionDict | None = None
) -> bytes:
    """Raises ValueError or ZstdError for what is no frame or unpacks to more than `limit` bytes."""
    if not 0 <= zstandard.frame_content_size(data) <= limit:
        raise zstandard.ZstdError(f"frame of {zstandard.frame_content_size(data)} bytes")
    return zstandard.ZstdDecompressor(dict_data=dictionary).decompress(data)


def _dictionary(manifest: Manifest) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(
        messages.encode(manifest), dict_type=zstandard.DICT_TYPE_RAWCONTENT
    )
