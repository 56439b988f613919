"""What is said of a run's disk, beside what checkpoints of such a policy take."""

from pathlib import Path

import pytest
import torch
from helpers.fixture_types import MakeRun, MakeSamples
from helpers.policies import build_policy
from safetensors.torch import save_file

from areal_q.checks import disk_use as checks
from areal_q.checks.disk_use import disk_use
from areal_q.config import load
from learner import checkpoint
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
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    assert disk_use(load(None, pretrained)).checkpoints == 0


def test_a_run_that_will_fill_the_disk_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = load(None, [f"root={tmp_path}/not/there/yet"])
    assert disk_use(run).fits and disk_use(run).where == tmp_path
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: type("", (), {"free": 10**6}))
    assert not disk_use(run).fits
    assert "1 MB are free" in str(disk_use(run))
