"""Answers workers' requests: manifests, catching up by deltas, chunks, and what is held."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict

import xxhash
import zmq

from areal_q import messages
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
from areal_q.weights import delta
from areal_q.weights.version import WeightVersion
from buffer.weight_sync.stats import ServerStats
from buffer.weight_sync.version_store import (
    CatchUp,
    DeltaChain,
    DeltaLink,
    VersionStore,
    build_catch_up,
)

logger = logging.getLogger(__name__)

MAX_CHUNK_BYTES = 64 << 20
QUEUED_REPLIES = 4 * messages.MAX_CREDIT
"""Replies that wait for one worker before ZeroMQ drops further ones. ZeroMQ learns of what was read
only after half of the queue, so less than twice the credit would drop replies to an honest worker."""
REQUESTS_PER_TURN = 256
"""Requests answered before the heartbeat gets its turn again."""
KEPT_CATCH_UPS = 4
WAITING_WORKERS = 1024
"""Questions for deltas that wait for an answer to be put together; further ones go unanswered."""


class RequestHandler:
    """Owns the ROUTER; lives on the server's thread.

    Delivery, told plainly (shown by tests/test_broadcast*.py and tests/weight_sync/test_catch_up.py):
    - A reply may be lost (peer gone, or over QUEUED_REPLIES behind). The worker asks again. No send blocks.
    - Chunks are sent without copying; those queued for a worker keep what they are part of in memory.
    - What brings a worker from an older version to the newest is put together once for all workers that
      stand there, on a thread of its own (test_many_workers_behind_are_served_by_one_catch_up); the last
      KEPT_CATCH_UPS of these stay fetchable. Where it would cost more than a snapshot, or the version is
      older than the deltas held, the answer is: none.
    - Whoever asks for what is no longer held gets Gone
      (test_a_request_for_a_version_that_went_is_answered_with_gone).
    - A frame that is no request is counted and ignored
      (test_requests_that_are_none_are_counted_and_change_nothing).
    """

    def __init__(
        self,
        router: zmq.Socket,
        stats: ServerStats,
        versions: VersionStore,
        deltas: DeltaChain,
        history: int,
        wake: Callable[[], None],
    ) -> None:
        self._router, self._stats, self._wake = router, stats, wake
        self._versions, self._deltas = versions, deltas
        self._history: list[Manifest] = []
        self._history_length = history
        self._composer = ThreadPoolExecutor(1, "composer")
        self._catch_ups: dict[tuple[str, int, int], Future[CatchUp]] = {}
        """By epoch and the versions they lead from and to, the last KEPT_CATCH_UPS"""
        self._waiting: list[tuple[bytes, Future[CatchUp]]] = []

    def add_version(
        self, version: WeightVersion, base: WeightVersion | None, body: bytes | None
    ) -> None:
        """From now on `version` is the newest; `body` leads to it from `base`."""
        self._versions.add(version)
        link = None
        if base is not None and body is not None:
            # On the thread that will add deltas up, which so never waits for it.
            plain = self._composer.submit(delta.plain, base, body)
            link = DeltaLink(base.manifest, version.manifest, len(body), plain)
        self._deltas.add(link)
        self._history = [*self._history, version.manifest][-self._history_length :]

    def answer_requests(self) -> None:
        """Reads the requests that have arrived, and answers those that can be answered at once."""
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

    def send_ready_catch_ups(self) -> None:
        """Tells those who wait for deltas that were put together meanwhile."""
        ready = [(peer, made) for peer, made in self._waiting if made.done()]
        self._waiting = [(peer, made) for peer, made in self._waiting if not made.done()]
        for peer, made in ready:
            self._send_catch_up(peer, made.result())

    def close(self) -> None:
        self._composer.shutdown(cancel_futures=True)
        self._versions.clear()

    def _reply(self, peer: bytes, request: messages.FetchRequest) -> None:
        match request:
            case FetchManifest():
                newest = self._versions.use_newest()
                self._stats.fetches += newest is not None
                self._send(peer, messages.encode(_manifest_reply(newest and newest.manifest)))
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
        if not links or len(self._waiting) >= WAITING_WORKERS:
            self._send(peer, messages.encode(DeltasReply()))
            return
        key = request.epoch, request.base, links[-1].new.version
        made = self._catch_ups.pop(key, None)
        if made is None:
            made = self._composer.submit(build_catch_up, links)
            made.add_done_callback(lambda _: self._wake())
        self._catch_ups[key] = made
        while len(self._catch_ups) > KEPT_CATCH_UPS:
            self._catch_ups.pop(next(iter(self._catch_ups)))
        if made.done():
            self._send_catch_up(peer, made.result())
        else:
            self._waiting.append((peer, made))

    def _send_catch_up(self, peer: bytes, made: CatchUp) -> None:
        newest = self._versions.newest
        if newest is None or len(made.body) >= newest.manifest.nbytes:
            self._send(peer, messages.encode(DeltasReply()))
            return
        self._stats.catch_ups += 1
        reply = DeltasReply(deltas=made.headers, sizes=made.sizes, digest=made.digest)
        self._send(peer, messages.encode(reply))

    def _send_chunk(self, peer: bytes, request: FetchChunk) -> None:
        memory = self._memory_of(request.digest)
        if memory is None:
            self._stats.gone += 1
            self._send(peer, messages.encode(Gone(digest=request.digest)))
            return
        start, end = request.offset, request.offset + request.nbytes
        if not (0 <= start < end <= len(memory) and request.nbytes <= MAX_CHUNK_BYTES):
            raise RecordError(f"chunk {start}:{end} of {len(memory)} bytes")
        header = ChunkReply(digest=request.digest, offset=start, nbytes=request.nbytes)
        self._send(peer, messages.encode(header), memory[start:end])
        self._stats.chunks += 1
        self._stats.chunk_bytes += request.nbytes

    def _memory_of(self, digest: str) -> memoryview | None:
        if (held := self._versions.use(digest)) is not None:
            return held.memory
        for made in self._catch_ups.values():
            if made.done() and made.result().digest == digest:
                return memoryview(made.result().body)
        return None

    def _describe(self, manifest: Manifest) -> HeldVersion:
        link = self._deltas.into(manifest.epoch, manifest.version)
        return HeldVersion(
            epoch=manifest.epoch,
            version=manifest.version,
            digest=manifest.digest,
            format=manifest.format,
            nbytes=manifest.nbytes,
            held=self._versions.has(manifest.digest),
            delta_bytes=link.nbytes if link else None,
            base=link.base.version if link else None,
            base_digest=link.base.digest if link else None,
            published_s=manifest.published_s,
        )

    def _send(self, peer: bytes, *frames: bytes | memoryview) -> None:
        # A ROUTER drops what it cannot deliver (peer gone or too far behind): this never blocks.
        self._router.send_multipart([peer, *frames], copy=False)


def _manifest_reply(manifest: Manifest | None) -> ManifestReply:
    if manifest is None:
        return ManifestReply(manifest=None)
    encoded = messages.encode(manifest)
    return ManifestReply(manifest=encoded, checksum=xxhash.xxh3_128_hexdigest(encoded))
