"""A shutdown of the whole machine: Redis, learner and worker are told to go at the same moment."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import wait_until

from areal_q.observability.metrics_log import read_metrics
from buffer.redis_store.local_server import RedisServer
from learner import checkpoint

SETTINGS = """
name = "down"
steps = 1000000
model = {type = "small", layers = 1, width = 16, heads = 2, kv_heads = 1, mlp = 16, max_positions = 32}
learner = {groups = 4, group_size = 2, max_lag = 1}
rollout = {engine = {type = "scripted", tokens_per_s = 300}, sampling = {max_tokens = 4}}
task = {type = "arithmetic", digits = 1, heldout = 4}
checkpoint = {every = 1000}
eval = {every = 2, problems = 4}
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_told_to_go_at_once_end_well(tmp_path: Path, short_dir: Path):
    """Once the learner waited a minute for a Redis that had gone, and ended with a traceback and code 1."""
    (tmp_path / "down.toml").write_text(SETTINGS)
    metrics, log = tmp_path / "down" / "metrics.jsonl", tmp_path / "said"

    def steps() -> int:
        records = read_metrics(metrics) if metrics.exists() else []
        return max((r["step"] for r in records if r["kind"] == "step"), default=0)

    with RedisServer.start(short_dir / "redis", short_dir / "s") as server, log.open("wb") as said:
        env = os.environ | {"REDIS_URL": server.url, "OMP_NUM_THREADS": "1"}
        ends = [f"--{kind}=ipc://{short_dir}/{kind}" for kind in ("announce", "fetch")]
        config = ["--config", str(tmp_path / "down.toml"), f"root={tmp_path}"]
        commands = [["learner", *config, *ends], ["rollout", "--run", "down", "--id", "w"]]
        children = [
            subprocess.Popen([sys.executable, "-m", *command], env=env, stdout=said, stderr=said)
            for command in commands
        ]
        try:
            wait_until(lambda: steps() >= 4, log.read_text, *children)
            server.process.send_signal(signal.SIGTERM)
            for child in children:
                child.send_signal(signal.SIGTERM)
            codes = [child.wait() for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
    told = log.read_text()
    assert codes == [143, 143], told
    assert "Traceback" not in told
    found = checkpoint.steps(tmp_path / "down" / "checkpoints")
    assert checkpoint.read_state(found[-1]).step >= steps() >= 4
    assert read_metrics(metrics)[-1]["reason"] == "drained"
