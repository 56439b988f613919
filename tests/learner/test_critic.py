"""The critic and the reference policy inside a learner step."""

import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from helpers.fixture_types import MakeRun, MakeSamples
from helpers.policies import build_policy

from areal_q.config import BySource, DrGrpo, Gae, Rloo, load, override
from areal_q.errors import ConfigError, RecordError
from areal_q.messages import Array
from areal_q.models import save_decoder
from areal_q.tasks import build_tokenizer
from learner.backends.single_device import TorchPolicy, token_logprobs
from learner.build_policy import build_reference
from learner.data.packing import Sample, pack_samples
from learner.policy_advantages import at_last_token, with_advantages
from learner.policy_update import (
    first_gradient,
    loss_inputs,
    prepare_minibatches,
    update_policy,
)

GAE = ["learner.advantage.type=gae", "learner.critic={}"]
LN2 = math.log(2)


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in module.state_dict().items()}


def rewarded(samples: list[Sample], rewards: list[float], **fields) -> list[Sample]:
    return [
        replace(s, trajectory=msgspec.structs.replace(s.trajectory, reward=r), **fields)
        for s, r in zip(samples, rewards, strict=True)
    ]


def mean_of(policy: TorchPolicy, samples: list[Sample], index: int) -> float:
    """Mean over the tokens that count of their log-prob (0) or entropy (1)."""
    batch = pack_samples(samples)
    with torch.no_grad():
        found = token_logprobs(policy.model, batch, policy.temperature)[index]
    return found[batch.mask].mean().item()


def test_a_reward_stands_at_the_last_token_that_counts():
    mask = torch.tensor([True, True, False, True, False, False])
    ids = torch.tensor([0, 0, 0, 1, 1, 2])
    found = at_last_token(torch.tensor([1.0, 5.0, 7.0]), mask, ids)
    assert found.tolist() == [0, 1, 0, 5, 0, 0]


def two_responses(make_samples: MakeSamples):
    """Samples of 2 and 3 tokens with rewards 1 and 0, of one prompt, and their inputs in two micro-batches.

    π_prox / π_ref is 2 at the first token of each: k1 = ln 2 there. V = 0.5 everywhere.
    """
    by_length = {s.trajectory.num_tokens: s for s in make_samples(40)}
    samples = rewarded([by_length[2], by_length[3]], [1.0, 0.0], ticket=7)
    inputs = []
    policy = build_policy(load(None))
    for sample in samples:
        batch = pack_samples([sample])
        n = len(batch.targets)
        prox = torch.full((n,), -1.0)
        inputs.append(
            replace(
                loss_inputs(batch, policy.scores([batch])[0], None),
                mask=torch.ones(n, dtype=torch.bool),
                proximal_logprobs=prox,
                reference_logprobs=prox - torch.tensor([LN2] + [0.0] * (n - 1)),
                old_values=torch.full((n,), 0.5),
            )
        )
    return samples, inputs


def test_values_are_not_rounded_to_the_dtype_of_their_head(
    make_run: MakeRun, make_samples: MakeSamples
):
    """That of ranks in bfloat16, whose numbers near 100 are 0.5 apart: GAE takes their differences."""
    critic = build_policy(make_run(*GAE, "learner.critic.trunk=shared")).critic
    assert critic is not None
    critic.head.to(torch.bfloat16)
    with torch.no_grad():
        critic.head.weight[0, :2] = 1.0
    hidden = torch.zeros(3, critic.head.in_features, dtype=torch.bfloat16)
    hidden[:, 0], hidden[:, 1] = 100.0, 0.25
    assert critic(hidden, pack_samples(make_samples(1))).tolist() == [100.25] * 3


def test_token_rewards_of_gae_are_penalties_then_the_reward(
    make_run: MakeRun, make_samples: MakeSamples
):
    samples, inputs = two_responses(make_samples)
    run = make_run(
        *GAE, "learner.advantage.normalize=false", "learner.advantage.trace=0.5",
        "learner.reference_kl={coef=0.1, place='reward', estimator='k1'}",
    )  # fmt: skip
    one, other = with_advantages(inputs, samples, run.learner)
    # γ = 1, λ = ½, rewards [-0.1 ln 2, 1] and [-0.1 ln 2, 0, 0], V = ½:
    # δ = -0.1 ln 2, 1 - ½;  A = -0.1 ln 2 + ½·½, ½
    # δ = -0.1 ln 2, 0, -½;  A = -0.1 ln 2 + ½·(-¼), -¼, -½
    assert one.advantages.tolist() == pytest.approx([0.25 - 0.1 * LN2, 0.5])
    assert other.advantages.tolist() == pytest.approx([-0.125 - 0.1 * LN2, -0.25, -0.5])
    assert one.returns is not None
    assert one.returns.tolist() == pytest.approx([0.75 - 0.1 * LN2, 1.0])


def test_group_advantages_subtract_each_responses_whole_penalty(
    make_run: MakeRun, make_samples: MakeSamples
):
    samples, inputs = two_responses(make_samples)
    inputs[1] = replace(inputs[1], reference_logprobs=inputs[1].proximal_logprobs)
    run = make_run(
        "learner.advantage.type=dr_grpo",
        "learner.reference_kl={coef=0.1, place='reward', estimator='k1'}",
    )
    one, other = with_advantages(inputs, samples, run.learner)
    # 1 - 0.1 ln 2 and 0, less their mean
    half = (1 - 0.1 * LN2) / 2
    assert one.advantages.tolist() == pytest.approx([half] * 2)
    assert other.advantages.tolist() == pytest.approx([-half] * 3)
    assert one.returns is None


def test_the_distance_to_the_reference_counts_by_source(
    make_run: MakeRun, make_samples: MakeSamples
):
    samples, inputs = two_responses(make_samples)
    kl = "learner.reference_kl={coef=0.1, place='reward', estimator='k1'}"
    of = [replace(sample, source="x") for sample in samples]
    dr_grpo = with_advantages(
        inputs, samples, make_run("learner.advantage.type=dr_grpo", kl).learner
    )
    run = make_run(kl).learner
    cfg = BySource(sources={"x": Rloo()}, otherwise=DrGrpo())
    for given, factor in ((samples, 1), (of, 2)):  # r - other is twice r - mean of two
        found = with_advantages(inputs, given, msgspec.structs.replace(run, advantage=cfg))
        for one, alone in zip(found, dr_grpo, strict=True):
            assert one.advantages.tolist() == pytest.approx((alone.advantages * factor).tolist())


def test_first_values_are_0_and_first_advantages_the_returns(
    make_run: MakeRun, make_samples: MakeSamples
):
    run = make_run(*GAE, "learner.advantage.normalize=false")
    policy = build_policy(run)
    samples = rewarded(make_samples(4), [1.0, 0.0, 2.0, 0.5])
    ((_, first), *_), *_ = prepare_minibatches(policy, samples)
    assert first.old_values is not None and first.returns is not None
    assert first.old_values.tolist() == [0.0] * len(first.mask)
    counted = [
        s.trajectory.reward for s in samples[:2] for m in s.trajectory.loss_mask.numpy() if m
    ]
    assert first.advantages[first.mask].tolist() == counted
    assert torch.equal(first.returns, first.advantages)


@pytest.mark.parametrize("trunk", ["separate", "shared"])
def test_the_critic_learns_the_rewards_of_responses(
    make_run: MakeRun, make_samples: MakeSamples, trunk: str
):
    run = make_run(
        *GAE, f"learner.critic.trunk={trunk}", "learner.critic.value.clip=0",
        "learner.critic.optimizer.lr=3e-3", "learner.optimizer.lr=0", "learner.epochs=2",
    )  # fmt: skip
    policy = build_policy(run)
    samples = rewarded(make_samples(12), [float(i % 2) for i in range(12)])
    values = [update_policy(policy, samples) for _ in range(25)]
    assert values[0]["value/explained_variance"] == pytest.approx(0, abs=1e-6)
    assert values[-1]["loss/value"] < 0.5 * values[0]["loss/value"]
    assert values[-1]["value/explained_variance"] > (0.5 if trunk == "separate" else 0.15)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("trunk", ["separate", "shared"])
def test_value_loss_trains_the_policy_only_in_a_shared_trunk(
    make_run: MakeRun, make_samples: MakeSamples, trunk: str, dtype: str
):
    samples = rewarded(make_samples(6), [0.0, 1.0] * 3)
    run = make_run(*GAE, f"learner.critic.trunk={trunk}", f"learner.dtype={dtype}")
    gradients = []
    for coef in (0.1, 10.0):
        policy = build_policy(run)
        update_policy(policy, samples)  # the head begins at 0, and would pass no gradient on
        policy.cfg = override(run, f"learner.critic.value.coef={coef}").learner
        first_gradient(policy, prepare_minibatches(policy, samples)[0])
        gradients.append([p.grad for p in policy.model.parameters()])
    same = all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert same == (trunk == "separate")


@pytest.mark.parametrize(
    "settings",
    [
        ["learner.critic={trunk='separate'}", "learner.reference_kl={place='reward', coef=0.5}"],
        ["learner.critic={trunk='shared'}", "learner.entropy_coef=0.1"],
    ],
)
def test_the_step_does_not_depend_on_how_the_batch_is_cut(
    make_run: MakeRun, make_samples: MakeSamples, settings: list[str]
):
    settings = ["learner.advantage.type=gae", "learner.optimizer.eps=1e-2", *settings]
    settings += ["learner.optimizer.lr=0.1", "learner.critic.optimizer={eps=1e-2, lr=0.1}"]
    results, metrics = [], []
    for tokens in (14, 33, 10**6):
        policy = build_policy(make_run(*settings, f"learner.microbatch_tokens={tokens}"))
        for seed in (1, 2):
            values = update_policy(policy, rewarded(make_samples(9, seed), [0.0, 1.0, 0.5] * 3))
        assert policy.critic
        results.append(weights(policy.model) | weights(policy.critic.head))
        metrics.append(values)
    for other, values in zip(results[:-1], metrics[:-1], strict=True):
        for name, tensor in other.items():
            torch.testing.assert_close(tensor, results[-1][name], atol=1e-4, rtol=0)
        names = ("train/loss", "loss/value", "value/explained_variance", "value/grad_norm")
        for key in (*names, "value/clip_fraction"):
            assert values[key] == pytest.approx(metrics[-1][key], rel=1e-3, abs=1e-6)


def test_entropy_bonus_alone_raises_the_entropy(make_run: MakeRun, make_samples: MakeSamples):
    samples = [replace(s, advantage=0.0) for s in make_samples(6)]
    unmoved = build_policy(make_run("learner.optimizer.warmup_steps=0"))
    before = mean_of(unmoved, samples, 1)
    update_policy(unmoved, samples)
    assert mean_of(unmoved, samples, 1) == before
    policy = build_policy(make_run("learner.optimizer.warmup_steps=0", "learner.entropy_coef=0.1"))
    values = [update_policy(policy, samples) for _ in range(3)]
    assert mean_of(policy, samples, 1) > before
    assert values[-1]["policy/entropy"] > values[0]["policy/entropy"]


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_penalty_in_the_loss_pulls_the_policy_to_the_reference(
    make_run: MakeRun, make_samples: MakeSamples, estimator: str
):
    kl = f"learner.reference_kl={{coef=1.0, estimator='{estimator}'}}"
    policy = build_policy(
        make_run(kl, "learner.optimizer={warmup_steps=0, lr=1e-3}", "learner.epochs=3")
    )
    samples = [replace(s, advantage=0.0) for s in make_samples(9)]
    reference = mean_of(policy, samples, 0)
    values = update_policy(policy, samples)
    assert values["reference/kl_k3"] == values["train/grad_norm"] == 0  # they are the same
    with torch.no_grad():
        for p in policy.model.parameters():
            p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    moved = mean_of(policy, samples, 0)
    found = [update_policy(policy, samples)["reference/kl_k3"] for _ in range(10)]
    assert found[-1] < 0.5 * found[0]
    assert abs(mean_of(policy, samples, 0) - reference) < 0.5 * abs(moved - reference)
    assert policy.reference is not None
    assert not any(p.requires_grad for p in policy.reference.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference_is_the_model_at_its_path_until_it_is_reset(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path, dtype: str
):
    computes = f"learner.dtype={dtype}"
    run = make_run("learner.reference_kl={}", computes)
    policy, other = build_policy(run), build_policy(make_run("seed=3", computes))
    save_decoder(other.model, tmp_path / "other", build_tokenizer(run.model, run.task))
    policy.reference = build_reference(str(tmp_path / "other"), run.model, policy.model)
    samples = make_samples(4)
    ((batch, inputs), *_), *_ = prepare_minibatches(policy, samples)
    with torch.no_grad():
        expected, _ = token_logprobs(other.model, batch, 1.0)
    assert inputs.reference_logprobs is not None
    assert torch.equal(inputs.reference_logprobs, expected)
    assert not torch.equal(inputs.reference_logprobs, inputs.proximal_logprobs)
    policy.reset_reference()
    ((_, inputs), *_), *_ = prepare_minibatches(policy, samples)
    assert inputs.reference_logprobs is not None
    assert torch.equal(inputs.reference_logprobs, inputs.proximal_logprobs)

    wide = build_policy(make_run("model.width=64"))
    with pytest.raises(ConfigError, match="not shaped like the policy"):
        build_reference(str(tmp_path / "other"), run.model, wide.model)


def test_nothing_is_held_or_computed_for_what_is_off(make_run: MakeRun, make_samples: MakeSamples):
    policy = build_policy(make_run())
    assert policy.critic is None and policy.reference is None
    ((_, inputs), *_), *_ = prepare_minibatches(policy, make_samples(4))
    assert inputs.reference_logprobs is inputs.values is inputs.returns is None
    assert inputs.entropy is not None and not inputs.entropy.requires_grad


def test_nonfinite_log_prob_names_ticket_response_and_token(
    make_run: MakeRun, make_samples: MakeSamples
):
    samples = make_samples(6)
    t = samples[4].trajectory
    bad = t.behavior_logprobs.numpy().copy()
    counted = int(t.loss_mask.numpy().nonzero()[0][-1])
    bad[counted] = -math.inf
    broken = msgspec.structs.replace(t, behavior_logprobs=Array.of(bad, "float32"))
    samples[4] = replace(samples[4], trajectory=broken)
    named = f"ticket 1, response 4, token {counted}: behavior_logprobs is -inf"
    with pytest.raises(RecordError, match=named):
        update_policy(build_policy(make_run()), samples)


def test_gae_takes_one_response_to_a_prompt():
    run = load(None, [*GAE, "learner.group_size=1"])
    assert isinstance(run.learner.advantage, Gae) and run.learner.group_size == 1
