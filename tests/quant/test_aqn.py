"""Adaptive quantization noise: the schedules' printed ends, noise in published norms alone."""

import math
from itertools import pairwise

import pytest
import torch
from helpers.fixture_types import MakeRun
from helpers.kinds import config_of
from helpers.policies import build_policy, initial_model

from areal_q.config import Aqn, dump_toml, override, parse
from areal_q.errors import ConfigError
from areal_q.messages import Noise
from areal_q.models import DecoderConfig
from areal_q.models.low_bit.published_state import published_state
from areal_q.quant.aqn import noise_of, sigma_of, with_noise
from areal_q.quant.rescaling import apply_uaq
from learner.policy_update import update_policy
from learner.publishing.version_builder import VersionBuilder

SCHEDULES = ("exponential", "exponential-attained", "linear", "cosine", "logarithmic")
AQN = ["rollout.aqn={}", "steps=20", "learner.uaq=1.0"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_noise_falls_from_start_to_end_of_its_schedule(schedule):
    cfg = Aqn(schedule=schedule)
    sigmas = [sigma_of(cfg, k) for k in range(10)]
    # As printed the last exponent is 8/9: 1e-2 · 20^(-8/9).
    last = 1e-2 * 0.05 ** (8 / 9) if schedule == "exponential" else 5e-4
    assert sigmas[0] == 0.0
    assert sigmas[1] == pytest.approx(1e-2, rel=1e-12)
    assert sigmas[9] == pytest.approx(last, rel=1e-12)
    assert all(a > b for a, b in pairwise(sigmas[1:]))


def test_the_schedules_hold_the_numbers_of_a_table_made_by_hand():
    middle = {"linear": 5.25e-3, "cosine": 5.25e-3, "exponential-attained": math.sqrt(5e-6)}
    middle["logarithmic"] = 1e-2 - 9.5e-3 * math.log(1 + (math.e - 1) / 2)
    for schedule, sigma in middle.items():
        cfg = Aqn(schedule=schedule, stages=12)  # type: ignore[arg-type]
        assert sigma_of(cfg, 6) == pytest.approx(sigma, rel=1e-12)
    assert sigma_of(Aqn(), 9) == pytest.approx(6.9743e-4, rel=1e-4)


def test_stages_are_equal_parts_of_the_run():
    stages = [noise_of(Aqn(steps=200), v, 0) for v in range(201)]
    assert stages[:20] == [None] * 20
    assert {n.sigma for n in stages[20:40] if n} == {1e-2}
    assert len({n.sigma for n in stages if n}) == 9
    assert stages[200] is not None and stages[200].sigma == sigma_of(Aqn(), 9)
    assert len({n.seed for n in stages if n}) == 181


def test_longer_run_keeps_the_noise_of_earlier_versions(make_run: MakeRun):
    run = make_run("rollout.aqn={}", "steps=200")
    again = override(parse(dump_toml(run), "config.toml"), "steps=900")
    assert again.steps == 900
    of_both = [[noise_of(r.rollout.aqn, v, 0) for v in range(300)] for r in (run, again)]
    assert of_both[0] == of_both[1]
    assert make_run("rollout.aqn={steps=50}", "steps=200").rollout.aqn == Aqn(steps=50)


def test_only_published_norms_before_qkv_and_gate_up_are_noisy(
    make_run: MakeRun,
):
    run = make_run(*AQN)
    model = initial_model(run)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    made = VersionBuilder(run).build(model, 5)
    quiet = published_state(model, run.rollout.format)
    noisy = {
        k
        for k in quiet
        if not torch.equal(quiet[k].view(torch.uint8), made.tensors[k].view(torch.uint8))
    }
    assert noisy == {
        f"model.layers.{i}.{n}_layernorm.weight"
        for i in range(2)
        for n in ("input", "post_attention")
    }
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_of_four_norms_those_before_the_projections_are_noisy() -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = DecoderConfig.from_hf(config_of("gemma3_text", shape).to_dict())
    state = {name: torch.zeros(size[:1]) for name, size in config.tensors().items()}
    noisy = with_noise(state, Noise(sigma=0.1, seed=1), 1.0)
    found = {name for name in state if not torch.equal(state[name], noisy[name])}
    assert found == {
        f"model.layers.{i}.{n}_layernorm.weight"
        for i in range(2)
        for n in ("input", "pre_feedforward")
    }


def test_noisy_version_is_rebuilt_bit_for_bit_from_its_manifest(
    make_run: MakeRun,
):
    run = make_run("rollout.aqn={}", "steps=20", "learner.uaq=1.5")
    model = initial_model(run)
    apply_uaq(model, 1.5)
    made = VersionBuilder(run).build(model, 7)
    m = made.manifest
    again = with_noise(published_state(model, m.format), m.noise, m.uaq_scale)
    assert m.noise is not None and m.noise.sigma > 0
    assert all(
        torch.equal(again[k].view(torch.uint8), t.view(torch.uint8))
        for k, t in made.tensors.items()
    )
    assert VersionBuilder(run).build(model, 7).manifest.digest == m.digest
    assert VersionBuilder(run).build(model, 8).manifest.digest != m.digest


def test_noise_is_normal_with_the_deviation_of_the_manifest():
    state = {"model.layers.0.input_layernorm.weight": torch.ones(200_000)}
    noise = noise_of(Aqn(steps=20), 3, 0)
    assert noise is not None
    z = (with_noise(state, noise, 1.5)["model.layers.0.input_layernorm.weight"] - 1) / 1.5
    assert float(z.std()) == pytest.approx(noise.sigma, rel=0.01)
    assert abs(float(z.mean())) < 4 * noise.sigma / math.sqrt(len(z))
    assert float((z.abs() < noise.sigma).float().mean()) == pytest.approx(0.6827, abs=0.005)


def test_uaq_leaves_the_effect_of_noise_as_it_is(make_run: MakeRun):
    run = make_run(*AQN)
    plain, scaled = (initial_model(run) for _ in range(2))
    apply_uaq(scaled, 2.0)
    noise = noise_of(Aqn(steps=20), 3, 0)
    a, b = (with_noise(m.state_dict(), noise, s) for m, s in ((plain, 1.0), (scaled, 2.0)))
    for norm, fed in (
        ("input_layernorm", "self_attn.q_proj"),
        ("post_attention_layernorm", "mlp.up_proj"),
    ):
        products = [
            s[f"model.layers.0.{fed}.weight"] * s[f"model.layers.0.{norm}.weight"] for s in (a, b)
        ]
        assert torch.equal(*products)


def test_the_learners_step_is_the_same_with_noise_and_without(make_run: MakeRun, make_samples):
    found = []
    for settings in (AQN, AQN[1:]):
        run = make_run(*settings)
        policy = build_policy(run)
        VersionBuilder(run).build(policy.model, 9)
        found.append(update_policy(policy, make_samples(12)))
    assert found[0] == found[1]


def test_too_few_stages_are_refused(make_run: MakeRun):
    with pytest.raises(ConfigError, match=r"rollout\.aqn\.stages"):
        make_run("rollout.aqn.stages=2")
