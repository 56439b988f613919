"""The whole learner on two real processes under torchrun: real Redis, a worker, kill -9, and on from there."""

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import redis

from areal_q.config import Run, dump_toml
from areal_q.models import load_decoder
from areal_q.observability.metrics_log import read_metrics
from bench.chaos.foreign_hand import ForeignHand
from buffer.logs.trajectory_log import iter_log
from learner import checkpoint

STEPS = 16
BACKENDS = {
    "fsdp": ["learner.reference_kl={coef=0.01}", "checkpoint.sharded=true"],
    "megatron": ["learner.backend={type='megatron', tensor=2}", "checkpoint.sharded=true"],
}


@contextmanager
def started(log: Path, *args: str) -> Iterator[subprocess.Popen]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with log.open("a") as out:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", *args], env=env, stdout=out, stderr=out
        )
    try:
        yield process
    finally:
        for pid in [*children(process.pid), process.pid] if process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        process.wait()


def children(pid: int) -> list[int]:
    file = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in file.read_text().split()] if file.exists() else []


def rank_of(pid: int) -> str | None:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    found = [v.removeprefix(b"RANK=").decode() for v in variables if v.startswith(b"RANK=")]
    return found[0] if found else None


def steps_in(directory: Path) -> list[int]:
    file = directory / "metrics.jsonl"
    records = read_metrics(file) if file.exists() else []
    return [r["step"] for r in records if r["kind"] == "step"]


@contextmanager
def on_two_ranks(
    make_run: Callable[..., Run], redis_url: str, place: Path, backend: str
) -> Iterator[tuple[Run, subprocess.Popen, subprocess.Popen]]:
    """Starts run "two" in `place`, a worker and a learner on two ranks, and yields it with torchrun and the
    worker, whose words are in the file `log`."""
    if backend == "megatron" and importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron is not installed: make test-megatron")
    settings = [f"root='{place}'", f"steps={STEPS}", "name=two", "checkpoint.every=2"]
    settings += ["learner.optimizer.lr=1e-3", "eval.every=1000", "eval.problems=4"]
    run = make_run(*settings, *BACKENDS[backend])
    config, log = place / "two.toml", place / "log"
    config.write_text(dump_toml(run))
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun += ["--max-restarts", "3", "-m", "learner"]
    learner = [*torchrun, "--redis", redis_url, "--config", str(config)]
    learner += [f"--{kind}=ipc://{place}/{kind[0]}" for kind in ("announce", "fetch")]
    with (
        started(log, "rollout", "--redis", redis_url, "--run", "two", "--id", "w") as worker,
        started(log, *learner) as leader,
    ):
        yield run, leader, worker


def await_step(step: int, place: Path, leader: subprocess.Popen) -> None:
    while len(steps_in(place / "two")) < step:
        assert leader.poll() is None, (place / "log").read_text()[-3000:]
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize(("backend", "killed"), [("fsdp", "1"), ("megatron", "0")])
def test_a_learner_on_two_ranks_goes_on_after_kill_9_of_one(
    make_run: Callable[..., Run], redis_url: str, tmp_path: Path, backend: str, killed: str
):
    directory, log = tmp_path / "two", tmp_path / "log"
    with on_two_ranks(make_run, redis_url, tmp_path, backend) as (run, leader, worker):
        await_step(3, tmp_path, leader)
        ranks = {rank_of(pid): pid for pid in children(leader.pid)}
        os.kill(ranks[killed], signal.SIGKILL)
        assert leader.wait() == 0, log.read_text()[-3000:]
        assert worker.wait() == 0, "it ends with its run"
    told = log.read_text()
    assert f"rank {1 - int(killed)}: another rank is gone" in told and "Traceback" not in told
    assert steps_in(directory) == list(range(1, STEPS + 1))
    found = checkpoint.steps(directory / "checkpoints")
    assert found[-1].name == f"step-{STEPS:06d}"
    assert checkpoint.read_state(found[-1]).updates == STEPS * run.learner.minibatches
    load_decoder(directory / "hf")
    table = pq.read_table(directory / "trajectories", columns=["step", "number", "spans"])
    rows = table.to_pylist()
    assert Counter(row["step"] for row in rows) == dict.fromkeys(range(STEPS), 8)
    # Each ticket counts once, over both lives; later ones were drawn with what the ranks had published.
    assert set(Counter(row["number"] for row in rows).values()) == {2}
    assert max(span["version"] for row in rows for span in row["spans"]) >= 4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_forged_records_end_neither_of_two_ranks(
    make_run: Callable[..., Run], redis_url: str, tmp_path: Path
):
    with (
        on_two_ranks(make_run, redis_url, tmp_path, "fsdp") as (run, leader, worker),
        redis.Redis.from_url(redis_url) as client,
    ):
        hand = ForeignHand(client, run, random.Random(2))
        for step in range(1, STEPS):
            await_step(step, tmp_path, leader)
            hand.act()
        assert (leader.wait(), worker.wait()) == (0, 0), (tmp_path / "log").read_text()[-3000:]
    assert hand.done["group"] > 0 and hand.done["requeue"] > 0, hand.done
    assert "another rank is gone" not in (tmp_path / "log").read_text()
    records = [r for r in read_metrics(tmp_path / "two" / "metrics.jsonl") if r["kind"] == "step"]
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert records[-1]["buffer/quarantined"] > 0
    taken = [
        g.ticket.number for _, groups in iter_log(tmp_path / "two/trajectories") for g in groups
    ]
    assert len(taken) == len({*taken}) == STEPS * run.learner.groups


def areal_q(place: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "areal_q", "run", *args]
    return subprocess.run(command, cwd=place, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_run_has_as_many_processes_as_its_settings_say(
    make_run: Callable[..., Run], tmp_path: Path
):
    run = make_run("name=here", "eval.every=1000", "eval.problems=4", "checkpoint.sharded=true")
    (tmp_path / "here.toml").write_text(dump_toml(run))
    began = areal_q(tmp_path, "here.toml", "learner.processes=2", "steps=2")
    assert began.returncode == 0, began.stderr
    directory = tmp_path / "runs" / "here"
    newest = checkpoint.steps(directory / "checkpoints")[-1]
    assert (newest / "tensors-00001.safetensors").exists(), "each process wrote its share"
    alone = areal_q(tmp_path, "runs/here", "--resume", "learner.processes=1", "steps=4")
    assert alone.returncode == 0, alone.stderr
    assert steps_in(directory) == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_several_processes_cannot_do_is_said_in_one_line(
    make_run: Callable[..., Run], tmp_path: Path
):
    (tmp_path / "odd.toml").write_text(dump_toml(make_run("name=odd")))
    refused = areal_q(tmp_path, "odd.toml", "learner.processes=3", "learner.backend.context=2")
    assert refused.returncode == 2
    assert "learner.backend.context = 2 does not divide 3 processes" in refused.stderr
    assert "Traceback" not in refused.stdout + refused.stderr
