"""The fidelity meter: engines that tell the truth about their log-probs, and one that does not."""

import asyncio
import logging
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from helpers.engines import ask_for, serving
from helpers.fixture_types import MakeRun
from helpers.paths import REAL_MODEL
from helpers.policies import initial_model

from areal_q.config import Run, Sampling, TorchEngine
from areal_q.messages import Array, Group, Ticket, VersionSpan
from areal_q.models import Decoder, PackedLayout, load_decoder
from areal_q.models.low_bit.engine_policy import engine_policy, perturbed
from areal_q.quant import is_quantized
from areal_q.weights.version import WeightVersion
from bench.records import make_group, make_trajectory
from learner.measure.fidelity import FidelityMeter, reach
from learner.measure.rescore import Scorer
from learner.publishing.version_builder import VersionBuilder
from rollout.engines import build_engine
from rollout.engines.base import Completion

EVERY = "learner.fidelity.share=1"


@pytest.fixture
def make_versions(make_run: MakeRun) -> Callable[[Run], list[WeightVersion]]:
    """Two published versions that differ."""

    def make(run: Run) -> list[WeightVersion]:
        model = initial_model(run)
        builder = VersionBuilder(run)
        first = builder.build(model, 0)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
        return [first, builder.build(model, 1)]

    return make


def group_of(ticket: Ticket, completions: list[Completion], engine: str, off: float) -> Group:
    trajectories = [
        make_trajectory(i, c.response_ids, c.logprobs - off, spans=c.spans)
        for i, c in enumerate(completions)
    ]
    return make_group(ticket, engine=engine, trajectories=trajectories)


@pytest.fixture
def drawn(make_ticket) -> Callable[..., list[Group]]:
    """drawn(run, versions, off=0.1): groups that the torch engine draws, its log-probs `off` nats too low; each
    is under way while version 1 takes the place of version 0."""

    def draw(run: Run, versions: list[WeightVersion], off: float = 0.0, name: str = "torch"):
        async def work() -> list[Group]:
            tickets = [
                make_ticket(n, sampling=run.rollout.sampling, group_size=4) for n in range(8)
            ]
            seen = asyncio.Event()

            def on_token(index: int, token: int, logprob: float) -> None:
                seen.set()

            async with serving(build_engine(TorchEngine(slots=64)), versions[0]) as engine:
                tasks = [
                    asyncio.create_task(engine.generate(ask_for(t), on_token)) for t in tickets
                ]
                await seen.wait()
                await engine.load_weights(versions[1])
                done = await asyncio.gather(*tasks)
            return [group_of(t, c, name, off) for t, c in zip(tickets, done, strict=True)]

        return asyncio.run(work())

    return draw


def meter_of(run: Run, versions: list[WeightVersion]) -> FidelityMeter:
    meter = FidelityMeter(run.learner, run.rollout.format)
    for version in versions:
        meter.remember(version)
    return meter


@pytest.mark.parametrize("format", ["int8", "bf16", "int4"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_healthy_engine_is_as_near_as_rounding(
    make_run, make_versions, drawn, caplog, format: str, temperature: float
):
    settings = [f"rollout.format={format}", f"rollout.sampling.temperature={temperature}"]
    run = make_run(EVERY, *settings, "rollout.sampling.max_tokens=20")
    versions = make_versions(run)
    groups = drawn(run, versions)
    with caplog.at_level(logging.WARNING, "learner.measure.fidelity"):
        values = meter_of(run, versions).measure(groups)
    assert values["fidelity/gap_mean_nats"] < 1e-4
    assert values["fidelity/gap_max_nats"] < 0.02  # an activation on the edge between two codes
    assert values["fidelity/engine_torch/gap_mean_nats"] == values["fidelity/gap_mean_nats"]
    assert not caplog.records


def test_planted_error_of_a_tenth_of_a_nat_is_warned_of_once(
    make_run, make_versions, drawn, caplog
):
    run = make_run(EVERY)
    versions = make_versions(run)
    healthy, planted = drawn(run, versions), drawn(run, versions, off=0.1, name="broken")
    meter = meter_of(run, versions)
    with caplog.at_level(logging.WARNING, "learner.measure.fidelity"):
        values = meter.measure(healthy + planted)
        assert meter.measure(planted)["fidelity/gap_mean_nats"] == pytest.approx(0.1, abs=1e-3)
    assert values["fidelity/engine_torch/gap_mean_nats"] < 1e-4
    assert values["fidelity/engine_broken/gap_mean_nats"] == pytest.approx(0.1, abs=1e-3)
    assert (
        values["fidelity/engine_broken/bound_nats"] == 0.03
    )  # int8 has no noise on so small a model
    assert values["fidelity/engine_broken/noise_mean_nats"] < 1e-3
    assert "fidelity/engine_torch/noise_mean_nats" not in values  # not needed
    assert (
        values["fidelity/engine_broken/version"] == 0
    )  # responses began with it; the rest is not looked at
    (record,) = caplog.records
    assert "engine broken" in record.message and "bound_nats" in record.message


def test_the_bound_is_what_noise_alone_may_reach():
    """Oracle: means of 96 tokens drawn anew from one distribution of noise, and of one with twice its scale."""
    rng = np.random.default_rng(0)
    draws = np.abs(rng.standard_t(3, (400, 3, 96))) * 0.15
    bounds = np.array([reach(noise) for noise, _, _ in draws])
    assert (draws[:, 1].mean(-1) > bounds).mean() < 0.02
    assert (2.5 * draws[:, 2].mean(-1) > bounds).mean() > 0.95


def test_the_share_is_of_the_ticket_numbers_whoever_drew_them(make_run, make_group, make_ticket):
    meter = FidelityMeter(make_run("learner.fidelity.share=0.0625").learner, "int8")
    groups = [make_group(make_ticket(n)) for n in range(512)]
    chosen = [g.ticket.number for g in groups if meter._chosen(g)]
    assert chosen == [*range(16), *range(256, 272)]
    assert FidelityMeter(make_run("learner.fidelity.share=0").learner, "int8").measure(groups) == {}


def test_versions_that_are_no_longer_held_are_passed_over(make_run, make_versions, drawn):
    run = make_run(EVERY)
    versions = make_versions(run)
    groups = drawn(run, versions)
    assert meter_of(run, []).measure(groups) == {}


def test_versions_are_measured_in_turn_as_each_alone(make_run, make_versions, drawn):
    run = make_run(EVERY)
    versions = make_versions(run)
    both = meter_of(run, versions)
    for order in (versions, versions[::-1], versions):
        groups = drawn(run, order)
        values = both.measure(groups)
        assert values == meter_of(run, versions).measure(groups)
        assert values["fidelity/gap_mean_nats"] < 1e-4


def test_tokens_that_the_engine_did_not_draw_are_left_out(make_run, make_versions, drawn):
    run = make_run(EVERY)
    versions = make_versions(run)
    group = drawn(run, versions)[0]
    t = group.trajectories[0]
    logprobs, mask = t.behavior_logprobs.numpy().copy(), t.loss_mask.numpy().copy()
    logprobs[0], mask[0] = 0.0, 0
    digest = t.spans[0].digest
    tool = msgspec.structs.replace(
        t,
        behavior_logprobs=Array.of(logprobs),
        loss_mask=Array.of(mask),
        spans=[VersionSpan(0, 1, digest), *[VersionSpan(1, t.num_tokens - 1, "unknown")]],
    )
    alone = msgspec.structs.replace(group, trajectories=[tool])
    assert "fidelity/gap_mean_nats" not in meter_of(run, versions).measure([alone])


@pytest.mark.parametrize("format", ["int8", "fp8", "nvfp4"])
def test_measuring_draws_no_random_number_and_changes_no_weight(make_run, make_versions, format):
    run = make_run(f"rollout.format={format}")
    version = make_versions(run)[0]
    model: Decoder = initial_model(run)
    before, state = version.payload.clone(), torch.random.get_rng_state()
    policy = engine_policy(model.config, version.tensors, format)
    left = {n for n, p in policy.named_parameters() if not p.is_meta}
    assert left == {n for n in model.state_dict() if not is_quantized(n)}
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(version.payload, before)
    assert Scorer(run.learner).cfg is run.learner


QUESTION = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2,
    198, 1, 4093, 198, 1780, 314, 216, 37, 41, 1232, 216, 35, 39, 47, 19842, 351, 915, 260, 1230, 30, 2, 198, 1,
    520, 9531, 198,
]  # fmt: skip
"""The ids of "What is 59 + 37? Answer with just the number." in SmolLM2's template"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not REAL_MODEL.is_dir(), reason=f"no models/{REAL_MODEL.name}: make real-model")
def test_a_wrong_scale_shows_beside_a_real_models_noise(make_run, make_ticket):
    """Engines: one that differs by rounding alone, and one with twice the scale in one of 210 linears."""
    run = make_run(EVERY, "rollout.format=int8")
    model = load_decoder(REAL_MODEL)
    version = VersionBuilder(run).build(model, 0)
    meter = meter_of(run, [version])
    engine = engine_policy(model.config, version.tensors, "int8")
    prompt = torch.tensor(QUESTION)
    texts = []
    for seed in range(4):
        ids, generator = prompt, torch.Generator().manual_seed(seed)
        for _ in range(24):
            with torch.no_grad():
                logits = engine.logits(engine(ids, PackedLayout.of([len(ids)]))[-1])
            ids = torch.cat((ids, torch.multinomial(logits.softmax(-1), 1, generator=generator)))
        texts.append(ids)

    def measured(policy: Decoder, name: str) -> dict[str, float]:
        done = []
        with torch.no_grad():
            hidden = policy(torch.cat(texts), PackedLayout.of([len(t) for t in texts]))
        for text, states in zip(texts, hidden.split([len(t) for t in texts]), strict=True):
            drawn = text[len(prompt) :]
            logs = policy.logits(states[len(prompt) - 1 : -1]).log_softmax(-1)
            logs = logs.gather(1, drawn[:, None])[:, 0]
            spans = [VersionSpan(0, len(drawn), version.manifest.digest)]
            done.append(
                Completion(
                    response_ids=drawn.int().numpy(),
                    logprobs=logs.numpy(),
                    spans=spans,
                    finish_reason="length",
                )
            )
        ids = Array.of(QUESTION, "int32")
        ticket = make_ticket(0, prompt_ids=ids, group_size=4, sampling=Sampling(max_tokens=24))
        values = meter.measure([group_of(ticket, done, name, 0.0)])
        prefix = f"fidelity/engine_{name}/"
        return {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}

    with perturbed(engine, seed=7):
        faithful = measured(engine, "faithful")
    assert 0.03 < faithful["gap_mean_nats"] <= faithful["bound_nats"]
    assert faithful["noise_mean_nats"] > 0.03
    key = "model.layers.15.mlp.down_proj.weight_scale"
    wrong = engine_policy(model.config, {**version.tensors, key: version.tensors[key] * 2}, "int8")
    broken = measured(wrong, "broken")
    assert broken["gap_mean_nats"] > broken["bound_nats"]
