"""Packs JSON and typed arrays into one chunk for the page; static/data.js reads what `pack_arrays` writes.

    gzip( uint32 n | n bytes of JSON {"meta": …, "arrays": [[name, dtype, offset, length], …]} | arrays )

Arrays are little-endian. Each begins at a multiple of 8 bytes after the JSON, which is padded likewise.
"""

import gzip
import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

_DTYPES = ("uint8", "int32", "float32", "float64")
_LEVEL = 6


def pack_arrays(meta: Any, arrays: Mapping[str, np.ndarray]) -> bytes:
    """Returns the chunk. Raises ValueError for an array whose dtype is not in _DTYPES."""
    entries, bodies, offset = [], [], 0
    for name, array in arrays.items():
        if array.dtype.name not in _DTYPES or array.ndim != 1:
            raise ValueError(f"{name}: {array.dtype.name} {list(array.shape)} cannot be in a chunk")
        body = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        entries.append([name, array.dtype.name, offset, len(array)])
        bodies.append(body + bytes(-len(body) % 8))
        offset += len(bodies[-1])
    header = msgspec.json.encode({"meta": meta, "arrays": entries})
    header += b" " * (-(len(header) + 4) % 8)
    # A time stamp would make two reports of the same run differ.
    return gzip.compress(
        struct.pack("<I", len(header)) + header + b"".join(bodies), _LEVEL, mtime=0
    )
