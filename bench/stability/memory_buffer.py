"""The replay buffer inside one process, for the laboratory and for tests.

It keeps the same contract as the buffer in Redis (tests/buffer/test_contract.py tests both), but its state ends
with the process. Records are encoded and decoded as on their way through Redis.
"""

import asyncio
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import cast

from msgspec.structs import replace

from areal_q.errors import RecordError
from areal_q.messages import (
    Group,
    PartialGroup,
    Ticket,
    WorkerStatus,
    check_size,
    decode_group,
    decode_ticket,
    encode,
)
from buffer.interface import START, Claim, Claims, Entry, Memory, RunInfo
from buffer.redis_store import LearnerBuffer, WorkerBuffer
from buffer.redis_store.keys import WORKER_TTL_S, Keys

_POLL_S = 0.005


@dataclass
class QueuedTicket:
    """A ticket in a stream; nobody has claimed it while `owner` is None."""

    record: bytes
    owner: object | None = None
    since_s: float = 0.0
    deliveries: int = 0
    partial: PartialGroup | None = None


@dataclass
class MemoryBuffer:
    """The state of one run that would otherwise be in Redis. It is thread-safe: every access acquires `lock`.

    Example:
        buffer = MemoryBuffer("run")
        learner, worker = buffer.learner(), buffer.worker("worker-0")
    """

    run: str
    lock: threading.Condition = field(default_factory=threading.Condition)
    info: RunInfo | None = None
    cursor: int | None = None
    tickets: dict[str, OrderedDict[str, QueuedTicket]] = field(init=False)
    groups: dict[str, OrderedDict[str, bytes]] = field(init=False)
    quarantine: list[tuple[str, str, bytes]] = field(default_factory=list)
    """Refused records, as (stream, reason, record)"""
    beats: dict[str, tuple[float, WorkerStatus]] = field(default_factory=dict)
    sequence: int = 0
    newest_ms: int = 0

    def __post_init__(self) -> None:
        self.keys = keys = Keys(self.run)
        self.tickets = {keys.eval_tickets: OrderedDict(), keys.tickets: OrderedDict()}
        self.groups = {keys.eval_groups: OrderedDict(), keys.groups: OrderedDict()}

    def learner(self) -> LearnerBuffer:
        """Returns what stands in for the learner's side."""
        return cast(LearnerBuffer, MemoryLearner(self))

    def worker(self, name: str, claim_timeout_s: float = 30.0) -> WorkerBuffer:
        """Returns what stands in for a worker's side."""
        return cast(WorkerBuffer, MemoryWorker(self, name, claim_timeout_s))

    def next_id(self) -> str:
        """Returns the next entry id; ids sort like those of a Redis stream."""
        self.sequence += 1
        self.newest_ms = max(self.newest_ms, int(time.time() * 1000))
        return f"{self.newest_ms}-{self.sequence}"


class MemoryLearner:
    def __init__(self, store: MemoryBuffer) -> None:
        self.position = START
        self.quarantined = 0
        self.run_id = ""
        self._store = store
        self._keys = store.keys

    def publish_run(self, config_toml: str, endpoints: dict[str, str], settings: str = "") -> None:
        with self._store.lock:
            self._store.info = RunInfo(config_toml, dict(endpoints), self.run_id, settings)

    def admit(self, tickets: list[Ticket], cursor: int) -> None:
        with self._store.lock:
            self._store.cursor = cursor
            self._add(self._keys.tickets, tickets)

    def admit_eval(self, tickets: list[Ticket]) -> None:
        with self._store.lock:
            self._add(self._keys.eval_tickets, tickets)

    def readmit(self, version: int) -> int:
        with self._store.lock:
            entries = self._store.tickets[self._keys.tickets]
            tickets = [(id, decode_ticket(entry.record)) for id, entry in entries.items()]
            ahead = [(id, ticket) for id, ticket in tickets if ticket.step > version]
            for id, ticket in ahead:
                del entries[id]
                self._add(self._keys.tickets, [replace(ticket, step=version)])
        return len(ahead)

    def open_eval(self) -> Counter[int]:
        with self._store.lock:
            entries = self._store.tickets[self._keys.eval_tickets].values()
            return Counter(decode_ticket(entry.record).step for entry in entries)

    def drop_eval(self) -> int:
        with self._store.lock:
            entries = self._store.tickets[self._keys.eval_tickets]
            count = len(entries)
            entries.clear()
        return count

    def cursor(self) -> int | None:
        return self._store.cursor

    def open_tickets(self) -> set[int]:
        with self._store.lock:
            entries = self._store.tickets[self._keys.tickets].values()
            return {decode_ticket(entry.record).number for entry in entries}

    def read(self, count: int, timeout_s: float) -> list[Entry]:
        entries: list[Entry] = []
        deadline = time.monotonic() + timeout_s
        with self._store.lock:
            while True:
                entries += self._read_now(count - len(entries))
                left_s = deadline - time.monotonic()
                if len(entries) >= count or left_s <= 0:
                    return entries
                self._store.lock.wait(left_s)

    def take(self, count: int, timeout_s: float) -> list[Group]:
        return [entry.group for entry in self.read(count, timeout_s)]

    def unread(self) -> list[int]:
        with self._store.lock:
            return [decode_group(record).ticket.number for _, record in self._after()]

    def trim(self, position: str) -> None:
        with self._store.lock:
            groups = self._store.groups[self._keys.groups]
            for entry in [e for e in groups if _order(e) <= _order(position)]:
                del groups[entry]

    def take_eval(self) -> list[Group]:
        with self._store.lock:
            groups = self._store.groups[self._keys.eval_groups]
            records = list(groups.values())
            groups.clear()
        return [g for g in map(self._decoded, records) if g is not None]

    def memory(self) -> Memory:
        return Memory(0, 0)

    def claims(self) -> Claims:
        with self._store.lock:
            entries = self._store.tickets[self._keys.tickets].values()
            owners = [str(entry.owner) for entry in entries if entry.owner]
            return Claims(len(entries), dict(Counter(owners)))

    def starves(self, sentence: str) -> None:
        pass

    def now_s(self) -> float:
        return time.time()

    def rewind(self) -> bool:
        return False

    def quarantined_total(self) -> int:
        return len(self._store.quarantine)

    def workers(self) -> list[WorkerStatus]:
        since = time.monotonic() - WORKER_TTL_S
        with self._store.lock:
            beats = sorted(self._store.beats.items())
            return [status for _, (beat_s, status) in beats if beat_s > since]

    def close(self) -> None:
        pass

    def _add(self, stream: str, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self._store.tickets[stream][self._store.next_id()] = QueuedTicket(encode(ticket))

    def _after(self) -> list[tuple[str, bytes]]:
        groups = self._store.groups[self._keys.groups]
        return [(e, r) for e, r in groups.items() if _order(e) > _order(self.position)]

    def _read_now(self, count: int) -> list[Entry]:
        entries = []
        for id, record in self._after():
            if len(entries) == count:
                break
            self.position = id
            group = self._decoded(record, id)
            if group:
                entries.append(Entry(id, group, len(record)))
        return entries

    def _decoded(self, record: bytes, entry: str | None = None) -> Group | None:
        try:
            return decode_group(record).validate()
        except RecordError as error:
            stream = self._keys.groups if entry else self._keys.eval_groups
            self._store.quarantine.append((stream, str(error), record))
            if entry:
                del self._store.groups[stream][entry]
            self.quarantined += 1
            return None


class MemoryWorker:
    def __init__(self, store: MemoryBuffer, name: str, claim_timeout_s: float) -> None:
        self.claim_timeout_s = claim_timeout_s
        self.max_deliveries = 5
        self.quarantined = 0
        self._store, self._name = store, name
        self._held: set[tuple[str, str]] = set()

    async def run_info(self) -> RunInfo:
        while self._store.info is None:
            await asyncio.sleep(_POLL_S)
        return self._store.info

    async def claim(
        self, count: int, block_s: float, *, training_first: bool = False
    ) -> list[Claim]:
        deadline = time.monotonic() + block_s
        while True:
            claims = self._claim_now(count, training_first)
            if claims or time.monotonic() >= deadline:
                return claims
            await asyncio.sleep(_POLL_S)

    async def commit(self, claim: Claim, group: Group) -> bool:
        if group.validate().ticket.number != claim.ticket.number:
            raise RecordError(
                f"group of ticket {group.ticket.number} for a claim on {claim.ticket.number}"
            )
        keys = self._store.keys
        evaluation = claim.stream == keys.eval_tickets
        target = keys.eval_groups if evaluation else keys.groups
        record = encode(group)
        check_size(len(record))
        self._held.discard((claim.stream, claim.entry))
        with self._store.lock:
            if not self._owns(claim):
                return False
            del self._store.tickets[claim.stream][claim.entry]
            self._store.groups[target][self._store.next_id()] = record
            self._store.lock.notify_all()
        return True

    async def renew(self, claims: list[Claim]) -> list[Claim]:
        with self._store.lock:
            lost = [claim for claim in claims if not self._owns(claim)]
            for claim in claims:
                if claim not in lost:
                    self._store.tickets[claim.stream][claim.entry].since_s = time.monotonic()
        self._held -= {(claim.stream, claim.entry) for claim in lost}
        return lost

    async def release(self, claims: list[Claim]) -> None:
        with self._store.lock:
            for claim in filter(self._owns, claims):
                entry = self._store.tickets[claim.stream][claim.entry]
                entry.owner, entry.deliveries = None, entry.deliveries - 1
                entry.partial = claim.partial
        self._held -= {(claim.stream, claim.entry) for claim in claims}

    async def quarantine(self, claim: Claim, reason: str) -> None:
        with self._store.lock:
            if self._owns(claim):
                entry = self._store.tickets[claim.stream].pop(claim.entry)
                self._store.quarantine.append((claim.stream, reason, entry.record))
                self.quarantined += 1
        self._held.discard((claim.stream, claim.entry))

    async def heartbeat(self, status: WorkerStatus) -> None:
        with self._store.lock:
            self._store.beats[self._name] = (time.monotonic(), status)

    async def close(self) -> None:
        pass

    def _owns(self, claim: Claim) -> bool:
        entry = self._store.tickets[claim.stream].get(claim.entry)
        return entry is not None and entry.owner is self

    def _claim_now(self, count: int, training_first: bool) -> list[Claim]:
        """Claims up to `count` tickets, the oldest of a stream first, whether abandoned or
        new."""
        now = time.monotonic()
        claims: list[Claim] = []
        with self._store.lock:
            for stream, entries in list(self._store.tickets.items())[
                :: -1 if training_first else 1
            ]:
                for id, entry in list(entries.items()):
                    if len(claims) == count:
                        return claims
                    if entry.owner is not None and now - entry.since_s < self.claim_timeout_s:
                        continue
                    # A worker that claims again a ticket it renewed too late has not fallen silent over it.
                    entry.deliveries += entry.owner is not self
                    entry.owner, entry.since_s = self, now
                    if entry.deliveries > self.max_deliveries:
                        reason = f"{self.max_deliveries} workers fell silent over it"
                        self._store.quarantine.append((stream, reason, entry.record))
                        del entries[id]
                        continue
                    if (stream, id) in self._held:
                        continue  # this worker's own ticket, which it renewed too late
                    try:
                        ticket = decode_ticket(entry.record)
                        claims.append(Claim(stream, id, ticket, entry.partial))
                    except RecordError as error:
                        self._store.quarantine.append((stream, str(error), entry.record))
                        self.quarantined += 1
                        del entries[id]
                        continue
                    self._held.add((stream, id))
        return claims


def _order(position: str) -> tuple[int, int]:
    ms, _, sequence = position.partition("-")
    return int(ms), int(sequence)
