"""A worker's side of the Redis buffer; buffer/redis_store/__init__.py has an overview."""

import asyncio
import functools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import redis

from areal_q.errors import BufferUnavailable, RecordError, RunChanged, RunFinished
from areal_q.messages import (
    Group,
    PartialGroup,
    Ticket,
    WorkerStatus,
    check_size,
    decode_partial,
    decode_ticket,
    encode,
    encode_into,
)
from areal_q.system.credentials import shown
from buffer.interface import Claim, RunInfo
from buffer.redis_store import lua_scripts
from buffer.redis_store.connection import (
    LEAVE_S,
    PATIENCE_S,
    Outage,
    Patience,
    connect_async,
    insist_async,
    refuses_writes,
)
from buffer.redis_store.keys import (
    RECORD,
    RELEASED,
    RELEASED_IDLE_MS,
    WORKER_TTL_S,
    WORKERS_GROUP,
    Keys,
)

_T = TypeVar("_T")
KEPT_BUFFERS = 4
logger = logging.getLogger(__name__)
STREAM_GONE = ("NOGROUP", "no such key", "UNBLOCKED")
"""Texts by which Redis's errors say that a stream or its consumer group does not exist"""
BLOCK_SLICE_S = 0.25
"""Most seconds that a claim blocks in Redis, since released and abandoned tickets do not end the block"""


class WorkerBuffer:
    """A worker's side. Many tasks of one event loop may use it.

    A claimed ticket belongs to this worker until it has not renewed the claim for `claim_timeout_s`. After
    that, or after `release`, another worker gets it (test_kill_9_after_a_claim_gives_the_ticket_to_another).
    The commit of a worker that has lost its claim is refused. A commit whose answer was lost is repeated and
    then returns False, although the group is in the buffer; it is there exactly once in any case. If the answer
    of `claim` is lost, this worker does not know of the tickets that it has, and the claim timeout frees them.

    While Redis does not answer, calls are repeated for `patience_s` and then raise BufferUnavailable. While
    Redis is full, `commit` waits without a limit, keeps the group and renews its claim. A ticket that cannot be
    decoded goes to the quarantine, and so does one over which `max_deliveries` workers fell silent
    (test_a_ticket_that_kills_every_worker_goes_to_the_quarantine).
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
        self.max_deliveries = 5
        """Most deliveries of a ticket. It and the claim timeout may be changed when `run_info` has returned the
        settings."""
        self.quarantined = 0
        """Number of tickets that this worker moved to the quarantine because they could not be decoded"""
        self.waiting = 0
        """Number of commits that wait for room in Redis"""
        self.full_s = 0.0
        """Seconds that commits have waited for room in Redis"""
        self._worker = worker
        # The name is unique, so that a restarted worker is not taken for the dead one of the same name.
        self._consumer = f"{worker}-{uuid.uuid4().hex[:12]}"
        self._url, self._patience_s, self._outage = url, patience_s, Outage()
        self._redis = connect_async(url)
        self._joined: RunInfo | None = None
        self._held: set[tuple[str, str]] = set()
        self._buffers: list[bytearray] = []
        """Buffers of records that were sent, which the next records reuse"""
        self._swept_s = time.monotonic()
        self._scripts = {
            name: self._redis.register_script(getattr(lua_scripts, name))
            for name in ("CLAIM", "COMMIT", "RENEW", "RELEASE", "QUARANTINE", "SWEEP")
        }

    async def run_info(self) -> RunInfo:
        waits = False
        while (info := await self._info()) is None:
            if not waits:
                logger.info(
                    "waiting for a learner of run %s at %s", self.keys.run, shown(self._url)
                )
            waits = True
            await asyncio.sleep(0.1)
        return info

    async def unfinished_run(self, patience_s: float) -> RunInfo:
        """Returns what the learner published. If the run is finished, waits `patience_s` for a learner that
        resumes it, which may start after its workers, and then raises RunFinished."""
        deadline, waits = time.monotonic() + patience_s, False
        while (info := await self.run_info()).finished:
            if time.monotonic() >= deadline:
                raise self._finished()
            if not waits:
                logger.info(
                    "run %s is finished: waits %g s for a learner that goes on",
                    self.keys.run,
                    patience_s,
                )
            waits = True
            await asyncio.sleep(0.2)
        return info

    def join(self, info: RunInfo) -> None:
        """Joins the run that `info` describes. Another run of the same name raises RunChanged from now on."""
        self._joined = info

    async def check_run(self) -> None:
        """Raises RunChanged if the run is not the one that was joined or has other settings, and RunFinished if
        it is finished. If Redis has lost the run's description, nothing is raised."""
        joined, found = self._joined, await self._info()
        if joined is None or found is None:
            return
        if found.run_id != joined.run_id:
            raise self._changed(found.run_id)
        if found.settings != joined.settings:
            raise RunChanged(f"run {self.keys.run} goes on with other settings")
        if found.finished:
            raise self._finished()

    async def _info(self) -> RunInfo | None:
        names = ["config", "endpoints", "run_id", "settings", "finished"]
        config, endpoints, run_id, settings, finished = await self._any(
            self._redis.hmget, self.keys.info, names
        )
        if config is None or endpoints is None:
            return None
        ends = msgspec.json.decode(endpoints, type=dict[str, str])
        run_id, settings = ((part or b"").decode() for part in (run_id, settings))
        return RunInfo(config.decode(), ends, run_id, settings, bool(finished))

    def _finished(self) -> RunFinished:
        return RunFinished(f"run {self.keys.run} is finished")

    def _changed(self, found: str) -> RunChanged:
        joined = self._joined.run_id if self._joined else ""
        return RunChanged(
            f"run {self.keys.run} is another one now: its id is {found or 'unknown'}, "
            f"this worker was set up for {joined or 'one without an id'}"
        )

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
        buffer = self._buffers.pop() if self._buffers else bytearray()
        encode_into(group, buffer)
        check_size(len(buffer))
        try:
            with memoryview(buffer) as record:
                committed = await self._commit(claim, target, record)
        finally:
            self._held.discard((claim.stream, claim.entry))
        # The buffer is reused only after success, since a cancelled commit may still be sending it.
        if len(self._buffers) < KEPT_BUFFERS:
            self._buffers.append(buffer)
        return committed

    async def _commit(self, claim: Claim, target: str, record: memoryview) -> bool:
        while True:
            try:
                keys = [claim.stream, target, self.keys.partials]
                joined = self._joined.run_id if self._joined else ""
                args = [claim.entry, record, joined, self.keys.info]
                return bool(await self._script("COMMIT", keys, *args))
            except redis.ResponseError as error:
                if str(error).startswith("FOREIGN"):
                    raise self._changed(str(error).partition(" ")[2]) from error
                if not refuses_writes(error):
                    raise
                await self._wait_for_room(claim, error)

    async def _wait_for_room(self, claim: Claim, error: redis.ResponseError) -> None:
        if not self.waiting:  # logged once, however many groups wait
            logger.warning("ticket %d waits for room: %s", claim.ticket.number, error)
        began = time.monotonic()
        self.waiting += 1
        try:
            await self.renew([claim])
            await asyncio.sleep(min(1.0, self.claim_timeout_s / 4))
        finally:
            self.waiting -= 1
            self.full_s += time.monotonic() - began

    async def renew(self, claims: list[Claim]) -> list[Claim]:
        lost = []
        for stream, mine in _by_stream(claims).items():
            gone = await self._script("RENEW", [stream], *mine)
            lost += [mine[entry.decode()] for entry in gone]
        self._held -= {(claim.stream, claim.entry) for claim in lost}
        return lost

    async def release(self, claims: list[Claim]) -> None:
        for stream, mine in _by_stream(claims).items():
            pairs = [
                part
                for entry, claim in mine.items()
                for part in (entry, encode(claim.partial) if claim.partial else b"")
            ]
            keys = [stream, self.keys.partials]
            await self._script("RELEASE", keys, RELEASED, RELEASED_IDLE_MS, *pairs)
            self._held -= {(stream, entry) for entry in mine}

    async def leave(self, claims: list[Claim]) -> None:
        """Gives tickets back when a worker ends. If Redis does not answer soon, the claim timeout frees
        them."""
        self._patience_s = min(self._patience_s, LEAVE_S)
        try:
            await self.release(claims)
        except BufferUnavailable as error:
            logger.warning("%d tickets were not handed back: %s", len(claims), error)

    async def set_aside(self, claim: Claim, reason: str) -> None:
        if not await self.renew([claim]):
            await self._to_quarantine(claim.stream, claim.entry, reason)
        self._held.discard((claim.stream, claim.entry))

    async def _to_quarantine(self, stream: str, entry: str, reason: str) -> None:
        logger.warning("%s %s goes to the quarantine: %s", stream, entry, reason)
        keys = [stream, self.keys.quarantine, self.keys.set_aside]
        args = [entry, reason, WORKERS_GROUP]
        await self._call(functools.partial(self._scripts["QUARANTINE"], keys, args))
        self.quarantined += 1

    async def heartbeat(self, status: WorkerStatus) -> None:
        """Sends a heartbeat. While Redis is full it is not sent, and a line is logged."""

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
        keys = [*self._streams, self.keys.partials, self.keys.quarantine, self.keys.set_aside]
        found = await self._script("CLAIM", keys, count, idle_ms, self.max_deliveries)
        entries = [(self._streams[i - 1], entry.decode(), *records) for i, entry, *records in found]
        return await self._claims(entries)

    async def _claim_new(self, count: int, wait_s: float) -> list[Claim]:
        """Claims up to `count` new tickets and waits up to `wait_s` for the first, in either stream."""
        streams: dict[Any, Any] = dict.fromkeys(self._streams, ">")
        wait_ms = max(1, round(wait_s * 1000))
        reply: Any = await self._on_group(
            lambda: self._redis.xreadgroup(
                WORKERS_GROUP, self._consumer, streams, count=count, block=wait_ms
            )
        )
        entries = [
            (stream.decode(), entry.decode(), fields.get(RECORD, b""), b"")
            for stream, page in reply or []
            for entry, fields in page
        ]
        claims = await self._claims(entries)
        if claims[count:]:  # both streams had new tickets
            await self.release(claims[count:])
        return claims[:count]

    async def _claims(self, entries: list[tuple[str, str, bytes, bytes]]) -> list[Claim]:
        claims = []
        for stream, entry, record, partial in entries:
            if (stream, entry) in self._held:
                continue  # this worker's own ticket, which it renewed too late
            try:
                ticket = decode_ticket(record)
                claim = Claim(stream, entry, ticket, _partial(ticket, partial))
            except RecordError as error:
                await self._to_quarantine(stream, entry, str(error))
                continue
            self._held.add((stream, entry))
            claims.append(claim)
        if foreign := next((c.ticket.run_id for c in claims if self._foreign(c.ticket)), None):
            await self.release(claims)
            raise self._changed(foreign)
        return claims

    def _foreign(self, ticket: Ticket) -> bool:
        return bool(self._joined and ticket.run_id and ticket.run_id != self._joined.run_id)

    async def _sweep(self) -> None:
        """Removes the consumers of workers that are gone, once in each claim timeout. It is put off while Redis
        is full, since Redis 6.2 then refuses every XGROUP."""
        if time.monotonic() - self._swept_s < self.claim_timeout_s:
            return
        self._swept_s = time.monotonic()
        idle_ms = round(self.claim_timeout_s * 1000)
        script = self._scripts["SWEEP"]
        try:
            for stream in self._streams:
                await self._on_group(functools.partial(script, [stream], [WORKERS_GROUP, idle_ms]))
        except redis.ResponseError as error:
            if not refuses_writes(error):
                raise

    async def _script(self, name: str, keys: list[str], *args: Any) -> Any:
        """Runs a script on behalf of this worker's consumer."""
        everything = [WORKERS_GROUP, self._consumer, *args]
        return await self._on_group(functools.partial(self._scripts[name], keys, everything))

    async def _on_group(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Returns the result of `call`. If the consumer groups do not exist, they are created and `call` is
        repeated. That happens before the learner's start, after Redis lost its data, and when a new run of the
        same name deletes them while a claim waits."""
        try:
            return await self._call(call)
        except redis.ResponseError as error:
            if not any(reason in str(error) for reason in STREAM_GONE):
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

    async def _call(self, call: Callable[[], Awaitable[_T]]) -> _T:
        return await insist_async(Patience(self._url, self._patience_s, self._outage), call)


def _partial(ticket: Ticket, record: bytes) -> PartialGroup | None:
    """Returns the responses that were drawn for `ticket`. A record that does not fit the ticket is ignored,
    since the responses can be drawn again."""
    if not record:
        return None
    try:
        partial = decode_partial(record)
        for response in partial.responses:
            response.validate()
        if (partial.ticket, len(partial.responses)) != (ticket.number, ticket.group_size):
            raise RecordError("partial group: of another ticket")
    except RecordError as error:
        logger.warning("ticket %d begins anew: %s", ticket.number, error)
        return None
    return partial


def _by_stream(claims: list[Claim]) -> dict[str, dict[str, Claim]]:
    out: dict[str, dict[str, Claim]] = {}
    for claim in claims:
        out.setdefault(claim.stream, {})[claim.entry] = claim
    return out
