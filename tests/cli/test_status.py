"""`areal-q status`: what it says of a run is so, and its exit code says whether that is well."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
import typer
from typer.testing import CliRunner, Result

from areal_q.config import BroadcastConfig
from areal_q.weights.version import WeightVersion
from bench.records import make_beat
from buffer.redis_store import LearnerBuffer, WorkerBuffer
from buffer.redis_store.keys import Keys
from buffer.redis_store.lease import owner_of
from buffer.weight_sync import WeightServer, WeightSource
from rollout.commands.cluster import gather
from rollout.commands.status import SILENT_S, main

Make = Callable[..., WeightVersion]


@pytest.fixture
def weight_server(short_dir: Path) -> Iterator[WeightServer]:
    ends = (f"ipc://{short_dir}/announce", f"ipc://{short_dir}/fetch")
    made = WeightServer(*ends, BroadcastConfig(heartbeat_s=0.05))
    yield made
    made.close()


@pytest.fixture
def learner(redis_url: str, weight_server: WeightServer) -> Iterator[LearnerBuffer]:
    made = LearnerBuffer(redis_url, "run")
    made.publish_run("", weight_server.endpoints._asdict())
    yield made
    made.close()


def publish(weight_server: WeightServer, version: WeightVersion) -> None:
    weight_server.publish(version)
    while weight_server.stats.published == 0:
        time.sleep(0.002)


def beat(redis_url: str, name: str, **fields) -> None:
    status = make_beat(name, **({"active": 1, "tokens": 1, "groups": 1, "time_s": 0.5} | fields))

    async def send() -> None:
        worker = WorkerBuffer(redis_url, "run", name)
        await worker.heartbeat(status)
        await worker.close()

    asyncio.run(send())


def command(redis_url: str, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(main)
    given = ["--redis", redis_url, "--run", "run", *arguments]
    return CliRunner().invoke(app, given, catch_exceptions=False)


def test_a_cluster_at_work_is_told_and_is_well(
    learner, redis_url, weight_server, make_version: Make, make_ticket
):
    version = make_version(3, published_s=time.time() - 2)
    publish(weight_server, version)
    learner.admit([make_ticket(0)], cursor=1)
    beat(redis_url, "a", version=3, digest=version.manifest.digest, tokens_per_s=1500.0)
    beat(redis_url, "b", version=2)
    result = command(redis_url, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["version"], found["digest"], found["wrong"]) == (3, version.manifest.digest, [])
    assert 2 <= found["since_step_s"] < 60
    assert [(w["worker"], w["version"]) for w in found["workers"]] == [("a", 3), ("b", 2)]
    assert found["redis"]["streams"][0]["entries"] == 1
    shown = command(redis_url).stdout
    assert "step 3" in shown and version.manifest.digest in shown
    assert "1,500" in shown and "2 workers" in shown and "WRONG" not in shown


def test_waits_are_whole_lines_on_80_columns(
    learner, redis_url, weight_server, make_version: Make, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    publish(weight_server, make_version(3, published_s=time.time()))
    for worker in ("rollout-0", "rollout-1"):
        waits_for = "agents, with 0 of 20 episodes open"
        beat(redis_url, worker, version=3, episodes=20, waits_for=waits_for)
    beat(redis_url, "busy", version=3)
    lines = [line.rstrip() for line in command(redis_url).stdout.splitlines()]
    assert [line for line in lines if "waits for" in line] == [
        "rollout-0 waits for agents, with 0 of 20 episodes open",
        "rollout-1 waits for agents, with 0 of 20 episodes open",
    ]
    assert any(line.startswith("rollout-0  ") for line in lines)


def test_event_loops_that_are_late_are_told_and_then_wrong(
    learner, redis_url, weight_server, make_version: Make
):
    publish(weight_server, make_version(3, published_s=time.time()))
    beat(redis_url, "well", version=3, loop_lag_s=0.012, loop_lag_max_s=2.5)
    found = command(redis_url)
    assert "event loops late by 12 ms (p99), 2,500 ms at most" in found.stdout
    assert "WRONG" not in found.stdout
    beat(redis_url, "held", version=3, loop_lag_s=1.4, loop_lag_max_s=2.0)
    found = command(redis_url)
    assert "event loops late by 1,400 ms (p99), 2,000 ms at most" in found.stdout
    assert "WRONG: held: its event loop is 1.4 s late" in found.stdout and found.exit_code == 1


def test_no_worker_and_a_learner_that_makes_no_step_are_wrong(
    learner, redis_url, weight_server, make_version: Make
):
    publish(weight_server, make_version(3, published_s=time.time() - 500))
    result = command(redis_url)
    assert result.exit_code == 1
    assert "no new version for 8 min" in result.stdout
    assert "no worker has sent a heartbeat" in result.stdout
    assert "no new version" not in command(redis_url, "--silent-s", "600").stdout


def test_a_worker_with_other_bytes_or_without_new_ones_is_named(
    learner, redis_url, weight_server, make_version: Make
):
    publish(weight_server, make_version(3, published_s=time.time()))
    beat(redis_url, "liar", version=3, digest="other")
    beat(redis_url, "late", version=1, behind_s=300.0)
    with redis.Redis.from_url(redis_url) as client:
        wrong = gather(client, "run", WeightSource(), SILENT_S).wrong
    assert [line.split(":")[0] for line in wrong] == ["late", "liar"]


def test_a_heartbeat_that_cannot_be_read_hides_no_other(
    learner, redis_url, weight_server, make_version: Make
):
    publish(weight_server, make_version(3, published_s=time.time()))
    beat(redis_url, "sound", version=3)
    keys = Keys("run")
    with redis.Redis.from_url(redis_url) as client:
        client.sadd(keys.workers, "junk", b"\xff\xfe")
        client.set(keys.worker("junk"), b"\xff\x00")
        client.set(keys.worker(b"\xff\xfe"), b"x" * 10**6)
        found = gather(client, "run", WeightSource(), SILENT_S)
    assert [worker.worker for worker in found.workers] == ["sound"]
    assert [line.partition(" ignored")[0] for line in found.wrong] == [
        "heartbeat of worker junk",
        "heartbeat of worker \ufffd\ufffd",
    ]


def test_a_learner_that_does_not_answer_is_wrong(learner, redis_url, weight_server, monkeypatch):
    monkeypatch.setattr("buffer.weight_sync.client.TIMEOUT_S", 0.2)
    weight_server.close()
    beat(redis_url, "a")
    result = command(redis_url)
    assert result.exit_code == 1
    assert "the learner does not answer" in result.stdout


@pytest.mark.parametrize("known", [False, True])
def test_a_run_that_has_just_begun_is_starting(
    redis_url, weight_server, tmp_path: Path, monkeypatch, known: bool
):
    """Nothing is served yet; after a resumption Redis still has the endpoints of the learner before."""
    monkeypatch.setattr("buffer.weight_sync.client.TIMEOUT_S", 0.05)
    learner = LearnerBuffer(redis_url, "run")
    with redis.Redis.from_url(redis_url) as client:
        assert gather(client, "run", WeightSource(), SILENT_S, held=True).starting
        if known:
            learner.publish_run("", weight_server.endpoints._asdict())
            weight_server.close()
        learner.acquire(owner_of("id", tmp_path))
        found = command(redis_url)
        assert found.exit_code == 0 and "learner: starting" in found.stdout, found.output
        late = gather(client, "run", WeightSource(), silent_s=0.0)
        assert late.wrong == ["the learner does not answer", "no worker has sent a heartbeat"]
        learner.close()
        assert command(redis_url).exit_code == 1
