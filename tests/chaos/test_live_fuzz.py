"""A run at work, a learner and a worker, while a foreign hand puts mutated records at all of their borders.

`make fuzz` has the decoders alone; here what they take goes on into pool, step, logs, engine and metrics."""

import asyncio
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.fixture_types import MakeRun

from areal_q.config import Run
from areal_q.errors import RecordError
from areal_q.messages import (
    Array,
    PartialGroup,
    PartialResponse,
    VersionSpan,
    decode_group,
    decode_ticket,
    encode,
)
from areal_q.observability.metrics_log import read_metrics
from areal_q.system.run_dir import METRICS_FILE, claimed, has_checkpoint
from bench.fuzz import Target, mutated
from bench.records import make_beat
from buffer.logs.trajectory_log import read_log
from buffer.redis_store import lua_scripts
from buffer.redis_store.keys import RECORD, RELEASED, RELEASED_IDLE_MS, WORKERS_GROUP, Keys
from buffer.weight_sync import WeightSource
from learner.build import build_learner
from learner.loop import Learner
from rollout.build import EndpointAddress, serve
from rollout.commands.cluster import gather

STEPS = 6
SETTINGS = (
    "learner.groups=2",
    "learner.minibatches=1",
    "learner.max_lag=3",
    "checkpoint.every=2",
    "eval.every=2",
    "eval.problems=4",
    "rollout.engine.slots=8",
    "warmstart.steps=0",
)
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
            for kind in (self._names, self._heartbeat, self._group, self._partial, self._end):
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

    def _end(self) -> int:
        """Adds an entry with one of the two largest ids, now and then, where there is none."""
        keys = self._keys
        stream = self._rng.choice((keys.groups, keys.eval_groups, keys.tickets, keys.quarantine))
        if self._rng.random() < 0.7:
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


@contextmanager
def learner_of(run: Run, directory: Path, url: str, sockets: Path) -> Iterator[Learner]:
    """Yields the run's learner, which resumes if there is something to go on with."""
    announce, fetch = (f"ipc://{sockets}/{end}" for end in ("announce", "fetch"))
    resume = has_checkpoint(directory)
    made = build_learner(run, directory, url, announce, fetch, resume, threading.Event())
    try:
        yield made
    finally:
        made.close()


def follow(learner: Learner, hand: ForeignHand) -> Learner:
    """Lets the hand act within each step: however fast the run is, the step's own groups are there."""
    report = learner.report

    def act_and_report(*args: Any, **named: Any) -> None:
        hand.act()
        report(*args, **named)

    learner.report = act_and_report
    return learner


async def train(learner: Learner, url: str, hand: ForeignHand) -> int:
    """Trains to the end, with a worker, while the foreign hand acts. Returns the step reached. The worker
    comes once the hand has taken a ticket: a fast one leaves none."""
    name, stop = learner.run.name, threading.Event()
    work: asyncio.Task[None] | None = None
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(learner.train, stop)
        try:
            while not training.done():
                await asyncio.to_thread(hand.act)
                if work is None and hand.done["_partial"]:
                    work = asyncio.create_task(
                        serve(
                            url,
                            name,
                            "w",
                            WeightSource(),
                            lambda status: None,
                            EndpointAddress(),
                            60.0,
                        )
                    )
                assert not (work and work.done()), work
                await asyncio.sleep(0.05)
        finally:
            stop.set()
    if work:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    return training.result()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [0, 1])
async def test_no_record_of_a_foreign_hand_ends_learner_or_worker(
    make_run: MakeRun, redis_url: str, tmp_path: Path, short_dir: Path, seed: int
):
    run, longer = (
        make_run(*SETTINGS, f'root="{tmp_path}"', f"steps={steps}") for steps in (STEPS, 2 * STEPS)
    )
    with claimed(run, resume=False) as (directory, _), ForeignHand(redis_url, run, seed) as hand:
        with learner_of(run, directory, redis_url, short_dir) as learner:
            assert await train(follow(learner, hand), redis_url, hand) == STEPS
            hand.act()
            with redis.Redis.from_url(redis_url) as client:
                assert gather(client, run.name, WeightSource(), silent_s=600.0).version == STEPS
        with learner_of(longer, directory, redis_url, short_dir) as learner:
            assert await train(follow(learner, hand), redis_url, hand) == 2 * STEPS
    assert all(hand.done.values()), hand.done
    file = directory / METRICS_FILE
    steps = [record for record in read_metrics(file) if record["kind"] == "step"]
    assert [record["step"] for record in steps] == [*range(1, 2 * STEPS + 1)]
    assert steps[-1]["buffer/quarantined"] > 0
    assert max(map(len, file.read_bytes().splitlines())) < 100_000
    taken = [g.ticket.number for _, groups in read_log(directory / "trajectories") for g in groups]
    assert len(taken) == len({*taken}) == 2 * STEPS * run.learner.groups
