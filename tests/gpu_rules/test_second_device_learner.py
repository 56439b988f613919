"""The learner on the second device (second_device.py): a CPU's steps, versions and checkpoints, and no wait for
each layer."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from helpers.fixture_types import MakeRun, MakeSamples
from helpers.policies import initial_model, save_at

from areal_q.config import LearnerConfig, Run, dump_toml, settings_hash
from areal_q.messages import Array, Group, Ticket, VersionSpan
from areal_q.models import (
    load_decoder,
)
from areal_q.models.hf.adapters import save_adapted
from areal_q.models.low_bit.engine_policy import engine_policy
from areal_q.observability.metrics_log import MetricsLog
from areal_q.quant import FORMATS
from areal_q.system.run_dir import keep_settings
from areal_q.tasks import build_task, build_tokenizer
from bench.weights.packed import packed
from buffer.logs.step_log import StepLog, StepRecord
from buffer.logs.trajectory_log import TrajectoryLog
from buffer.sampling.replay_pool import SampledGroups
from learner import checkpoint
from learner.backends.precision import set_precision
from learner.backends.single_device import TorchPolicy
from learner.build_policy import build_policy
from learner.data.staleness import VersionHistory
from learner.doctor.probe import Probe
from learner.measure.fidelity import FidelityMeter
from learner.measure.rescore import Scorer
from learner.measure.token_recorder import TokenRecorder
from learner.policy_update import SingleProcessUpdater, update_policy
from learner.publishing.version_builder import VersionBuilder
from learner.publishing.weight_publisher import WeightPublisher
from learner.replay.compare import compare
from learner.replay.replay_steps import Replay
from learner.supervised.demonstrations import sample_of
from learner.supervised.supervised_step import held_out_loss, share_right
from learner.train_step import train_step

if not shutil.which("c++"):
    pytest.skip("no C++ compiler for the second device's guard", allow_module_level=True)
from helpers.second_device import Far, SecondDevice

BF16 = "learner.dtype=bfloat16"
STEPS: dict[str, tuple[str, ...]] = {
    "full": (),
    "full, bfloat16, recomputed": (BF16, "learner.recompute=true"),
    "qarl int8": ("learner.precision=qarl", "rollout.format=int8"),
    "qarl int8, bfloat16": ("learner.precision=qarl", "rollout.format=int8", BF16),
    "qarl fp8": ("learner.precision=qarl", "rollout.format=fp8", "learner.recompute=true"),
    "qarl fp8, bfloat16": ("learner.precision=qarl", "rollout.format=fp8", BF16),
    "qarl int4": ("learner.precision=qarl", "rollout.format=int4", "rollout.unquantized=bf16"),
    "jet fp8": ("learner.precision=jet", "rollout.format=fp8"),
    "jet fp8, bfloat16": ("learner.precision=jet", "rollout.format=fp8", BF16),
    "critic": ("learner.advantage.type=gae", "learner.critic={}", "learner.reference_kl={}"),
    "penalty in the reward": ('learner.reference_kl={place="reward"}', "learner.epochs=2"),
    "LoRA on nf4": ("learner.lora={rank=4}", "rollout.format=nf4", "learner.reference_kl={}"),
    "LoRA on int4": ("learner.lora={rank=4}", "rollout.format=int4", BF16),
    "AdamW in 8 bits": ("learner.optimizer.type=adamw8bit", "learner.optimizer.small=1"),
    "Muon": ("learner.optimizer.type=muon",),
    "experts": ("model.experts=4", "learner.routing_replay=true", "learner.router_aux_coef=0.01"),
    "entropy": ("learner.entropy_coef=0.01", "learner.minibatches=2"),
}


def policies(run: Run) -> tuple[TorchPolicy, TorchPolicy]:
    """On the second device, and on the CPU: the same weights."""
    found = []
    for device in ("cuda", "cpu"):
        cfg = msgspec.structs.replace(run.learner, device=device)
        placed = msgspec.structs.replace(run, learner=cfg)
        model = initial_model(run).to(device)
        set_precision(model, placed)
        found.append(TorchPolicy(model, cfg, 1.0))
        found[-1].calibrate = run.rollout.kv_scales
    return found[0], found[1]


def close(far: TorchPolicy, near: TorchPolicy, atol: float) -> None:
    state = far.model.state_dict()
    for name, tensor in near.model.state_dict().items():
        torch.testing.assert_close(state[name].cpu(), tensor, atol=atol, rtol=1e-3, msg=name)


@pytest.mark.parametrize("kind", STEPS)
def test_a_learner_step_is_the_same(
    kind: str, make_run: MakeRun, make_samples: MakeSamples, cuda: SecondDevice
) -> None:
    # A large eps makes the optimizer's step smooth in the gradient.
    run = make_run("learner.optimizer.lr=0.01", "learner.optimizer.eps=1e-2", *STEPS[kind])
    far, near = policies(run)
    tap, samples = TokenRecorder(), make_samples(9)
    values = [update_policy(far, samples, tap), update_policy(near, samples)]
    for policy in (far, near):
        policy.calibrate_kv_scales(samples)
    if BF16 in STEPS[kind]:  # rounded elsewhere: CUDA's autocast has other lists of operations
        # A neighbouring bfloat16 may fall on the next E4M3 code, an eighth away; which one does, differs
        # between processors. On a CPU the head's backward pass rounds its factors as well.
        rel = 0.125 if "fp8" in kind else 0.05
        for name in ("train/loss", "train/grad_norm", "policy/entropy"):
            assert values[0][name] == pytest.approx(values[1][name], rel=rel, abs=0.01), name
        close(far, near, 5e-3)
    else:
        assert values[0] == pytest.approx(values[1], rel=1e-3, abs=1e-4)
        close(far, near, 1e-5)
    assert len(tap.scores().logprobs) == sum(s.trajectory.num_tokens for s in samples)


@pytest.mark.parametrize(
    "kind", ["full", "full, bfloat16, recomputed", "AdamW in 8 bits", "critic"]
)
def test_a_learner_step_waits_as_often_with_more_layers(
    kind: str, make_run: MakeRun, make_samples: MakeSamples, cuda: SecondDevice
) -> None:
    waits = []
    for layers in (1, 3):
        far, _ = policies(make_run(*STEPS[kind], f"model.layers={layers}"))
        update_policy(far, make_samples(9))
        cuda.waits.clear()
        update_policy(far, make_samples(9))
        waits.append(cuda.waits.copy())
    assert waits[0] == waits[1]


@pytest.mark.parametrize("percentile", [100, 90])
def test_kv_scales_are_the_same(
    percentile: int, make_run: MakeRun, make_samples: MakeSamples, cuda: SecondDevice
) -> None:
    run = make_run(
        "rollout.engine.kv_cache=fp8", f"rollout.kv_scales={{percentile={percentile}, tokens=20}}"
    )
    far, near = policies(run)
    samples = make_samples(9)
    for policy in (far, near):
        update_policy(policy, samples)
        policy.calibrate_kv_scales(samples)
    assert len(far.kv_scales) == 6
    for name, scale in near.kv_scales.items():
        assert isinstance(far.kv_scales[name], Far)
        torch.testing.assert_close(far.kv_scales[name].cpu(), scale)


def test_supervised_measures_are_the_same(make_run: MakeRun, cuda: SecondDevice) -> None:
    rows = [([1, 2, 3, 4, 5], [False] * 3 + [True] * 2), ([6, 7, 8, 9], [False] + [True] * 3)]
    samples = [sample_of(number, *row) for number, row in enumerate(rows)]
    far, near = policies(make_run())
    assert share_right(far, samples) == share_right(near, samples)
    assert held_out_loss(far, samples) == pytest.approx(held_out_loss(near, samples), abs=1e-5)


@pytest.mark.parametrize("format", ["int8", "nf4", "fp8"])
def test_the_fidelity_meters_policy_is_the_same(
    format: str, make_run: MakeRun, make_samples: MakeSamples, cuda: SecondDevice
) -> None:
    model = policies(make_run())[1].model
    version = packed(model.state_dict(), format, model.config.to_hf())
    found = []
    for device in ("cuda", "cpu"):
        policy = engine_policy(model.config, version.tensors, format, device)
        cfg = LearnerConfig(device=device, microbatch_tokens=40)
        found.append(Scorer(cfg)(policy, make_samples(9), 1.0))
    for far, near in zip(*found, strict=True):
        np.testing.assert_allclose(far, near, atol=1e-5)


PUBLISHED: dict[str, tuple[str, ...]] = {
    **{name: (f"rollout.format={name}",) for name in FORMATS},
    "sticky, noisy": (
        "rollout.format=int8",
        "rollout.sticky_scales=0.1",
        "rollout.aqn={}",
        "learner.uaq=2",
    ),
    "in bf16": ("rollout.format=fp8", "rollout.unquantized=bf16", "learner.precision=qarl"),
    "LoRA": ("learner.lora={rank=4}", "rollout.format=nf4"),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_what_is_published_has_the_same_bytes(
    kind: str, make_run: MakeRun, cuda: SecondDevice
) -> None:
    run = make_run(*PUBLISHED[kind])
    digests = []
    for policy in policies(run):
        publisher, made = (
            WeightPublisher(VersionBuilder(run), lambda made: None),
            [],
        )
        for version in range(3):
            publisher.begin(policy.model, version, {})
            publisher.wait_until_read()
            version = publisher.wait_until_out()
            assert version is not None
            made.append(version.manifest.digest)
        publisher.close()
        digests.append(made)
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    "kind", ["full", "critic", "LoRA on nf4", "qarl int8", "AdamW in 8 bits", "Muon"]
)
def test_a_checkpoint_goes_from_either_device_to_the_other(
    kind: str, make_run: MakeRun, make_samples: MakeSamples, cuda: SecondDevice, tmp_path: Path
) -> None:
    run = make_run("learner.optimizer.lr=0.01", "learner.optimizer.eps=1e-2", *STEPS[kind])
    for number, (source, target) in enumerate([policies(run), policies(run)[::-1]]):
        update_policy(source, make_samples(9))
        save_at(1, tmp_path / str(number), source)
        checkpoint.restore(tmp_path / str(number), target)
        for policy in (source, target):
            update_policy(policy, make_samples(9, 1))
        close(*((source, target) if number == 0 else (target, source)), 1e-5)


@pytest.mark.parametrize("more", [(), ("learner.lora={rank=4}", "rollout.format=nf4")])
def test_a_trainer_is_built_resumed_and_exported_there(
    more: tuple[str, ...], make_run: MakeRun, make_samples: MakeSamples, cuda: SecondDevice,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = ("learner.device=cuda", "warmstart.steps=2", "learner.uaq=2", "learner.reference_kl={}")
    run = make_run(*place, *more)
    task, tokenizer = build_task(run.task), build_tokenizer(run.model, run.task)

    def build(resume: bool) -> TorchPolicy:
        with MetricsLog(tmp_path, tensorboard=False) as metrics:
            stop = threading.Event()
            return build_policy(run, tmp_path, resume, task, tokenizer, metrics, stop)[0]

    first, cached = build(False), build(False)  # the latter's warm start is read from its file
    update_policy(first, make_samples(9))
    save_at(1, tmp_path / "checkpoints", first)
    resumed = build(True)
    for name, tensor in first.model.state_dict().items():
        if name.endswith("weight") or "lora" in name:
            assert torch.equal(resumed.model.state_dict()[name].cpu(), tensor.cpu()), name
    assert isinstance(next(cached.model.parameters()), Far)
    if run.learner.lora:
        save_adapted(first.model, tmp_path, run.learner.lora, run.learner.uaq, tokenizer)
        assert load_decoder(tmp_path / "hf").config.layers == 2


def test_run_logged_on_a_cpu_is_replayed_on_the_device(
    make_run: MakeRun, make_group: Callable[..., Group], make_ticket: Callable[..., Ticket],
    cuda: SecondDevice, tmp_path: Path,
) -> None:  # fmt: skip
    run, directory = make_run("rollout.format=int8", "learner.fidelity.share=1"), tmp_path / "run"
    directory.mkdir()
    (directory / "config.toml").write_text(dump_toml(run))
    keep_settings(directory, run)
    policy, history, builder = (
        policies(run)[1],
        VersionHistory(4),
        VersionBuilder(run),
    )
    versions = [builder.build(policy.model, 0)]
    history.add(0, versions[0].manifest.digest)
    state = checkpoint.State(
        step=0, position="0-0", cursor=0, outstanding=[], digests=dict(history.digests), updates=0,
        skipped=0, model=policy.model.config.to_hf(),
    )  # fmt: skip
    checkpoint.save(directory / "checkpoints", state, policy, keep=1)
    log, steps = TrajectoryLog(directory / "trajectories"), StepLog(directory / "steps")
    groups: list[Group] = []
    for step in range(2):
        groups = [make_group(make_ticket(4 * step + i, step=step)) for i in range(4)]
        groups = [within(group, history.digests[step], step) for group in groups]
        metrics = train_step(SingleProcessUpdater(policy), SampledGroups(groups), history, step)
        base = history.digests[step]
        versions.append(builder.build(policy.model, step + 1))
        history.add(step + 1, versions[-1].manifest.digest)
        log.append(step, step, groups)
        steps.append(
            StepRecord(
                step=step, tickets=[g.ticket.number for g in groups], seeds=[0] * 4, base_digest=base,
                digest=history.digests[step + 1], fork=0, settings=settings_hash(run), machine="a CPU",
                metrics=metrics,
            )
        )  # fmt: skip
    log.close()
    steps.close()
    replay = Replay(directory, ["learner.device=cuda"])
    probe = Probe(replay.run, 0)
    replayed = list(replay.steps(probe))
    assert not replay.exact and not [d for one in replayed for d in compare(one, replay.exact)]
    assert isinstance(next(replay.policy.model.parameters()), Far)
    assert np.isfinite(probe.table().terms).all()
    gaps = []
    for chosen in (replay.run, run):
        meter = FidelityMeter(chosen.learner, chosen.rollout.format)
        meter.remember(versions[1])
        gaps.append(meter.measure(groups))
    assert gaps[0] == pytest.approx(gaps[1], abs=1e-4)


def within(group: Group, digest: str, version: int) -> Group:
    """`group` with tokens of the small vocabulary, all drawn by one version."""
    trajectories = [
        msgspec.structs.replace(
            t,
            response_ids=Array.of(t.response_ids.numpy() % 23, "int32"),
            spans=[VersionSpan(version, t.num_tokens, digest)],
        )
        for t in group.trajectories
    ]
    return msgspec.structs.replace(group, trajectories=trajectories)
