"""The learner's end of weight sync: announces versions and serves their bytes, from a thread of its own.

    publish(version) ──▶ pending (latest wins) ──▶ server thread
                                                     │ ▲ delta to the version before
                                                     │ └─── differ (one more thread)
                                                     │ XPUB    delta once, announcements again and again
                                                     └ ROUTER  manifests, deltas, chunks (request_handler.py)

The thread waits for one thing only, its poll: unblocked by a request, a new subscriber, `publish`,
a finished delta, `close`, the next heartbeat being due, a delta that takes too long, or a connection. No send
on these two kinds of socket ever blocks. The differ waits for work only; requests are answered meanwhile.
"""

import logging
import math
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import zmq

from areal_q import messages
from areal_q.config import BroadcastConfig
from areal_q.errors import WeightVersionError
from areal_q.messages import Announce
from areal_q.weights import delta
from areal_q.weights.version import WeightVersion
from buffer.weight_sync.request_handler import QUEUED_REPLIES, RequestHandler
from buffer.weight_sync.sockets import Endpoints, ServerSockets
from buffer.weight_sync.stats import ServerStats
from buffer.weight_sync.version_store import DeltaLink

logger = logging.getLogger(__name__)

QUEUED_BROADCASTS = 8
"""Most deltas and announcements that wait for one worker, which bounds the memory that a stuck one costs."""


class _Pending(NamedTuple):
    """A version that was published and is not yet visible."""

    version: WeightVersion
    base_digest: str
    body: bytes | None
    """Delta from the version that hashes to `base_digest`; None where the server has to make it."""


class WeightServer:
    """Announces each version to all workers and serves its bytes to whoever asks.

    - `publish` returns at once and never waits for a worker; a version that is not yet announced when the next
      one comes is skipped.
    - Announcements repeat every `heartbeat_s`, a delta is sent once: whoever missed it fetches.
    - Memory is bounded by `hold`, `hold_deltas`, `max_delta_bytes` and QUEUED_BROADCASTS messages a worker,
      open files by `most_connections` of each TCP endpoint.

    docs/weights.md has the full list, with the test that shows each.
    """

    def __init__(
        self,
        announce: str,
        fetch: str,
        config: BroadcastConfig | None = None,
        *,
        peer_timeout_s: float = 10.0,
    ) -> None:
        """Binds both endpoints and starts the thread.

        `endpoints` has the ports that the system chose where an endpoint ends in `:0` or `:*`. A worker
        that answers no ZeroMQ heartbeat for `peer_timeout_s` is dropped with its queue. Raises ConfigError when
        an endpoint cannot be bound or a key cannot be used.
        """
        self._config = config = config or BroadcastConfig()
        self.stats = ServerStats()
        queued = QUEUED_BROADCASTS, QUEUED_REPLIES
        self._sockets = ServerSockets(
            Endpoints(announce, fetch), config.keys, self.stats, queued, peer_timeout_s
        )
        self.endpoints = self._sockets.endpoints
        self._announcement = b""
        self._next_heartbeat_s = 0.0
        self._lock = threading.Lock()
        self._pending: _Pending | None = None
        self._differ = ThreadPoolExecutor(1, "differ")
        self._next: tuple[WeightVersion, Future[bytes | None], float] | None = None
        """The version whose delta is being made, the delta, and the monotonic time by which it must be
        ready."""
        self._closing = False
        self._newest: WeightVersion | None = None
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._handler = RequestHandler(self._sockets.router, self.stats, config)
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """True until the server is closed, or its thread has ended of an error."""
        return self._thread.is_alive()

    def publish(self, version: WeightVersion, delta: tuple[str, bytes] | None = None) -> None:
        """Hands `version` over and returns at once; its payload must not be written to any more.

        `delta` is (digest of its base, bytes) where one has been made already, as for a relay.
        Raises WeightVersionError when the server is closed or its thread died.
        """
        if not self.running:
            raise WeightVersionError(f"version {version.manifest.version}: the server stopped")
        with self._lock:
            if self._pending is not None:
                self.stats.skipped += 1
            self._pending = _Pending(version, *(delta or ("", None)))
        self._wake()

    def close(self) -> None:
        """Stops the thread, drops what is queued, removes ipc files. Idempotent."""
        self._closing = True
        if self._thread.is_alive():
            self._wake()
            self._thread.join()

    def _wake(self) -> None:
        with suppress(
            BlockingIOError, OSError
        ):  # a full pipe has woken the thread; a closed one has none
            self._wake_in.send(b"\0")

    def _run(self) -> None:
        xpub, router, bounds = self._sockets.xpub, self._sockets.router, self._sockets.bounds
        poller = zmq.Poller()
        for source in (xpub, router, self._wake_out, *(bound.events for bound in bounds)):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._closing:
                due_s = min(self._next_heartbeat_s, self._next[2] if self._next else math.inf)
                wait_s = max(0.0, due_s - time.monotonic())
                events = dict(poller.poll(math.ceil(wait_s * 1000)))
                if self._wake_out.fileno() in events:
                    self._wake_out.recv(4096)
                for bound in bounds:
                    bound.look()
                self._check_delta()
                self._take_pending()
                if router in events:
                    self._handler.answer_requests()
                if xpub in events:
                    self._read_subscriptions()
                self._announce_if_due()
        finally:
            self._differ.shutdown(cancel_futures=True)
            self._handler.close()
            self._sockets.close()
            self._wake_in.close()
            self._wake_out.close()
            self._newest = None

    def _take_pending(self) -> None:
        """Takes the version published last and makes it visible, at once or as soon as its delta is ready."""
        if self._next is not None:
            return
        with self._lock:
            handed, self._pending = self._pending, None
        if handed is None:
            return
        version, base = handed.version, self._newest
        deltas = self._config.max_delta_bytes > 0
        if base is None or base.manifest.epoch != version.manifest.epoch or not deltas:
            self._make_visible(version, None)
        elif handed.body is not None and handed.base_digest == base.manifest.digest:
            self._make_visible(version, handed.body)
        else:
            future = self._differ.submit(delta.diff, base, version)
            self._next = version, future, time.monotonic() + self._config.stall_s
            future.add_done_callback(lambda _: self._wake())

    def _check_delta(self) -> None:
        """Makes the next version visible if its delta is ready, or without one if it takes too long."""
        if self._next is None:
            return
        version, future, due_s = self._next
        if future.done():
            self._next = None
            self._make_visible(version, future.result())
        elif time.monotonic() >= due_s:
            self._next = None
            self.stats.stalls += 1
            logger.warning(
                "the delta to version %d took over %.1f s; announced without",
                version.manifest.version,
                self._config.stall_s,
            )
            # The late delta may take for ever, so its thread is abandoned, and the next delta gets a new one.
            self._differ.shutdown(wait=False, cancel_futures=True)
            self._differ = ThreadPoolExecutor(1, "differ")
            self._make_visible(version, None)

    def _make_visible(self, version: WeightVersion, body: bytes | None) -> None:
        """Sends the delta `body`, if there is one that is not too large, and announces `version` from now
        on."""
        new = version.manifest
        base = self._newest
        if body is not None and len(body) > self._config.max_delta_bytes:
            body = None
        # Before anything leaves, so that even a learner killed now has said what it published.
        logger.debug("publishes version %d with digest %s", new.version, new.digest)
        self.stats.published += 1
        link = None
        if base is not None and body is not None:
            link = DeltaLink(base.manifest, new, body)
            self.stats.deltas += 1
            self.stats.delta_bytes += len(body)
            self._sockets.xpub.send_multipart([messages.encode(link.header), body], copy=False)
        self._handler.add_version(version, link)
        self._newest = version
        self._announcement = messages.encode(
            Announce(
                run=new.run,
                run_id=new.run_id,
                epoch=new.epoch,
                version=new.version,
                digest=new.digest,
            )
        )
        self._next_heartbeat_s = 0.0

    def _read_subscriptions(self) -> None:
        """Reads subscriptions. A new subscriber gets an announcement at once; other messages are refused."""
        with suppress(zmq.Again):
            while True:
                frames = self._sockets.xpub.recv_multipart(zmq.NOBLOCK)
                if len(frames) == 1 and frames[0][:1] == b"\1":
                    self._next_heartbeat_s = 0.0
                    self.stats.subscribers += 1
                elif len(frames) == 1 and frames[0][:1] == b"\0":
                    self.stats.subscribers -= 1
                else:
                    self.stats.refused += 1

    def _announce_if_due(self) -> None:
        now = time.monotonic()
        if now < self._next_heartbeat_s:
            return
        self._next_heartbeat_s = now + self._config.heartbeat_s
        if self._announcement:
            self._sockets.xpub.send(self._announcement)
