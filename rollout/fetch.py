"""Fetches the learner's newest version in full: its manifest, then its payload in chunks.

idle ──start──▶ manifest asked ──▶ chunks asked, `credit` at a time ──▶ hashes verified ──▶ idle
  ▲                  ▲  │ ▲                 │ │ overdue: reconnect, ask again
  └── not wanted ────┼──┘ └───── gone ──────┘ │
                     └── rest ◀── mismatch ───┘
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import xxhash
import zmq

from areal_q import messages
from areal_q.errors import RecordError, WeightVersionError
from areal_q.messages import ChunkReply, FetchChunk, FetchManifest, Gone, Manifest, ManifestReply
from areal_q.payloads import PayloadPool
from areal_q.weights import WeightVersion, check, unpack

logger = logging.getLogger(__name__)

MAX_MANIFEST_BYTES = 64 << 20
FIRST_REST_S = 0.1


@dataclass
class FetchStats:
    """Counts since the start; written by the receiver's thread only."""

    fetches: int = 0
    """Payloads fetched in full"""
    fetched_bytes: int = 0
    retries: int = 0
    """Answers that were overdue, each met by a new connection and a repeated question"""
    gone: int = 0
    """Fetches that began again because the learner no longer held the version"""
    mismatches: int = 0
    """Versions refused because a hash differed or the manifest contradicts itself"""
    refused: int = 0
    """Frames that were no awaited answer"""


class _Partial:
    """A payload under way: chunks to ask for, chunks asked for, and the buffer that they fill."""

    def __init__(self, manifest: Manifest, pool: PayloadPool, chunk_bytes: int) -> None:
        self.manifest = manifest
        self.payload = pool.lend(manifest.nbytes)
        self._memory = self.payload.numpy().data
        self._chunk_bytes = chunk_bytes
        self._missing = deque(range(0, manifest.nbytes, chunk_bytes))
        self._asked: dict[int, int] = {}

    @property
    def complete(self) -> bool:
        return not self._missing and not self._asked

    def next_requests(self, credit: int) -> list[FetchChunk]:
        requests = []
        while self._missing and len(self._asked) < credit:
            offset = self._missing.popleft()
            nbytes = min(self._chunk_bytes, self.manifest.nbytes - offset)
            self._asked[offset] = nbytes
            requests.append(FetchChunk(digest=self.manifest.digest, offset=offset, nbytes=nbytes))
        return requests

    def ask_again(self) -> None:
        self._missing.extendleft(reversed(self._asked))
        self._asked.clear()

    def receive(self, reply: ChunkReply, dealer: zmq.Socket) -> None:
        """Reads the chunk's bytes into place. Raises RecordError for what was not asked for."""
        where = f"chunk at {reply.offset} of {reply.digest}"
        known = reply.digest == self.manifest.digest
        if not known or self._asked.get(reply.offset) != reply.nbytes:
            raise RecordError(f"{where} was not asked for")
        if not dealer.getsockopt(zmq.RCVMORE):
            raise RecordError(f"{where} has no bytes")
        place = self._memory[reply.offset : reply.offset + reply.nbytes]
        if (nbytes := dealer.recv_into(place)) != reply.nbytes:
            raise RecordError(f"{where} has {nbytes} of {reply.nbytes} bytes")
        del self._asked[reply.offset]


def _manifest_of(reply: ManifestReply) -> Manifest | None:
    if reply.manifest is None:
        return None
    if xxhash.xxh3_128_hexdigest(reply.manifest) != reply.checksum:
        raise WeightVersionError("a manifest does not hash to its checksum")
    return messages.decode_manifest(reply.manifest)


class Fetcher:
    """One fetch at a time over one DEALER, which it replaces when an answer is overdue.

    Not thread-safe: lives on the receiver's thread, and its socket in the receiver's poller.
    `wanted` is asked before a payload is fetched.
    """

    def __init__(
        self,
        context: zmq.Context,
        poller: zmq.Poller,
        endpoint: str,
        wanted: Callable[[Manifest], bool],
        *,
        chunk_bytes: int,
        credit: int,
        timeout_s: float,
        max_payload_bytes: int,
    ) -> None:
        self.stats = FetchStats()
        self.pool = PayloadPool()
        self._context, self._poller, self.endpoint = context, poller, endpoint
        self._wanted = wanted
        self._chunk_bytes, self._credit = chunk_bytes, credit
        self._timeout_s = timeout_s
        self._max_payload_bytes = max_payload_bytes
        self._partial: _Partial | None = None
        self._resting = False
        self._failures = 0
        self.due_s = math.inf
        """Monotonic time by which `on_due` wants to be called; infinite while idle"""
        self.dealer = self._connect()

    def start(self) -> None:
        """Asks for the newest version, unless a fetch is under way already."""
        if self.due_s == math.inf:
            self._ask_manifest()

    def on_due(self) -> None:
        """An answer is overdue, or a rest is over."""
        if self._resting:
            self._ask_manifest()
            return
        self.stats.retries += 1
        self._failures += 1
        if self._failures == 1:
            logger.warning("no answer about weights for %.1f s; reconnecting", self._timeout_s)
        self._poller.unregister(self.dealer)
        self.dealer.close(linger=0)
        self.dealer = self._connect()
        if self._partial is None:
            self._ask_manifest()
        else:
            self._partial.ask_again()
            self._ask_chunks(self._partial)

    def read(self) -> WeightVersion | None:
        """Reads what has arrived; a complete, verified version if the last chunk was among it."""
        with suppress(zmq.Again):
            while True:
                frame = self.dealer.recv(zmq.NOBLOCK)
                try:
                    if (version := self._on_reply(frame)) is not None:
                        return version
                except RecordError as error:
                    self.stats.refused += 1
                    logger.debug("reply refused: %s", error)
                except WeightVersionError as error:
                    self._rest(error)
                finally:
                    while self.dealer.getsockopt(zmq.RCVMORE):
                        self.dealer.recv_into(bytearray())
        return None

    def _on_reply(self, frame: bytes) -> WeightVersion | None:
        reply = messages.decode_reply(frame)
        partial = self._partial
        match reply:
            case ManifestReply() if partial is None and self.due_s < math.inf:
                return self._begin(_manifest_of(reply))
            case Gone() if partial is not None and reply.digest == partial.manifest.digest:
                self.stats.gone += 1
                self._ask_manifest()
            case ChunkReply() if partial is not None:
                partial.receive(reply, self.dealer)
                return self._advance(partial)
            case _:
                raise RecordError(f"{type(reply).__name__} was not asked for")
        return None

    def _begin(self, manifest: Manifest | None) -> WeightVersion | None:
        if manifest is None or not self._wanted(manifest):
            self._idle()
            return None
        check(manifest)
        if manifest.nbytes > self._max_payload_bytes:
            raise WeightVersionError(
                f"version {manifest.version}: {manifest.nbytes} bytes are over the limit"
            )
        self._partial = _Partial(manifest, self.pool, self._chunk_bytes)
        return self._advance(self._partial)

    def _advance(self, partial: _Partial) -> WeightVersion | None:
        """After each chunk: more questions, or the end."""
        if not partial.complete:
            self._ask_chunks(partial)
            return None
        version = unpack(partial.manifest, partial.payload)
        self.stats.fetches += 1
        self.stats.fetched_bytes += partial.manifest.nbytes
        if self._failures:
            logger.info("the learner answers again: version %d fetched", version.manifest.version)
        self._failures = 0
        self._idle()
        return version

    def _ask_manifest(self) -> None:
        self._partial, self._resting = None, False
        self._send(FetchManifest())

    def _ask_chunks(self, partial: _Partial) -> None:
        for request in partial.next_requests(self._credit):
            self._send(request)
        self.due_s = time.monotonic() + self._timeout_s

    def _send(self, request: messages.FetchRequest) -> None:
        self.due_s = time.monotonic() + self._timeout_s
        with suppress(zmq.Again):  # the queue to a lost peer is full: the answer will be overdue
            self.dealer.send(messages.encode(request), zmq.NOBLOCK)

    def _idle(self) -> None:
        self._partial, self._resting, self.due_s = None, False, math.inf

    def _rest(self, error: WeightVersionError) -> None:
        """Tries again after a pause that doubles, up to `timeout_s`, while it keeps happening."""
        self.stats.mismatches += 1
        logger.warning("fetched weights refused, fetching again: %s", error)
        rest_s = min(self._timeout_s, FIRST_REST_S * 2**self._failures)
        self._failures = min(self._failures + 1, 16)
        self._partial, self._resting, self.due_s = None, True, time.monotonic() + rest_s

    def _connect(self) -> zmq.Socket:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.MAXMSGSIZE, max(self._chunk_bytes, MAX_MANIFEST_BYTES))
        dealer.connect(self.endpoint)
        self._poller.register(dealer, zmq.POLLIN)
        return dealer
