"""Who leads a run, and which run a worker is of: with learners and workers that are processes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.commands import wait_until

from areal_q.messages import WorkerStatus, decode_status
from areal_q.observability.metrics_log import read_metrics
from areal_q.system.run_dir import METRICS_FILE
from buffer.logs.trajectory_log import iter_log
from buffer.redis_store.keys import Keys

KEYS = Keys("twice")
SETTINGS = """
name = "twice"
steps = 1000000
model = {type = "small", layers = 1, width = 16, heads = 2, kv_heads = 1, mlp = 16, max_positions = 32}
learner = {groups = 4, group_size = 2, max_lag = 1}
rollout = {engine = {type = "scripted", tokens_per_s = 300}, sampling = {max_tokens = 4}}
task = {type = "arithmetic", digits = 1, heldout = 4}
checkpoint = {every = 5}
eval = {every = 1000, problems = 4}
"""


class Processes:
    """Learners and workers of one Redis, all of which end with the test. `logs` has what each said."""

    def __init__(self, url: str, sockets: Path, logs: Path) -> None:
        self._sockets, self.logs = sockets, logs
        self._env = os.environ | {"REDIS_URL": url, "OMP_NUM_THREADS": "1"}
        self._started: list[subprocess.Popen[bytes]] = []

    def learner(self, name: str, root: Path, *overrides: str) -> subprocess.Popen[bytes]:
        ends = [f"--{kind}=ipc://{self._sockets}/{name}-{kind}" for kind in ("announce", "fetch")]
        settings = ["--config", str(self.logs / "base.toml"), f"root={root}", *overrides]
        return self._start(name, "learner", *settings, *ends)

    def worker(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        return self._start(name, "rollout", "--run", "twice", "--id", name, *options)

    def relay(self, name: str, learner: str) -> tuple[str, str]:
        """Starts a relay behind that learner, and returns a worker's options to stand behind it."""
        ends = [f"{kind}=ipc://{self._sockets}/" for kind in ("announce", "fetch")]
        above = [f"--from-{end}{learner}-{end.partition('=')[0]}" for end in ends]
        below = [f"--{end}{name}-{end.partition('=')[0]}" for end in ends]
        self._start(name, "buffer.weight_sync.commands.relay", *above, *below)
        return below[0], below[1]

    def said(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text()

    def kill_all(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()

    def _start(self, name: str, *args: str) -> subprocess.Popen[bytes]:
        with (self.logs / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", *args]
            self._started.append(subprocess.Popen(command, env=self._env, stdout=log, stderr=log))
        return self._started[-1]


@pytest.fixture
def processes(redis_url: str, short_dir: Path, tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "base.toml").write_text(SETTINGS)
    made = Processes(redis_url, short_dir, tmp_path)
    yield made
    made.kill_all()


def steps(root: Path) -> int:
    path = root / "twice" / METRICS_FILE
    records = read_metrics(path) if path.exists() else []
    return max((r["step"] for r in records if r["kind"] == "step"), default=0)


def until_step(root: Path, step: int, *alive: subprocess.Popen[bytes]) -> None:
    while steps(root) < step:
        assert all(process.poll() is None for process in alive)
        time.sleep(0.05)


def state_of(client: redis.Redis) -> dict[bytes, bytes]:
    """What a learner may change of a run, of which heartbeats are no part."""
    keys = (key for key in KEYS.fixed if key != KEYS.workers)
    return {key.encode(): found for key in keys if (found := client.dump(key))}  # pyright: ignore


def status(client: redis.Redis, worker: str) -> WorkerStatus:
    found: Any = None
    while not found:
        time.sleep(0.05)
        found = client.get(KEYS.worker(worker))
    return decode_status(found)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_learner_stopped_beyond_its_lease_writes_nothing(
    processes: Processes, redis_url: str, tmp_path: Path
):
    """Its directory cannot be taken; a learner in a copy of it follows once the lease is over."""
    once = "checkpoint.every=1000000"  # it would complete one that was being written when it was stopped
    first, worker = processes.learner("first", tmp_path / "a", once), processes.worker("w0")
    checkpoints = tmp_path / "a" / "twice" / "checkpoints"
    said = partial(processes.said, "first")
    wait_until((checkpoints / "step-000000").exists, said, first, worker)
    until_step(tmp_path / "a", 7, first, worker)
    first.send_signal(signal.SIGSTOP)
    beside = processes.learner("beside", tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    second = processes.learner("second", tmp_path / "b", once)
    assert beside.wait() == 2
    assert "a run is going on there" in processes.said("beside")
    before = steps(tmp_path / "b")
    until_step(tmp_path / "b", before + 3, second, worker)
    worker.kill()
    worker.wait()
    second.send_signal(signal.SIGSTOP)
    with redis.Redis.from_url(redis_url) as client:
        found = state_of(client)
        written = sorted(checkpoints.iterdir())
        first.send_signal(signal.SIGCONT)
        assert first.wait() == 2
        assert state_of(client) == found
    assert sorted(checkpoints.iterdir()) == written
    assert f"run twice has another learner, process {second.pid} on host" in processes.said("first")
    second.send_signal(signal.SIGCONT)
    at = steps(tmp_path / "b")
    until_step(tmp_path / "b", at + 2, second, processes.worker("w1"))
    second.send_signal(signal.SIGTERM)
    assert second.wait() == 143
    log = list(iter_log(tmp_path / "b" / "twice" / "trajectories"))
    uses = Counter(group.ticket.number for _, taken in log for group in taken)
    assert [step for step, _ in log] == list(range(len(log)))
    assert set(uses.values()) == {1}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_worker_rebuilds_itself_for_another_run(processes: Processes, tmp_path: Path):
    """It once went on with the settings of the run before, and scored the next one's responses by them."""
    first, worker = processes.learner("first", tmp_path / "a"), processes.worker("w0")
    until_step(tmp_path / "a", 3, first, worker)
    first.send_signal(signal.SIGTERM)
    assert first.wait() == 143
    overlong = "reward.overlong={max_tokens=4, cache_tokens=1}"
    second = processes.learner("second", tmp_path / "b", overlong, "steps=6")
    assert second.wait() == 0
    assert worker.wait() == 0, "the run is finished"
    assert processes.said("w0").count("setting up anew") == 1
    rewards, ids = {}, {}
    for name in ("a", "b"):
        log = list(iter_log(tmp_path / name / "twice" / "trajectories"))
        groups = [group for _, taken in log for group in taken]
        cut = [t for g in groups for t in g.trajectories if t.finish_reason == "length"]
        rewards[name] = {t.reward - t.reward_parts["correct"] for t in cut}
        ids[name] = {g.ticket.run_id for g in groups}
    assert rewards == {"a": {0.0}, "b": {-1.0}}
    for name, found in ids.items():
        assert found == {(tmp_path / name / "twice" / "run-id").read_text().strip()}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_worker_takes_no_weights_of_an_earlier_run(
    processes: Processes, redis_url: str, tmp_path: Path
):
    """A relay holds them, and hears nothing of the run that begins: its learner is at other endpoints."""
    first = processes.learner("first", tmp_path / "a")
    worker = processes.worker("w0", *processes.relay("relay", "first"))
    until_step(tmp_path / "a", 2, first, worker)
    first.send_signal(signal.SIGTERM)
    assert first.wait() == 143
    earlier = (tmp_path / "a" / "twice" / "run-id").read_text().strip()
    second = processes.learner("second", tmp_path / "b", "steps=3")
    refused = "weights of another run named twice are refused"
    with redis.Redis.from_url(redis_url) as client:
        while refused not in processes.said("w0"):
            assert worker.poll() is second.poll() is None
            found = status(client, "w0")
            assert found.run_id == earlier or found.version == -1
    processes.worker("w1")
    assert second.wait() == 0
    log = list(iter_log(tmp_path / "b" / "twice" / "trajectories"))
    assert {group.worker for _, taken in log for group in taken} == {"w1"}
    assert processes.said("w0").count(refused) == 1
