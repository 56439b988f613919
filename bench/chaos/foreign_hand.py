"""A foreign hand that puts mutated records at every border of a run, none of which may end anything."""

import random
import threading
from contextlib import suppress
from typing import Any

import redis

from areal_q.config import Run
from areal_q.errors import BufferFull, RecordError
from areal_q.messages import (
    Array,
    PartialGroup,
    PartialResponse,
    VersionSpan,
    decode_group,
    decode_ticket,
    encode,
)
from bench.fuzz import Target, mutated
from bench.records import make_beat
from buffer.admin.actions import requeue_records
from buffer.redis_store import lua_scripts
from buffer.redis_store.keys import RECORD, RELEASED, RELEASED_IDLE_MS, WORKERS_GROUP, Keys

BEAT = make_beat("forged", version=1, active=1, tokens=1, tokens_per_s=1.0, time_s=1.0)


class ForeignHand:
    """Has the rights of a worker, and none of its manners."""

    def __init__(self, url: str, run: Run, seed: int) -> None:
        self._client, self._keys = redis.Redis.from_url(url), Keys(run.name)
        self._run, self._rng = run, random.Random(seed)
        self.done: dict[str, int] = {}
        """Number of records by kind"""
        self._turn = threading.Lock()

    def __enter__(self) -> "ForeignHand":
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.close()

    def act(self) -> None:
        with self._turn:
            kinds = (self._names, self._heartbeat, self._group, self._partial, self._requeue)
            for kind in (*kinds, self._end):
                self.done[kind.__name__] = self.done.get(kind.__name__, 0) + kind()

    def _mutated(self, record: bytes) -> bytes:
        return mutated(Target("", decode_ticket, [record], (), "msgpack"), self._rng)

    def _names(self) -> int:
        names = [self._rng.randbytes(self._rng.randrange(9)) for _ in range(3)]
        self._client.sadd(self._keys.workers, *names)
        self._client.set(self._keys.worker(names[0]), self._rng.randbytes(20), ex=5)
        self._client.xgroup_createconsumer(self._keys.tickets, WORKERS_GROUP, names[1])
        return len(names)

    def _heartbeat(self) -> int:
        self._client.sadd(self._keys.workers, BEAT.worker)
        self._client.set(self._keys.worker(BEAT.worker), self._mutated(encode(BEAT)), ex=5)
        return 1

    def _group(self) -> int:
        """Mutates the newest sound groups of both streams, so that the first that is sound counts."""
        count = 0
        for stream in (self._keys.groups, self._keys.eval_groups):
            found: Any = self._client.xrevrange(stream)
            for _, fields in found:
                with suppress(RecordError, redis.ResponseError):  # no id after the last
                    group = decode_group(fields.get(RECORD, b""))
                    self._client.xadd(stream, {RECORD: self._mutated(encode(group))})
                    count += 1
                    break
        return count

    def _requeue(self) -> int:
        """Takes a sound group away and puts it back, as `areal-q buffer requeue --all` does: behind a copy of
        it, so that it comes twice, or alone, so that nothing is learnt from it unless it comes back."""
        stream, count = self._keys.groups, 0
        found: Any = self._client.xrevrange(stream)
        for entry, fields in found:
            with suppress(RecordError, redis.ResponseError):  # no id after the last
                decode_group(fields.get(RECORD, b"")).validate()
                if self._rng.random() < 0.5:
                    self._client.xadd(stream, fields)
                count += self._client.register_script(lua_scripts.QUARANTINE)(
                    keys=[stream, self._keys.quarantine, self._keys.set_aside],
                    args=[entry, "taken away", ""],
                )
                with suppress(BufferFull):  # the same
                    requeue_records(self._client, self._run.name, [])
                break
        return count

    def _end(self) -> int:
        """Adds an entry with one of the two largest ids, now and then, where there is none."""
        keys = self._keys
        stream = self._rng.choice((keys.groups, keys.eval_groups, keys.tickets, keys.quarantine))
        # A worker mends the tickets' stream, and comes once the hand has taken one.
        if not self.done["_partial"] or self._rng.random() < 0.7:
            return 0
        last = f"{2**64 - 1}-{2**64 - self._rng.choice((1, 2))}"
        with suppress(redis.ResponseError):
            self._client.xadd(stream, {RECORD: b"junk"}, last)
            return 1
        return 0

    def _partial(self) -> int:
        """Takes a ticket, away from a worker that has it, and gives it back with spoilt beginnings."""
        me: Any = b"\xff-1"  # as a consumer's name not UTF-8
        self._client.xreadgroup(WORKERS_GROUP, me, {self._keys.tickets: ">"}, count=1)
        reply: Any = self._client.xautoclaim(
            self._keys.tickets, WORKERS_GROUP, me, 0, "0-0", count=1
        )
        # Its own junk may lie among the tickets.
        taken = [(e, fields) for e, fields in reply[1] if fields and fields[RECORD] != b"junk"]
        for entry, fields in taken:
            ticket = decode_ticket(fields[RECORD])
            tokens = self._rng.choice((0, 1, 3, self._run.rollout.sampling.max_tokens, 20))
            begun = PartialResponse(
                response_ids=Array.of(
                    [self._rng.choice((2, 3, 10**6)) for _ in range(tokens)], "int32"
                ),
                behavior_logprobs=Array.of([-1.0] * tokens, "float32"),
                loss_mask=Array.of([self._rng.choice((0, 1)) for _ in range(tokens)], "uint8"),
                spans=[VersionSpan(ticket.step, tokens, "a")] if tokens else [],
                finish_reason="length",
                turns=0,
                pending=tokens,
                ended=self._rng.random() < 0.3,
            )
            record = encode(
                PartialGroup(ticket=ticket.number, responses=[begun] * ticket.group_size)
            )
            if self._rng.random() < 0.5:
                record = self._mutated(record)
            self._client.register_script(lua_scripts.RELEASE)(
                keys=[self._keys.tickets, self._keys.partials],
                args=[WORKERS_GROUP, me, RELEASED, RELEASED_IDLE_MS, entry, record],
            )
        return len(taken)
