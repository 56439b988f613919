"""An operator's client of a weight server, for `areal-q weights` and `areal-q status`."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import msgspec
import zmq

from areal_q import messages
from areal_q.errors import ConfigError, RecordError, WeightVersionError
from areal_q.messages import (
    ChunkReply,
    DeltasReply,
    FetchChunk,
    FetchDeltas,
    FetchHeld,
    FetchManifest,
    Gone,
    HeldReply,
    HeldVersion,
    Manifest,
    ManifestReply,
)
from buffer.weight_sync.curve import ClientKeys

TIMEOUT_S = 5.0
CHUNK_BYTES = 4 << 20
Reply = TypeVar("Reply", bound=messages.FetchReply)


class WeightClient:
    """Asks a learner or relay one question after the other.

    Every question raises WeightVersionError when nobody answers within TIMEOUT_S, or with what is no answer.
    """

    def __init__(self, announce: str, fetch: str, keys: ClientKeys | None) -> None:
        self._context = zmq.Context()
        self._fetch, self._announce, self._keys = fetch, announce, keys
        self._dealer = self._connect(zmq.DEALER, fetch)

    def held(self) -> HeldReply:
        """Returns the versions that the server remembers, and its counters."""
        return self._ask(FetchHeld(), HeldReply)[0]

    def manifest(self) -> Manifest | None:
        """Returns the newest version's manifest; None before the first version."""
        reply, _ = self._ask(FetchManifest(), ManifestReply)
        with self._named():
            return messages.decode_manifest(reply.manifest) if reply.manifest else None

    def changes(self, base: HeldVersion) -> dict[str, tuple[int, int]] | None:
        """Returns (elements changed, elements) by tensor, from `base` to the newest; None without a held
        delta."""
        from areal_q.weights import delta  # it needs torch, which no other question does

        request = FetchDeltas(epoch=base.epoch, base=base.version, base_digest=base.digest)
        reply, _ = self._ask(request, DeltasReply)
        newest = self.manifest()
        if not len(reply.deltas) == len(reply.sizes) == 1 or newest is None:
            return None
        if reply.deltas[0].digest != newest.digest:  # one more was published in between
            return None
        return delta.changed(newest, self._bytes(reply.digest, reply.sizes[0]))

    def follow(self) -> Iterator[tuple[messages.Broadcast, bytes]]:
        """Yields what is announced and its delta, empty where there is none, without end; what is no
        announcement is left out."""
        with self._connect(zmq.SUB, self._announce) as sub:
            sub.subscribe(b"")
            while True:
                told, *rest = sub.recv_multipart()
                with suppress(RecordError):
                    yield messages.decode_broadcast(told), b"".join(rest)

    def close(self) -> None:
        """Closes all sockets."""
        self._context.destroy(linger=0)

    def _bytes(self, digest: str, nbytes: int) -> bytes:
        chunks = []
        for at in range(0, nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, nbytes - at)
            request = FetchChunk(digest=digest, offset=at, nbytes=size)
            _, found = self._ask(request, ChunkReply)
            if sum(map(len, found)) != size:
                raise WeightVersionError(f"{self._fetch}: a piece of a delta is not {size} bytes")
            chunks += found
        return b"".join(chunks)

    def _ask(self, request: msgspec.Struct, awaited: type[Reply]) -> tuple[Reply, list[bytes]]:
        """Returns the answer to `request`, which must be of that type, and the frames that came with it."""
        self._dealer.send(messages.encode(request))
        if not self._dealer.poll(round(TIMEOUT_S * 1000)):
            raise WeightVersionError(f"{self._fetch}: no answer for {TIMEOUT_S:g} s")
        head, *rest = self._dealer.recv_multipart()
        with self._named():
            reply = messages.decode_reply(head)
        if isinstance(reply, Gone):
            raise WeightVersionError("what was being looked at is no longer held; ask again")
        if not isinstance(reply, awaited):
            raise WeightVersionError(f"{self._fetch}: {type(reply).__name__} is no answer")
        return reply, rest

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Turns what cannot be decoded into WeightVersionError, with the server's address."""
        try:
            yield
        except RecordError as error:
            raise WeightVersionError(f"{self._fetch}: {error}") from error

    def _connect(self, kind: int, endpoint: str) -> zmq.Socket:
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        if self._keys is not None:
            self._keys.apply(sock)
        try:
            sock.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot connect to {endpoint}: {error}") from error
        return sock
