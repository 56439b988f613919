"""Records of a foreign hand: whatever fails at a border of Redis is set aside there, and ends nobody."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from helpers.fixture_types import MakeGroup, MakeRun
from helpers.policies import new_admission
from helpers.strategies import begun
from msgspec.structs import replace

from areal_q.config import Sampling
from areal_q.errors import ConfigError
from areal_q.messages import (
    Array,
    Group,
    PartialGroup,
    PartialResponse,
    Ticket,
    VersionSpan,
    encode,
)
from areal_q.observability.metrics_log import MetricsLog, read_metrics
from areal_q.system.run_dir import METRICS_FILE
from bench.records import make_beat
from buffer.admin import actions, inspect_state
from buffer.interface import END
from buffer.redis_store import LearnerBuffer, WorkerBuffer
from buffer.redis_store.keys import Keys
from buffer.redis_store.lease import owner_of
from learner.measure.buffer_metrics import BufferMetrics

KEYS = Keys("run")
FIELDS = {
    "number": 2**62,
    "purpose": "eval",
    "prompt": "another",
    "answer": "another",
    "prompt_ids": Array.of([5, 6], "int32"),
    "group_size": 3,
    "seed": 7,
    "sampling": Sampling(max_tokens=99),
}
NAMES = [b"\xff\xfe", b"\xff\xfe-\xff", b"", b"\x00", b"x" * 10**5, "é".encode("latin-1")]
"""Names that are no UTF-8, or no names"""
BEAT = make_beat(active=1, tokens=1, tokens_per_s=1.0, time_s=1.0)
SPOILT_BEATS = {
    "no msgpack": b"\xff\x00",
    "no UTF-8": encode(BEAT).replace(b"\xa1w", b"\xa1\xff"),
    "a long name": encode(replace(BEAT, worker="w" * 300)),
    "a long wait": encode(replace(BEAT, waits_for="w" * 10**5)),
    "a long digest": encode(replace(BEAT, digest="w" * 10**5)),
    "a long id": encode(replace(BEAT, run_id="w" * 10**5)),
    "no number": encode(replace(BEAT, tokens_per_s=float("nan"))),
    "no end": encode(replace(BEAT, busy_s=float("inf"))),
    "no such version": encode(replace(BEAT, version=2**64 - 1)),
    "many fields": msgspec.msgpack.encode(
        msgspec.structs.asdict(BEAT) | {str(n): n for n in range(10**5)}
    ),
}


SPOILT_PARTIALS: dict[str, PartialResponse] = {
    "more than the budget": begun([2] * 9),
    "far more, and ended": begun([2] * 300, ended=True),
    "a negative token": begun([2] * 2, response_ids=Array.of([2, -1], "int32")),
    "a log-prob above zero": begun([2] * 2, behavior_logprobs=Array.of([-1.0, 0.1], "float32")),
    "no log-prob": begun([2] * 2, behavior_logprobs=Array.of([-1.0, float("nan")], "float32")),
    "more turns than tokens": begun([2] * 2, turns=2**62),
    "more pending than there are": begun([2] * 2, pending=3),
    "spans that do not cover it": begun([2] * 2, spans=[VersionSpan(0, 1, "a")]),
    "routes without bytes": begun([2] * 2, routes=Array("uint8", (1, 2, 3), b"")),
    "routes of numbers": begun([2] * 2, routes=Array.of([[[1.0]]], "float32")),
    "routes of more tokens": begun([2] * 2, routes=Array.of([[[1]]] * 9, "uint8")),
    "no arrays": begun([2] * 2, response_ids=Array("int32", (-2,), b"")),
}


@pytest.fixture
def learner(redis_url: str) -> Iterator[LearnerBuffer]:
    made = LearnerBuffer(redis_url, "run")
    yield made
    made.close()


@pytest.mark.parametrize("error", [IndexError, OverflowError, MemoryError, RecursionError])
def test_a_group_at_which_a_check_fails_is_set_aside(
    learner: LearnerBuffer,
    client: redis.Redis,
    make_group: MakeGroup,
    make_ticket: Callable[..., Ticket],
    error: type[Exception],
):
    """However it fails: the entry stays in Redis, and would end each learner that resumes."""

    def check(group: Group) -> None:
        if group.ticket.number == 1:
            raise error("x" * 10**6)

    learner.checks = [check]
    for number in range(3):
        group = encode(make_group(make_ticket(number)))
        client.xadd(KEYS.groups, {"record": group})
        client.xadd(KEYS.eval_groups, {"record": group})
    assert [group.ticket.number for group in learner.take(3, 0.0)] == [0, 2]
    assert [group.ticket.number for group in learner.take_eval()] == [0, 2]
    found: Any = client.xrange(KEYS.quarantine)
    kept = [fields[b"reason"] for _, fields in found]
    assert learner.quarantined_total() == len(kept) == 2
    assert all(reason.startswith(error.__name__.encode()) for reason in kept)
    assert max(map(len, kept)) < 2000


@pytest.mark.parametrize("field", FIELDS)
def test_a_group_of_another_ticket_than_admitted_is_set_aside(
    learner: LearnerBuffer,
    client: redis.Redis,
    make_run: MakeRun,
    make_group: MakeGroup,
    field: str,
):
    """The learner computes on the ticket that comes back: on its prompt, its seed, its size."""
    admission = new_admission(make_run(), learner)
    learner.checks = [admission.check]
    for number, changes in enumerate(
        [{}, {field: FIELDS[field]}, {"step": 5, "run_id": "id", "run": "old"}]
    ):
        group = make_group(replace(admission.ticket(number, 0), **changes))
        client.xadd(KEYS.groups, {"record": encode(group)})
    assert [group.ticket.number for group in learner.take(3, 0.0)] == [0, 2]
    assert learner.quarantined_total() == 1


async def test_names_that_are_no_text_end_neither_side(
    learner: LearnerBuffer, client: redis.Redis, redis_url: str, make_ticket: Callable[..., Ticket]
):
    """In the set of workers, with heartbeats and without, and as consumers that have claims."""
    learner.publish_run("", {})
    learner.admit([make_ticket(n) for n in range(len(NAMES))], cursor=len(NAMES))
    client.sadd(KEYS.workers, *NAMES)
    consumers: list[Any] = NAMES
    for name in consumers:
        client.xreadgroup("workers", name, {KEYS.tickets: ">"}, count=1)
    assert learner.workers() == []
    assert client.smembers(KEYS.workers) == set()
    assert learner.claims().open == len(NAMES)
    client.sadd(KEYS.workers, *NAMES)
    for name in NAMES:
        client.set(KEYS.worker(name), encode(BEAT))
    assert learner.workers() == [BEAT] * len(NAMES)
    assert len(inspect_state.read_status(client, "run").workers) == len(NAMES)
    worker = WorkerBuffer(redis_url, "run", "heir", claim_timeout_s=0.001)
    assert len(await worker.claim(9, 0.0)) == len(NAMES)
    await worker.close()
    learner.forget()
    assert client.keys("*") == []
    client.sadd(KEYS.workers, *NAMES)
    assert actions.purge_run(client, "run", "all") == 1
    assert client.keys("*") == []


def test_a_heartbeat_that_cannot_be_read_is_dropped(learner: LearnerBuffer, client: redis.Redis):
    client.sadd(KEYS.workers, "sound", *SPOILT_BEATS)
    client.set(KEYS.worker("sound"), encode(BEAT))
    for name, record in SPOILT_BEATS.items():
        client.set(KEYS.worker(name), record)
    assert learner.workers() == [BEAT]
    assert learner.refused_heartbeats == len(SPOILT_BEATS)
    client.delete(*map(KEYS.worker, SPOILT_BEATS))
    assert learner.workers() == [BEAT]
    assert learner.refused_heartbeats == 0


async def test_claims_and_names_may_be_more_than_lua_unpacks(
    learner: LearnerBuffer, client: redis.Redis, redis_url: str, make_ticket: Callable[..., Ticket]
):
    """It unpacks 8,000 values."""
    count = 8200
    learner.publish_run("", {})
    learner.admit([make_ticket(n) for n in range(count)], cursor=count)
    client.sadd(KEYS.workers, *(f"w{n}" for n in range(count)))
    worker = WorkerBuffer(redis_url, "run", "w")
    claims = await worker.claim(count, 0.0)
    assert len(claims) == count
    assert await worker.renew(claims) == []
    lost = claims[:: count // 2]
    client.xack(KEYS.tickets, "workers", *(claim.entry for claim in lost))
    assert await worker.renew(claims) == lost
    await worker.close()
    learner.forget()
    assert client.keys("*") == []


async def test_a_partial_that_is_no_beginning_is_left_out(
    learner: LearnerBuffer, redis_url: str, make_ticket: Callable[..., Ticket]
):
    """The next worker begins the ticket anew; it goes on with one that is whole, and with one that is sound."""
    sampling, kinds = (
        Sampling(max_tokens=5),
        [*SPOILT_PARTIALS.values(), begun([2] * 5), begun([2] * 2)],
    )
    tickets = [make_ticket(n, group_size=1, sampling=sampling) for n in range(len(kinds))]
    learner.admit(tickets, cursor=len(kinds))
    worker = WorkerBuffer(redis_url, "run", "w")
    claims = await worker.claim(99, 0.0)
    partials = [PartialGroup(ticket=n, responses=[kind]) for n, kind in enumerate(kinds)]
    pairs = zip(claims, partials, strict=True)
    await worker.release([replace(claim, partial=partial) for claim, partial in pairs])
    found = {claim.ticket.number: claim.partial for claim in await worker.claim(99, 0.0)}
    await worker.close()
    assert {n for n, partial in found.items() if partial} == {len(kinds) - 2, len(kinds) - 1}
    assert len(found) == len(kinds)


@pytest.mark.parametrize(
    "change",
    [
        {"group_size": 0},
        {"group_size": 2**40},
        {"seed": -1},
        {"seed": 2**63},
        {"step": 2**63},
        {"number": -1},
        {"prompt_ids": Array.of([], "int32")},
        {"prompt_ids": Array.of([1.0], "float32")},
        {"prompt_ids": Array.of([[1]], "int32")},
        {"prompt_ids": Array("int32", (3,), b"")},
    ],
)
async def test_a_ticket_that_no_worker_can_take_is_set_aside(
    learner: LearnerBuffer, redis_url: str, make_ticket: Callable[..., Ticket], change: Any
):
    learner.admit([replace(make_ticket(0), **change), make_ticket(1)], cursor=2)
    worker = WorkerBuffer(redis_url, "run", "w")
    assert [claim.ticket.number for claim in await worker.claim(9, 0.0)] == [1]
    await worker.close()
    assert learner.quarantined_total() == 1


async def test_a_redis_that_evicts_is_refused(
    learner: LearnerBuffer, client: redis.Redis, tmp_path: Path
):
    """What it deletes at its limit looked like a Redis that had lost its memory."""
    client.config_set("maxmemory", 100 << 20)
    try:
        client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(ConfigError, match="maxmemory-policy is allkeys-lru"):
            learner.acquire(owner_of("id", tmp_path))
        client.config_set("maxmemory-policy", "volatile-lru")
        learner.acquire(owner_of("id", tmp_path))
    finally:
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")


@pytest.mark.parametrize("last", [END, f"{2**64 - 1}-{2**64 - 2}"])
@pytest.mark.parametrize("kind", ["redis 6.2", "redis 7", "valkey 9"])
async def test_an_id_at_the_end_ends_no_stream(
    servers: Callable[[str], str],
    make_ticket: Callable[..., Ticket],
    make_group: MakeGroup,
    kind: str,
    last: str,
):
    """Each ticket becomes one group, whoever has claimed it, and no group is lost."""
    learner = LearnerBuffer(servers(kind), "run")
    worker = WorkerBuffer(servers(kind), "run", "w")
    client = redis.Redis.from_url(servers(kind))
    learner.publish_run("", {})
    forged: Any = {"record": b"\xc1", "another": "x"}
    client.xadd(KEYS.tickets, forged, last)
    client.xadd(KEYS.eval_tickets, forged, last)
    learner.admit([make_ticket(n) for n in range(4)], cursor=4)
    learner.admit_eval([make_ticket(9, purpose="eval")])
    evaluation, *claims = await worker.claim(6, 0.0)  # with the two forged ones
    assert await worker.commit(claims[0], make_group(claims[0].ticket))
    assert [group.ticket.number for group in learner.take(1, 0.0)] == [0]
    client.xadd(KEYS.groups, forged, last)
    client.xadd(KEYS.eval_groups, forged, last)
    work = [
        asyncio.create_task(worker.commit(claim, make_group(claim.ticket)))
        for claim in (evaluation, claims[1], claims[2])
    ]
    taken, evaluated = [], []
    while {*taken} != {0, 1, 2} or len(evaluated) != 1:
        await asyncio.sleep(0.01)
        taken += [group.ticket.number for group in learner.take(9, 0.0)]
        assert learner.unread() == []
        evaluated += [group.ticket.number for group in learner.take_eval()]
        learner.rewind()
    assert await asyncio.gather(*work) == [True] * 3
    assert evaluated == [9] and learner.quarantined_total() == 4
    learner.trim(END)  # the position in a checkpoint from before
    assert client.xlen(KEYS.groups) == 3
    learner.trim(learner.position)
    assert client.xlen(KEYS.groups) == 0
    client.xadd(KEYS.tickets, forged, last)
    learner.admit([make_ticket(4)], cursor=5)
    assert [claim.ticket.number for claim in await worker.claim(9, 0.0)] == [3, 4]
    await worker.close()
    learner.close()
    client.close()


def test_an_entry_with_another_id_has_all_its_fields(learner: LearnerBuffer, client: redis.Redis):
    """But for one of more fields than a script can hand on, which is no record of ours."""
    entries: list[Any] = [{"record": b"a", "new": b"b"}, {"new": b"b", "record": b"\x00"}]
    for fields in [*entries, {f"field {n}": "x" for n in range(5000)}]:
        client.xadd(KEYS.groups, fields)
    client.xadd(KEYS.groups, {"record": b"z"}, END)
    assert learner.rewind()
    kept: Any = client.xrange(KEYS.groups)
    asked = [*entries, {"record": b""}, {"record": b"z"}]
    assert [{k.decode(): v for k, v in fields.items()} for _, fields in kept] == asked


@pytest.mark.parametrize("kind", ["redis 6.2", "redis 7", "valkey 9"])
@pytest.mark.parametrize("foreign", [END, "no stream"])
def test_a_spoilt_quarantine_takes_the_next_record(
    servers: Callable[[str], str], kind: str, foreign: str
):
    """One that has no next id, and one that is no stream, goes; the count stays."""
    learner, client = LearnerBuffer(servers(kind), "run"), redis.Redis.from_url(servers(kind))
    if foreign == END:
        client.xadd(KEYS.quarantine, {"record": b"x"}, END)
    else:
        client.set(KEYS.quarantine, foreign)
    for number in range(2):
        client.xadd(KEYS.groups, {"record": b"\xc1"})
        assert learner.take(1, 0.0) == []
        assert learner.quarantined_total() == number + 1
    kept = list(inspect_state.quarantine(client, "run"))
    assert [(record.source, record.record) for record in kept] == [(KEYS.groups, b"\xc1")] * 2
    client.xadd(KEYS.quarantine, {"bytes": "many"})
    assert [record.nbytes for record in inspect_state.quarantine(client, "run")] == [1, 1, 0]
    learner.close()
    client.close()


def test_a_redis_that_begins_to_evict_is_told_once_each_time(
    learner: LearnerBuffer, client: redis.Redis, tmp_path: Path, make_run: MakeRun
):
    """While the run goes on: the start alone refuses it."""
    log = MetricsLog(tmp_path, tensorboard=False)
    measured = BufferMetrics(learner, make_run().rollout.environment, log)
    policies = ["noeviction", "allkeys-lru", "allkeys-lru", "volatile-lru", "allkeys-lfu"]
    client.config_set("maxmemory", 100 << 20)
    try:
        for step, policy in enumerate(policies):
            client.config_set("maxmemory-policy", policy)
            measured.measure(step, [])
    finally:
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")
    log.close()
    told = [
        (record["kind"], record["step"], record["message"])
        for record in read_metrics(tmp_path / METRICS_FILE)
    ]
    why = "redis deletes groups and tickets at its limit: maxmemory-policy is"
    assert told == [
        ("warning", 1, f"{why} allkeys-lru now"),
        ("warning", 4, f"{why} allkeys-lfu now"),
    ]
