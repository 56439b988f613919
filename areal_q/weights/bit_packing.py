"""Numbers as bytes: what areal_q/weights/delta_codec.py builds its streams of.

A number whose distribution is smooth is kept in two parts: a symbol of few kinds, which zstd's Huffman stage
brings close to its entropy, and low bits that are as good as uniform and kept as they are.
"""

from functools import cache

import numpy as np
import zstandard

from areal_q.weights import delta_kernels as kernels

ESCAPE = 255
LEVEL = 1
LARGEST_SYMBOL = 250


def shifts(sizes: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """uint8: low bits k of a gap, where `counts` of `sizes` elements are listed: the mean is 2^k · m, with
    4 ≤ m < 8 unless k is 0."""
    mean = sizes // np.maximum(1, counts)
    return np.maximum(0, np.frexp(mean.astype(np.float64))[1] - 3).astype(np.uint8)


def escaped(high: np.ndarray) -> bytes:
    """int64 [N] ≥ 0 as bytes, 255 meaning "255 more, and go on"."""
    ends = np.cumsum(high // ESCAPE + 1)
    tops = np.full(ends[-1] if len(ends) else 0, ESCAPE, np.uint8)
    tops[ends - 1] = high % ESCAPE
    return tops.tobytes()


def unescaped(tops: bytes, count: int) -> np.ndarray:
    """int64 [count]: the inverse of `escaped`."""
    symbols = np.frombuffer(tops, np.uint8)
    ends = np.flatnonzero(symbols != ESCAPE)
    if len(ends) != count or (len(symbols) and symbols[-1] == ESCAPE):
        raise ValueError(f"{len(ends)} gaps instead of {count}")
    return (np.diff(ends, prepend=-1) - 1) * ESCAPE + symbols[ends]


def split(sizes: np.ndarray, exact: bool) -> tuple[np.ndarray, np.ndarray]:
    """(symbols, widths of the low bits left open), uint8 [N], of uint64 [N] ≥ 1. `exact`, for sizes up to
    256: nothing is left open."""
    if exact:
        return (sizes - np.uint64(1)).astype(np.uint8), np.zeros(len(sizes), np.uint8)
    symbol, width = np.empty(len(sizes), np.uint8), np.empty(len(sizes), np.uint8)
    kernels.symbols(sizes, symbol, width)
    return symbol, width


def widths(symbol: np.ndarray, exact: bool) -> np.ndarray:
    """Of the low bits that each symbol leaves open, uint8. Raises ValueError for one that does not exist."""
    if exact:
        return np.zeros(len(symbol), np.uint8)
    if len(symbol) and symbol.max() > LARGEST_SYMBOL:
        raise ValueError(f"a step of symbol {symbol.max()}")
    return np.where(symbol < 7, 0, (symbol.astype(np.int16) - 7) // 4 + 1).astype(np.uint8)


def joined(symbol: np.ndarray, low: np.ndarray, exact: bool) -> np.ndarray:
    """uint64 [N]: the inverse of `split`."""
    if exact:
        return symbol.astype(np.uint64) + np.uint64(1)
    values = np.empty(len(symbol), np.uint64)
    kernels.values_of(symbol, low, values)
    return values


def packed(values: np.ndarray, widths: np.ndarray) -> bytes:
    """The low bits of uint64 [N], as many of each as uint8 [N] says, without padding between them."""
    out = np.zeros(-(-int(widths.sum(dtype=np.int64)) // 8), np.uint8)
    kernels.pack(values, widths, out)
    return out.tobytes()


def unpacked(data: bytes, widths: np.ndarray) -> np.ndarray:
    """uint64 [N]: the inverse of `packed`. Raises ValueError where there are more or fewer bytes."""
    nbytes = -(-int(widths.sum(dtype=np.int64)) // 8)
    if len(data) != nbytes:
        raise ValueError(f"{len(data)} bytes of low bits instead of {nbytes}")
    values = np.empty(len(widths), np.uint64)
    kernels.unpack(np.frombuffer(data, np.uint8), widths, values)
    return values


def ordered(codes: np.ndarray) -> np.ndarray:
    """Bit patterns of floats (unsigned) as unsigned integers in the order of their values, −0 below +0."""
    top = codes.dtype.type(1 << (8 * codes.itemsize - 1))
    return np.where(codes < top, codes + top, ~codes)


def unordered(numbers: np.ndarray) -> np.ndarray:
    """The inverse of `ordered`."""
    top = numbers.dtype.type(1 << (8 * numbers.itemsize - 1))
    return np.where(numbers >= top, numbers - top, ~numbers)


class Reader:
    """Takes one array after the other."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self._at = array, 0

    def take(self, length: int) -> np.ndarray:
        self._at += length
        return self._array[self._at - length : self._at]


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
    if not 0 <= size_of(data) <= limit:
        raise zstandard.ZstdError(f"frame of {size_of(data)} bytes")
    return zstandard.ZstdDecompressor(dict_data=dictionary).decompress(data)


def size_of(data: bytes) -> int:
    """The bytes that a frame unpacks to, as it says itself; -1 where it does not. Raises ZstdError for what is
    no frame."""
    return zstandard.frame_content_size(data)


def exactly(data: bytes, nbytes: int) -> np.ndarray:
    """uint8 [nbytes]. Raises ValueError where the frame holds more or fewer."""
    found = np.frombuffer(decompress(data, nbytes), np.uint8)
    if len(found) != nbytes:
        raise ValueError(f"stream of {len(found)}, not {nbytes} bytes")
    return found
