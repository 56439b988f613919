"""The worker's end of weight sync: follows the learner's versions in the background, on a thread of its own.

    SUB ──Delta──▶ of the version held? ──▶ applied to a copy ────────────────┐
     └─Announce──▶ newer than the one held? ──▶ Fetcher (fetcher.py) ──▶ verified version
                                                 deltas it lacks, or all of it │
    engine ◀───── latest() / await wait() ◀───── LatestValue (latest.py) ◀────┘

The thread waits for one thing only, its poll: unblocked by a frame, `close`, or the nearest deadline
(an answer is overdue, a rest is over, the server fell silent, the sync makes no progress).
"""

import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import zmq

from areal_q import messages
from areal_q.config import BroadcastConfig
from areal_q.errors import RecordError, WeightVersionError
from areal_q.messages import Announce, Delta, Manifest
from areal_q.weights import delta
from areal_q.weights.version import WeightVersion
from buffer.weight_sync.curve import ClientKeys
from buffer.weight_sync.fetcher import Fetcher
from buffer.weight_sync.latest import LatestValue
from buffer.weight_sync.stats import SubscriberStats

logger = logging.getLogger(__name__)

OnVersion = Callable[[WeightVersion, tuple[str, bytes] | None], None]
"""Called with a version, and (digest of its base, delta) where it came as a delta."""
KEPT_DELTAS = 8
"""Most deltas kept for a base that is still being fetched."""
BROADCASTS_PER_TURN = 256
"""Most messages read before the rest gets its turn again: there is no end to what a liar may send."""
TURNS_OF_A_FLOOD = 64
"""Turns after which the connection is given up, and what waits in it, if there were always more to read."""


class WeightSubscriber:
    """Gives the newest complete version, bit for bit what the learner published, or nothing.

    - Versions may be skipped; within an epoch they are never repeated or out of order.
    - Weights of another run are refused, also of an earlier one of the same name that a relay still holds.
    - Every hash is verified before a version is handed over. Whatever was lost, altered or cut off is counted
      and fetched anew; a restarted learner is followed whatever its numbers.
    - A version's payload stays untouched as long as any tensor views it (see PayloadPool).

    docs/weights.md has the full list, with the test that shows each.
    """

    silent = False
    """True while the server has announced nothing for `silence_s`."""
    _held: WeightVersion | None = None
    _behind: Announce | Delta | None = None
    """The newest announcement, while it is of something newer than `_held`."""
    _newest: Announce | Delta | None = None
    """The newest announcement of all."""
    _behind_since_s = math.inf
    _distrusted = ""
    """Digest of a held version whose deltas gave other bytes, so that it is replaced in full."""
    _stalled = _said_foreign = _closing = False
    _full_turns = 0
    """Turns in a row in which more announcements were there than were read."""

    def __init__(
        self,
        announce: str,
        fetch: str,
        *,
        run: str | None,
        run_id: str = "",
        config: BroadcastConfig | None = None,
        keys: ClientKeys | None = None,
        silence_s: float = 10.0,
        on_version: OnVersion | None = None,
    ) -> None:
        """Connects to a weight server and starts the thread; nothing need be there yet.

        `run` is the name of the run to follow, None any; `run_id` its id, "" any. `on_version`, if given, gets
        every version on the subscriber's thread, and `latest` and `wait` get none: a relay passes them on.
        After `silence_s` without an announcement the connection is renewed.
        """
        config = config or BroadcastConfig()
        self._expected_run, self._expected_id = run, run_id
        self._silence_s, self._stall_s = silence_s, config.stall_s
        self._announce_endpoint, self._keys = announce, keys
        self._max_delta_bytes = config.max_delta_bytes
        self._slot: LatestValue[WeightVersion] = LatestValue()
        self._on_version = on_version or (lambda version, _: self._slot.put(version))
        self._deltas: dict[tuple[str, int], tuple[Delta, bytes]] = {}
        """Announced deltas by epoch and number of their base."""
        self._heard_s = time.monotonic()
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._wake_in, self._wake_out = socket.socketpair()
        self._poller.register(self._wake_out, zmq.POLLIN)
        self._sub = self._subscribe()
        self._fetcher = Fetcher(self._context, self._poller, fetch, self._wants, config, keys)
        self.stats = SubscriberStats(self._fetcher.stats)
        self._thread = threading.Thread(target=self._run, name="subscriber", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """True until the subscriber is closed, or its thread has ended of an error."""
        return self._thread.is_alive()

    @property
    def behind_s(self) -> float:
        """Seconds for which a newer version has been known while none arrived; 0 while up to date."""
        return max(0.0, time.monotonic() - self._behind_since_s)

    def latest(self) -> WeightVersion | None:
        """Returns the newest version if it was not taken yet, else None."""
        return self._slot.take()

    async def wait(self) -> WeightVersion:
        """Returns the newest version as soon as there is one that was not taken yet.

        Raises WeightVersionError when the subscriber stops.
        """
        return await self._slot.wait()

    def follow(self, announce: str, fetch: str) -> None:
        """Uses these endpoints from the next reconnection on, which silence brings: the learner may have
        moved."""
        self._announce_endpoint, self._fetcher.endpoint = announce, fetch

    def close(self) -> None:
        """Stops the thread and wakes everybody who waits. Idempotent."""
        self._closing = True
        if self._thread.is_alive():
            with suppress(OSError):
                self._wake_in.send(b"\0")
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing:
                due_s = min(self._heard_s + self._silence_s, self._fetcher.due_s, self._stall_due_s)
                wait_ms = math.ceil(max(0.0, due_s - time.monotonic()) * 1000)
                events = dict(self._poller.poll(wait_ms))
                # The work below may take long, so only what was due before it counts as overdue.
                now = time.monotonic()
                if self._sub in events:
                    self._listen()
                if self._fetcher.dealer in events:
                    self._take_fetched()
                if now >= self._fetcher.due_s:
                    self._fetcher.on_due()
                if now >= self._heard_s + self._silence_s:
                    self._on_silence()
                if now >= self._stall_due_s:
                    self._on_stall()
                self._apply_deltas()
                if (told := self._behind) is not None:
                    held = self._held and self._held.manifest
                    base = held and held.epoch == told.epoch and held.digest != self._distrusted
                    self._fetcher.start(held if base else None)
        finally:
            self._context.destroy(linger=0)
            self._wake_in.close()
            self._wake_out.close()
            self._slot.close()

    def _listen(self) -> None:
        with suppress(zmq.Again):
            for _ in range(BROADCASTS_PER_TURN):
                frames = self._sub.recv_multipart(zmq.NOBLOCK)
                try:
                    self._on_broadcast(messages.decode_broadcast(frames[0]), frames[1:])
                except RecordError as error:
                    self.stats.refused += 1
                    logger.debug("broadcast refused: %s", error)
            self._full_turns += 1
            if self._full_turns < TURNS_OF_A_FLOOD:
                return
            self._reconnect()
        self._full_turns = 0

    def _on_broadcast(self, told: Announce | Delta, frames: list[bytes]) -> None:
        if not self._is_ours(told):
            raise RecordError(f"announcement of run {told.run!r}, id {told.run_id!r}")
        if len(frames) != isinstance(told, Delta):
            raise RecordError(f"{type(told).__name__} with {len(frames)} further frames")
        self._heard_s = time.monotonic()
        if self.silent:
            self.silent = False
            logger.info("the learner announces again: version %d", told.version)
        if not self._is_news(told):
            return
        self._behind = self._newest = told
        self._behind_since_s = min(self._behind_since_s, self._heard_s)
        if isinstance(told, Delta):
            self._keep(told, frames[0])

    def _keep(self, told: Delta, body: bytes) -> None:
        """Keeps a delta until its base is there; the oldest goes where there are too many."""
        self._deltas[told.epoch, told.base] = told, body
        while len(self._deltas) > KEPT_DELTAS:
            self._deltas.pop(next(iter(self._deltas)))

    def _take_fetched(self) -> None:
        fetched = self._fetcher.read()
        if isinstance(fetched, list):
            before = self._held
            for told, body in fetched:
                self._keep(told, body)
                self._apply_deltas()
            if before is not None and self._held is before:
                self._distrusted = before.manifest.digest
        # Deltas may have overtaken the fetch.
        elif fetched is not None and self._is_news(fetched.manifest):
            self._hand_over(fetched, None)

    def _apply_deltas(self) -> None:
        """Applies the deltas that are there, one after the other, beginning with that of the version held."""
        while (held := self._held) and not self._closing:
            key = held.manifest.epoch, held.manifest.version
            told, body = self._deltas.pop(key, (None, b""))
            if told is None or held.manifest.digest == self._distrusted:
                return
            try:
                if told.base_digest != held.manifest.digest:
                    raise WeightVersionError(f"delta of another version {told.base}")
                payload = self._fetcher.pool.lend(held.manifest.nbytes)
                version = delta.apply(held, body, payload)
                new = version.manifest
                if (new.epoch, new.version, new.digest) != (told.epoch, told.version, told.digest):
                    raise WeightVersionError(f"delta to another version than {told.version}")
                if not (self._is_ours(new) and self._is_news(new)):
                    raise WeightVersionError(f"delta to version {new.version} of run {new.run!r}")
            except Exception as error:  # whatever a publisher says, the thread goes on
                self.stats.mismatches += 1
                self._distrusted = held.manifest.digest
                foreseen = isinstance(error, WeightVersionError)
                logger.warning("delta refused, fetching instead: %s", error, exc_info=not foreseen)
                return
            self.stats.deltas += 1
            self.stats.delta_bytes += len(body)
            self._hand_over(version, (told.base_digest, body))

    def _is_ours(self, told: Announce | Delta | Manifest) -> bool:
        """Returns whether that version is of the run to follow. A version or run without an id is accepted,
        since older learners and relays send none."""
        if self._expected_run not in (None, told.run):
            return False
        if not told.run_id or self._expected_id in ("", told.run_id):
            return True
        if not self._said_foreign:
            self._said_foreign = True
            logger.warning(
                "weights of another run named %s are refused: its id is %s, this worker's run has %s; a relay "
                "may hold them until this run's first version reaches it",
                *(told.run, told.run_id, self._expected_id),
            )
        return False

    def _is_news(self, told: Announce | Delta | Manifest) -> bool:
        """Returns whether that version is of another epoch than the one held, or newer."""
        if self._held is None:
            return True
        held = self._held.manifest
        return told.epoch != held.epoch or told.version > held.version

    def _wants(self, manifest: Manifest) -> bool:
        """Returns whether to fetch the version; bytes held already are handed over at once, under the new
        number."""
        self._behind = None
        held = self._held
        if not self._is_ours(manifest):
            self.stats.refused += 1
            return False
        if not self._is_news(manifest):
            return False
        if held is not None and manifest.tensors == held.manifest.tensors:
            self._hand_over(WeightVersion(manifest, held.payload, held.tensors), None)
            return False
        return True

    def _hand_over(self, version: WeightVersion, made_by: tuple[str, bytes] | None) -> None:
        new, old = version.manifest, self._held.manifest if self._held else None
        if old is None or old.epoch != new.epoch:
            self.stats.epochs += 1
        else:
            self.stats.skipped += new.version - old.version - 1
        self._held = version
        self._deltas = {
            (epoch, base): d
            for (epoch, base), d in self._deltas.items()
            if epoch == new.epoch and base >= new.version
        }
        if self._behind is not None and not self._is_news(self._behind):
            self._behind = None
        if self._stalled:
            self._stalled = False
            logger.info("weights arrive again, after %.1f s", self.behind_s)
        still = self._newest is not None and self._is_news(self._newest)
        self._behind_since_s = time.monotonic() if still else math.inf
        self.stats.received += 1
        self._on_version(version, made_by)

    @property
    def _stall_due_s(self) -> float:
        return math.inf if self._stalled else self._behind_since_s + self._stall_s

    def _on_stall(self) -> None:
        self._stalled = True
        self.stats.stalls += 1
        told = self._newest.version if self._newest else -1
        held = self._held.manifest.version if self._held else -1
        logger.warning(
            "sync stalled: version %d is known, %d is held, nothing arrived for %.1f s (%s)",
            *(told, held, self.behind_s, self._fetcher),
        )

    def _on_silence(self) -> None:
        self._heard_s = time.monotonic()
        if not self.silent:
            self.silent = True
            self.stats.silences += 1
            logger.warning("no announcement of weights for %.1f s; reconnecting", self._silence_s)
        self._reconnect()

    def _reconnect(self) -> None:
        self._poller.unregister(self._sub)
        self._sub.close(linger=0)
        self._sub = self._subscribe()

    def _subscribe(self) -> zmq.Socket:
        sub = self._context.socket(zmq.SUB)
        sub.setsockopt(zmq.LINGER, 0)
        sub.setsockopt(zmq.MAXMSGSIZE, max(4096, self._max_delta_bytes))
        # No bound of its own: libzmq 4.3.5 aborts the process where a ping waits behind a full queue and the
        # peer has hung up (zeromq/libzmq#4364). The thread empties it at every turn and keeps KEPT_DELTAS.
        sub.setsockopt(zmq.RCVHWM, 0)
        if self._keys is not None:
            self._keys.apply(sub)
        sub.subscribe(b"")
        sub.connect(self._announce_endpoint)
        self._poller.register(sub, zmq.POLLIN)
        return sub
