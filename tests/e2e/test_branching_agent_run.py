"""A run whose agent does not only continue its episodes: it learns from their branches, and is replayed."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers.paths import ROOT

import areal_q
from areal_q.system.ports import free_ports
from buffer.logs.trajectory_log import iter_log

AGENT = ROOT / "docs" / "examples" / "drafts.py"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_run_steps_on_branches_and_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An episode has a branch off its own draft. A replay needs no agent."""
    monkeypatch.chdir(tmp_path)
    (port,) = free_ports(1)
    ended = threading.Event()

    def play() -> None:
        while not ended.wait(0.2):  # it ends when there is no server yet, or no more
            command = [sys.executable, str(AGENT), f"http://127.0.0.1:{port}/v1", "1000"]
            subprocess.run(command, check=False, stderr=subprocess.DEVNULL)

    agent = threading.Thread(target=play)
    agent.start()
    small = {
        **{"rollout.environment": {"type": "external"}, "rollout.serve": port},
        **{"learner.groups": 4, "learner.group_size": 4, "rollout.sampling.max_tokens": 10},
        **{"warmstart.steps": 0, "eval.problems": 8, "eval.every": 4, "checkpoint.every": 4},
    }
    try:
        quickstart = ROOT / "configs" / "quickstart.toml"
        run = areal_q.train(config=quickstart, steps=4, settings=small, progress=False)
    finally:
        ended.set()
        agent.join()
    steps = dict(iter_log(run.directory / "trajectories"))
    assert [*steps] == [0, 1, 2, 3]
    played = [t for step in steps.values() for group in step for t in group.trajectories]
    branches = [branch for t in played for branch in t.branches]
    assert len(branches) > len(played) / 2, "a draft of one digit is continued"
    assert all(b.parent == 0 and b.loss_mask.numpy()[-1] for b in branches)
    assert areal_q.replay(run)
