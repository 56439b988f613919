"""A worker's side of the Redis buffer; buffer/redis_store/__init__.py has an overview."""

import asyncio
import functools
import logging
import time

import redis

from areal_q.errors import BufferUnavailable, RecordError
from areal_q.messages import (
    Group,
    PartialGroup,
    Ticket,
    WorkerStatus,
    check_size,
    decode_partial,
    decode_ticket,
    encode,
    encode_group,
)
from buffer.interface import Claim, RunInfo
from buffer.redis_store.connection import LEAVE_S, PATIENCE_S, refuses_writes
from buffer.redis_store.consumer import Parts, TicketConsumer
from buffer.redis_store.joined_run import JoinedRun
from buffer.redis_store.keys import RECORD, RELEASED, RELEASED_IDLE_MS, WORKER_TTL_S, Keys

logger = logging.getLogger(__name__)
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
        self.waiting = 0
        """Number of commits that wait for room in Redis"""
        self.full_s = 0.0
        """Seconds that commits have waited for room in Redis"""
        self._worker = worker
        self._consumer = TicketConsumer(url, self.keys, worker, patience_s)
        self.run = JoinedRun(self._consumer)
        self._held: set[tuple[str, str]] = set()

    async def run_info(self) -> RunInfo:
        """Returns what the learner published, and waits until it has."""
        return await self.run.info()

    async def claim(
        self, count: int, block_s: float, *, training_first: bool = False
    ) -> list[Claim]:
        """Claims up to `count` tickets: evaluation tickets first, unless `training_first`, and abandoned ones
        before new ones. Waits up to `block_s` seconds for the first."""
        await self._consumer.sweep(self.claim_timeout_s)
        deadline = time.monotonic() + block_s
        idle_ms = round(self.claim_timeout_s * 1000)
        streams = self._consumer.streams[:: -1 if training_first else 1]
        keys = [*streams, self.keys.partials, self.keys.quarantine, self.keys.set_aside]
        while True:
            found = await self._consumer.script("CLAIM", keys, count, idle_ms, self.max_deliveries)
            entries = [(streams[i - 1], entry.decode(), *records) for i, entry, *records in found]
            claims = await self._claims(entries)
            left_s = deadline - time.monotonic()
            if claims or left_s <= 0:
                return claims
            claims = await self._claim_new(count, min(left_s, BLOCK_SLICE_S))
            if claims:
                return claims

    async def commit(self, claim: Claim, group: Group) -> bool:
        """Replaces the ticket by the group. Does nothing and returns False if the claim was lost. Raises
        RecordError for a group that is not valid, or is larger than a learner would read."""
        if group.validate().ticket.number != claim.ticket.number:
            raise RecordError(
                f"group of ticket {group.ticket.number} for a claim on {claim.ticket.number}"
            )
        evaluation = claim.stream == self.keys.eval_tickets
        target = self.keys.eval_groups if evaluation else self.keys.groups
        try:
            if (committed := await self._try_commit(claim, target, group)) is not None:
                return committed
            self.waiting += 1
            try:
                while committed is None:
                    began = time.monotonic()
                    await self.renew([claim])
                    await asyncio.sleep(min(1.0, self.claim_timeout_s / 4))
                    self.full_s += time.monotonic() - began
                    committed = await self._try_commit(claim, target, group)
            finally:
                self.waiting -= 1
            return committed
        finally:
            self._held.discard((claim.stream, claim.entry))

    async def _try_commit(self, claim: Claim, target: str, group: Group) -> bool | None:
        """Returns whether the group was committed, or None if Redis has no room for it."""
        keys = [claim.stream, target, self.keys.partials]
        args = [claim.entry, self.run.id, self.keys.info]
        record = functools.partial(_record, group)
        try:
            return bool(await self._consumer.script("COMMIT", keys, *args, record=record))
        except redis.ResponseError as error:
            if str(error).startswith("FOREIGN"):
                raise self.run.changed(str(error).partition(" ")[2]) from error
            if not refuses_writes(error):
                raise
            if not self.waiting:  # logged once, however many groups wait and however often they try
                logger.warning("ticket %d waits for room: %s", claim.ticket.number, error)
            return None

    async def renew(self, claims: list[Claim]) -> list[Claim]:
        """Renews claims, so that no other worker takes them over. Returns those that another worker already
        has."""
        lost = []
        for stream, mine in _by_stream(claims).items():
            gone = await self._consumer.script("RENEW", [stream], *mine)
            lost += [mine[entry.decode()] for entry in gone]
        self._held -= {(claim.stream, claim.entry) for claim in lost}
        return lost

    async def release(self, claims: list[Claim]) -> None:
        """Gives tickets back with the responses drawn so far. Others can claim them at once."""
        for stream, mine in _by_stream(claims).items():
            pairs = [
                part
                for entry, claim in mine.items()
                for part in (entry, encode(claim.partial) if claim.partial else b"")
            ]
            keys = [stream, self.keys.partials]
            await self._consumer.script("RELEASE", keys, RELEASED, RELEASED_IDLE_MS, *pairs)
            self._held -= {(stream, entry) for entry in mine}

    async def leave(self, claims: list[Claim]) -> None:
        """Gives tickets back when a worker ends. If Redis does not answer soon, the claim timeout frees
        them."""
        self._consumer.patience_s = min(self._consumer.patience_s, LEAVE_S)
        try:
            await self.release(claims)
        except BufferUnavailable as error:
            logger.warning("%d tickets were not handed back: %s", len(claims), error)

    async def quarantine(self, claim: Claim, reason: str) -> None:
        """Moves a ticket that cannot become a group to the quarantine, so that no worker gets it again. Does
        nothing if the claim was lost."""
        if not await self.renew([claim]):
            await self._to_quarantine(claim.stream, claim.entry, reason)
        self._held.discard((claim.stream, claim.entry))

    async def _to_quarantine(self, stream: str, entry: str, reason: str) -> None:
        logger.warning("%s %s goes to the quarantine: %s", stream, entry, reason)
        await self._consumer.quarantine(stream, entry, reason)

    async def heartbeat(self, status: WorkerStatus) -> None:
        """Sends a heartbeat, which even a full Redis takes. While Redis cannot write its append-only file it is
        not sent, and a line is logged."""
        keys = [self.keys.worker(self._worker), self.keys.workers]
        args = [encode(status), WORKER_TTL_S, self._worker]
        try:
            await self._consumer.script("HEARTBEAT", keys, *args)
        except redis.ResponseError as error:
            if not refuses_writes(error):
                raise
            logger.warning("heartbeat skipped: %s", error)

    async def close(self) -> None:
        await self._consumer.redis.aclose()

    async def _claim_new(self, count: int, wait_s: float) -> list[Claim]:
        """Claims up to `count` new tickets and waits up to `wait_s` for the first, in either stream."""
        reply = await self._consumer.read_new(count, max(1, round(wait_s * 1000)))
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
                ticket = decode_ticket(record).validate()
                claim = Claim(stream, entry, ticket, _partial(ticket, partial))
            except RecordError as error:
                await self._to_quarantine(stream, entry, str(error))
                continue
            self._held.add((stream, entry))
            claims.append(claim)
        if foreign := [c.ticket.run_id for c in claims if self.run.is_foreign(c.ticket)]:
            await self.release(claims)
            raise self.run.changed(foreign[0])
        return claims


def _record(group: Group) -> Parts:
    parts = encode_group(group)
    check_size(sum(map(len, parts)))
    return parts


def _partial(ticket: Ticket, record: bytes) -> PartialGroup | None:
    """Returns the responses that were drawn for `ticket`. A record that does not fit the ticket is ignored,
    since the responses can be drawn again."""
    if not record:
        return None
    try:
        partial = decode_partial(record)
        for response in partial.responses:
            response.validate(ticket)
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
