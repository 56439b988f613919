"""A run of an earlier version, whose launcher was killed at step 6, is read, replayed and gone on with.

tests/data/old-run was made by commit 5cc3ba6: a checkpoint every four steps, the log, and Redis's file with the
groups of the steps after the newest checkpoint. Its steps have the bits of one kind of processor, so that here
they are compared within tolerances.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from helpers.paths import ROOT

from buffer.logs.parquet_log import steps_of
from buffer.logs.step_log import iter_steps
from learner import checkpoint
from learner.replay.replay_steps import Replay

OLD_RUN = ROOT / "tests" / "data" / "old-run"
CHECKPOINT = 4


@pytest.fixture
def old_run(short_dir: Path) -> Path:
    """A copy that a test may spoil."""
    return shutil.copytree(OLD_RUN, short_dir / "old-run")


def areal_q(cwd: Path, *args: str, codes: tuple[int, ...] = (0,)) -> str:
    """Returns what the command says, which must end with one of the exit codes."""
    environment = {k: v for k, v in os.environ.items() if k != "REDIS_URL"} | {"NO_COLOR": "1"}
    argv = [sys.executable, "-P", "-m", "areal_q", *args]
    result = subprocess.run(
        argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100
    )
    assert result.returncode in codes, result.stdout + result.stderr
    return result.stdout


def test_a_run_of_an_earlier_version_is_replayed(old_run: Path):
    replay = Replay(old_run)

    steps = list(replay.steps())

    assert [step.record.step for step in steps] == list(range(CHECKPOINT))
    for step in steps:
        recorded = step.record.metrics
        for name in ("train/loss", "reward/mean", "policy/entropy"):
            assert step.metrics[name] == pytest.approx(recorded[name], rel=0.02, abs=0.01), name


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_run_of_an_earlier_version_resumes(old_run: Path):
    said = areal_q(old_run.parent, "run", str(old_run), "--resume", "steps=10")

    assert "done after 10 steps" in said
    assert [r.step for r in iter_steps(old_run / "steps")] == list(range(10))
    assert checkpoint.steps(old_run / "checkpoints")[-1].name == "step-000010"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_commands_read_a_run_of_an_earlier_version(old_run: Path):
    cwd, name = old_run.parent, old_run.name

    assert "old-run" in areal_q(cwd, "report", name)
    assert "float32" in areal_q(cwd, "export", name, "model", "--step", "4")
    assert "groups" in areal_q(cwd, "buffer", "status", name)
    # Exit code 1 where another processor comes to other bits.
    assert "step" in areal_q(cwd, "replay", name, codes=(0, 1))
    assert "made again by replay" in areal_q(cwd, "doctor", name)


def test_fetched_steps_replay_elsewhere(old_run: Path, tmp_path: Path):
    """Of two checkpoints the one that the steps need, and no part of the log that begins after them."""
    argv = [
        sys.executable,
        "-P",
        "-m",
        "areal_q",
        "fetch",
        str(old_run),
        "--from",
        "2",
        "--to",
        "4",
    ]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as child:
        assert child.stdout
        with tarfile.open(fileobj=child.stdout, mode="r|") as tar:
            tar.extractall(tmp_path, filter="data")
    assert child.returncode == 0
    there = tmp_path / "old-run"
    assert [path.name for path in (there / "checkpoints").iterdir()] == ["step-000000"]
    replayed = [step.record.step for step in Replay(there, None, 2, 4).steps()]
    assert replayed[-1] == 3
    said = areal_q(tmp_path, "fetch", "old-run", "--from", "900", codes=(2,))
    assert said == ""


def test_a_part_says_which_steps_it_holds(old_run: Path):
    [part] = (old_run / "steps").glob("part-*.parquet")
    steps = [record.step for record in iter_steps(old_run / "steps")]
    assert steps_of(part) == (steps[0], steps[-1])
