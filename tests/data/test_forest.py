"""Trees of samples, whose tokens are computed once each, against rows that share nothing."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.fixture_types import MakeRun
from helpers.policies import build_policy
from helpers.strategies import DEEP, FORESTS, forest, gradients, unshared
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from areal_q.models import (
    Decoder,
    DecoderConfig,
    Experts,
    PackedLayout,
    init_weights,
    packed_layout,
)
from areal_q.models.config import DeltaRule
from areal_q.models.packed_layout import Segment
from learner.backends.routing_replay import routing_for
from learner.backends.single_device import token_logprobs
from learner.data.packing import PackedBatch, Sample, microbatches, pack_samples
from learner.policy_update import update_policy

SHAPE: dict[str, Any] = {
    "family": "qwen3",
    "vocab_size": 13,
    "width": 16,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "mlp": 24,
    "max_positions": 128,
}
DELTA = DeltaRule(layers=(0,), key_heads=2, value_heads=4, key_dim=4, value_dim=6, kernel=4)
MODELS = {
    "plain": {},
    "sliding window": {"window": 4, "sliding": (1,)},
    "no positions in a layer": {"unrotated": (0,)},
    "experts": {"family": "qwen3_moe", "experts": Experts(count=5, per_token=2, mlp=8)},
    "sinks": {
        "family": "gpt_oss",
        "experts": Experts(count=5, per_token=2, mlp=8),
        "mlp_bias": True,
        "window": 4,
        "sliding": (1,),
    },
    "a state": {"family": "qwen3_5_text", "delta": DELTA, "rope_dim": 4},
}
STAR = [(99, 0, 1, 20), *[(0, 20, 20, 1)] * 8]
"""A path with eight branches of one token at its end, which alone are few tokens"""
drawn = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=8
)


def decoder(kind: str) -> Decoder:
    model = Decoder(DecoderConfig(**{**SHAPE, **MODELS[kind]}))
    init_weights(model, 0)
    return model.double()


def loss_of(model: Decoder, batch: PackedBatch) -> torch.Tensor:
    hidden = model(batch.token_ids, batch.layout, routing_for(model, batch, replay=True))
    logp = model.logits(hidden[batch.predict]).log_softmax(-1)
    chosen = logp.gather(1, batch.targets[:, None]).squeeze(1)
    return -(chosen * batch.advantages * batch.mask).sum()


@pytest.mark.parametrize("worth", [1, packed_layout.WORTH])
@pytest.mark.parametrize("kind", MODELS)
@drawn
@given(nodes=FORESTS, seed=st.integers(0, 99))
@example(nodes=DEEP, seed=0)
def test_a_forest_has_the_loss_and_gradient_of_rows(
    monkeypatch: pytest.MonkeyPatch, kind: str, worth: int, nodes: list, seed: int
):
    monkeypatch.setattr(packed_layout, "WORTH", worth)
    samples, model = forest(nodes, seed), decoder(kind)
    together, apart = (loss_of(model, pack_samples(s)) for s in (samples, unshared(samples)))
    torch.testing.assert_close(together, apart, atol=1e-9, rtol=1e-9)
    expected = gradients(apart, model)
    for name, gradient in gradients(together, model).items():
        torch.testing.assert_close(
            gradient, expected[name], atol=1e-6, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@drawn
@given(nodes=FORESTS, seed=st.integers(0, 99))
@example(nodes=DEEP, seed=0)
def test_every_token_of_a_forest_is_computed_and_learnt_once(nodes: list, seed: int):
    samples = forest(nodes, seed)
    batch = pack_samples(samples)
    inputs = {tuple(s.path[: n + 1].tolist()) for s in samples for n in range(s.num_tokens - 1)}
    assert len(batch.token_ids) == len(batch.layout.positions) <= sum(s.own_tokens for s in samples)
    assert len(inputs) <= len(batch.token_ids)  # two children may draw the same token
    start = 0
    for length, sample in zip(batch.layout.lengths, samples, strict=True):
        path = batch.layout.paths[start : start + length]
        assert batch.token_ids[path].tolist() == sample.path[:length].tolist()
        assert batch.layout.positions[path].tolist() == list(range(length))
        start += length
    counted = sum(int(pack_samples([s]).mask.sum()) for s in unshared(samples))
    assert int(batch.mask.sum()) == counted
    assert batch.routes is not None and (batch.routes >= 0).all()


@drawn
@given(nodes=FORESTS, seed=st.integers(0, 99), limit=st.integers(1, 60), times=st.integers(1, 4))
@example(nodes=STAR, seed=0, limit=30, times=4)
@example(nodes=STAR, seed=0, limit=30, times=1)
def test_cut_trees_compute_again_what_they_share(nodes: list, seed: int, limit: int, times: int):
    samples, model = forest(nodes, seed), decoder("plain")
    cuts = list(microbatches(samples, limit, times))
    assert [s for cut in cuts for s in cut] == samples
    batches = [pack_samples(cut) for cut in cuts]
    assert all(
        len(batch.token_ids) <= limit or len(cut) == 1
        for batch, cut in zip(batches, cuts, strict=True)
    )
    paths = [sum(s.num_tokens for s in cut) for cut in cuts]
    assert all(n <= times * limit or len(c) == 1 for n, c in zip(paths, cuts, strict=True))
    whole = loss_of(model, pack_samples(samples))
    parts = torch.stack([loss_of(model, batch) for batch in batches]).sum()
    torch.testing.assert_close(parts, whole, atol=1e-9, rtol=1e-9)


def test_a_sibling_stands_in_for_a_parent_that_is_elsewhere():
    samples = forest(DEEP, 0)
    batch = pack_samples(samples[4:6])  # both branch off sample 3 at its ninth token
    assert [s.shared for s in samples[4:6]] == [9, 9]
    apart = pack_samples([samples[4], replace(samples[5], ticket=1)])
    assert len(apart.token_ids) == sum(s.num_tokens - 1 for s in samples[4:6])
    assert len(batch.token_ids) == len(apart.token_ids) - 9


SETTINGS = ["model.max_positions=128", "learner.optimizer.eps=1e-2", "learner.minibatches=1"]
FORWARDS = {
    "plain": [],
    "qarl": ["learner.precision=qarl", "rollout.format=int4"],
    "lora": ["learner.lora={rank=4}", "rollout.format=nf4"],
    "jet": ["learner.precision=jet", "rollout.format=fp8"],
    "routes": ["model.experts=5", "learner.routing_replay=true"],
}


@pytest.mark.parametrize("forward", FORWARDS)
def test_a_step_on_trees_is_the_step_on_rows(make_run: MakeRun, forward: str):
    found = []
    for form in (list[Sample], unshared):
        policy = build_policy(make_run(*SETTINGS, *FORWARDS[forward]))
        values = update_policy(policy, form(forest(DEEP, 1) + forest(DEEP, 2, ticket=1)))
        found.append((values, policy.model.state_dict()))
    (values, weights), (expected, others) = found
    for name in ("train/loss", "mismatch/kl", "mismatch/tokens"):
        assert values[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    rounded = forward == "jet"  # to FP8, in which a sum of gradients is not the sum of rounded ones
    norms = values["train/grad_norm"], expected["train/grad_norm"]
    assert norms[0] == pytest.approx(norms[1], rel=0.02 if rounded else 1e-5)
    for name, tensor in () if rounded else others.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-6, rtol=1e-6, msg=name)


def test_scores_of_a_tree_stand_in_the_order_of_its_samples(make_run: MakeRun):
    policy, samples = build_policy(make_run(*SETTINGS)), forest(DEEP, 3)
    with torch.no_grad():
        found, expected = (
            token_logprobs(policy.model, pack_samples(s), 0.7) for s in (samples, unshared(samples))
        )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "segments",
    [
        [Segment(2), Segment(1, 1, 1)],
        [Segment(2), Segment(1, 0, 3)],
        [Segment(2), Segment(1, 0, 0)],
    ],
)
def test_a_segment_hangs_off_a_token_that_is_there(segments: Sequence[Segment]):
    with pytest.raises(ValueError, match="segment 1 hangs off"):
        PackedLayout.of_forest(segments)
