"""Integers as bytes, for the streams of areal_q/weights/delta_codec.py.

A number whose distribution is smooth is stored in two parts: a symbol of a small alphabet, which zstd's Huffman
stage compresses almost to its entropy, and low bits that are nearly uniform and stored uncompressed.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import zstandard

from areal_q.kernels import delta_bits as kernels

_ESCAPE = 255
"""Byte that adds 255 and says that the number goes on in the next byte"""
_LEVEL = 1
"""Compression level of zstd."""
_LARGEST_SYMBOL = 250
"""Largest symbol that `split_sizes` returns without `exact`"""


def shifts(sizes: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns how many low bits of a gap are stored uncompressed, uint8, if `counts` of `sizes` elements are
    listed.

    The mean gap is 2^k · m with 4 ≤ m < 8 for the k returned, unless k is 0.
    """
    mean = sizes // np.maximum(1, counts)
    return np.maximum(0, np.frexp(mean.astype(np.float64))[1] - 3).astype(np.uint8)


def escape_bytes(gaps: np.ndarray, shifts: np.ndarray) -> bytes:
    """Returns the high parts of int64 [N] ≥ 0, shifted down as `shifts` says, as bytes, where a byte 255 adds
    255 and continues the number in the next byte."""
    # By their shifts they are below 8 on average.
    out = np.empty(len(gaps) + 8 * len(gaps) // _ESCAPE, np.uint8)
    return out[: kernels.escape(gaps, shifts, out)].tobytes()


def unescaped(tops: bytes, shifts: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Returns int64 [N], the inverse of `escape_bytes`; `low`, uint64 [N], has the low parts and is used up.

    Raises ValueError for another count of numbers.
    """
    gaps = low.view(np.int64)
    found = kernels.unescape(np.frombuffer(tops, np.uint8), shifts, gaps)
    if found != len(gaps) or tops[-1:] == bytes([_ESCAPE]):
        raise ValueError(f"{found} gaps instead of {len(gaps)}")
    return gaps


def split_sizes(sizes: np.ndarray, exact: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns (symbols, widths of the low bits left open), both uint8 [N], for unsigned [N] ≥ 1.

    With `exact`, for sizes up to 256, nothing is left open.
    """
    if exact:
        return (sizes - sizes.dtype.type(1)).astype(np.uint8), np.zeros(len(sizes), np.uint8)
    symbol, width = np.empty(len(sizes), np.uint8), np.empty(len(sizes), np.uint8)
    kernels.symbols(sizes, symbol, width)
    return symbol, width


def widths(symbol: np.ndarray, exact: bool) -> np.ndarray:
    """Returns the width of the low bits that each symbol leaves open, uint8.

    Raises ValueError for a symbol that does not exist.
    """
    if exact:
        return np.zeros(len(symbol), np.uint8)
    if len(symbol) and symbol.max() > _LARGEST_SYMBOL:
        raise ValueError(f"a step of symbol {symbol.max()}")
    width = np.empty(len(symbol), np.uint8)
    kernels.widths_of(symbol, width)
    return width


def join_sizes(symbol: np.ndarray, low: np.ndarray, exact: bool, out: np.ndarray) -> None:
    """Writes into out, uint64 [N], the inverse of `split_sizes`; `low` has the bits that were left open."""
    if exact:
        out[:] = symbol
        out += np.uint64(1)
    else:
        kernels.values_of(symbol, low, out)


def packed(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> bytes:
    """Returns the low bits of all values, unsigned [N], as many of each as its width, uint8 [N], says. Between
    them, and between the parts (values, widths), there is no padding."""
    total = sum(kernels.total(widths) for _, widths in parts)
    out, at = np.zeros(total // 64 + 1, "<u8"), 0
    for values, widths in parts:
        at = kernels.pack_bits(values, widths, out, at)
    return out.view(np.uint8)[: -(-total // 8)].tobytes()


class LowBits:
    """Reads what `packed` wrote, part by part."""

    def __init__(self, data: bytes) -> None:
        self._nbytes, self._at = len(data), 0
        self._words = np.zeros(len(data) // 8 + 2, "<u8")
        self._words.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)

    def take(self, widths: np.ndarray) -> np.ndarray:
        """Returns the next part's values, uint64 [N]. Raises ValueError where there are too few bytes."""
        end = self._at + kernels.total(widths)
        if end > 8 * self._nbytes:
            raise ValueError(f"{self._nbytes} bytes of low bits instead of {-(-end // 8)}")
        values = np.empty(len(widths), np.uint64)
        self._at = kernels.unpack_bits(self._words, widths, values, self._at)
        return values

    def finish(self) -> None:
        """Raises ValueError where bytes are left."""
        if -(-self._at // 8) != self._nbytes:
            raise ValueError(f"{self._nbytes} bytes of low bits instead of {-(-self._at // 8)}")


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
