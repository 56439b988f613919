"""Follows the learner's versions in the background, on a thread of its own.

    SUB ──Announce──▶ newer than what is held? ──▶ Fetcher (rollout/fetch.py) ──▶ verified version
                                                                                       │
    engine ◀───── latest() / await wait() ◀───── slot (latest wins) ◀──────────────────┘

The thread waits for one thing only, its poll: unblocked by a frame, `close`, or the nearest deadline
(an answer is overdue, a rest is over, the learner fell silent).
"""

import logging
import math
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import zmq

from areal_q import messages
from areal_q.errors import RecordError
from areal_q.messages import Announce, Manifest
from areal_q.weights import WeightVersion
from rollout.fetch import Fetcher, FetchStats
from rollout.slot import Slot

logger = logging.getLogger(__name__)

MAX_ANNOUNCE_BYTES = 4096


@dataclass
class ReceiverStats:
    """Counts since the start; written by the receiver's thread only."""

    fetch: FetchStats
    received: int = 0
    """Versions verified and handed over"""
    skipped: int = 0
    """Version numbers of the same epoch that were never received"""
    epochs: int = 0
    """Learners followed: 1, and one more for every restart seen"""
    silences: int = 0
    """Times the learner announced nothing for `silence_s`"""
    refused: int = 0
    """Frames on the announcement socket that were no announcement of this run"""


class Receiver:
    """The newest complete version, bit for bit what the learner published, or nothing.

    Delivery, told plainly (each line has its test in tests/test_broadcast*.py):
    - Latest wins: versions may be skipped, never repeated, never out of order within an epoch. A
      version that was replaced in the slot before it was taken is gone.
    - Every tensor's hash and the version's are verified before hand-over. A mismatch is counted,
      logged, and healed by fetching again.
    - A lost or late announcement only delays: the next heartbeat repeats it. An overdue answer is
      asked for again after `timeout_s` over a new connection; chunks that have arrived are kept.
    - A restarted learner is known by its epoch; what it publishes is taken whatever its number.
    - Silence is counted and logged once; the connection is renewed every `silence_s`.
    - At most `credit` chunks are asked for ahead. Memory: the version held, the one being fetched,
      those that an engine still views, and two spare buffers.
    - Frames of another run, malformed, duplicate or unasked ones are counted and ignored.

    The payload of a version stays untouched for as long as any tensor views it (see PayloadPool).
    """

    def __init__(
        self,
        announce: str,
        fetch: str,
        *,
        run: str,
        chunk_bytes: int = 4 << 20,
        credit: int = 4,
        timeout_s: float = 5.0,
        silence_s: float = 10.0,
        max_payload_bytes: int = 64 << 30,
    ) -> None:
        self._expected_run = run
        self._silence_s = silence_s
        self._announce_endpoint = announce
        self._slot: Slot[WeightVersion] = Slot()
        self._held: WeightVersion | None = None
        self._behind: Announce | None = None
        """The newest announcement, while it is of something newer than `_held`"""
        self._heard_s = time.monotonic()
        self._silent = False
        self._closing = False
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._wake_in, self._wake_out = socket.socketpair()
        self._poller.register(self._wake_out, zmq.POLLIN)
        self._sub = self._subscribe()
        self._fetcher = Fetcher(
            self._context,
            self._poller,
            fetch,
            self._wants,
            chunk_bytes=chunk_bytes,
            credit=credit,
            timeout_s=timeout_s,
            max_payload_bytes=max_payload_bytes,
        )
        self.stats = ReceiverStats(self._fetcher.stats)
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)
        self._thread.start()

    def latest(self) -> WeightVersion | None:
        """The newest version that was not taken yet, or None. Taken once."""
        return self._slot.take()

    async def wait(self) -> WeightVersion:
        """`latest`, once there is one. Raises WeightVersionError when the receiver stops."""
        return await self._slot.wait()

    def close(self) -> None:
        """Stops the thread and wakes whoever waits. Idempotent."""
        self._closing = True
        if self._thread.is_alive():
            with suppress(OSError):
                self._wake_in.send(b"\0")
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing:
                due_s = min(self._heard_s + self._silence_s, self._fetcher.due_s)
                wait_ms = math.ceil(max(0.0, due_s - time.monotonic()) * 1000)
                events = dict(self._poller.poll(wait_ms))
                if self._sub in events:
                    self._listen()
                if self._fetcher.dealer in events and (version := self._fetcher.read()):
                    self._hand_over(version)
                if time.monotonic() >= self._fetcher.due_s:
                    self._fetcher.on_due()
                if time.monotonic() >= self._heard_s + self._silence_s:
                    self._on_silence()
                if self._behind is not None:
                    self._fetcher.start()
        finally:
            self._context.destroy(linger=0)
            self._wake_in.close()
            self._wake_out.close()
            self._slot.close()

    def _listen(self) -> None:
        with suppress(zmq.Again):
            while True:
                frames = self._sub.recv_multipart(zmq.NOBLOCK)
                try:
                    if len(frames) != 1:
                        raise RecordError(f"announcement of {len(frames)} frames")
                    self._on_announce(messages.decode_announce(frames[0]))
                except RecordError as error:
                    self.stats.refused += 1
                    logger.debug("announcement refused: %s", error)

    def _on_announce(self, announce: Announce) -> None:
        if announce.run != self._expected_run:
            raise RecordError(f"announcement of run {announce.run!r}")
        self._heard_s = time.monotonic()
        if self._silent:
            self._silent = False
            logger.info("the learner announces again: version %d", announce.version)
        if self._is_news(announce):
            self._behind = announce

    def _is_news(self, told: Announce | Manifest) -> bool:
        if self._held is None:
            return True
        held = self._held.manifest
        return told.epoch != held.epoch or told.version > held.version

    def _wants(self, manifest: Manifest) -> bool:
        """Whether to fetch this. Bytes held already are handed over at once, under their new number."""
        self._behind = None
        held = self._held
        if manifest.run != self._expected_run or not self._is_news(manifest):
            return False
        if held is not None and manifest.tensors == held.manifest.tensors:
            self._hand_over(WeightVersion(manifest, held.payload, held.tensors))
            return False
        return True

    def _hand_over(self, version: WeightVersion) -> None:
        new, old = version.manifest, self._held.manifest if self._held else None
        if old is None or old.epoch != new.epoch:
            self.stats.epochs += 1
        else:
            self.stats.skipped += new.version - old.version - 1
        self._held = version
        if self._behind is not None and not self._is_news(self._behind):
            self._behind = None
        self.stats.received += 1
        self._slot.put(version)

    def _on_silence(self) -> None:
        self._heard_s = time.monotonic()
        if not self._silent:
            self._silent = True
            self.stats.silences += 1
            logger.warning("no announcement of weights for %.1f s; reconnecting", self._silence_s)
        self._poller.unregister(self._sub)
        self._sub.close(linger=0)
        self._sub = self._subscribe()

    def _subscribe(self) -> zmq.Socket:
        sub = self._context.socket(zmq.SUB)
        sub.setsockopt(zmq.LINGER, 0)
        sub.setsockopt(zmq.MAXMSGSIZE, MAX_ANNOUNCE_BYTES)
        sub.subscribe(b"")
        sub.connect(self._announce_endpoint)
        self._poller.register(sub, zmq.POLLIN)
        return sub
