"""A Redis that refuses commits for want of memory, on each kind of server."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import redis
from helpers.paths import ROOT
from helpers.policies import Learning
from msgspec.structs import replace

from areal_q.config import Run
from areal_q.messages import Array, Group, Ticket, VersionSpan
from areal_q.observability.metrics_log import read_metrics
from bench.records import make_beat
from buffer.interface import Memory
from buffer.redis_store import LearnerBuffer, WorkerBuffer
from buffer.redis_store.keys import WORKER_TTL_S, Keys
from buffer.redis_store.local_server import RedisServer
from learner.data import starvation

KEYS = Keys("run")
KINDS = ["redis 6.2", "redis 7", "valkey 9"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_redis_lets_dead_consumers_wait(
    servers: Callable[[str], str], make_ticket: Callable[..., Ticket], kind: str
):
    url = servers(kind)
    learner = LearnerBuffer(url, "run")
    learner.publish_run("", {})
    learner.admit([make_ticket(0)], cursor=1)

    async def scenario(client: redis.Redis) -> None:
        gone = WorkerBuffer(url, "run", "gone", claim_timeout_s=0.01)
        await gone.release(await gone.claim(1, block_s=0.0))
        await gone.close()
        client.config_set("maxmemory", 1)
        worker = WorkerBuffer(url, "run", "w", claim_timeout_s=0.01)
        await asyncio.sleep(0.02)
        (claim,) = await worker.claim(1, block_s=0.0)
        client.config_set("maxmemory", 0)
        await worker.release([claim])
        await asyncio.sleep(0.02)
        await worker.claim(1, block_s=0.0)
        await worker.close()

    with redis.Redis.from_url(url) as client:
        asyncio.run(scenario(client))
        names = [c["name"] for c in client.xinfo_consumers(Keys("run").tickets, "workers")]
    assert not any(name.startswith(b"gone") for name in names)
    learner.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_full_redis_takes_heartbeats(servers: Callable[[str], str], kind: str):
    url = servers(kind)
    learner, worker = LearnerBuffer(url, "run"), WorkerBuffer(url, "run", "w")
    with redis.Redis.from_url(url) as client:
        client.config_set("maxmemory", 1)
        for waiting in (0, 3):
            await worker.heartbeat(make_beat(waiting=waiting))
            assert learner.workers() == [make_beat(waiting=waiting)]
        assert 0 < client.ttl(KEYS.worker("w")) <= WORKER_TTL_S  # pyright: ignore
        client.config_set("maxmemory", 0)
    await worker.close()
    learner.close()


class Worker(threading.Thread):
    """Commits `count` groups, each with a record of 1.8 MB, and sends heartbeats while it does."""

    def __init__(self, url: str, run: str, count: int, make_group: Callable[..., Group]) -> None:
        super().__init__(daemon=True)
        self.url, self.of, self.left, self.make_group = url, run, count, make_group

    def run(self) -> None:
        asyncio.run(self._work())

    async def _work(self) -> None:
        worker = WorkerBuffer(self.url, self.of, "w", claim_timeout_s=1.0)
        while self.left:
            for claim in await worker.claim(self.left, block_s=0.05):
                self.left -= 1
                sending = asyncio.create_task(worker.commit(claim, self._large(claim.ticket)))
                while not sending.done():
                    await worker.heartbeat(make_beat(waiting=worker.waiting))
                    await asyncio.sleep(0.05)
        await worker.close()

    def _large(self, ticket: Ticket) -> Group:
        group, n = self.make_group(ticket), 100_000
        long = [
            replace(
                t,
                response_ids=Array.of(np.zeros(n), "int32"),
                behavior_logprobs=Array.of(-np.ones(n), "float32"),
                loss_mask=Array.of(np.ones(n), "uint8"),
                spans=[VersionSpan(0, n, "d0")],
            )
            for t in group.trajectories
        ]
        return replace(group, trajectories=long)


@pytest.mark.parametrize("kind", KINDS)
def test_room_is_made_for_a_group_refused_below_the_limit(
    servers: Callable[[str], str],
    make_run: Callable[..., Run],
    make_group: Callable[..., Group],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
):
    """A third of a record is free, so that Redis does not count as full but while a record comes in, which a
    learner need not see. What was learnt from has the room of three, as much as Redis 6.2 was seen to need."""
    monkeypatch.setattr(starvation, "ASK_EVERY_S", 0.3)
    monkeypatch.setattr(Memory, "full", False)
    url = servers(kind)
    run = make_run("learner.groups=1", "learner.minibatches=1", "learner.max_lag=1")
    learner = Learning(run, url)

    def learn(count: int) -> list[list[int]]:
        worker = Worker(url, run.name, count, make_group)
        worker.start()
        drawn = [learner.step(lambda: None) for _ in range(count)]
        worker.join()
        return drawn

    assert learn(3) == [[0], [1], [2]]
    with redis.Redis.from_url(url) as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 600_000)
        assert learn(1) == [[3]]
        client.config_set("maxmemory", 0)
    assert learner.rooms_made
    learner.buffer.close()


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("steps", "groups", "size", "room_kb"),
    [(40, 16, 16, 1200), (6, 2, 1024, 2300)],
    ids=["small groups, up to the limit", "groups of 300 kB, refused below it"],
)
def test_a_run_in_a_small_redis_checkpoints_early_and_ends(
    short_dir: Path, tmp_path: Path, steps: int, groups: int, size: int, room_kb: int
):
    """Without the early checkpoints it would wait for ever: the next regular one is after the last step."""
    settings = ["model.width=32", "model.layers=1", "model.mlp=48", "warmstart.steps=0"]
    settings += [f"steps={steps}", "checkpoint.every=1000", "eval.problems=2", f"root={tmp_path}"]
    settings += [f"learner.groups={groups}", f"learner.group_size={size}", "learner.max_lag=1"]
    settings += ["learner.minibatches=1", "rollout.engine.slots=1024"]
    config = ROOT / "configs" / "quickstart.toml"
    with (
        RedisServer.start(short_dir / "redis", short_dir / "s") as server,
        redis.Redis.from_url(server.url) as client,
    ):
        client.config_set("maxmemory", client.info("memory")["used_memory"] + (room_kb << 10))
        command = [sys.executable, "-m", "areal_q", "run", str(config), *settings]
        environment = {**os.environ, "REDIS_URL": server.url}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    said = (tmp_path / "quickstart" / "logs" / "learner.log").read_text()
    assert ended.returncode == 0, ended.stderr + said
    assert "a checkpoint before its time makes room" in said
    metrics = read_metrics(tmp_path / "quickstart" / "metrics.jsonl")
    assert [r["step"] for r in metrics if r["kind"] == "step"] == list(range(1, steps + 1))
