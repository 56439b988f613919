"""A run of an earlier version, whose launcher was killed at step 6, is read, replayed and gone on with.

tests/data/old-run was made by commit 5cc3ba6: a checkpoint every four steps, the log, and Redis's file with the
groups of the steps after the newest checkpoint. Its steps have the bits of one kind of processor.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

from areal_q.observability.metrics_log import read_metrics
from buffer.logs.step_log import iter_steps
from learner import checkpoint
from learner.replay.replay_steps import Replay

OLD_RUN = ROOT / "tests" / "data" / "old-run"
CHECKPOINT = 4
PROCESSOR = "AMD EPYC"
"""Made the run"""


@pytest.fixture
def old_run(short_dir: Path) -> Path:
    """A copy that a test may spoil."""
    return shutil.copytree(OLD_RUN, short_dir / "old-run")


def areal_q(cwd: Path, *args: str) -> str:
    """What the command says, which must end with exit code 0."""
    environment = {k: v for k, v in os.environ.items() if k != "REDIS_URL"} | {"NO_COLOR": "1"}
    argv = [sys.executable, "-P", "-m", "areal_q", *args]
    result = subprocess.run(
        argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def made_here(replay: Replay) -> bool:
    """Whether this processor must come to the same bits: kernels are chosen by more than the machine's
    record tells."""
    models = Path("/proc/cpuinfo").read_text().split("\n") if Path("/proc/cpuinfo").exists() else []
    return replay.exact and any(line.endswith(f": {PROCESSOR}") for line in models)


def test_a_run_of_an_earlier_version_is_replayed(old_run: Path):
    replay = Replay(old_run)

    steps = list(replay.steps())

    assert [step.record.step for step in steps] == list(range(CHECKPOINT))
    exact = made_here(replay)
    for step in steps:
        recorded = step.record.metrics
        for name in recorded if exact else ("train/loss", "reward/mean", "policy/entropy"):
            slack = {"rel": 0.0, "abs": 0.0} if exact else {"rel": 0.02, "abs": 0.01}
            assert step.metrics[name] == pytest.approx(recorded[name], nan_ok=True, **slack), name
        assert step.digest == step.record.digest or not exact


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_run_of_an_earlier_version_resumes(old_run: Path):
    exact = made_here(Replay(old_run))
    before = [r for r in read_metrics(old_run / "metrics.jsonl") if r["kind"] == "step"]
    replayed = {r["step"]: r for r in before if r["step"] > CHECKPOINT}

    said = areal_q(old_run.parent, "run", str(old_run), "--resume", "steps=10")

    assert "done after 10 steps" in said
    assert [r.step for r in iter_steps(old_run / "steps")] == list(range(10))
    assert checkpoint.steps(old_run / "checkpoints")[-1].name == "step-000010"
    if not exact:
        return
    after = {r["step"]: r for r in read_metrics(old_run / "metrics.jsonl") if r["kind"] == "step"}
    for step, record in replayed.items():
        for name in ("train/loss", "train/grad_norm", "reward/mean", "mismatch/kl"):
            assert after[step][name] == record[name], (step, name)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_commands_read_a_run_of_an_earlier_version(old_run: Path):
    cwd, name = old_run.parent, old_run.name

    assert "old-run" in areal_q(cwd, "report", name)
    assert "float32" in areal_q(cwd, "export", name, "model", "--step", "4")
    assert "groups" in areal_q(cwd, "buffer", "status", name)
    assert "every metric" in areal_q(cwd, "replay", name)
    assert "made again by replay" in areal_q(cwd, "doctor", name)
