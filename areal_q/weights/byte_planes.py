"""Integers as compressed bytes, for the streams of areal_q/weights/delta_codec.py.

Of the numbers in a stream all lowest bytes are one plane, all second ones another, up to the highest that is
not 0 everywhere. Each has a distribution of its own, and zstd's Huffman stage comes close to its entropy.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import zstandard

_LEVEL = 1
"""Compression level of zstd."""
_MOST = 8
"""Planes of the largest integer."""


def planes_of(numbers: np.ndarray) -> list[bytes]:
    """Returns the compressed planes of unsigned [N], lowest first; none for N = 0."""
    if not len(numbers):
        return []
    count = max(1, -(-int(numbers.max()).bit_length() // 8))
    columns = numbers.astype(f"<u{numbers.itemsize}").view(np.uint8).reshape(len(numbers), -1)
    return [compress(columns[:, i].tobytes()) for i in range(count)]


def numbers_of(planes: Sequence[bytes], count: int) -> np.ndarray:
    """Returns uint64 [count], the inverse of `planes_of`. Raises ValueError or ZstdError for planes of another
    count, before any memory is taken for them."""
    if len(planes) > _MOST or bool(planes) != bool(count):
        raise ValueError(f"{len(planes)} planes for {count} numbers")
    for plane in planes:
        if size_of(plane) != count:
            raise ValueError(f"a plane of {size_of(plane)} bytes for {count} numbers")
    columns = np.zeros((count, _MOST), np.uint8)
    for i, plane in enumerate(planes):
        columns[:, i] = exactly(plane, count)
    return columns.view("<u8")[:, 0] if count else np.empty(0, "<u8")


class Reader:
    """Reads an array from front to back, piece by piece."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self._at = array, 0

    def take(self, length: int) -> np.ndarray:
        """Returns the next `length` elements, fewer at the end."""
        self._at += length
        return self._array[self._at - length : self._at]


@cache
def _parameters() -> zstandard.ZstdCompressionParameters:
    # Short matches in noise are accidental and cost more than they save, so only long ones are used.
    return zstandard.ZstdCompressionParameters.from_level(_LEVEL, min_match=7)


def compress(data: bytes, dictionary: zstandard.ZstdCompressionDict | None = None) -> bytes:
    """Returns a zstd frame; with a dictionary at level 19 and with a checksum."""
    if dictionary is not None:
        return zstandard.ZstdCompressor(19, dictionary, write_checksum=True).compress(data)
    return zstandard.ZstdCompressor(compression_params=_parameters()).compress(data)


def decompress(
    data: bytes, limit: int, dictionary: zstandard.ZstdCompressionDict | None = None
) -> bytes:
    """Returns the content of a zstd frame.

    Raises ValueError or ZstdError for bytes that are no frame or unpack to more than `limit` bytes.
    """
    if not 0 <= size_of(data) <= limit:
        raise zstandard.ZstdError(f"frame of {size_of(data)} bytes")
    return zstandard.ZstdDecompressor(dict_data=dictionary).decompress(data)


def size_of(data: bytes) -> int:
    """Returns how many bytes a frame unpacks to, as its header says; -1 where it does not.

    Raises ZstdError for bytes that are no frame.
    """
    return zstandard.frame_content_size(data)


def exactly(data: bytes, nbytes: int) -> np.ndarray:
    """Returns a frame's content, uint8 [nbytes]. Raises ValueError where it holds more or fewer bytes."""
    found = np.frombuffer(decompress(data, nbytes), np.uint8)
    if len(found) != nbytes:
        raise ValueError(f"stream of {len(found)}, not {nbytes} bytes")
    return found
