"""Readers of what the product writes for others: the log of tokens, and the chunks of the report's page."""

import gzip
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from buffer.logs.parquet_log import row_groups
from buffer.logs.token_log import TOKEN_LOG_FORMAT


def iter_tokens(directory: Path) -> Iterator[tuple[int, pa.Table]]:
    """Yields (step, its rows) of a log of tokens, in order."""
    for rows in row_groups(directory, TOKEN_LOG_FORMAT):
        yield rows.step, rows.read()


def unpack_arrays(chunk: bytes) -> tuple[Any, dict[str, np.ndarray]]:
    """Returns the (meta, arrays) that `pack_arrays` was given."""
    data = gzip.decompress(chunk)
    (length,) = struct.unpack_from("<I", data)
    start = 4 + length
    header = msgspec.json.decode(data[4:start])
    arrays = {
        name: np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), count, start + offset)
        for name, dtype, offset, count in header["arrays"]
    }
    return header["meta"], arrays
