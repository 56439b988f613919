"""A run whose turns are those of the example of docs/environments.md."""

import shutil
from pathlib import Path

import pytest
from helpers.paths import ROOT

import areal_q
from buffer.logs.trajectory_log import iter_log

PAGE = (ROOT / "docs" / "environments.md").read_text("utf-8")
EXAMPLES = ROOT / "docs" / "examples"


@pytest.mark.parametrize(("file", "kind"), [("sums.py", "python"), ("sums.toml", "toml")])
def test_the_page_shows_the_environments_files(file: str, kind: str):
    text = (EXAMPLES / file).read_text("utf-8")
    assert f"```{kind}\n# {file}\n{text}```" in PAGE
    assert len(text.splitlines()) <= 30


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_small_model_learns_turns_of_a_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With fewer and smaller steps; its replay needs no environment."""
    monkeypatch.chdir(tmp_path)
    for file in ("sums.py", "sums.toml"):
        shutil.copy(EXAMPLES / file, tmp_path)
    small = {"learner.groups": 16, "eval.problems": 32, "eval.every": 8, "checkpoint.every": 8}
    run = areal_q.train(config="sums.toml", steps=16, settings=small, progress=False)
    rewards = [reward for _, reward in run.metric("reward/mean")]
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 0.4
    assert run.accuracy is not None and run.accuracy > 0.9
    groups = [
        group for _, step in iter_log(run.directory / "trajectories", 0, 16) for group in step
    ]
    masks = [t.loss_mask.numpy() for group in groups for t in group.trajectories]
    # A call's result is in the log, and not learnt.
    assert sum(0 in mask for mask in masks) > len(masks) / 2
    (tmp_path / "sums.py").unlink()
    assert areal_q.replay(run)
