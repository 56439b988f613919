"""The difference between two versions of the weights, in a few bits per code that changed.

Tensors with equal digests cost nothing; areal_q/weights/delta_codec.py says how the others are coded. The new
manifest is compressed with the old one as dictionary, and has a checksum: its own digest does not
cover all of it. Tensors' digests are left out of it and computed again from the bytes that a delta gives.
"""

from typing import Any

import msgspec
import numpy as np
import torch
import zstandard

from areal_q import messages
from areal_q.errors import RecordError, WeightVersionError
from areal_q.kernels import delta_blocks as kernels
from areal_q.kernels.delta_blocks import CLASSES
from areal_q.messages import Manifest, TensorSpec
from areal_q.weights import delta_codec
from areal_q.weights.byte_planes import compress, decompress
from areal_q.weights.delta_codec import Classes, Floats, Moves, Streams
from areal_q.weights.version import DTYPES, WeightVersion, unpack_unnamed, without_digests

MANTISSA = {
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 2,
    torch.float16: 10,
    torch.bfloat16: 7,
    torch.float32: 23,
    torch.float64: 52,
}
"""Bits of the mantissa, by float type. Floats are stepped through in the order of their values."""


class _Body(msgspec.Struct, frozen=True, array_like=True):
    manifest: bytes
    streams: Streams


_decode_body: messages.MessageDecoder[_Body] = messages.MessageDecoder(_Body)


def diff(base: WeightVersion, new: WeightVersion) -> bytes | None:
    """Returns the delta with which `apply` turns `base` into `new`; None where their layouts differ.

    Needs temporary memory of about 40 bytes per changed element; kernels, numpy and zstd release the
    interpreter lock for most of the time.
    """
    if not same_layout(base.manifest, new.manifest):
        return None
    moves = []
    pairs = zip(base.manifest.tensors, new.manifest.tensors, strict=True)
    for index, (old_spec, new_spec) in enumerate(pairs):
        if old_spec.digest != new_spec.digest:
            old, now = _elements(base.payload, old_spec), _elements(new.payload, new_spec)
            moves.append(_moved(index, old, now, MANTISSA.get(DTYPES[new_spec.dtype])))
    manifest = compress(messages.encode(without_digests(new.manifest)), _dictionary(base.manifest))
    return messages.encode(_Body(manifest, delta_codec.encode(moves)))


def apply(base: WeightVersion, delta: bytes, payload: torch.Tensor) -> WeightVersion:
    """Returns the new version, with all hashes verified, made in `payload`: uint8 [base.manifest.nbytes].

    Raises WeightVersionError for a delta that is malformed, belongs to another base, or gives other bytes.
    """
    try:
        body = _decode_body(delta)
        limit = messages.MAX_RECORD_BYTES
        encoded = decompress(body.manifest, limit, _dictionary(base.manifest))
        manifest = messages.decode_manifest(encoded)
    except (RecordError, zstandard.ZstdError) as error:
        raise WeightVersionError(f"delta refused: {error}") from error
    if not same_layout(base.manifest, manifest):
        raise WeightVersionError(f"delta to version {manifest.version}: of another layout")
    moved = {moves.index: moves for moves in _moves(base, manifest, body.streams)}
    ends = [*(spec.offset for spec in manifest.tensors[1:]), manifest.nbytes]

    def fill(index: int) -> None:
        spec = manifest.tensors[index]
        payload[spec.offset : ends[index]].copy_(base.payload[spec.offset : ends[index]])
        if (m := moved.get(index)) is not None:
            elements = _elements(payload, spec)
            floats = DTYPES[spec.dtype] in MANTISSA
            elements[m.where] = _stepped(elements[m.where], m.step, floats)

    return unpack_unnamed(manifest, payload, fill)


def changed(manifest: Manifest, delta: bytes) -> dict[str, tuple[int, int]]:
    """Returns (elements that the delta changes, elements) for every tensor of the version that it leads to.

    Elements of whole numbers are bytes, since they may be packed codes. Raises RecordError for bytes that are
    no delta, WeightVersionError for a delta to another version.
    """
    counts = {c.index: c.count for c in _decode_body(delta).streams.changes}
    if any(index >= len(manifest.tensors) for index in counts):
        raise WeightVersionError(f"delta of another version than {manifest.version}")
    return {
        spec.name: (counts.get(index, 0), spec.nbytes // _unit(spec))
        for index, spec in enumerate(manifest.tensors)
    }


def same_layout(a: Manifest, b: Manifest) -> bool:
    """Returns whether a delta between the two is possible: the same tensors lie at the same places."""

    def layout(spec: TensorSpec) -> tuple[Any, ...]:
        return spec.name, spec.dtype, spec.shape, spec.offset, spec.nbytes

    same_size = a.nbytes == b.nbytes
    return same_size and [layout(s) for s in a.tensors] == [layout(s) for s in b.tensors]


def _moved(index: int, old: np.ndarray, now: np.ndarray, mantissa: int | None) -> Moves:
    """Returns the moves from `old` to `now`, elements of one tensor, with the classes of floats."""
    if mantissa is None:
        where = np.flatnonzero(old != now)
        return Moves(index, len(now), where, now[where] - old[where])
    # Only those pages that are written to take memory.
    where, step = np.empty(len(now), np.int64), np.empty_like(now)
    kinds, gaps = np.empty(len(now), np.uint8), np.empty(len(now), np.int64)
    sizes = np.empty(CLASSES, np.int64)
    count = kernels.changed_floats(old, now, mantissa, where, step, kinds, gaps, sizes)
    classes = Classes(_first(kinds, count), _first(gaps, count), sizes)
    return Moves(index, len(now), _first(where, count), _first(step, count), classes)


def _stepped(codes: np.ndarray, step: np.ndarray, floats: bool) -> np.ndarray:
    """Returns unsigned codes moved by `step`, those of floats in the order of their values."""
    if not floats:
        return codes + step
    top = codes.dtype.type(1 << (8 * codes.itemsize - 1))
    ordered = np.where(codes < top, codes + top, ~codes) + step
    return np.where(ordered >= top, ordered - top, ~ordered)


def _first(array: np.ndarray, count: int) -> np.ndarray:
    """Returns `array` cut off after `count` elements, in place: the memory behind them is free again."""
    array.resize(count, refcheck=False)
    return array


def _moves(base: WeightVersion, manifest: Manifest, streams: Streams) -> list[Moves]:
    def floats(index: int) -> Floats | None:
        spec = base.manifest.tensors[index]
        mantissa = MANTISSA.get(DTYPES[spec.dtype])
        return None if mantissa is None else Floats(_elements(base.payload, spec), mantissa)

    sizes = [(s.nbytes // _unit(s), _unit(s)) for s in manifest.tensors]
    try:
        return delta_codec.decode(streams, sizes, floats)
    except (ValueError, zstandard.ZstdError) as error:
        raise WeightVersionError(f"delta to version {manifest.version}: {error}") from error


def _elements(payload: torch.Tensor, spec: TensorSpec) -> np.ndarray:
    """Returns a flat view of the tensor's bytes as unsigned integers of `_unit` bytes."""
    raw = payload[spec.offset : spec.offset + spec.nbytes].numpy()
    return raw.view(f"<u{_unit(spec)}")


def _unit(spec: TensorSpec) -> int:
    """Returns the bytes that move together: those of a float; one for whole numbers, which may be packed."""
    dtype = DTYPES[spec.dtype]
    return dtype.itemsize if dtype in MANTISSA else 1


def _dictionary(manifest: Manifest) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(
        messages.encode(without_digests(manifest)), dict_type=zstandard.DICT_TYPE_RAWCONTENT
    )
