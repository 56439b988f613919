"""Gradients against finite differences, and what objectives become at their limits."""

from dataclasses import replace

import pytest
import torch

from areal_q.algorithms import LossInputs, loss_fn
from areal_q.algorithms.policy_losses import policy_loss
from areal_q.algorithms.ratios import ratios
from areal_q.config import (
    Acr,
    Cispo,
    Decoupled,
    Gspo,
    IcePop,
    Mis,
    Naive,
    Ppo,
    ReferenceKl,
    Sapo,
    SeqMeanTokenMean,
    SeqMeanTokenSumNorm,
    Tbpo,
    Tis,
    TokenMean,
    ValueLoss,
)

WIDE = Tbpo(clip_high=0.1, negative_clip_low=0.1, negative_clip_high=0.15, outside="clamp")
SMOOTH_IN_THETA = [
    Naive(),
    Ppo(dual_clip=1.3),
    Decoupled(),
    Tis(cap=1.2),
    Tis(cap=1.2, level="product"),
    Tis(cap=1.1, level="geometric"),
    Mis(cap_high=1.3, denominator="kept_tokens"),
    Mis(cap_high=1.3, level="product"),
    IcePop(cap_low=0.7),
    Acr(cap=1.1),
    Acr(cap=1.1, max_widening=1.1),
    Gspo(clip_low=0.05, clip_high=0.05),
    Sapo(),
    WIDE,
]
AGGREGATIONS = [TokenMean(), SeqMeanTokenMean(), SeqMeanTokenSumNorm(length=7)]


def name(cfg) -> str:
    return f"{type(cfg).__name__}-{getattr(cfg, 'level', '')}"


def random_batch(seed=0, tokens=24, sequences=6, drift=0.3, gap=0.3) -> LossInputs:
    """π_θ and π_prox `drift` apart, π_prox and π_behav `gap` apart (standard deviations in nats)."""
    g = torch.Generator().manual_seed(seed)

    def normal(n):
        return torch.randn(n, generator=g, dtype=torch.float64)

    ids = torch.arange(tokens) * sequences // tokens
    theta = -normal(tokens).abs() - 0.1
    prox = theta - drift * normal(tokens)
    return LossInputs(
        logprobs=theta.requires_grad_(),
        proximal_logprobs=prox.detach(),
        behavior_logprobs=(prox - gap * normal(tokens)).detach(),
        advantages=normal(sequences)[ids],
        mask=torch.rand(tokens, generator=g) > 0.2,
        sequence_ids=ids,
        num_sequences=sequences,
        version_lag=torch.zeros(tokens, dtype=torch.int64),
    )


def gradient(inputs, cfg, aggregation=None) -> torch.Tensor:
    return torch.autograd.grad(loss_fn(inputs, cfg, aggregation).loss, inputs.logprobs)[0]


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=name)
@pytest.mark.parametrize("cfg", SMOOTH_IN_THETA, ids=name)
def test_autograd_equals_finite_differences(cfg, aggregation):
    inputs = random_batch()

    def loss(theta):
        return loss_fn(replace(inputs, logprobs=theta), cfg, aggregation).loss

    assert gradient(inputs, cfg, aggregation).abs().sum() > 0
    assert torch.autograd.gradcheck(loss, (inputs.logprobs,), eps=1e-7, atol=1e-7)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_autograd_of_the_other_terms_equals_finite_differences(estimator):
    inputs = random_batch()
    reference = inputs.proximal_logprobs + 0.1
    old, returns = random_batch(seed=1).proximal_logprobs, random_batch(seed=2).proximal_logprobs

    def loss(theta, entropy, values):
        more = {"entropy": entropy, "values": values, "old_values": old, "returns": returns}
        return loss_fn(
            replace(inputs, logprobs=theta, reference_logprobs=reference, **more),
            Ppo(),
            reference_kl=ReferenceKl(coef=0.3, estimator=estimator),
            entropy_coef=0.2,
            value=ValueLoss(clip=0.4),
        ).loss

    entropy = torch.rand(24, dtype=torch.float64, requires_grad=True)
    values = (old + 0.5 * torch.linspace(-1, 1, 24, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(loss, (inputs.logprobs, entropy, values), eps=1e-7, atol=1e-7)


def test_cispo_has_the_gradient_of_a_weighted_log_likelihood():
    inputs = random_batch()
    ratio = (inputs.logprobs - inputs.proximal_logprobs).exp().detach()
    expected = -ratio.clamp(max=1.25) * inputs.advantages * inputs.mask / inputs.mask.sum()
    torch.testing.assert_close(gradient(inputs, Cispo(clip_high=0.25)), expected)


def test_gradient_sees_no_mismatch_weight_and_no_proximal_policy():
    """Only log π_θ is learnt, also when a caller forgot to detach the others."""
    inputs = random_batch()
    prox = inputs.proximal_logprobs.clone().requires_grad_()
    behavior = inputs.behavior_logprobs.clone().requires_grad_()
    attached = replace(inputs, proximal_logprobs=prox, behavior_logprobs=behavior)
    loss_fn(attached, Acr()).loss.backward()
    assert prox.grad is None and behavior.grad is None


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=name)
@pytest.mark.parametrize("cfg", [*SMOOTH_IN_THETA, Cispo(), Tbpo()], ids=name)
def test_on_policy_gradient_is_that_of_reinforce(cfg, aggregation):
    inputs = random_batch(drift=0.0, gap=0.0)
    lengths = torch.bincount(inputs.sequence_ids[inputs.mask], minlength=6).double()
    sequences = (lengths > 0).sum()
    weight = {
        TokenMean: torch.full((24,), 1.0, dtype=torch.float64) / lengths.sum(),
        SeqMeanTokenMean: 1 / (lengths * sequences)[inputs.sequence_ids],
        SeqMeanTokenSumNorm: torch.full((24,), 1.0, dtype=torch.float64) / (7 * sequences),
    }[type(aggregation)]
    reinforce = (weight * inputs.mask * inputs.advantages * inputs.logprobs).sum()
    (expected,) = torch.autograd.grad(-reinforce, inputs.logprobs)
    torch.testing.assert_close(gradient(inputs, cfg, aggregation), expected)


def same(left, right, inputs) -> bool:
    x = ratios(inputs)
    same_value = torch.equal(policy_loss(x, left).objective, policy_loss(x, right).objective)
    return same_value and torch.equal(gradient(inputs, left), gradient(inputs, right))


def test_acr_is_tis_where_no_weight_exceeds_the_cap():
    inputs = random_batch(gap=0.2)
    largest = ratios(inputs).log_mismatch.max().exp().item()
    assert same(Acr(cap=largest + 1e-9), Tis(cap=largest + 1e-9), inputs)
    assert not same(Acr(cap=1.0), Tis(cap=1.0), inputs)


def test_acr_with_a_widening_of_at_most_one_is_tis():
    assert same(Acr(cap=1.1, max_widening=1.0), Tis(cap=1.1), random_batch())


def test_tis_and_acr_become_decoupled_as_the_cap_grows():
    inputs = random_batch(gap=2.0)
    assert same(Tis(cap=1e9), Decoupled(), inputs)
    assert same(Acr(cap=1e9), Decoupled(), inputs)
    assert same(Mis(cap_low=0.0, cap_high=1e9), Decoupled(), inputs)
    assert not same(Tis(cap=2.0), Decoupled(), inputs)


@pytest.mark.parametrize(
    "cfg", [Naive(), Decoupled(), Tis(), Tis(level="product"), Mis(), IcePop(), Acr()], ids=name
)
def test_token_objectives_are_ppo_where_behaviour_is_proximal(cfg):
    assert same(cfg, Ppo(), random_batch(gap=0.0))


def test_gspo_is_ppo_on_sequences_of_one_token():
    inputs = random_batch(tokens=24, sequences=24)
    assert same(Gspo(clip_low=0.2, clip_high=0.2), Ppo(), inputs)


def test_tbpo_drop_and_clamp_differ_in_value_and_not_in_gradient():
    inputs = random_batch()
    drop = Tbpo(clip_high=0.1, negative_clip_low=0.01, negative_clip_high=0.01)
    clamp = Tbpo(clip_high=0.1, negative_clip_low=0.01, negative_clip_high=0.01, outside="clamp")
    assert torch.equal(gradient(inputs, drop), gradient(inputs, clamp))
    assert loss_fn(inputs, drop).loss != loss_fn(inputs, clamp).loss
