"""The replay buffer in Redis: the learner's side (blocking) and a worker's side (asyncio).

    LearnerBuffer.admit ─▶ tickets ─claim▶ WorkerBuffer ─commit▶ groups ─▶ LearnerBuffer.take
                              ▲               │ release, or silent for claim_timeout_s
                              └───────────────┘

A ticket is delivered at least once; its commit is one script that checks the owner, so it becomes a group
exactly once (test_a_group_commits_once_however_many_workers_race).
"""

import asyncio
import functools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import msgspec
import redis
import redis.asyncio

from areal_q.errors import BufferUnavailable, RecordError
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
from buffer.base import START, Claim, LearnerSide, WorkerSide
from buffer.connection import (
    Patience,
    connect,
    connect_async,
    insist,
    insist_async,
    refuses_writes,
)
from buffer.keys import (
    QUARANTINE_LENGTH,
    QUARANTINE_RECORD_BYTES,
    RECORD,
    RELEASED,
    RELEASED_IDLE_MS,
    WORKER_TTL_S,
    WORKERS_GROUP,
    Keys,
)

__all__ = ["START", "Claim", "LearnerBuffer", "LearnerSide", "WorkerBuffer", "WorkerSide"]

T = TypeVar("T")
logger = logging.getLogger(__name__)
PATIENCE_S = 60.0
BLOCK_SLICE_S = 0.25
"""The longest that a claim sleeps in Redis: released and abandoned tickets wake nobody."""
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
    Redis refuses `admit` at once with BufferUnavailable and admits nothing: only a checkpoint and `trim`
    make room.
    """

    def __init__(self, url: str, run: str, patience_s: float = PATIENCE_S) -> None:
        self.keys = Keys(run)
        self.position = START
        self.quarantined = 0
        self._url, self._patience_s = url, patience_s
        self._redis = connect(url)
        self._eval_position = START
        self._admit = self._redis.register_script(scripts.ADMIT)
        self._quarantine = self._redis.register_script(scripts.QUARANTINE)

    def publish_run(self, config_toml: str, endpoints: dict[str, str]) -> None:
        fields: dict[Any, Any] = {
            "config": config_toml,
            "endpoints": msgspec.json.encode(endpoints),
        }
        self._create_groups()
        self._write(lambda: self._redis.hset(self.keys.info, mapping=fields))
        self._write(lambda: self._redis.hdel(self.keys.info, "done"))

    def admit(self, tickets: list[Ticket], cursor: int) -> None:
        self._admit_to([self.keys.tickets, self.keys.admission, self.keys.cursor], tickets, cursor)

    def admit_eval(self, tickets: list[Ticket]) -> None:
        self._admit_to([self.keys.eval_tickets, self.keys.admission], tickets, 0)

    def _admit_to(self, keys: list[str], tickets: list[Ticket], cursor: int) -> None:
        args = [uuid.uuid4().hex, cursor, *map(encode, tickets)]
        self._write(lambda: self._admit(keys, args))

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

    def take(self, count: int, timeout_s: float) -> list[Group]:
        groups: list[Group] = []
        deadline = time.monotonic() + timeout_s
        while len(groups) < count:
            left_s = max(0.0, deadline - time.monotonic())
            entries = self._read(count - len(groups), left_s)
            for entry, fields in entries:
                group = self._decoded(self.keys.groups, entry, fields)
                if group:
                    groups.append(group)
                self.position = entry.decode()
            if not entries and left_s == 0:
                break
        return groups

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

    def announce_done(self) -> None:
        self._write(lambda: self._redis.hset(self.keys.info, "done", "1"))

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

    def _numbers(self, stream: str, after: str, number: Callable[[bytes], int]) -> Iterator[int]:
        for entry, fields in self._pages(stream, after):
            try:
                yield number(fields.get(RECORD, b""))
            except RecordError as error:
                logger.warning("%s %s: %s", stream, entry.decode(), error)

    def _decoded(self, stream: str, entry: bytes, fields: dict[bytes, bytes]) -> Group | None:
        """The entry's group; None if it was poison, and is now in the quarantine."""
        record = fields.get(RECORD, b"")
        try:
            return decode_group(record).validate()
        except RecordError as error:
            logger.warning("%s %s goes to the quarantine: %s", stream, entry.decode(), error)
            args = _quarantine_args(entry, error, record, group="")
            self._call(lambda: self._quarantine([stream, self.keys.quarantine], args))
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
            return self._call(call)
        except redis.ResponseError as error:
            if not refuses_writes(error):
                raise
            raise BufferUnavailable(f"redis refuses writes: {error}") from error


class WorkerBuffer:
    """A worker's side. Safe for many tasks of one event loop.

    Delivery: a claimed ticket is this worker's until `claim_timeout_s` pass without `renew`; then, or
    after `release`, another gets it (test_kill_9_between_claim_and_commit_gives_the_ticket_to_another).
    A stale owner's commit is refused. A commit whose answer was lost is repeated and then returns False
    though the group is in the buffer: it is there once either way. A reply of `claim` that is lost leaves
    tickets with this worker that it does not know of; the timeout frees them.
    While Redis does not answer, calls are repeated for `patience_s`, then raise BufferUnavailable. While
    Redis is full, `commit` waits without end and keeps the group; it renews its claim meanwhile.
    A poison ticket goes to the quarantine.
    """

    def __init__(
        self,
        url: str,
        run: str,
        worker: str,
        claim_timeout_s: float = 30.0,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.keys = Keys(run)
        self.claim_timeout_s = claim_timeout_s
        """May be set once `run_info` has brought the configuration."""
        self.quarantined = 0
        self._worker = worker
        # A restarted worker must not pass for the dead one of the same name.
        self._consumer = f"{worker}-{uuid.uuid4().hex[:12]}"
        self._url, self._patience_s = url, patience_s
        self._redis = connect_async(url)
        self._held: set[tuple[str, str]] = set()
        self._swept_s = time.monotonic()
        self._scripts = {
            name: self._redis.register_script(getattr(scripts, name))
            for name in ("CLAIM", "COMMIT", "RENEW", "RELEASE", "QUARANTINE", "SWEEP")
        }

    async def run_info(self) -> tuple[str, dict[str, str]]:
        while True:
            config, endpoints = await self._any(
                self._redis.hmget, self.keys.info, ["config", "endpoints"]
            )
            if config is not None and endpoints is not None:
                return config.decode(), msgspec.json.decode(endpoints, type=dict[str, str])
            await asyncio.sleep(0.1)

    async def done(self) -> bool:
        return bool(await self._any(self._redis.hexists, self.keys.info, "done"))

    async def claim(self, count: int, block_s: float) -> list[Claim]:
        await self._sweep()
        deadline = time.monotonic() + block_s
        while True:
            claims = await self._claim_now(count)
            left_s = deadline - time.monotonic()
            if claims or left_s <= 0:
                return claims
            claims = await self._claim_new(count, min(left_s, BLOCK_SLICE_S))
            if claims:
                return claims

    async def commit(self, claim: Claim, group: Group) -> bool:
        if group.validate().ticket.number != claim.ticket.number:
            raise RecordError(
                f"group of ticket {group.ticket.number} for a claim on {claim.ticket.number}"
            )
        evaluation = claim.stream == self.keys.eval_tickets
        target = self.keys.eval_groups if evaluation else self.keys.groups
        record = encode(group)
        try:
            while True:
                try:
                    return bool(
                        await self._script("COMMIT", [claim.stream, target], claim.entry, record)
                    )
                except redis.ResponseError as error:
                    if not refuses_writes(error):
                        raise
                    logger.warning("ticket %d waits for room in redis", claim.ticket.number)
                    await self.renew([claim])
                    await asyncio.sleep(min(1.0, self.claim_timeout_s / 4))
        finally:
            self._held.discard((claim.stream, claim.entry))

    async def renew(self, claims: list[Claim]) -> list[Claim]:
        lost = []
        for stream, mine in _by_stream(claims).items():
            gone = await self._script("RENEW", [stream], *mine)
            lost += [mine[entry.decode()] for entry in gone]
        self._held -= {(claim.stream, claim.entry) for claim in lost}
        return lost

    async def release(self, claims: list[Claim]) -> None:
        for stream, mine in _by_stream(claims).items():
            await self._script("RELEASE", [stream], RELEASED, RELEASED_IDLE_MS, *mine)
            self._held -= {(stream, entry) for entry in mine}

    async def heartbeat(self, status: WorkerStatus) -> None:
        """Skipped, with a log line, while Redis is full."""

        async def beat() -> None:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.set(self.keys.worker(self._worker), encode(status), ex=WORKER_TTL_S)
                pipe.sadd(self.keys.workers, self._worker)
                await pipe.execute()

        try:
            await self._call(beat)
        except redis.ResponseError as error:
            if not refuses_writes(error):
                raise
            logger.warning("heartbeat skipped: %s", error)

    async def close(self) -> None:
        await self._redis.aclose()

    @property
    def _streams(self) -> list[str]:
        return [self.keys.eval_tickets, self.keys.tickets]

    async def _claim_now(self, count: int) -> list[Claim]:
        idle_ms = round(self.claim_timeout_s * 1000)
        found = await self._script("CLAIM", self._streams, count, idle_ms)
        entries = [(self._streams[i - 1], entry.decode(), record) for i, entry, record in found]
        return await self._claims(entries)

    async def _claim_new(self, count: int, wait_s: float) -> list[Claim]:
        """Sleeps in Redis until there is a new ticket in either stream."""
        streams: dict[Any, Any] = dict.fromkeys(self._streams, ">")
        wait_ms = max(1, round(wait_s * 1000))
        reply: Any = await self._on_group(
            lambda: self._redis.xreadgroup(
                WORKERS_GROUP, self._consumer, streams, count=count, block=wait_ms
            )
        )
        entries = [
            (stream.decode(), entry.decode(), fields.get(RECORD, b""))
            for stream, page in reply or []
            for entry, fields in page
        ]
        claims = await self._claims(entries)
        if claims[count:]:  # both streams had some
            await self.release(claims[count:])
        return claims[:count]

    async def _claims(self, entries: list[tuple[str, str, bytes]]) -> list[Claim]:
        claims = []
        for stream, entry, record in entries:
            if (stream, entry) in self._held:
                continue  # our own, renewed too late and taken from ourselves
            try:
                claim = Claim(stream, entry, decode_ticket(record))
            except RecordError as error:
                logger.warning("%s %s goes to the quarantine: %s", stream, entry, error)
                args = _quarantine_args(entry, error, record, WORKERS_GROUP)
                script = self._scripts["QUARANTINE"]
                keys = [stream, self.keys.quarantine]
                await self._call(functools.partial(script, keys, args))
                self.quarantined += 1
                continue
            self._held.add((stream, entry))
            claims.append(claim)
        return claims

    async def _sweep(self) -> None:
        """Once per claim timeout: removes the consumers of workers that are gone."""
        if time.monotonic() - self._swept_s < self.claim_timeout_s:
            return
        self._swept_s = time.monotonic()
        idle_ms = round(self.claim_timeout_s * 1000)
        script = self._scripts["SWEEP"]
        for stream in self._streams:
            await self._on_group(functools.partial(script, [stream], [WORKERS_GROUP, idle_ms]))

    async def _script(self, name: str, keys: list[str], *args: Any) -> Any:
        """Runs a script that acts for this consumer."""
        everything = [WORKERS_GROUP, self._consumer, *args]
        return await self._on_group(functools.partial(self._scripts[name], keys, everything))

    async def _on_group(self, call: Callable[[], Awaitable[T]]) -> T:
        """`call`; where the consumer groups are missing (before the learner's start, or after Redis lost its
        data) they are created first."""
        try:
            return await self._call(call)
        except redis.ResponseError as error:
            if "NOGROUP" not in str(error) and "no such key" not in str(error):
                raise
        for stream in self._streams:
            try:
                await self._call(
                    functools.partial(
                        self._redis.xgroup_create, stream, WORKERS_GROUP, id="0", mkstream=True
                    )
                )
            except redis.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise
        return await self._call(call)

    async def _any(self, command: Callable[..., Any], *args: Any) -> Any:
        return await self._call(functools.partial(command, *args))

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        return await insist_async(Patience(self._url, self._patience_s), call)


def _by_stream(claims: list[Claim]) -> dict[str, dict[str, Claim]]:
    out: dict[str, dict[str, Claim]] = {}
    for claim in claims:
        out.setdefault(claim.stream, {})[claim.entry] = claim
    return out


def _quarantine_args(
    entry: str | bytes, error: RecordError, record: bytes, group: str
) -> list[Any]:
    return [entry, str(error), record[:QUARANTINE_RECORD_BYTES], QUARANTINE_LENGTH, group]


def _statuses(beat: bytes) -> list[WorkerStatus]:
    try:
        return [decode_status(beat)]
    except RecordError as error:
        logger.warning("heartbeat ignored: %s", error)
        return []
