"""Bytes on their way to a worker, chunk by chunk: a whole version, or deltas to the version that it holds."""

from collections import deque
from itertools import accumulate

import torch
import xxhash
import zmq

from areal_q.errors import RecordError, WeightVersionError
from areal_q.messages import ChunkReply, Delta, DeltasReply, FetchChunk, Manifest
from areal_q.weights.version import Verifier, WeightVersion


class ChunkBuffer:
    """A buffer that chunks fill in any order: which are there, which were asked for, which are missing."""

    def __init__(self, digest: str, memory: memoryview, chunk_bytes: int) -> None:
        self.digest = digest
        self._memory = memory
        self._chunk_bytes = chunk_bytes
        self._missing = deque(range(0, len(memory), chunk_bytes))
        self._asked: dict[int, int] = {}

    @property
    def complete(self) -> bool:
        """True once every chunk has arrived."""
        return not self._missing and not self._asked

    @property
    def front(self) -> int:
        """Offset of the first byte that has not arrived: all before it are there."""
        return min([len(self._memory), *self._asked, *list(self._missing)[:1]])

    def next_requests(self, credit: int) -> list[FetchChunk]:
        """Returns the requests to send now, so that at most `credit` chunks are on their way."""
        requests = []
        while self._missing and len(self._asked) < credit:
            offset = self._missing.popleft()
            nbytes = min(self._chunk_bytes, len(self._memory) - offset)
            self._asked[offset] = nbytes
            requests.append(FetchChunk(digest=self.digest, offset=offset, nbytes=nbytes))
        return requests

    def ask_again(self) -> None:
        """Counts what was asked for as missing again, after its answers were lost with a connection."""
        self._missing.extendleft(sorted(self._asked, reverse=True))
        self._asked.clear()

    def receive(self, reply: ChunkReply, dealer: zmq.Socket) -> None:
        """Reads the chunk's bytes from `dealer` straight into place, without a copy.

        Raises RecordError for a chunk that was not asked for or has another number of bytes.
        """
        where = f"chunk at {reply.offset} of {reply.digest}"
        if reply.digest != self.digest or self._asked.get(reply.offset) != reply.nbytes:
            raise RecordError(f"{where} was not asked for")
        if not dealer.getsockopt(zmq.RCVMORE):
            raise RecordError(f"{where} has no bytes")
        place = self._memory[reply.offset : reply.offset + reply.nbytes]
        if (nbytes := dealer.recv_into(place)) != reply.nbytes:
            raise RecordError(f"{where} has {nbytes} of {reply.nbytes} bytes")
        del self._asked[reply.offset]


class ChunkedSnapshot:
    """A whole version on its way, hashed while it arrives."""

    def __init__(self, manifest: Manifest, payload: torch.Tensor, chunk_bytes: int) -> None:
        self._verifier = Verifier(manifest, payload)
        self.chunks = ChunkBuffer(manifest.digest, payload.numpy().data, chunk_bytes)

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
