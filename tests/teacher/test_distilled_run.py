"""A whole run with a teacher, and its replay where there is no teacher any more."""

import shutil
from pathlib import Path

import pytest
from helpers.commands import areal_q, run_here
from helpers.fixture_types import MakeRun
from helpers.policies import initial_model

from areal_q.models import save_decoder
from areal_q.observability.metrics_log import read_metrics
from areal_q.tasks import CharTokenizer
from buffer.logs.trajectory_log import iter_log
from learner.replay.cli import main as replay

SETTINGS = [
    *("name=taught", "steps=4", "model.width=32", "model.layers=1", "model.mlp=48"),
    *("task.digits=1", "task.heldout=20", "eval.problems=4", "rollout.sampling.max_tokens=4"),
    *("learner.groups=8", "learner.group_size=4", "learner.optimizer.lr=1e-3"),
    *("learner.dtype=float32", "warmstart.steps=0"),
]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_replay_needs_no_teacher_and_has_its_bits(make_run: MakeRun, tmp_path: Path):
    teacher = tmp_path / "teacher"
    save_decoder(initial_model(make_run("model.width=64", "seed=5")), teacher, CharTokenizer())
    settings = [*SETTINGS, f"root={tmp_path}"]
    settings.append(f"learner.teacher={{type='model', path='{teacher}', coef=0.5}}")
    areal_q(tmp_path, "run", "quickstart", *settings)
    directory = tmp_path / "taught"
    steps = [r for r in read_metrics(directory / "metrics.jsonl") if r["kind"] == "step"]
    assert all(r["teacher/kl"] > 0 and r["teacher/score_s"] >= 0 for r in steps)
    for _, groups in iter_log(directory / "trajectories"):
        assert all(t.teacher_logprobs for g in groups for t in g.trajectories)
    shutil.rmtree(teacher)
    again = run_here("replay", replay, str(directory))
    assert again.returncode == 0, again.stdout + again.stderr
    assert "bit for bit" in again.stdout, again.stdout
    other = run_here("replay", replay, str(directory), "--set", "learner.teacher.coef=2.0")
    assert other.returncode == 0, other.stderr
    refused = run_here("replay", replay, str(directory), "--set", "learner.teacher.path=x")
    assert refused.returncode == 2 and "learner.teacher.path" in refused.stderr
