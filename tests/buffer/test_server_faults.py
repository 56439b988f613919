"""The buffer on each kind of server, processes on both sides: kill -9 of anybody, full memory, power loss."""

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from helpers.commands import limit, wait_until
from helpers.policies import Learning
from msgspec.structs import replace

from areal_q.config import Run
from areal_q.messages import Group, Ticket, VersionSpan, encode
from buffer.redis_store import LearnerBuffer, WorkerBuffer
from buffer.redis_store.connection import CONNECTIONS, connect_async
from buffer.redis_store.keys import Keys
from buffer.redis_store.local_server import RedisServer
from learner.data import group_reader as group_reader_module

KEYS = Keys("run")
PRODUCER = """
import asyncio, json, sys
import numpy as np
from areal_q.messages import Array, Group, Trajectory, VersionSpan
from buffer.redis_store import WorkerBuffer

async def main(url, name, tokens):
    n = int(tokens)
    worker = WorkerBuffer(url, "run", name, claim_timeout_s=0.5, patience_s=30.0)
    worker.max_deliveries = 10**6
    t = Trajectory(
        index=0, response_ids=Array.of(np.zeros(n), "int32"), loss_mask=Array.of(np.ones(n), "uint8"),
        behavior_logprobs=Array.of(-np.ones(n), "float32"), spans=[VersionSpan(0, n, "a")],
        finish_reason="stop", reward=0.0,
    )
    while True:
        for claim in await worker.claim(4, block_s=0.2):
            group = Group(ticket=claim.ticket, worker=name, engine="e", weight_format="int8",
                          trajectories=[t], started_s=0.0, finished_s=0.0)
            await worker.commit(claim, group)
        print(worker.full_s, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""
CONSUMER = """
import json, os, sys, time
from buffer.redis_store import LearnerBuffer

url, path, pause = sys.argv[1:]
learner = LearnerBuffer(url, "run", patience_s=30.0)
seen = []
if os.path.exists(path):
    saved = json.load(open(path))
    learner.position, seen = saved["position"], saved["numbers"]
while True:
    seen += [group.ticket.number for group in learner.take(5, timeout_s=0.1)]
    time.sleep(float(pause))
    with open(path + ".part", "w") as file:
        json.dump({"position": learner.position, "numbers": seen}, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(path + ".part", path)
    learner.trim(learner.position)
"""


class Play:
    """A server, producers and a consumer, each a process that may be killed and started again."""

    def __init__(self, directory: Path, binary: str, tokens: int, pause_s: float) -> None:
        self.directory, self.binary = directory, binary
        self.tokens, self.pause_s = tokens, pause_s
        self.saved = directory / "saved.json"
        self.server = self.serve()
        self.children: dict[str, subprocess.Popen[str]] = {}

    def serve(self) -> RedisServer:
        where = (self.directory / "redis", self.directory / "s")
        return RedisServer.start(*where, appendfsync="always", binary=self.binary)

    def start(self, name: str) -> None:
        arguments = [CONSUMER, self.server.url, str(self.saved), str(self.pause_s)]
        if name != "consumer":
            arguments = [PRODUCER, self.server.url, name, str(self.tokens)]
        output = (self.directory / f"{name}.log").open("a")
        with output:
            command = [sys.executable, "-c", *arguments]
            self.children[name] = subprocess.Popen(command, stdout=output, stderr=output, text=True)

    def kill(self, name: str) -> None:
        process = self.server.process if name == "redis" else self.children[name]
        assert process is not None
        process.send_signal(signal.SIGKILL)
        process.wait()

    def revive(self, name: str) -> None:
        if name == "redis":
            self.server = self.serve()
        else:
            self.start(name)

    @property
    def counted(self) -> list[int]:
        return json.loads(self.saved.read_text())["numbers"] if self.saved.exists() else []

    def wait(self, count: int) -> None:
        while len(self.counted) < count:
            assert time.monotonic() < limit.at_s, f"{len(self.counted)} of {count}"
            for name, child in self.children.items():
                assert child.poll() is None, (self.directory / f"{name}.log").read_text()
            time.sleep(0.05)

    def end(self) -> None:
        for name in self.children:
            self.kill(name)
        self.server.stop()


@pytest.fixture
def play(short_dir: Path, binary: str):
    made: list[Play] = []

    def start(tokens: int, pause_s: float) -> Play:
        made.append(Play(short_dir, binary, tokens, pause_s))
        return made[0]

    yield start
    for each in made:
        each.end()


def test_kill_9_of_anybody_loses_no_group_and_counts_none_twice(play, make_ticket):
    it, rng = play(tokens=50, pause_s=0.005), random.Random(0)
    learner = LearnerBuffer(it.server.url, "run", patience_s=30.0)
    learner.publish_run("", {})
    learner.admit([make_ticket(n, group_size=1) for n in range(250)], cursor=250)
    everybody = ["a", "b", "consumer"]
    for name in everybody:
        it.start(name)
    it.wait(20)
    for victim in ["consumer", "redis", "a", "redis", "b", "consumer"]:
        it.kill(victim)
        time.sleep(rng.random() * 0.2)
        it.revive(victim)
        time.sleep(rng.random() * 0.2)
    it.wait(250)
    assert Counter(it.counted) == Counter(range(250))
    assert learner.open_tickets() == set()
    learner.close()


def test_a_full_redis_makes_producers_wait_and_loses_nothing(play, make_ticket):
    """100 groups of 90 kB, 9 MB in all, through a Redis that may hold 3 MB of them."""
    it = play(tokens=10_000, pause_s=0.05)
    learner = LearnerBuffer(it.server.url, "run")
    learner.publish_run("", {})
    learner.admit([make_ticket(n, group_size=1) for n in range(100)], cursor=100)
    with redis.Redis.from_url(it.server.url) as client:
        limit = client.info("memory")["used_memory"] + (3 << 20)
        client.config_set("maxmemory", limit)
        for name in ("a", "b"):
            it.start(name)
        logs = [it.directory / f"{name}.log" for name in ("a", "b")]
        wait_until(lambda: any("waits for room" in log.read_text() for log in logs), learner.memory)
        it.start("consumer")
        it.wait(100)
        assert client.info("memory")["used_memory"] < limit + (1 << 20)
    assert Counter(it.counted) == Counter(range(100))
    learner.close()
    assert max(float(log.read_text().split()[-1]) for log in logs) > 0  # seconds waited


@pytest.mark.parametrize("learner_is", ["alive", "resumed"])
def test_tickets_that_a_power_cut_brings_back_do_not_count_again(
    short_dir: Path,
    make_run: Callable[..., Run],
    make_group: Callable[..., Group],
    monkeypatch: pytest.MonkeyPatch,
    learner_is: str,
):
    """The append-only file of some time ago takes the place of the present one."""
    monkeypatch.setattr(group_reader_module, "POLL_S", 0.01)
    run = make_run("learner.groups=4", "learner.max_lag=2")
    where = (short_dir / "redis", short_dir / "s")
    server = RedisServer.start(*where, appendfsync="always")

    left = 8
    """Groups of two steps: of what is admitted beyond, nothing is committed before the copy is made"""

    def work() -> None:
        async def commit() -> None:
            nonlocal left
            worker = WorkerBuffer(server.url, run.name, "w", claim_timeout_s=0.01)
            for claim in await worker.claim(min(6, left), block_s=0.0) if left else []:
                left -= await worker.commit(claim, fresh(make_group(claim.ticket)))
            await worker.close()

        asyncio.run(commit())

    learner = Learning(run, server.url)
    counted = learner.step(work) + learner.step(work)
    shutil.copytree(where[0], short_dir / "before")
    left = 1000
    counted += learner.step(work) + learner.step(work)
    state = learner.state()
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    shutil.rmtree(where[0])
    (short_dir / "before").rename(where[0])
    server = RedisServer.start(*where)
    try:
        if learner_is == "resumed":
            learner.buffer.close()
            learner = Learning(run, server.url, state)
        for _ in range(5):
            counted += learner.step(work)
        assert max(Counter(counted).values()) == 1
        assert learner.group_reader.duplicates > 0
        assert len(learner.admission.outstanding) <= 12
        learner.buffer.close()
    finally:
        server.stop()


@pytest.mark.parametrize("redis_has", ["nothing", "its older groups"])
def test_groups_with_ids_below_the_position_are_read(
    redis_url: str,
    make_run: Callable[..., Run],
    make_group: Callable[..., Group],
    make_ticket: Callable[..., Ticket],
    monkeypatch: pytest.MonkeyPatch,
    redis_has: str,
):
    """Redis came back without its last groups, on a host whose clock is behind."""
    monkeypatch.setattr(group_reader_module, "POLL_S", 0.01)
    run = make_run("learner.groups=4", "learner.max_lag=2")
    learner, keys = Learning(run, redis_url), Keys(run.name)
    learner.admission.admit(0)
    with redis.Redis.from_url(redis_url) as client:

        def commit(numbers: range, ms: int) -> None:
            for n in numbers:
                record = encode(fresh(make_group(make_ticket(n, run=run.name))))
                client.xadd(keys.groups, {"record": record}, id=f"{ms + n}-0")

        commit(range(5), ms=9_000_000)
        drawn = learner.group_reader.take(0, threading.Event())
        assert drawn
        before = [group.ticket.number for group in drawn.groups]
        learner.buffer.read(1, timeout_s=0.0)
        client.delete(keys.groups)
        if redis_has != "nothing":
            commit(range(2), ms=1_000_000)
        commit(range(5, 9), ms=1_000_000)
        learner.group_reader.consumed()
        after = learner.group_reader.take(0, threading.Event())
        assert after
        assert before + [group.ticket.number for group in after.groups] == [0, 1, 2, 3, 5, 6, 7, 8]
        # Nothing that was not learnt from is trimmed.
        learner.buffer.trim(learner.group_reader.position)
        assert client.xlen(keys.groups) >= 4
    learner.buffer.close()


def fresh(group: Group) -> Group:
    """`group`, all drawn by version 0 of this history."""
    spans = [[VersionSpan(0, t.num_tokens, "d0")] for t in group.trajectories]
    pairs = zip(group.trajectories, spans, strict=True)
    return replace(group, trajectories=[replace(t, spans=s) for t, s in pairs])


def test_a_group_put_back_counts_though_its_place_was_filled(
    redis_url: str,
    make_run: Callable[..., Run],
    make_group: Callable[..., Group],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(group_reader_module, "POLL_S", 0.01)
    run = make_run("learner.groups=2", "learner.minibatches=1", "learner.max_lag=1")
    learner = Learning(run, redis_url)
    learner.admission.admit(0)
    assert learner.admission.outstanding == {0, 1, 2, 3}
    # Ticket 0 is set aside: the learner starves, and its place goes to ticket 4.
    learner.admission.recount({1, 2, 3})
    assert learner.admission.admit(0) == 1

    def work() -> None:
        async def commit() -> None:
            worker = WorkerBuffer(redis_url, run.name, "w")
            for claim in await worker.claim(2, block_s=0.0):
                await worker.commit(claim, fresh(make_group(claim.ticket)))
            await worker.close()

        asyncio.run(commit())

    assert learner.step(work) == [0, 1]
    assert learner.group_reader.duplicates == 0
    assert learner.admission.lost == set()
    learner.buffer.close()


async def test_three_hundred_groups_share_a_few_connections(redis_url: str):
    client = connect_async(redis_url)
    try:
        answers = await asyncio.gather(*(client.echo(str(i)) for i in range(300)))
        assert answers == [str(i).encode() for i in range(300)]
        connected = await client.client_list()
        assert 1 < len(connected) <= CONNECTIONS + 1  # the fixture's
    finally:
        await client.aclose()
