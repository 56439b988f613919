"""A foreign hand that puts forged records at every border of a run, none of which may end anything."""

import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import redis
from msgspec.structs import replace

from areal_q.config import Run
from areal_q.errors import BufferFull, RecordError
from areal_q.messages import (
    Array,
    Group,
    PartialGroup,
    PartialResponse,
    Ticket,
    Trajectory,
    VersionSpan,
    decode_group,
    decode_ticket,
    encode,
)
from bench.chaos.cluster import Notes
from bench.chaos.promises import FOREIGN
from bench.fuzz import Target, mutated
from bench.records import make_beat
from buffer.admin.actions import requeue_records
from buffer.redis_store import lua_scripts
from buffer.redis_store.keys import RECORD, RELEASED, RELEASED_IDLE_MS, WORKERS_GROUP, Keys

BEAT = make_beat("forged", version=1, active=1, tokens=1, tokens_per_s=1.0, time_s=1.0)


def _first_changed(group: Group, change: Callable[[Trajectory], Trajectory]) -> Group:
    first, *others = group.trajectories
    return replace(group, trajectories=[change(first), *others])


def _over_long(t: Trajectory) -> Trajectory:
    """Makes a group of more tokens than the model has positions; sound for whoever does not know the model."""
    size, span = 1000, t.spans[0]
    return replace(
        t,
        response_ids=Array.of([1] * size, "int32"),
        behavior_logprobs=Array.of([-1.0] * size, "float32"),
        loss_mask=Array.of([1] * size, "uint8"),
        spans=[VersionSpan(span.version, size, span.digest)],
    )


def _of_ticket(group: Group, **changes: Any) -> Group:
    return replace(group, ticket=replace(group.ticket, **changes))


def _nan_logprobs(t: Trajectory) -> Trajectory:
    return replace(t, behavior_logprobs=Array.of([float("nan")] * t.num_tokens, "float32"))


SPOILT: dict[str, Callable[[Group], Group]] = {
    "too long": lambda g: _first_changed(g, _over_long),
    "a reward that is infinite": lambda g: _first_changed(
        g, lambda t: replace(t, reward=float("inf"))
    ),
    "log-probs that are NaN": lambda g: _first_changed(g, _nan_logprobs),
    "of another run": lambda g: _of_ticket(g, run_id="0" * 32),
    "no responses": lambda g: replace(_of_ticket(g, group_size=0), trajectories=[]),
    "a prompt beyond the vocabulary": lambda g: _of_ticket(
        g, prompt_ids=Array.of([10**6], "int32")
    ),
    "a negative token in the prompt": lambda g: _of_ticket(g, prompt_ids=Array.of([-4], "int32")),
    "a seed that no log holds": lambda g: _of_ticket(g, seed=2**63),
    "a step that no log holds": lambda g: _of_ticket(g, step=2**63),
}


class ForeignHand:
    """Has the rights of a worker, and none of its manners."""

    KINDS = ("names", "heartbeat", "group", "partial", "requeue", "end", "spoilt")
    """What it does"""
    SPARING = KINDS[:-2]
    """What costs a run nothing that it has not got again after a moment"""

    def __init__(
        self, client: redis.Redis, run: Run, rng: random.Random, notes: Notes | None = None
    ) -> None:
        self._client, self._keys = client, Keys(run.name)
        self._run, self._rng = run, rng
        self._notes = notes or Notes()
        """What a judge of the run must know of its deeds"""
        self.done: Counter[str] = Counter()
        """Number of records by kind"""
        self._turn = threading.Lock()

    def act(self, *kinds: str) -> None:
        """Does these kinds, by default all that are sparing and, now and then, `end`."""
        with self._turn:
            # A worker mends the tickets' stream, and comes once the hand has taken one.
            now_and_then = ("end",) if self.done["partial"] and self._rng.random() >= 0.7 else ()
            for kind in kinds or (*self.SPARING, *now_and_then):
                self.done[kind] += getattr(self, f"_{kind}")()

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

    def _newest(self, stream: str) -> tuple[bytes, dict[Any, Any], Group] | None:
        """Returns the newest entry of a stream of groups that is a sound group."""
        with suppress(redis.ResponseError):  # no id after the last
            found: Any = self._client.xrevrange(stream)
            for entry, fields in found:
                with suppress(RecordError):
                    group = decode_group(fields.get(RECORD, b"")).validate()
                    if group.worker != FOREIGN:
                        return entry, fields, group
        return None

    def _group(self) -> int:
        """Mutates the newest sound groups of both streams, so that the first that is sound counts."""
        count = 0
        for stream in (self._keys.groups, self._keys.eval_groups):
            if found := self._newest(stream):
                record = self._mutated(found[1][RECORD])
                self._notes.forged.add(record)
                with suppress(RecordError):
                    self._notes.spent.add(decode_group(record).ticket.number)
                with suppress(redis.ResponseError):  # no id after the last
                    self._client.xadd(stream, {RECORD: record})
                    count += 1
        return count

    def _requeue(self) -> int:
        """Takes a sound group away and puts it back, as `areal-q buffer requeue --all` does: behind a copy of
        it, so that it comes twice, or alone, so that nothing is learnt from it unless it comes back."""
        stream, count = self._keys.groups, 0
        if found := self._newest(stream):
            entry, fields, group = found
            self._notes.moved.add(group.ticket.number)
            with suppress(redis.ResponseError):  # no id after the last
                if self._rng.random() < 0.5:
                    self._client.xadd(stream, fields)
                count += self._client.register_script(lua_scripts.QUARANTINE)(
                    keys=[stream, self._keys.quarantine, self._keys.set_aside],
                    args=[entry, "taken away", ""],
                )
            with suppress(BufferFull):  # the same
                requeue_records(self._client, self._run.name, [])
        return count

    def _end(self) -> int:
        """Adds an entry with one of the two largest ids, where there is none."""
        keys = self._keys
        stream = self._rng.choice((keys.groups, keys.eval_groups, keys.tickets, keys.quarantine))
        last = f"{2**64 - 1}-{2**64 - self._rng.choice((1, 2))}"
        with suppress(redis.ResponseError):
            self._client.xadd(stream, {RECORD: b"junk"}, last)
            if stream == keys.groups:  # who mends the stream gives its entries other ids
                self._notes.spoiled.clear()
            return 1
        return 0

    def _taken(self, consumer: Any, count: int) -> list[tuple[bytes, Ticket]]:
        """Takes tickets, the oldest also from workers that have them; returns them with their entries."""
        streams: Any = {self._keys.tickets: ">"}
        self._client.xreadgroup(WORKERS_GROUP, consumer, streams, count=count)
        reply: Any = self._client.xautoclaim(
            self._keys.tickets, WORKERS_GROUP, consumer, 0, "0-0", count=count
        )
        taken = []
        for entry, fields in reply[1]:
            with suppress(RecordError):  # junk lies among them
                taken.append((entry, decode_ticket((fields or {}).get(RECORD, b""))))
        return taken

    def _partial(self) -> int:
        """Takes a ticket, away from a worker that has it, and gives it back with spoilt beginnings."""
        me = b"\xff-1"  # as a consumer's name not UTF-8
        taken = self._taken(me, 1)
        for entry, ticket in taken:
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
            self._notes.spent.add(ticket.number)
            self._client.register_script(lua_scripts.RELEASE)(
                keys=[self._keys.tickets, self._keys.partials],
                args=[WORKERS_GROUP, me, RELEASED, RELEASED_IDLE_MS, entry, record],
            )
        return len(taken)

    def _spoilt(self) -> int:
        """Takes tickets from their workers, and commits for them what cannot be learnt from, each kind once."""
        if not (found := self._newest(self._keys.groups)):
            return 0
        taken = self._taken(FOREIGN, len(SPOILT))
        for (entry, ticket), (what, spoil) in zip(taken, SPOILT.items(), strict=False):
            self._commit(entry, spoil(replace(found[2], ticket=ticket, worker=FOREIGN)), what)
        return len(taken)

    def _commit(self, entry: bytes, group: Group, what: str) -> None:
        """Commits `group` as a worker does, but for all checks."""
        tickets = self._keys.tickets
        with self._client.pipeline(transaction=True) as pipe:
            pipe.xadd(self._keys.groups, {RECORD: encode(group)})
            pipe.xack(tickets, WORKERS_GROUP, entry)
            pipe.xdel(tickets, entry)
            pipe.hdel(self._keys.partials, f"{tickets}:{entry.decode()}")
            self._notes.spent.add(group.ticket.number)
            made = pipe.execute()[0].decode()
        self._notes.spoiled[made] = what
