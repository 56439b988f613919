"""Answers what workers ask the weight server: the newest manifest, deltas to it, chunks, and what is held."""

import logging
from collections import deque
from contextlib import suppress
from dataclasses import asdict

import zmq

from areal_q import messages
from areal_q.config import BroadcastConfig
from areal_q.errors import RecordError
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
from areal_q.weights.version import WeightVersion
from buffer.weight_sync.stats import ServerStats
from buffer.weight_sync.version_store import (
    CatchUp,
    DeltaChain,
    DeltaLink,
    VersionStore,
    catch_up,
)

logger = logging.getLogger(__name__)

MAX_CHUNK_BYTES = 64 << 20
"""Largest chunk that a worker may ask for."""
QUEUED_REPLIES = 4 * messages.MAX_CREDIT
"""Most replies that wait for one worker before ZeroMQ drops further ones. ZeroMQ learns of what was read
only after half of the queue, so less than twice the credit would drop replies to an honest worker."""
REQUESTS_PER_TURN = 256
"""Most requests answered before the heartbeat gets its turn again."""
KEPT_CATCH_UPS = 4
"""Number of catch-ups that stay fetchable, newest use last."""
LEASE_S = 2.0
"""Seconds after its last request for which a version counts as being fetched."""
_NO_VERSION = messages.encode(ManifestReply(manifest=None))


class RequestHandler:
    """Owns the ROUTER socket and what can be fetched over it; lives on the weight server's thread.

    No send blocks: a reply to a peer that is gone, or QUEUED_REPLIES behind, is dropped, and the worker asks
    again. Deltas for workers at the same version are put together once.
    docs/weights.md has the full list, with the test that shows each.
    """

    def __init__(self, router: zmq.Socket, stats: ServerStats, config: BroadcastConfig) -> None:
        self._router, self._stats = router, stats
        self._versions = VersionStore(config.hold, LEASE_S)
        self._deltas = DeltaChain(config.hold_deltas, config.max_delta_bytes)
        self._history: deque[Manifest] = deque(maxlen=max(config.hold, config.hold_deltas))
        self._catch_ups: dict[tuple[str, str], CatchUp] = {}
        """The last KEPT_CATCH_UPS catch-ups, by the digests of the versions that they lead from and to."""

    def add_version(self, version: WeightVersion, link: DeltaLink | None) -> None:
        """Makes `version` the newest that can be fetched; `link` is the delta to it, if there is one."""
        self._versions.add(version)
        self._deltas.add(link)
        self._history.append(version.manifest)

    def answer_requests(self) -> None:
        """Reads the requests that have arrived and answers them."""
        with suppress(zmq.Again):
            for _ in range(REQUESTS_PER_TURN):
                peer, *frames = self._router.recv_multipart(zmq.NOBLOCK)
                try:
                    if len(frames) != 1:
                        raise RecordError(f"request of {len(frames)} frames")
                    self._reply(peer, messages.decode_request(frames[0]))
                except RecordError as error:
                    self._stats.refused += 1
                    logger.debug("request refused: %s", error)

    def close(self) -> None:
        """Lets go of all versions."""
        self._versions.clear()

    def _reply(self, peer: bytes, request: messages.FetchRequest) -> None:
        match request:
            case FetchManifest():
                newest = self._versions.use_newest()
                self._stats.fetches += newest is not None
                self._send(peer, newest.reply if newest else _NO_VERSION)
            case FetchDeltas():
                self._catch_up(peer, request)
            case FetchChunk():
                self._send_chunk(peer, request)
            case FetchHeld():
                held = [self._describe(manifest) for manifest in self._history]
                reply = HeldReply(versions=held, stats=asdict(self._stats))
                self._send(peer, messages.encode(reply))

    def _catch_up(self, peer: bytes, request: FetchDeltas) -> None:
        links = self._deltas.since(request.epoch, request.base, request.base_digest)
        if not links or sum(len(link.body) for link in links) >= links[-1].new.nbytes:
            self._send(peer, messages.encode(DeltasReply()))
            return
        key = links[0].base.digest, links[-1].new.digest
        made = self._catch_ups.pop(key, None) or catch_up(links)
        self._catch_ups[key] = made
        while len(self._catch_ups) > KEPT_CATCH_UPS:
            self._catch_ups.pop(next(iter(self._catch_ups)))
        self._stats.catch_ups += 1
        reply = DeltasReply(deltas=made.headers, sizes=made.sizes, digest=made.digest)
        self._send(peer, messages.encode(reply))

    def _send_chunk(self, peer: bytes, request: FetchChunk) -> None:
        held = self._versions.use(request.digest)
        made = self._catch_ups.values()
        bodies = (memoryview(one.body) for one in made if one.digest == request.digest)
        memory = held.memory if held else next(bodies, None)
        if memory is None:
            self._stats.gone += 1
            self._send(peer, messages.encode(Gone(digest=request.digest)))
            return
        start, end = request.offset, request.offset + request.nbytes
        if not (0 <= start < end <= len(memory) and request.nbytes <= MAX_CHUNK_BYTES):
            raise RecordError(f"chunk {start}:{end} of {len(memory)} bytes")
        header = ChunkReply(
            digest=request.digest, offset=start, nbytes=request.nbytes, shared=request.shared
        )
        frames = () if request.shared else (memory[start:end],)
        self._send(peer, messages.encode(header), *frames)
        self._stats.chunks += 1
        self._stats.chunk_bytes += request.nbytes

    def _describe(self, manifest: Manifest) -> HeldVersion:
        link = self._deltas.into(manifest.epoch, manifest.version)
        return HeldVersion(
            epoch=manifest.epoch,
            version=manifest.version,
            digest=manifest.digest,
            format=manifest.format,
            nbytes=manifest.nbytes,
            held=self._versions.has(manifest.digest),
            delta_bytes=len(link.body) if link else None,
            base=link.base.version if link else None,
            base_digest=link.base.digest if link else None,
            published_s=manifest.published_s,
        )

    def _send(self, peer: bytes, *frames: bytes | memoryview) -> None:
        # A ROUTER drops what it cannot deliver (peer gone or too far behind): this never blocks.
        self._router.send_multipart([peer, *frames], copy=False)
