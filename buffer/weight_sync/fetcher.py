"""Fetches what a worker lacks: deltas to the version it holds if they are to be had, else a whole version.

idle ──start──▶ deltas asked ──▶ chunks asked, `credit` at a time ──▶ hashes verified ──▶ idle
  ▲         │        │ none             ▲   │ │ overdue: reconnect, ask again
  │         └─▶ manifest asked ─────────┘   │ │ gone: rest, then the same question again
  └── not wanted ────┘  ▲                   │
                        └── rest ◀── mismatch
"""

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress

import xxhash
import zmq

from areal_q import messages
from areal_q.config import BroadcastConfig
from areal_q.errors import RecordError, WeightVersionError
from areal_q.messages import (
    ChunkReply,
    Delta,
    DeltasReply,
    FetchDeltas,
    FetchManifest,
    Gone,
    Manifest,
    ManifestReply,
    SharedFile,
)
from areal_q.weights.shared_memory import SharedReader
from areal_q.weights.version import PayloadPool, WeightVersion, check_version
from buffer.weight_sync.chunks import ChunkBuffer, ChunkedDeltas, ChunkedSnapshot
from buffer.weight_sync.curve import ClientKeys
from buffer.weight_sync.stats import FetchStats

logger = logging.getLogger(__name__)

Fetched = WeightVersion | list[tuple[Delta, bytes]]
"""A verified version, or (header, bytes) of each delta that leads to one."""
MAX_MANIFEST_BYTES = 64 << 20
"""Largest answer that is accepted, unless chunks are larger."""
MAX_PAYLOAD_BYTES = 64 << 30
"""Largest version that is fetched."""
FIRST_REST_S = 0.1
"""Seconds of the first pause after fetched bytes were refused, and of each after they had gone"""
REPLIES_PER_TURN = 256
"""Most answers read before the subscriber gets its turn again: there is no end to what a liar may send."""


class Fetcher:
    """Fetches one thing at a time over one DEALER socket, which it replaces when an answer is overdue.

    What is lost is asked for again, what answers no question is refused, and what does not hash to its manifest
    is fetched anew after rests that double; at most `credit` chunks are on their way. docs/weights.md has the
    full list, with the test that shows each. Not thread-safe: it lives on the subscriber's thread, its socket
    in the subscriber's poller.

    `wanted` is asked before a payload is fetched. An answer is overdue after `timeout_s`, which doubles with
    every failure in a row, up to four times that: a chunk that a slow line needs longer for still arrives.
    """

    def __init__(
        self,
        context: zmq.Context,
        poller: zmq.Poller,
        endpoint: str,
        wanted: Callable[[Manifest], bool],
        config: BroadcastConfig,
        keys: ClientKeys | None,
    ) -> None:
        self.stats = FetchStats()
        self.pool = PayloadPool()
        self._context, self._poller, self.endpoint = context, poller, endpoint
        self._wanted, self._keys = wanted, keys
        self._chunk_bytes = config.chunk_bytes
        self._credit = min(config.credit, messages.MAX_CREDIT)
        self._timeout_s = config.timeout_s
        self._max_delta_bytes = config.max_delta_bytes
        self._work: ChunkedSnapshot | ChunkedDeltas | None = None
        self._question: FetchManifest | FetchDeltas = FetchManifest()
        self._resting = False
        self._failures = 0
        self._refusals = 0
        """How often in a row what came was refused; chunks that fit between two do not end that"""
        self.due_s = math.inf
        """Monotonic time at which `on_due` wants to be called; infinite while idle."""
        self.dealer = self._connect()

    def __str__(self) -> str:
        if self._work is not None:
            return f"{self._work.chunks.front:,} bytes in order fetched"
        return "resting" if self._resting else "nothing asked" if self.idle else "no answer"

    @property
    def idle(self) -> bool:
        """True while no fetch is under way."""
        return self.due_s == math.inf

    def start(self, base: Manifest | None) -> None:
        """Begins a fetch of the deltas from `base` to the newest version, or of a whole version if `base` is
        None.

        Does nothing while a fetch is under way already.
        """
        if not self.idle:
            return
        if base is None or not self._max_delta_bytes:
            self._ask(FetchManifest())
        else:
            self._ask(FetchDeltas(epoch=base.epoch, base=base.version, base_digest=base.digest))

    def on_due(self) -> None:
        """Asks again: an answer is overdue, which costs the connection, or a rest is over."""
        if self._resting:
            self._ask(self._question)
            return
        self.stats.retries += 1
        self._failures += 1
        if self._failures == 1:
            logger.warning("no answer about weights for %.1f s; reconnecting", self._timeout_s)
        self._poller.unregister(self.dealer)
        self.dealer.close(linger=0)
        self.dealer = self._connect()
        if self._work is None:
            self._ask(self._question)
        else:
            self._work.chunks.ask_again()
            self._ask_chunks(self._work.chunks)

    def read(self) -> Fetched | None:
        """Reads what has arrived; returns what is complete and verified if the last chunk was among it."""
        with suppress(zmq.Again):
            for _ in range(REPLIES_PER_TURN):
                frame = self.dealer.recv(zmq.NOBLOCK)
                try:
                    if (result := self._on_reply(frame)) is not None:
                        return result
                except RecordError as error:
                    self.stats.refused += 1
                    logger.debug("reply refused: %s", error)
                except Exception as error:  # whatever a publisher says, the thread goes on
                    self._refuse(error)
                finally:
                    while self.dealer.getsockopt(zmq.RCVMORE):
                        self.dealer.recv_into(bytearray())
        return None

    def _on_reply(self, frame: bytes) -> Fetched | None:
        reply = messages.decode_reply(frame)
        work = self._work
        asked = self._question if work is None and not self.idle and not self._resting else None
        match reply:
            case ManifestReply() if isinstance(asked, FetchManifest):
                return self._begin(reply)
            case DeltasReply() if isinstance(asked, FetchDeltas):
                return self._catch_up(reply)
            case Gone() if work is not None and reply.digest == work.chunks.digest:
                self.stats.gone += 1
                # A server that never has what it tells of is not asked without end.
                self._rest(FIRST_REST_S)
            case ChunkReply() if work is not None:
                work.chunks.receive(reply, self.dealer)
                self._failures = min(self._failures, 1)
                return self._advance(work)
            case _:
                raise RecordError(f"{type(reply).__name__} was not asked for")
        return None

    def _begin(self, reply: ManifestReply) -> Fetched | None:
        if reply.manifest is None:
            # It was told of a version, so that it would be asked again at once.
            self._rest(FIRST_REST_S)
            return None
        if xxhash.xxh3_128_hexdigest(reply.manifest) != reply.checksum:
            raise WeightVersionError("a manifest does not hash to its checksum")
        try:
            manifest = messages.decode_manifest(reply.manifest)
        except RecordError as error:
            raise WeightVersionError(f"a manifest that is none: {error}") from error
        check_version(manifest)
        if not self._wanted(manifest):
            self._idle()
            return None
        if manifest.nbytes > MAX_PAYLOAD_BYTES:
            raise WeightVersionError(
                f"version {manifest.version}: {manifest.nbytes} bytes are over the limit"
            )
        payload = self.pool.lend(manifest.nbytes)
        reader = self._reader_of(reply.shared)
        work = self._work = ChunkedSnapshot(manifest, payload, self._chunk_bytes, reader)
        return self._advance(work)

    def _reader_of(self, file: SharedFile | None) -> SharedReader | None:
        """Returns a reader of the server's memory; None where the bytes have to come over the socket. They do
        after bytes were refused: a server that is slow to answer may have reused its memory."""
        if file is None or self._failures:
            return None
        try:
            return SharedReader(file)
        except OSError as error:
            logger.debug("the server's memory cannot be read, weights come by socket: %s", error)
            return None

    def _catch_up(self, reply: DeltasReply) -> None:
        if not reply.deltas:
            self._ask(FetchManifest())
            return
        total = sum(reply.sizes)
        fits = len(reply.sizes) == len(reply.deltas) and min(reply.sizes) > 0
        if not fits or total > self._max_delta_bytes:
            raise WeightVersionError(f"{len(reply.deltas)} deltas of {total} bytes")
        self._work = ChunkedDeltas(reply, self._chunk_bytes)
        self._ask_chunks(self._work.chunks)

    def _advance(self, work: ChunkedSnapshot | ChunkedDeltas) -> Fetched | None:
        """Asks for the next chunks, or ends the fetch if all are there."""
        self._ask_chunks(work.chunks)
        result = work.advance()
        if result is None:
            return None
        if isinstance(result, WeightVersion):
            self.stats.fetches += 1
            self.stats.fetched_bytes += result.manifest.nbytes
        else:
            self.stats.catch_ups += 1
            self.stats.catch_up_bytes += sum(len(body) for _, body in result)
        if self._failures:
            logger.info("the learner answers again about weights")
        self._failures = self._refusals = 0
        self._idle()
        return result

    def _ask(self, question: FetchManifest | FetchDeltas) -> None:
        self._work, self._resting, self._question = None, False, question
        self._send(question)

    def _ask_chunks(self, chunks: ChunkBuffer) -> None:
        for request in chunks.next_requests(self._credit):
            self._send(request)
        self.due_s = time.monotonic() + self._patience_s

    def _send(self, request: messages.FetchRequest) -> None:
        self.due_s = time.monotonic() + self._patience_s
        with suppress(zmq.Again):  # the queue to a lost peer is full: the answer will be overdue
            self.dealer.send(messages.encode(request), zmq.NOBLOCK)

    @property
    def _patience_s(self) -> float:
        return self._timeout_s * 2 ** min(self._failures, 2)

    def _idle(self) -> None:
        self._work, self._resting, self.due_s = None, False, math.inf

    def _refuse(self, error: Exception) -> None:
        """Tries again, in full, after a pause that doubles up to `timeout_s` while it keeps happening."""
        self.stats.mismatches += 1
        foreseen = isinstance(error, WeightVersionError)
        logger.warning("fetched weights refused, fetching again: %s", error, exc_info=not foreseen)
        rest_s = min(self._timeout_s, FIRST_REST_S * 2**self._refusals)
        self._refusals = min(self._refusals + 1, 16)
        self._failures = max(self._failures, 1)
        self._question = FetchManifest()
        self._rest(rest_s)

    def _rest(self, seconds: float) -> None:
        self._work, self._resting, self.due_s = None, True, time.monotonic() + seconds

    def _connect(self) -> zmq.Socket:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.MAXMSGSIZE, max(self._chunk_bytes, MAX_MANIFEST_BYTES))
        if self._keys is not None:
            self._keys.apply(dealer)
        dealer.connect(self.endpoint)
        self._poller.register(dealer, zmq.POLLIN)
        return dealer
