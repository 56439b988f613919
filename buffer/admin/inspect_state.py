"""A run's state in Redis as records, for whoever looks from outside: nothing here changes anything."""

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import redis

from areal_q.errors import RecordError
from areal_q.messages import Group, Ticket, decode_group, decode_ticket
from buffer.interface import START
from buffer.redis_store.keys import RECORD, WORKERS_GROUP, Keys

ENTRIES_PER_PAGE = 64


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """One stream of a run."""

    name: str
    entries: int
    claimed: int = 0
    """Number of tickets that are with a worker; 0 in streams of groups"""
    deliveries: int = 0
    """Largest number of workers that a ticket was given to, among the first 1,000 claimed"""
    nbytes: int = 0
    """Bytes by Redis's own estimate, its overhead included"""
    oldest_s: float | None = None
    newest_s: float | None = None
    """Seconds since the last entry came; `oldest_s` are those since the first. None in an empty stream."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `areal-q buffer status` tells."""

    run: str
    server: str
    used_bytes: int
    limit_bytes: int
    """Bytes at which Redis is full; 0 means that there is no limit."""
    policy: str
    """Policy that Redis follows at its limit; any but noeviction may lose groups."""
    append_only: bool
    cursor: int | None
    """Number of the next ticket; None in a Redis that never saw the run."""
    set_aside: int
    """Records that ever went to the quarantine"""
    streams: list[Stream]
    workers: list[str]
    """Names of the workers that live; their heartbeats are in the metrics."""


class RefusedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record in the quarantine."""

    id: str
    source: str
    """Stream that the record came from"""
    reason: str
    nbytes: int
    record: bytes
    """Bytes of the record, fewer than `nbytes` where only the start was kept"""

    @property
    def whole(self) -> bool:
        return len(self.record) == self.nbytes


def read_status(client: redis.Redis, run: str) -> Status:
    keys = Keys(run)
    info: Any = client.info()
    names: Any = client.smembers(keys.workers)
    cursor: Any = client.get(keys.cursor)
    set_aside: Any = client.get(keys.set_aside)
    server = info.get("valkey_version") or info["redis_version"]
    return Status(
        run=run,
        server=f"{'valkey' if 'valkey_version' in info else 'redis'} {server}",
        used_bytes=info["used_memory"],
        limit_bytes=info.get("maxmemory", 0),
        policy=info.get("maxmemory_policy", ""),
        append_only=bool(info.get("aof_enabled")),
        cursor=None if cursor is None else int(cursor),
        set_aside=int(set_aside or 0),
        streams=[
            _stream(client, "tickets", keys.tickets, claims=True),
            _stream(client, "groups", keys.groups),
            _stream(client, "eval tickets", keys.eval_tickets, claims=True),
            _stream(client, "eval groups", keys.eval_groups),
            _stream(client, "quarantine", keys.quarantine),
        ],
        workers=sorted(n.decode() for n in names if client.exists(keys.worker(n.decode()))),
    )


def groups(client: redis.Redis, run: str, after: str = START) -> Iterator[tuple[str, Group]]:
    """The committed groups in order, those that break their contract left out."""
    for entry, fields in pages(client, Keys(run).groups, after):
        try:
            yield entry, decode_group(fields.get(RECORD, b"")).validate()
        except RecordError:
            continue


def tickets(client: redis.Redis, stream: str) -> Iterator[tuple[str, Ticket]]:
    for entry, fields in pages(client, stream):
        try:
            yield entry, decode_ticket(fields.get(RECORD, b""))
        except RecordError:
            continue


def quarantine(client: redis.Redis, run: str) -> Iterator[RefusedRecord]:
    for entry, fields in pages(client, Keys(run).quarantine):
        text = {k: fields.get(k, b"").decode(errors="replace") for k in (b"source", b"reason")}
        record = fields.get(RECORD, b"")
        yield RefusedRecord(
            id=entry,
            source=text[b"source"],
            reason=text[b"reason"],
            nbytes=int(fields.get(b"bytes", len(record))),
            record=record,
        )


def pages(
    client: redis.Redis, stream: str, after: str = START
) -> Iterator[tuple[str, dict[bytes, bytes]]]:
    """All entries of a stream, ENTRIES_PER_PAGE at a time."""
    while True:
        page: Any = client.xrange(stream, min=f"({after}", count=ENTRIES_PER_PAGE)
        for entry, fields in page:
            after = entry.decode()
            yield after, fields
        if len(page) < ENTRIES_PER_PAGE:
            return


def _stream(client: redis.Redis, name: str, key: str, claims: bool = False) -> Stream:
    entries: Any = client.xlen(key)
    if not entries:
        return Stream(name=name, entries=0)
    first: Any = client.xrange(key, count=1)
    last: Any = client.xrevrange(key, count=1)
    size: Any = client.memory_usage(key, samples=0)
    claimed, deliveries = _claims(client, key) if claims else (0, 0)
    return Stream(
        name=name,
        entries=entries,
        claimed=claimed,
        deliveries=deliveries,
        nbytes=size or 0,
        oldest_s=_age(first),
        newest_s=_age(last),
    )


def _claims(client: redis.Redis, key: str) -> tuple[int, int]:
    try:
        pending: Any = client.xpending(key, WORKERS_GROUP)
        page: Any = client.xpending_range(key, WORKERS_GROUP, "-", "+", 1000)
    except redis.ResponseError as error:
        if "NOGROUP" not in str(error):
            raise
        return 0, 0
    return pending["pending"], max((p["times_delivered"] for p in page), default=0)


def _age(entries: list[tuple[bytes, Any]]) -> float | None:
    """Seconds since the entry came, by its id: Redis's clock against ours."""
    if not entries:
        return None
    return max(0.0, time.time() - int(entries[0][0].partition(b"-")[0]) / 1000)
