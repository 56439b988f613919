"""Reads a run's state in Redis as records. Nothing here changes the state."""

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import redis

from areal_q.errors import RecordError
from areal_q.messages import Group, Ticket, decode_group, decode_ticket
from buffer.redis_store.keys import RECORD, WORKERS_GROUP, Keys
from buffer.redis_store.streams import pages


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """One stream of a run."""

    name: str
    entries: int
    claimed: int = 0
    """Number of tickets that workers have claimed; 0 in streams of groups"""
    deliveries: int = 0
    """Largest number of times that a ticket was delivered, among the first 1,000 claimed"""
    nbytes: int = 0
    """Memory of the stream in bytes by Redis's own estimate, overhead included"""
    oldest_s: float | None = None
    newest_s: float | None = None
    """Seconds since the last entry was added; `oldest_s` is the same for the first. None in an empty stream."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `areal-q buffer status` shows."""

    run: str
    server: str
    used_bytes: int
    limit_bytes: int
    """Memory limit of Redis in bytes; 0 means that there is no limit."""
    policy: str
    """Eviction policy of Redis at its limit. Any policy other than noeviction may lose groups."""
    append_only: bool
    cursor: int | None
    """Number of the next ticket; None if Redis has no state of the run"""
    set_aside: int
    """Number of records that were ever moved to the quarantine"""
    streams: list[Stream]
    workers: list[str]
    """Names of the workers that sent a heartbeat lately; the heartbeats themselves are in the metrics."""


class RefusedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record in the quarantine."""

    id: str
    source: str
    """Key of the stream that the record came from"""
    reason: str
    nbytes: int
    record: bytes
    """The record, or only its first bytes if it was too large; its full size is `nbytes`."""

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
        workers=sorted(n.decode(errors="replace") for n in names if client.exists(keys.worker(n))),
    )


def groups(client: redis.Redis, run: str) -> Iterator[tuple[str, Group]]:
    """Yields (entry id, group) of the committed groups in order, except those that are not valid."""
    for entry, fields in pages(client, Keys(run).groups):
        try:
            yield entry.decode(), decode_group(fields.get(RECORD, b"")).validate()
        except RecordError:
            continue


def tickets(client: redis.Redis, stream: str) -> Iterator[tuple[str, Ticket]]:
    for entry, fields in pages(client, stream):
        try:
            yield entry.decode(), decode_ticket(fields.get(RECORD, b""))
        except RecordError:
            continue


def quarantine(client: redis.Redis, run: str) -> Iterator[RefusedRecord]:
    for entry, fields in pages(client, Keys(run).quarantine):
        text = {k: fields.get(k, b"").decode(errors="replace") for k in (b"source", b"reason")}
        record, nbytes = fields.get(RECORD, b""), fields.get(b"bytes", b"")
        yield RefusedRecord(
            id=entry.decode(),
            source=text[b"source"],
            reason=text[b"reason"],
            nbytes=int(nbytes) if nbytes.isdigit() else len(record),
            record=record,
        )


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
    """Returns the seconds since the first of `entries` was added: this machine's clock minus the time by
    Redis's clock in the entry's id."""
    if not entries:
        return None
    return max(0.0, time.time() - int(entries[0][0].partition(b"-")[0]) / 1000)
