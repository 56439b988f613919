"""What is said of a run's disk, beside what checkpoints of such a policy take."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers.fixture_types import MakeRun, MakeSamples
from helpers.policies import build_policy
from safetensors.torch import save_file

from areal_q.checks import disk_use as checks
from areal_q.checks.disk_use import check_room, disk_use, still_to_write
from areal_q.config import load
from areal_q.errors import ConfigError
from areal_q.system.stop_request import StopRequest
from learner import checkpoint
from learner.__main__ import _learn
from learner.policy_update import update_policy

WIDE = ("model.width=256", "model.mlp=512", "model.layers=4", "model.max_positions=32")


def bytes_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def state(step: int, model: dict) -> checkpoint.State:
    return checkpoint.State(
        step=step, position="0-0", cursor=1, outstanding=[], digests={}, updates=0, skipped=0, model=model
    )  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("learner.optimizer.type=adamw8bit",),
        ("learner.reference_kl={}",),
        ("learner.advantage.type=gae", "learner.critic={}"),
        ("learner.lora={rank=8}", "rollout.format=nvfp4"),
    ],
)
def test_checkpoints_take_what_is_said(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path, settings: tuple[str, ...]
):
    run = make_run(*WIDE, "steps=40", "checkpoint.every=10", "checkpoint.keep=1", *settings)
    policy = build_policy(run)
    checkpoint.save(tmp_path, state(0, policy.model.config.to_hf()), policy, keep=9)
    update_policy(policy, make_samples(4))
    for step in (10, 20):  # the newest, and the next one before the oldest goes
        checkpoint.save(tmp_path, state(step, policy.model.config.to_hf()), policy, keep=9)
    use = disk_use(run)
    assert use.at_once == 3
    assert use.checkpoints == pytest.approx(bytes_of(tmp_path), rel=0.1)


def test_a_pretrained_model_is_counted_by_its_files(tmp_path: Path):
    save_file({"a": torch.zeros(300, 40), "b": torch.zeros(7)}, tmp_path / "model.safetensors")
    pretrained = ["model.type=pretrained", f"model.path={tmp_path}"]
    use = disk_use(load(None, [*pretrained, "steps=10", "checkpoint.start=false"]))
    assert use.checkpoints == 12 * 12007
    assert use.model == (tmp_path / "model.safetensors").stat().st_size
    # As Mistral's directories have it: a second time, in another layout, that nobody reads.
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "consolidated.safetensors")
    again = disk_use(load(None, [*pretrained, "steps=10", "checkpoint.start=false"]))
    assert (again.checkpoints, again.model) == (use.checkpoints, use.model)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    assert disk_use(load(None, pretrained)).checkpoints == 0


def test_a_run_that_will_fill_the_disk_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = load(None, [f"root={tmp_path}/not/there/yet"])
    assert disk_use(run).fits and disk_use(run).where == tmp_path
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: type("", (), {"free": 10**6}))
    assert not disk_use(run).fits
    assert "1 MB are free" in str(disk_use(run))


def checkpoint_of(directory: Path, step: int, nbytes: float) -> None:
    where = directory / "checkpoints" / f"step-{step:06}"
    where.mkdir(parents=True)
    with (where / "tensors.safetensors").open("wb") as file:
        file.truncate(int(nbytes))


@pytest.mark.parametrize(
    ("there", "lacking"),
    [([], 4 + 3 * 12), ([0, 10], 2 * 12), ([0, 10, 20], 12), ([0, 10, 20, 30], 12)],
)
def test_learner_without_room_for_checkpoints_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: list[int], lacking: int
):
    """With checkpoint.keep = 2 there are the start's, of 4 bytes a weight, two of 12, and the next."""
    run = load(None, ["steps=400", "checkpoint.every=10", "checkpoint.keep_every=40"])
    weights = disk_use(run).one / 12
    for step in there:
        checkpoint_of(tmp_path, step, weights * (12 if step else 4))
    free = {"free": int(weights * lacking)}
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: type("", (), free))
    check_room(run, tmp_path)
    free["free"] -= 1
    with pytest.raises(ConfigError, match=r"4 checkpoints of the model need .* are free"):
        _learn(run, tmp_path, "redis://nowhere", "", "", False, StopRequest(), "", 0.0)


def test_what_is_still_to_be_written_becomes_less_with_each_step(tmp_path: Path):
    run = load(None, ["steps=40", "checkpoint.every=10"])
    one, model = disk_use(run).one, disk_use(run).model
    assert still_to_write(run, tmp_path) == disk_use(run).checkpoints + model
    checkpoint_of(tmp_path, 10, one)
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "part-0.parquet").write_bytes(b"x" * 1000)
    ahead = disk_use(run).checkpoints - one + model + 3000  # logs of 30 more steps
    assert still_to_write(run, tmp_path) == pytest.approx(ahead)
    for step in (20, 30):
        checkpoint_of(tmp_path, step, one)
    assert still_to_write(run, tmp_path) == pytest.approx(one + model + 1000 / 3)
    checkpoint_of(tmp_path, 40, one)
    (tmp_path / "hf").mkdir()
    assert still_to_write(run, tmp_path) == 0
