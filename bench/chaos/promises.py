"""What AReaL-Q promises, checked on what a run left behind, with a witness that watched it from outside.

Nothing here asks the learner what it believes: lags are counted again from the logs, by the formula of
learner/data/staleness.py written anew.
"""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import redis
import zmq

from areal_q.errors import RecordError
from areal_q.messages import (
    Broadcast,
    Group,
    VersionSpan,
    decode_broadcast,
    decode_group,
)
from bench.chaos.cluster import RUN, Cluster, Notes
from buffer.admin.inspect_state import groups, tickets
from buffer.logs.step_log import StepRecord, iter_steps
from buffer.logs.trajectory_log import iter_log
from buffer.redis_store.keys import Keys
from buffer.redis_store.streams import pages
from learner import checkpoint

KEYS = Keys(RUN)
FORGED = 10**9
"""Tickets of groups that a fault made up have numbers from here"""
FOREIGN = "foreign-hand"
"""Worker of the groups that a fault commits, and that cannot be learnt from"""


@dataclass
class Seen:
    """What a witness wrote down."""

    committed: dict[int, list[VersionSpan]] = field(default_factory=dict)
    """By ticket, the versions that drew the first group seen of it"""
    order: list[int] = field(default_factory=list)
    """Tickets in the order of their commits"""
    published: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    """Announced digests by (epoch, version)"""
    set_aside: set[str] = field(default_factory=set)
    """Entries of the group stream that went to the quarantine"""


class Follower:
    """Reads a stream along, from its start wherever Redis was emptied and its clock is behind."""

    def __init__(self, client: redis.Redis, stream: str) -> None:
        self._client, self._stream, self._last = client, stream, "0-0"

    def read(self) -> list[tuple[str, dict[bytes, bytes]]]:
        """What has come since the last call. Raises RedisError where there is no such stream."""
        known: Any = self._client.xinfo_stream(self._stream)
        if _order(known["last-generated-id"].decode()) < _order(self._last):
            self._last = "0-0"
        found: Any = self._client.xrange(self._stream, min=f"({self._last}")
        if found:
            self._last = found[-1][0].decode()
        return [(entry.decode(), fields) for entry, fields in found]


def _order(entry: str) -> tuple[int, int]:
    ms, _, sequence = entry.partition("-")
    return int(ms), int(sequence)


class Witness:
    """Reads along, changing nothing, until `stop`."""

    def __init__(self, cluster: Cluster) -> None:
        self.seen = Seen()
        self.version = -1
        """The newest that was announced"""
        self._cluster, self._over = cluster, threading.Event()
        work = (self._groups, self._quarantine, self._versions)
        self._threads = [threading.Thread(target=each) for each in work]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def next_run(self) -> Seen:
        """Returns what was seen of the run that has ended; what follows is the next one's."""
        seen, self.seen, self.version = self.seen, Seen(), -1
        return seen

    def _groups(self) -> None:
        for _, fields in self._along(KEYS.groups):
            record = fields.get(b"record", b"")
            if record not in self._cluster.notes.forged:
                with suppress(RecordError):
                    self._saw(decode_group(record).validate())

    def _saw(self, group: Group) -> None:
        number, seen = group.ticket.number, self.seen
        foreign = group.worker == FOREIGN or group.ticket.run_id in self._cluster.ended
        if number >= FORGED or foreign:
            return
        if number in self._cluster.notes.moved and number in seen.committed:
            seen.order.remove(number)
            del seen.committed[number]
        if number not in seen.committed:
            seen.committed[number] = [s for t in group.trajectories for s in t.all_spans]
            seen.order.append(number)

    def _quarantine(self) -> None:
        for _, fields in self._along(KEYS.quarantine):
            if fields.get(b"source", b"").decode() == KEYS.groups:
                self.seen.set_aside.add(fields.get(b"id", b"").decode())

    def _along(self, stream: str) -> Iterator[tuple[str, dict[bytes, bytes]]]:
        with self._cluster.client() as client:
            follower = Follower(client, stream)
            while not self._over.wait(0.1):
                with suppress(redis.RedisError):
                    yield from follower.read()

    def _versions(self) -> None:
        """Follows the announcements."""
        with zmq.Context() as context, context.socket(zmq.SUB) as sub:
            sub.setsockopt(zmq.LINGER, 0)
            sub.subscribe(b"")
            sub.connect(self._cluster.endpoint("announce"))
            while not self._over.is_set():
                if sub.poll(200):
                    with suppress(RecordError):
                        self._announced(decode_broadcast(sub.recv()))

    def _announced(self, told: Broadcast) -> None:
        self.version = told.version
        digests = self.seen.published.setdefault((told.epoch, told.version), set())
        digests.add(told.digest)


def said_published(log: Path) -> set[tuple[int, str]]:
    """Returns the versions and digests that learners whose log is `log` published.

    A learner says so before anything leaves it, so what a worker can have fetched is here, even where the
    learner was killed before its announcement reached anybody else.
    """
    found = re.finditer(
        r"publishes version (\d+) with digest (\w+)$", log.read_text(), re.MULTILINE
    )
    return {(int(match[1]), match[2]) for match in found}


@dataclass(frozen=True)
class Left:
    """A stopped run: logs, last checkpoint, and what Redis holds."""

    max_lag: int
    steps: list[StepRecord]
    log: list[tuple[int, list[Group]]]
    state: checkpoint.State
    open: set[int]
    """Tickets in Redis"""
    unread: set[int]
    """Tickets of committed groups in Redis"""
    entries: set[str]
    """All entries of the group stream"""
    quarantine: list[dict[bytes, bytes]]
    published: set[tuple[int, str]]
    """Versions and digests that learners of this and earlier runs said they published"""

    @classmethod
    def of(cls, run_dir: Path, client: redis.Redis, learner_log: Path, max_lag: int) -> "Left":
        # Tickets before groups: a worker that goes on may make the one the other meanwhile.
        waiting = {t.number for _, t in tickets(client, KEYS.tickets)}
        return cls(
            max_lag,
            list(iter_steps(run_dir / "steps")),
            list(iter_log(run_dir / "trajectories")),
            checkpoint.read_state(checkpoint.steps(run_dir / "checkpoints")[-1]),
            waiting,
            {g.ticket.number for _, g in groups(client, RUN)},
            {entry.decode() for entry, _ in pages(client, KEYS.groups)},
            [fields for _, fields in pages(client, KEYS.quarantine)],
            said_published(learner_log),
        )

    @cached_property
    def digests(self) -> dict[int, str]:
        """Digests of the versions of the surviving history."""
        first = {0: self.steps[0].base_digest} if self.steps else {}
        return first | {r.step + 1: r.digest for r in self.steps}

    @cached_property
    def set_aside(self) -> list[tuple[int, Group]]:
        """Ticket numbers and groups of the quarantine's records that are sound in themselves."""
        found = []
        for fields in self.quarantine:
            if fields.get(b"source", b"").decode() == KEYS.groups:
                with suppress(RecordError):
                    group = decode_group(fields.get(b"record", b"")).validate()
                    found.append((group.ticket.number, group))
        return found

    def lag(self, span: VersionSpan, step: int) -> int:
        """Versions between the weights that drew `span` and those that `step` begins with; `step` may be
        the next one, for which the learner was drawing when it was stopped."""
        if self.digests.get(span.version) == span.digest:
            return step - span.version
        fork = next((r.fork for r in reversed(self.steps) if r.step <= step), 0)
        return (span.version - fork) + (step - fork)


def broken(left: Left, seen: Seen, notes: Notes) -> Iterator[str]:
    """One line for each breach."""
    yield from _history(left)
    yield from _counted_once(left)
    yield from _none_lost(left, seen, notes)
    yield from _bound(left)
    yield from _same_weights(left, seen, notes)
    yield from _quarantine(left, notes)
    yield from _own_groups(left)
    yield from _set_aside(left, seen, notes)
    yield from notes.breaches


def _history(left: Left) -> Iterator[str]:
    numbers = [r.step for r in left.steps]
    if numbers != list(range(left.state.step)):
        yield f"step log: not steps 0 to {left.state.step - 1}, each once"
    for before, after in zip(left.steps, left.steps[1:], strict=False):
        if before.digest != after.base_digest:
            yield f"step {after.step} does not begin with the weights that step {before.step} made"
    logged = {step: [g.ticket.number for g in taken] for step, taken in left.log}
    for record in left.steps:
        if logged.get(record.step) != record.tickets:
            yield f"step {record.step}: its groups are not those of the trajectory log"


def _counted_once(left: Left) -> Iterator[str]:
    uses = Counter(g.ticket.number for _, taken in left.log for g in taken)
    for number, count in uses.items():
        if count > 1:
            yield f"ticket {number} counted {count} times"
        if number >= left.state.cursor:
            yield f"ticket {number} counted and was never admitted"
        if number in left.state.outstanding:
            yield f"ticket {number} counted and is still outstanding"


def _none_lost(left: Left, seen: Seen, notes: Notes) -> Iterator[str]:
    """A committed group was learnt from, is still to be, or was too old when the next in line was used. What
    Redis held when it was emptied is nobody's any more, and what a foreign hand answered need not count."""
    used = {g.ticket.number: step for step, taken in left.log for g in taken}
    excused = notes.flushed | notes.spent | (notes.moved & {n for n, _ in left.set_aside})
    following = left.state.step
    for number in reversed(seen.order):
        if number in used:
            following = used[number]
        elif number not in left.open | left.unread | excused:
            spans = seen.committed[number]
            foreign = any(left.digests.get(s.version) != s.digest for s in spans)
            if not foreign and max(left.lag(s, following) for s in spans) <= left.max_lag:
                yield f"ticket {number}: its group was committed in time, and is lost"
    for number in left.state.outstanding:
        if number not in left.open | left.unread | excused:
            yield f"ticket {number} is outstanding and nowhere in Redis"


def _bound(left: Left) -> Iterator[str]:
    for step, taken in left.log:
        for group in taken:
            spans = [s for t in group.validate().trajectories for s in t.all_spans]
            worst = max(left.lag(s, step) for s in spans)
            if worst > left.max_lag:
                yield f"step {step}, ticket {group.ticket.number}: a token {worst} versions old"


def _same_weights(left: Left, seen: Seen, notes: Notes) -> Iterator[str]:
    """What drew a token is, bit for bit, something that was published under that number."""
    known = left.published | set(left.digests.items())
    announced = {(v, d) for (_, v), digests in seen.published.items() for d in digests}
    for version, digest in sorted(announced - known):
        yield f"version {version} ({digest}) was announced and is not in the learner's log"
    for key, digests in seen.published.items():
        if len(digests) > 1:
            yield f"version {key[1]} of one epoch was published with {len(digests)} digests"
    honest = [spans for n, spans in seen.committed.items() if n not in notes.spent]
    drawn = {(s.version, s.digest) for spans in honest for s in spans}
    for version, digest in sorted(drawn - known):
        yield f"tokens were drawn by a version {version} ({digest}) that was never published"


def _quarantine(left: Left, notes: Notes) -> Iterator[str]:
    for number, group in left.set_aside:
        aside = notes.moved | notes.spent
        if group.worker != FOREIGN and number < FORGED and number not in aside:
            yield f"ticket {number}: a sound group in the quarantine"


def _own_groups(left: Left) -> Iterator[str]:
    """The learner learns from its own run, and from nothing that cannot be learnt from."""
    for step, taken in left.log:
        for group in taken:
            where = f"step {step}, ticket {group.ticket.number}"
            if group.ticket.run_id != left.state.run_id:
                yield f"{where}: a group of run {group.ticket.run_id or 'without an id'}"
            if group.worker == FOREIGN:
                yield f"{where}: what a foreign hand committed was learnt from"


def _set_aside(left: Left, seen: Seen, notes: Notes) -> Iterator[str]:
    """What cannot be learnt from is in the quarantine, or its turn is still to come."""
    kept = {fields.get(b"id", b"").decode() for fields in left.quarantine}
    for entry, what in notes.spoiled.items():
        if entry not in seen.set_aside | kept | left.entries:
            yield f"group {entry}, {what}: neither in the quarantine nor still to come"


class Growth(msgspec.Struct, frozen=True):
    """Growth of the longest-lived process of a service."""

    service: str
    minutes: float
    resident_mb: tuple[float, float]
    """Median of the second and of the last quarter of its life, 10^6 bytes"""
    files: tuple[float, float]

    @property
    def flat(self) -> bool:
        """Within what caches, buffers and a connection more or less come to."""
        (before, after), (few, many) = self.resident_mb, self.files
        return after <= 1.1 * before + 20 and many <= few + 16


def growth(service: str, samples: list[tuple[float, int, int, int]]) -> Growth | None:
    """`samples` are (time s, pid, bytes, files); None for a process that was seen fewer than 8 times."""
    if not samples:
        return None
    longest = Counter(pid for _, pid, *_ in samples).most_common(1)[0][0]
    mine = [sample for sample in samples if sample[1] == longest]
    if len(mine) < 8:
        return None
    quarter = len(mine) // 4
    early, late = mine[quarter : 2 * quarter], mine[-quarter:]
    return Growth(
        service,
        (mine[-1][0] - mine[0][0]) / 60,
        (_median(early, 2) / 1e6, _median(late, 2) / 1e6),
        (_median(early, 3), _median(late, 3)),
    )


def _median(samples: list[tuple[float, int, int, int]], column: int) -> float:
    return sorted(float(sample[column]) for sample in samples)[len(samples) // 2]
