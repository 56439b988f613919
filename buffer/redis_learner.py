"""The learner's side of the Redis buffer; see buffer/redis_buffer.py for the whole."""

import functools
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import redis
from msgspec.structs import replace

from areal_q.errors import BufferFull, RecordError
from areal_q.messages import (
    Decoder,
    Group,
    Ticket,
    WorkerStatus,
    decode_group,
    decode_status,
    decode_ticket,
    encode,
)
from buffer import scripts
from buffer.base import START, Entry, Memory
from buffer.connection import PATIENCE_S, Patience, connect, insist, refuses_writes
from buffer.keys import RECORD, WORKERS_GROUP, Keys

T = TypeVar("T")
logger = logging.getLogger(__name__)
PAGE = 64
"""Entries read at once; each may be megabytes."""


class _TicketOf(msgspec.Struct):
    number: int


class _GroupOf(msgspec.Struct):
    """Just enough of a group to know its ticket, without copying its arrays."""

    ticket: _TicketOf


_decode_number: Decoder[_TicketOf] = Decoder(_TicketOf)
_decode_group_number: Decoder[_GroupOf] = Decoder(_GroupOf)


class LearnerBuffer:
    """The learner's side. One learner per run.

    Delivery: `take` reads in stream order without removing, so a learner that resumes at a checkpoint's
    position gets the same groups again, in the same order, until `trim` (test_a_resumed_learner_takes_the_
    same_groups_again). `admit` is atomic and happens once, also when its answer is lost. An evaluation
    group is removed after it was read: a learner killed in between reads it again. What cannot be decoded
    or breaks the contract goes to the quarantine and its ticket produces nothing.
    While Redis does not answer, calls are repeated for `patience_s`, then raise BufferUnavailable. A full
    Redis refuses `admit` at once with BufferFull and admits nothing: only a checkpoint and `trim` make room.
    """

    def __init__(self, url: str, run: str, patience_s: float = PATIENCE_S) -> None:
        self.keys = Keys(run)
        self.position = START
        self.quarantined = 0
        self.check: Callable[[Group], None] = lambda group: None
        """Raises RecordError for a valid group that does not fit the model"""
        self._url, self._patience_s = url, patience_s
        self._redis = connect(url)
        self._eval_position = START
        self._admit = self._redis.register_script(scripts.ADMIT)
        self._readmit = self._redis.register_script(scripts.READMIT)
        self._quarantine = self._redis.register_script(scripts.QUARANTINE)

    def publish_run(self, config_toml: str, endpoints: dict[str, str]) -> None:
        fields: dict[Any, Any] = {
            "config": config_toml,
            "endpoints": msgspec.json.encode(endpoints),
        }
        self._create_groups()
        self._write(lambda: self._redis.hset(self.keys.info, mapping=fields))

    def admit(self, tickets: list[Ticket], cursor: int) -> None:
        self._admit_to([self.keys.tickets, self.keys.admission, self.keys.cursor], tickets, cursor)

    def admit_eval(self, tickets: list[Ticket]) -> None:
        self._admit_to([self.keys.eval_tickets, self.keys.admission], tickets, 0)

    def _admit_to(self, keys: list[str], tickets: list[Ticket], cursor: int) -> None:
        args = [uuid.uuid4().hex, cursor, *map(encode, tickets)]
        self._write(lambda: self._admit(keys, args))

    def readmit(self, version: int) -> int:
        ahead = [
            (entry, encode(replace(ticket, step=version)))
            for entry, ticket in self._open(self.keys.tickets)
            if ticket.step > version
        ]
        return self._exchange(self.keys.tickets, ahead)

    def drop_eval(self) -> int:
        entries = [(entry, b"") for entry, _ in self._open(self.keys.eval_tickets)]
        return self._exchange(self.keys.eval_tickets, entries)

    def _exchange(self, stream: str, entries: list[tuple[bytes, bytes]]) -> int:
        if not entries:
            return 0
        keys = [stream, self.keys.partials]
        args = [WORKERS_GROUP, *(part for pair in entries for part in pair)]
        return int(self._call(lambda: self._readmit(keys, args)))  # pyright: ignore

    def cursor(self) -> int | None:
        value: Any = self._call(lambda: self._redis.get(self.keys.cursor))
        return None if value is None else int(value)

    def open_tickets(self) -> set[int]:
        """See LearnerSide. A poison ticket is set aside by the worker that meets it, and left out here."""
        return set(self._numbers(self.keys.tickets, START, lambda r: _decode_number(r).number))

    def unread(self) -> list[int]:
        return list(
            self._numbers(
                self.keys.groups, self.position, lambda r: _decode_group_number(r).ticket.number
            )
        )

    def read(self, count: int, timeout_s: float) -> list[Entry]:
        out: list[Entry] = []
        deadline = time.monotonic() + timeout_s
        while len(out) < count:
            left_s = max(0.0, deadline - time.monotonic())
            entries = self._read(count - len(out), left_s)
            for entry, fields in entries:
                group = self._decoded(self.keys.groups, entry, fields)
                if group:
                    out.append(Entry(entry.decode(), group, len(fields[RECORD])))
                self.position = entry.decode()
            if not entries and left_s == 0:
                break
        return out

    def take(self, count: int, timeout_s: float) -> list[Group]:
        return [entry.group for entry in self.read(count, timeout_s)]

    def take_eval(self) -> list[Group]:
        groups = []
        for entry, fields in self._pages(self.keys.eval_groups, self._eval_position):
            group = self._decoded(self.keys.eval_groups, entry, fields)
            if group:
                groups.append(group)
            # Kept here as well: should the answer to XDEL be lost, this learner reads nothing twice.
            self._eval_position = entry.decode()
            self._call(functools.partial(self._redis.xdel, self.keys.eval_groups, entry))
        return groups

    def trim(self, position: str) -> None:
        ms, _, sequence = position.partition("-")
        following = f"{ms}-{int(sequence) + 1}"
        self._call(lambda: self._redis.xtrim(self.keys.groups, minid=following, approximate=False))

    def memory(self) -> Memory:
        found: Any = self._call(lambda: self._redis.info("memory"))
        return Memory(int(found["used_memory"]), int(found.get("maxmemory", 0)))

    def now_s(self) -> float:
        seconds, micros = self._call(self._redis.time)  # pyright: ignore
        return seconds + micros / 1e6

    def rewind(self) -> bool:
        if _behind(self._last_id(self.keys.eval_groups), self._eval_position):
            self._eval_position = START
        if not _behind(self._last_id(self.keys.groups), self.position):
            return False
        self.position = START
        return True

    def _last_id(self, stream: str) -> str:
        """The newest id that `stream` ever gave out."""
        try:
            found: Any = self._call(lambda: self._redis.xinfo_stream(stream))
        except redis.ResponseError as error:
            if "no such key" not in str(error):
                raise
            return START
        return found["last-generated-id"].decode()

    def set_aside(self) -> int:
        return int(self._call(lambda: self._redis.get(self.keys.set_aside)) or 0)  # pyright: ignore

    def workers(self) -> list[WorkerStatus]:
        names: Any = self._call(lambda: self._redis.smembers(self.keys.workers))
        if not names:
            return []
        names = sorted(names)
        beats: Any = self._call(
            lambda: self._redis.mget([self.keys.worker(name.decode()) for name in names])
        )
        silent = [name for name, beat in zip(names, beats, strict=True) if beat is None]
        if silent:  # one that beats again comes back by itself
            self._call(lambda: self._redis.srem(self.keys.workers, *silent))
        return [status for beat in beats if beat is not None for status in _statuses(beat)]

    def forget(self) -> None:
        """Deletes every key of the run."""
        names: Any = self._call(lambda: self._redis.smembers(self.keys.workers))
        beats = [self.keys.worker(name.decode()) for name in names]
        self._call(lambda: self._redis.delete(*self.keys.fixed, *beats))

    def close(self) -> None:
        self._redis.close()

    def _read(self, count: int, wait_s: float) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Up to `count` entries after `position`; waits up to `wait_s` (in slices of 1 s) for the first."""
        block_ms = min(1000, round(wait_s * 1000)) or None
        streams: dict[Any, Any] = {self.keys.groups: self.position}
        reply: Any = self._call(lambda: self._redis.xread(streams, min(count, PAGE), block_ms))
        return reply[0][1] if reply else []

    def _pages(self, stream: str, after: str) -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
        while True:
            start = f"({after}"
            page: Any = self._call(
                functools.partial(self._redis.xrange, stream, min=start, count=PAGE)
            )
            yield from page
            if len(page) < PAGE:
                return
            after = page[-1][0].decode()

    def _open(self, stream: str) -> Iterator[tuple[bytes, Ticket]]:
        """The tickets of `stream` by their entries. One that cannot be decoded is the workers' to set aside."""
        for entry, fields in self._pages(stream, START):
            try:
                yield entry, decode_ticket(fields.get(RECORD, b""))
            except RecordError as error:
                logger.warning("%s %s: %s", stream, entry.decode(), error)

    def _numbers(self, stream: str, after: str, number: Callable[[bytes], int]) -> Iterator[int]:
        for entry, fields in self._pages(stream, after):
            try:
                yield number(fields.get(RECORD, b""))
            except RecordError as error:
                logger.warning("%s %s: %s", stream, entry.decode(), error)

    def _decoded(self, stream: str, entry: bytes, fields: dict[bytes, bytes]) -> Group | None:
        """The entry's group; None if it was poison, and is now in the quarantine."""
        try:
            group = decode_group(fields.get(RECORD, b"")).validate()
            self.check(group)
            return group
        except RecordError as error:
            logger.warning("%s %s goes to the quarantine: %s", stream, entry.decode(), error)
            keys = [stream, self.keys.quarantine, self.keys.set_aside]
            args = [entry, str(error), ""]
            self._call(lambda: self._quarantine(keys, args))
            self.quarantined += 1
            return None

    def _create_groups(self) -> None:
        for stream in (self.keys.tickets, self.keys.eval_tickets):
            try:
                self._write(
                    functools.partial(
                        self._redis.xgroup_create, stream, WORKERS_GROUP, id="0", mkstream=True
                    )
                )
            except redis.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    def _call(self, call: Callable[[], T]) -> T:
        return insist(Patience(self._url, self._patience_s), call)

    def _write(self, call: Callable[[], T]) -> T:
        try:
            return insist(Patience(self._url, self._patience_s), call, disk=False)
        except redis.ResponseError as error:
            if not refuses_writes(error):
                raise
            raise BufferFull(f"redis refuses writes: {error}") from error


def _behind(one: str, other: str) -> bool:
    """Whether the first of two stream ids is the smaller one."""
    first, second = (tuple(map(int, id.split("-"))) for id in (one, other))
    return first < second


def _statuses(beat: bytes) -> list[WorkerStatus]:
    try:
        return [decode_status(beat)]
    except RecordError as error:
        logger.warning("heartbeat ignored: %s", error)
        return []
