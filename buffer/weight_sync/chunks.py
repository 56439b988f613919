"""Bytes on their way to a worker, chunk by chunk: a whole version, or deltas to the version that it holds."""

from collections.abc import Callable
from itertools import accumulate

import numpy as np
import torch
import xxhash
import zmq

from areal_q.errors import RecordError, WeightVersionError
from areal_q.messages import ChunkReply, Delta, DeltasReply, FetchChunk, Manifest
from areal_q.weights.shared_memory import PIECE_BYTES, SharedReader
from areal_q.weights.version import Verifier, WeightVersion

SHARED_CHUNK_BYTES = 8 << 20
"""Size of a chunk that is read in the server's memory, so that few questions are needed."""


class ChunkBuffer:
    """A buffer that chunks fill in any order: which are there, which were asked for, which are missing."""

    def __init__(
        self,
        digest: str,
        memory: memoryview,
        chunk_bytes: int,
        reader: SharedReader | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        """`reader` reads the chunks in the server's memory, where that is possible. `on_bytes` is called while
        a chunk is copied, with the number of bytes from the front that are there."""
        self.digest = digest
        self._memory, self._reader, self._on_bytes = memory, reader, on_bytes
        self._chunk_bytes = chunk_bytes if reader is None else SHARED_CHUNK_BYTES
        # A range, since a publisher may claim any size: a list of its chunks would take memory and seconds.
        self._unasked = range(0, len(memory), self._chunk_bytes)
        self._lost: list[int] = []
        self._asked: dict[int, int] = {}

    @property
    def complete(self) -> bool:
        """True once every chunk has arrived."""
        return not (self._unasked or self._lost or self._asked)

    @property
    def front(self) -> int:
        """Offset of the first byte that has not arrived: all before it are there."""
        return min([len(self._memory), *self._asked, *self._lost, *self._unasked[:1]])

    def next_requests(self, credit: int) -> list[FetchChunk]:
        """Returns the requests to send now, so that at most `credit` chunks are on their way."""
        requests = []
        while (self._lost or self._unasked) and len(self._asked) < credit:
            if self._lost:
                offset = self._lost.pop(0)
            else:
                offset, self._unasked = self._unasked[0], self._unasked[1:]
            nbytes = min(self._chunk_bytes, len(self._memory) - offset)
            self._asked[offset] = nbytes
            requests.append(
                FetchChunk(
                    digest=self.digest,
                    offset=offset,
                    nbytes=nbytes,
                    shared=self._reader is not None,
                )
            )
        return requests

    def ask_again(self) -> None:
        """Counts what was asked for as missing again, after its answers were lost with a connection."""
        self._lost = sorted([*self._lost, *self._asked])
        self._asked.clear()

    def receive(self, reply: ChunkReply, dealer: zmq.Socket) -> None:
        """Copies the chunk's bytes into place, from the message or from the server's memory.

        Raises RecordError for a chunk that was not asked for or has another number of bytes, WeightVersionError
        for bytes that cannot be read or are not those of the version.
        """
        where = f"chunk at {reply.offset} of {reply.digest}"
        if reply.digest != self.digest or self._asked.get(reply.offset) != reply.nbytes:
            raise RecordError(f"{where} was not asked for")
        if reply.shared and self._reader is not None:
            self._copy(reply, self._reader.read_into)
        elif dealer.getsockopt(zmq.RCVMORE):
            frame = dealer.recv(copy=False).buffer
            if len(frame) != reply.nbytes:
                raise RecordError(f"{where} has {len(frame)} of {reply.nbytes} bytes")
            self._copy(reply, _reader_of(frame, reply.offset))
        else:
            raise RecordError(f"{where} has no bytes")
        del self._asked[reply.offset]

    def _copy(self, reply: ChunkReply, read_into: Callable[[memoryview, int], int]) -> None:
        """Copies a chunk in pieces that stay in the processor's cache until `on_bytes` has hashed them."""
        end = reply.offset + reply.nbytes
        on_bytes = self._on_bytes if reply.offset == self.front else None
        for start in range(reply.offset, end, PIECE_BYTES):
            place = self._memory[start : min(end, start + PIECE_BYTES)]
            if (nbytes := read_into(place, start)) != len(place):
                raise WeightVersionError(f"{nbytes} of {len(place)} bytes at {start} could be read")
            if on_bytes is not None:
                on_bytes(start + nbytes)


def _reader_of(frame: memoryview, offset: int) -> Callable[[memoryview, int], int]:
    """Returns a function that copies from `frame`, whose first byte is that at `offset`."""

    def read_into(place: memoryview, start: int) -> int:
        # numpy, other than memoryview, lets other threads run meanwhile.
        np.copyto(np.asarray(place), np.asarray(frame)[start - offset :][: len(place)])
        return len(place)

    return read_into


class ChunkedSnapshot:
    """A whole version on its way, hashed while it arrives."""

    def __init__(
        self,
        manifest: Manifest,
        payload: torch.Tensor,
        chunk_bytes: int,
        reader: SharedReader | None = None,
    ) -> None:
        self._verifier = Verifier(manifest, payload)
        memory = payload.numpy().data
        self.chunks = ChunkBuffer(
            manifest.digest, memory, chunk_bytes, reader, self._verifier.advance
        )

    def advance(self) -> WeightVersion | None:
        """Hashes what has arrived since the last call; returns the version once it is complete, else None.

        Raises WeightVersionError as soon as a tensor does not hash to its digest.
        """
        self._verifier.advance(self.chunks.front)
        return self._verifier.finish() if self.chunks.complete else None


class ChunkedDeltas:
    """Deltas on their way, from the version held to the newest; hashed at the end, for they are small."""

    def __init__(self, reply: DeltasReply, chunk_bytes: int) -> None:
        self._reply = reply
        self._memory = memoryview(bytearray(sum(reply.sizes)))
        self.chunks = ChunkBuffer(reply.digest, self._memory, chunk_bytes)

    def advance(self) -> list[tuple[Delta, bytes]] | None:
        """Returns (header, bytes) of each delta, in the order to apply them, once all have arrived; else None.

        Raises WeightVersionError if all of them together do not hash to their digest.
        """
        if not self.chunks.complete:
            return None
        if xxhash.xxh3_128_hexdigest(self._memory) != self._reply.digest:
            raise WeightVersionError(f"deltas do not hash to {self._reply.digest}")
        ends = accumulate(self._reply.sizes)
        bodies = [
            bytes(self._memory[e - n : e]) for e, n in zip(ends, self._reply.sizes, strict=True)
        ]
        return list(zip(self._reply.deltas, bodies, strict=True))
