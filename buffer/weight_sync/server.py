"""Publishes versions of the weights over ZeroMQ, from a thread of its own.

    publish(version) ──▶ slot (latest wins) ──▶ server thread
                                                  │ ▲ delta to the version before
                                                  │ └─── differ (one more thread)
                                                  │ XPUB    delta once, announcements again and again
                                                  └ ROUTER  manifests, deltas, chunks (request_handler.py)

The thread waits for one thing only, its poll: unblocked by a request, a new subscriber, `publish`,
a finished delta, `close`, the next heartbeat being due, or a delta that takes too long. No send on these
two kinds of socket ever blocks. The differ waits for work only; requests are answered meanwhile.
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
from areal_q.errors import ConfigError, WeightVersionError
from areal_q.messages import Announce, Manifest
from areal_q.weights import delta
from areal_q.weights.version import WeightVersion
from buffer.weight_sync.curve import server_keys
from buffer.weight_sync.request_handler import QUEUED_REPLIES, RequestHandler
from buffer.weight_sync.sockets import Endpoints, IpcFiles, bind, bound_to
from buffer.weight_sync.stats import ServerStats
from buffer.weight_sync.version_store import DeltaChain, VersionStore, delta_header

logger = logging.getLogger(__name__)

QUEUED_BROADCASTS = 8
"""Deltas and announcements that wait for one worker: what bounds the memory a stuck one costs."""


class _Handed(NamedTuple):
    version: WeightVersion
    base_digest: str
    body: bytes | None
    """A delta from `base_digest`, where there is one already"""


class WeightServer:
    """Announces each version to all workers and serves its bytes to whoever asks.

    Delivery, told plainly (shown by tests/test_broadcast*.py):
    - `publish` never waits for a socket or a worker (test_a_stopped_worker_holds_up_nobody_and_catches_up).
      A version published before the previous one was announced replaces it: latest wins, versions may
      be skipped (test_versions_published_faster_than_taken_are_skipped).
    - Deltas and announcements may be lost (slow or absent subscribers, more than QUEUED_BROADCASTS
      behind). A delta is sent once, to all; announcements are repeated every `heartbeat_s` and sent
      at once for a new subscriber: whoever missed a delta learns of it and fetches what it lacks
      (test_a_lost_delta_is_replaced_by_a_fetched_one).
    - A version is visible once its delta is ready, or has taken longer than `stall_s`, which is logged and
      counted (test_a_delta_that_takes_too_long_is_left_out). A delta over `max_delta_bytes` is not sent,
      only announced (test_a_delta_over_the_limit_is_announced_and_fetched); 0 turns deltas off.
    - At most `hold` versions are held, and the oldest fetch under way finishes; at most `hold_deltas` deltas,
      of `max_delta_bytes` together (buffer/weight_sync/version_store.py). Memory is flat
      (test_memory_does_not_grow_over_a_thousand_versions).
    - A worker that answers no ZeroMQ heartbeat for `peer_timeout_s` (stopped, cut off) is dropped with its
      queue.
    - ZeroMQ hangs up on a peer that sends more than MAX_REQUEST_BYTES. With `keys`, only listed keys get in,
      and everything is encrypted (tests/weight_sync/test_curve.py); without, nobody is authenticated: bind to
      loopback or a trusted network.
    - After a restart of the learner the epoch differs, and workers fetch anew
      (test_a_learner_killed_and_started_again_is_followed), wherever in the protocol it ended
      (test_a_learner_that_ends_anywhere_is_followed_once_it_is_back).

    Raises ConfigError when an endpoint cannot be bound or a key cannot be used. `.endpoints` has the ports
    that the system chose where an endpoint ended in `:0` or `:*`.
    """

    def __init__(
        self,
        announce: str,
        fetch: str,
        config: BroadcastConfig | None = None,
        *,
        lease_s: float = 2.0,
        peer_timeout_s: float = 10.0,
    ) -> None:
        self._config = config = config or BroadcastConfig()
        self.stats = ServerStats()
        self._announcement = b""
        self._next_heartbeat_s = 0.0
        self._lock = threading.Lock()
        self._pending: _Handed | None = None
        self._differ = ThreadPoolExecutor(1, "differ")
        self._next: tuple[WeightVersion, Future[bytes | None], float] | None = None
        """The version whose delta is being made, and until when it may take"""
        self._closing = False
        self._newest: WeightVersion | None = None
        keys = server_keys(config.keys) if config.keys else None
        self._context = zmq.Context()
        self._guard = keys.guard(self._context, self.stats) if keys else None
        self._files = IpcFiles()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        options = {"peer_timeout_s": peer_timeout_s, "keys": keys}
        versions = VersionStore(config.hold, lease_s)
        deltas = DeltaChain(config.hold_deltas, config.max_delta_bytes)
        self._handler: RequestHandler | None = None
        try:
            self._xpub = bind(
                self._context, zmq.XPUB, announce, queued=QUEUED_BROADCASTS, **options
            )
            self._router = bind(self._context, zmq.ROUTER, fetch, queued=QUEUED_REPLIES, **options)
        except ConfigError:
            self._release()
            raise
        self._xpub.setsockopt(zmq.XPUB_VERBOSER, 1)
        self.endpoints = Endpoints(bound_to(self._xpub), bound_to(self._router))
        self._files = IpcFiles(*self.endpoints)
        history = max(config.hold, config.hold_deltas)
        self._handler = RequestHandler(
            self._router, self.stats, versions, deltas, history, self._wake
        )
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()

    def publish(self, version: WeightVersion, delta: tuple[str, bytes] | None = None) -> None:
        """Hands `version` over and returns at once; its payload must not be written to any more.

        `delta` is (digest of its base, bytes) where one has been made already, as for a relay.
        Raises WeightVersionError when the server is closed or its thread died.
        """
        if not self._thread.is_alive():
            raise WeightVersionError(f"version {version.manifest.version}: the server stopped")
        with self._lock:
            if self._pending is not None:
                self.stats.skipped += 1
            self._pending = _Handed(version, *(delta or ("", None)))
        self._wake()

    def close(self) -> None:
        """Stops the thread, drops what is queued, removes ipc files. Idempotent."""
        self._closing = True
        if self._thread.is_alive():
            self._wake()
            self._thread.join()

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):  # full: awake already; closed: nobody to wake
            self._wake_in.send(b"\0")

    def _run(self) -> None:
        handler = self._handler
        assert handler is not None
        poller = zmq.Poller()
        for source in (self._xpub, self._router, self._wake_out):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._closing:
                due_s = min(self._next_heartbeat_s, self._next[2] if self._next else math.inf)
                wait_s = max(0.0, due_s - time.monotonic())
                events = dict(poller.poll(math.ceil(wait_s * 1000)))
                if self._wake_out.fileno() in events:
                    self._wake_out.recv(4096)
                    handler.send_ready_catch_ups()
                self._finish(handler)
                self._take(handler)
                if self._router in events:
                    handler.answer_requests()
                if self._xpub in events:
                    self._welcome()
                self._announce_if_due()
        finally:
            self._release()

    def _release(self) -> None:
        self._differ.shutdown(cancel_futures=True)
        if self._handler is not None:
            self._handler.close()
        if self._guard is not None:
            self._guard.stop()
        self._context.destroy(linger=0)
        self._wake_in.close()
        self._wake_out.close()
        self._newest = None
        self._files.remove()

    def _take(self, handler: RequestHandler) -> None:
        """Makes what was published last visible: at once, or when its delta is ready."""
        if self._next is not None:
            return
        with self._lock:
            handed, self._pending = self._pending, None
        if handed is None:
            return
        version, base = handed.version, self._newest
        if base is None or not self._follows(base.manifest, version.manifest):
            self._show(handler, version, None)
        elif handed.body is not None and handed.base_digest == base.manifest.digest:
            self._show(handler, version, handed.body)
        else:
            future = self._differ.submit(delta.diff, base, version)
            self._next = version, future, time.monotonic() + self._config.stall_s
            future.add_done_callback(lambda _: self._wake())

    def _follows(self, base: Manifest, new: Manifest) -> bool:
        """Whether a delta between them is wanted."""
        return base.epoch == new.epoch and self._config.max_delta_bytes > 0

    def _finish(self, handler: RequestHandler) -> None:
        if self._next is None:
            return
        version, future, due_s = self._next
        if future.done():
            self._next = None
            self._show(handler, version, future.result())
        elif time.monotonic() >= due_s:
            self._next = None
            self.stats.stalls += 1
            logger.warning(
                "the delta to version %d took over %.1f s; announced without",
                version.manifest.version,
                self._config.stall_s,
            )
            self._differ.shutdown(wait=False, cancel_futures=True)
            self._differ = ThreadPoolExecutor(1, "differ")
            self._show(handler, version, None)

    def _show(self, handler: RequestHandler, version: WeightVersion, body: bytes | None) -> None:
        new = version.manifest
        base = self._newest
        if body is not None and len(body) > self._config.max_delta_bytes:
            body = None
        self.stats.published += 1
        self.stats.last_version_bytes = new.nbytes if body is None else len(body)
        if base is not None and body is not None:
            header = messages.encode(delta_header(base.manifest, new))
            self._xpub.send_multipart([header, body], copy=False)
            self.stats.deltas += 1
            self.stats.delta_bytes += len(body)
        handler.add_version(version, base, body)
        self._newest = version
        self._announcement = messages.encode(
            Announce(run=new.run, epoch=new.epoch, version=new.version, digest=new.digest)
        )
        self._next_heartbeat_s = 0.0

    def _welcome(self) -> None:
        """Announces at once to a new subscriber; whatever else comes up here is refused."""
        with suppress(zmq.Again):
            while True:
                frames = self._xpub.recv_multipart(zmq.NOBLOCK)
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
            self._xpub.send(self._announcement)
