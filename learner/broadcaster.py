"""Publishes versions of the weights over ZeroMQ, from a thread of its own.

    learner ──publish(version)──▶ slot (latest wins) ──▶ broadcaster thread
                                                           │ ▲ delta to the version before
                                                           │ └─── differ (one more thread)
                                                           │ XPUB    delta once, announcements again and again
                                                           └ ROUTER  manifests, chunks, on request

The thread waits for one thing only, its poll: unblocked by a request, a new subscriber, `publish`,
a finished delta, `close`, or the next heartbeat being due. No send on these two kinds of socket ever
blocks. The differ waits for work only; requests are answered meanwhile.
"""

import logging
import math
import os
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import xxhash
import zmq

from areal_q import delta, messages
from areal_q.errors import ConfigError, RecordError, WeightVersionError
from areal_q.messages import (
    Announce,
    ChunkReply,
    Delta,
    FetchChunk,
    FetchManifest,
    Gone,
    Manifest,
    ManifestReply,
)
from areal_q.weights import WeightVersion
from learner.held import HeldVersions

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 4096
"""A request is about 100 bytes; ZeroMQ hangs up on a peer that sends more than this."""
MAX_CHUNK_BYTES = 64 << 20
QUEUED_REPLIES = 4 * messages.MAX_CREDIT
"""Replies that wait for one worker before ZeroMQ drops further ones. ZeroMQ learns of what was read
only after half of the queue, so less than twice the credit would drop replies to an honest worker."""
QUEUED_BROADCASTS = 8
"""Deltas and announcements that wait for one worker: what bounds the memory a stuck one costs."""
REQUESTS_PER_TURN = 256
"""Requests answered before the heartbeat gets its turn again."""


class Endpoints(NamedTuple):
    announce: str
    fetch: str


@dataclass
class BroadcastStats:
    """Counts since the start; written by the broadcaster's thread only."""

    published: int = 0
    """Versions announced"""
    skipped: int = 0
    """Versions replaced by a newer one before their turn came"""
    last_version_bytes: int = 0
    """What the newest version costs a worker that follows: its delta, or else its payload"""
    deltas: int = 0
    delta_bytes: int = 0
    fetches: int = 0
    """Manifests served"""
    chunks: int = 0
    chunk_bytes: int = 0
    gone: int = 0
    """Requests for a version that is no longer held"""
    refused: int = 0
    """Frames that were no request"""


class Broadcaster:
    """Announces each version to all workers and serves its bytes to whoever asks.

    Delivery, told plainly (shown by tests/test_broadcast*.py):
    - `publish` never waits for a socket or a worker. A version published before the previous one
      was announced replaces it: latest wins, versions may be skipped.
    - Deltas and announcements may be lost (slow or absent subscribers, more than QUEUED_BROADCASTS
      behind). A delta is sent once, to all; announcements are repeated every `heartbeat_s` and sent
      at once for a new subscriber: whoever missed a delta learns of it and fetches.
    - A version is visible once its delta is ready. A delta over `max_delta_bytes` is not sent, only
      announced; 0 turns deltas off.
    - A chunk may be lost (peer gone, or over QUEUED_REPLIES behind). The worker asks again.
    - At most `hold` versions are held, and the oldest fetch under way finishes (learner/held.py).
      Whoever asks for a version that went gets Gone.
    - Chunks are sent without copying; those queued for a worker keep their version in memory. A
      worker that answers no ZeroMQ heartbeat for `peer_timeout_s` (stopped, cut off) is dropped
      with its queue.
    - A frame that is no request is counted and ignored; ZeroMQ hangs up on a peer that sends one
      over MAX_REQUEST_BYTES. Nobody is authenticated: bind to loopback or a trusted network.
    - After a restart of the learner the epoch differs, and workers fetch anew.

    Raises ConfigError when an endpoint cannot be bound. `.endpoints` has the ports that the system
    chose where an endpoint ended in `:0` or `:*`.
    """

    def __init__(
        self,
        announce: str,
        fetch: str,
        *,
        hold: int = 3,
        max_delta_bytes: int = 64 << 20,
        heartbeat_s: float = 0.5,
        lease_s: float = 2.0,
        peer_timeout_s: float = 10.0,
    ) -> None:
        self.stats = BroadcastStats()
        self._max_delta_bytes = max_delta_bytes
        self._heartbeat_s = heartbeat_s
        self._decode = messages.decode_request
        self._held = HeldVersions(hold, lease_s)
        self._announcement = b""
        self._next_heartbeat_s = 0.0
        self._lock = threading.Lock()
        self._pending: WeightVersion | None = None
        self._differ = ThreadPoolExecutor(1, "differ")
        self._next: tuple[WeightVersion, Future[bytes | None]] | None = None
        """The version whose delta is being made"""
        self._closing = False
        self._ipc_files: list[tuple[str, int]] = []
        self._context = zmq.Context()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        try:
            self._xpub = self._bind(zmq.XPUB, announce, QUEUED_BROADCASTS, peer_timeout_s)
            self._router = self._bind(zmq.ROUTER, fetch, QUEUED_REPLIES, peer_timeout_s)
        except ConfigError:
            self._release()
            raise
        self._xpub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.endpoints = Endpoints(_bound_to(self._xpub), _bound_to(self._router))
        self._ipc_files = [f for e in self.endpoints if (f := _ipc_file(e)) is not None]
        self._thread = threading.Thread(target=self._run, name="broadcaster", daemon=True)
        self._thread.start()

    def publish(self, version: WeightVersion) -> None:
        """Hands `version` over and returns at once; its payload must not be written to any more.

        Raises WeightVersionError when the broadcaster is closed or its thread died.
        """
        if not self._thread.is_alive():
            raise WeightVersionError(f"version {version.manifest.version}: the broadcaster stopped")
        with self._lock:
            if self._pending is not None:
                self.stats.skipped += 1
            self._pending = version
        self._wake()

    def close(self) -> None:
        """Stops the thread, drops what is queued, removes ipc files. Idempotent."""
        self._closing = True
        if self._thread.is_alive():
            self._wake()
            self._thread.join()

    def _bind(self, kind: int, endpoint: str, queued: int, peer_timeout_s: float) -> zmq.Socket:
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, queued)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        sock.setsockopt(zmq.HEARTBEAT_IVL, int(peer_timeout_s * 250))
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(peer_timeout_s * 1000))
        try:
            sock.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot bind {endpoint}: {error}") from error
        return sock

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):  # full: awake already; closed: nobody to wake
            self._wake_in.send(b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._xpub, self._router, self._wake_out):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._closing:
                wait_s = max(0.0, self._next_heartbeat_s - time.monotonic())
                events = dict(poller.poll(math.ceil(wait_s * 1000)))
                if self._wake_out.fileno() in events:
                    self._wake_out.recv(4096)
                    self._finish()
                    self._take()
                if self._router in events:
                    self._answer()
                if self._xpub in events:
                    self._welcome()
                self._announce_if_due()
        finally:
            self._release()

    def _release(self) -> None:
        self._differ.shutdown(cancel_futures=True)
        self._context.destroy(linger=0)
        self._wake_in.close()
        self._wake_out.close()
        self._held.clear()
        for path, inode in self._ipc_files:
            with suppress(FileNotFoundError):
                if os.stat(path).st_ino == inode:  # else a successor has bound the same path
                    os.unlink(path)

    def _take(self) -> None:
        """Makes what was published last visible: at once, or when its delta is ready."""
        if self._next is not None:
            return
        with self._lock:
            version, self._pending = self._pending, None
        if version is None:
            return
        base = self._held.newest.version if self._held.newest else None
        if (
            base is None
            or base.manifest.epoch != version.manifest.epoch
            or not self._max_delta_bytes
        ):
            self._show(version, None)
            return
        future = self._differ.submit(delta.diff, base, version)
        self._next = version, future
        future.add_done_callback(lambda _: self._wake())

    def _finish(self) -> None:
        if self._next is not None and self._next[1].done():
            version, future = self._next
            self._next = None
            self._show(version, future.result())

    def _show(self, version: WeightVersion, body: bytes | None) -> None:
        new = version.manifest
        self.stats.published += 1
        self.stats.last_version_bytes = new.nbytes
        base = self._held.newest
        if base is not None and body is not None and len(body) <= self._max_delta_bytes:
            self._send_delta(base.manifest, new, body)
        self._held.add(version)
        self._announcement = messages.encode(
            Announce(run=new.run, epoch=new.epoch, version=new.version, digest=new.digest)
        )
        self._next_heartbeat_s = 0.0

    def _send_delta(self, base: Manifest, new: Manifest, body: bytes) -> None:
        header = Delta(
            run=new.run,
            epoch=new.epoch,
            version=new.version,
            digest=new.digest,
            base=base.version,
            base_digest=base.digest,
        )
        self._xpub.send_multipart([messages.encode(header), body], copy=False)
        self.stats.deltas += 1
        self.stats.delta_bytes += len(body)
        self.stats.last_version_bytes = len(body)

    def _welcome(self) -> None:
        """Announces at once to a new subscriber; whatever else comes up here is refused."""
        with suppress(zmq.Again):
            while True:
                frames = self._xpub.recv_multipart(zmq.NOBLOCK)
                if len(frames) == 1 and frames[0][:1] == b"\1":
                    self._next_heartbeat_s = 0.0
                elif len(frames) != 1 or frames[0][:1] != b"\0":
                    self.stats.refused += 1

    def _announce_if_due(self) -> None:
        now = time.monotonic()
        if now < self._next_heartbeat_s:
            return
        self._next_heartbeat_s = now + self._heartbeat_s
        if self._announcement:
            self._xpub.send(self._announcement)

    def _answer(self) -> None:
        with suppress(zmq.Again):
            for _ in range(REQUESTS_PER_TURN):
                peer, *frames = self._router.recv_multipart(zmq.NOBLOCK)
                try:
                    if len(frames) != 1:
                        raise RecordError(f"request of {len(frames)} frames")
                    self._reply(peer, self._decode(frames[0]))
                except RecordError as error:
                    self.stats.refused += 1
                    logger.debug("request refused: %s", error)

    def _reply(self, peer: bytes, request: messages.FetchRequest) -> None:
        match request:
            case FetchManifest():
                newest = self._held.use_newest()
                self.stats.fetches += newest is not None
                self._send(peer, messages.encode(_manifest_reply(newest and newest.manifest)))
            case FetchChunk():
                self._send_chunk(peer, request)

    def _send_chunk(self, peer: bytes, request: FetchChunk) -> None:
        held = self._held.use(request.digest)
        if held is None:
            self.stats.gone += 1
            self._send(peer, messages.encode(Gone(digest=request.digest)))
            return
        start, end = request.offset, request.offset + request.nbytes
        if not (0 <= start < end <= len(held.memory) and request.nbytes <= MAX_CHUNK_BYTES):
            raise RecordError(f"chunk {start}:{end} of {len(held.memory)} bytes")
        header = ChunkReply(digest=request.digest, offset=start, nbytes=request.nbytes)
        self._send(peer, messages.encode(header), held.memory[start:end])
        self.stats.chunks += 1
        self.stats.chunk_bytes += request.nbytes

    def _send(self, peer: bytes, *frames: bytes | memoryview) -> None:
        # A ROUTER drops what it cannot deliver (peer gone or too far behind): this never blocks.
        self._router.send_multipart([peer, *frames], copy=False)


def _manifest_reply(manifest: Manifest | None) -> ManifestReply:
    if manifest is None:
        return ManifestReply(manifest=None)
    encoded = messages.encode(manifest)
    return ManifestReply(manifest=encoded, checksum=xxhash.xxh3_128_hexdigest(encoded))


def _bound_to(sock: zmq.Socket) -> str:
    return sock.getsockopt_string(zmq.LAST_ENDPOINT)


def _ipc_file(endpoint: str) -> tuple[str, int] | None:
    """Path and inode of the file behind a bound `ipc://` endpoint: ZeroMQ leaves it behind."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or path.startswith("@"):
        return None
    return path, os.stat(path).st_ino
