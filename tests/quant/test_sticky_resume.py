"""With sticky scales a resumed run publishes what the uninterrupted one does, to the bit."""

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from helpers.fixture_types import MakeRun, MakeSamples
from helpers.policies import initial_model, save_at
from msgspec.structs import replace

from areal_q.config import Lora, Run, dump_toml
from areal_q.observability.metrics_log import MetricsLog
from areal_q.tasks import build_task, build_tokenizer
from learner.backends.messages import SentSample
from learner.backends.single_device import TorchPolicy
from learner.build_policy import build_policy
from learner.policy_update import update_policy
from learner.publishing.version_builder import VersionBuilder, new_ranges

STEPS, EVERY = 9, 3
SETTINGS = ["rollout.sticky_scales=0.01", "learner.optimizer.lr=0.01"]

LIFE = f"""
import os, signal, sys
from pathlib import Path
import msgspec
from areal_q.config import load
from areal_q.tasks import build_tokenizer
from learner import checkpoint
from learner.build_policy import build_model
from learner.checkpoint.async_writer import CheckpointWriter
from learner.publishing.version_builder import VersionBuilder, new_ranges
from learner.backends.messages import SentSample
from learner.policy_update import SingleProcessUpdater, update_policy
from learner.backends.single_device import TorchPolicy

directory, killed_at = Path(sys.argv[1]), int(sys.argv[2])
run = load(directory / "config.toml")
model = build_model(run.model, build_tokenizer(run.model, run.task), run.seed)
policy = TorchPolicy(model, run.learner, 1.0)
policy.sticky = new_ranges(run)
checkpoints, step = directory / "checkpoints", 0
if checkpoint.steps(checkpoints):
    step = checkpoint.restore(checkpoints, policy).step
builder = VersionBuilder(run, policy.sticky)
writer = CheckpointWriter(checkpoints, run.checkpoint)
policy.readers.append(writer.wait_until_read)
steps = msgspec.msgpack.decode((directory / "samples").read_bytes(), type=list[list[SentSample]])
while True:
    print(step, builder.build(policy.model, step).manifest.digest, flush=True)
    if step == killed_at:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == {STEPS}:
        break
    writer.finish()
    if step and step % {EVERY} == 0:
        state = checkpoint.State(step=step, position="0-1", cursor=1, outstanding=[], digests={{}},
                                 updates=policy.updates, skipped=0)
        writer.save(state, SingleProcessUpdater(policy))
    update_policy(policy, [piece.sample() for piece in steps[step]])
    step += 1
writer.close()
"""


def life(directory: Path, killed_at: int = -1) -> list[tuple[int, str]]:
    """(version, digest) of what a learner publishes, from its newest checkpoint on; with SIGKILL after version
    `killed_at`."""
    process = subprocess.run(
        [sys.executable, "-c", LIFE, str(directory), str(killed_at)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.returncode == (0 if killed_at < 0 else -signal.SIGKILL)
    lines = [line.split() for line in process.stdout.splitlines()]
    return [(int(version), digest) for version, digest in lines]


@pytest.mark.timeout(60)
def test_killed_learner_goes_on_to_publish_the_same_versions(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path
):
    run = make_run(*SETTINGS, "rollout.format=nvfp4")
    pieces = [[SentSample.of(s) for s in make_samples(6, seed, vocab=13)] for seed in range(STEPS)]
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(dump_toml(run))
        (tmp_path / name / "samples").write_bytes(msgspec.msgpack.encode(pieces))
    whole = life(tmp_path / "whole")
    assert [version for version, _ in whole] == list(range(STEPS + 1))
    assert len({digest for _, digest in whole}) == STEPS + 1
    first, second = life(tmp_path / "broken", killed_at=5), life(tmp_path / "broken")
    assert second[0][0] == EVERY and second[-1][0] == STEPS
    assert set(first) | set(second) == set(whole)


def build(run: Run) -> TorchPolicy:
    policy = TorchPolicy(initial_model(run), run.learner, 1.0)
    policy.sticky = new_ranges(run)
    return policy


@pytest.mark.parametrize("held", [True, False])
def test_checkpoint_without_ranges_restores_with_a_warning(
    make_run: MakeRun,
    make_samples: MakeSamples,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    held: bool,
):
    run = make_run(*SETTINGS)
    policy = build(run)
    builder, digests = VersionBuilder(run, policy.sticky), []
    for seed in range(3):
        update_policy(policy, make_samples(6, seed, vocab=13))
        digests.append(builder.build(policy.model, seed + 1).manifest.digest)
    if not held:
        policy.sticky = None
    save_at(3, tmp_path / "checkpoints", policy)
    task, tokenizer = build_task(run.task), build_tokenizer(run.model, run.task)
    with (
        caplog.at_level(logging.WARNING, "learner.build_policy"),
        MetricsLog(tmp_path, tensorboard=False) as metrics,
    ):
        resumed, _ = build_policy(run, tmp_path, True, task, tokenizer, metrics, threading.Event())
    assert ("holds no ranges of sticky scales" in caplog.text) is not held
    again = VersionBuilder(run, resumed.sticky).build(resumed.model, 3).manifest.digest
    assert (again == digests[-1]) is held


def test_where_no_scale_changes_there_are_no_ranges_to_keep(make_run: MakeRun):
    """Such settings are refused today; runs of before that may hold them."""
    run = make_run(*SETTINGS)
    assert new_ranges(run) is not None
    in_bf16 = replace(run, rollout=replace(run.rollout, format="bf16"))
    adapters = replace(run, learner=replace(run.learner, lora=Lora(rank=4)))
    assert new_ranges(in_bf16) is None and new_ranges(adapters) is None
