"""Our losses and gradients against verl's, areal's and trl's, and where these differ: docs/agreement.md."""

# pyright: reportMissingImports=false, reportArgumentType=false

import pytest
import torch
from torch import Tensor

from areal_q.algorithms import loss_fn, whole_step
from areal_q.config import (
    Cispo,
    Decoupled,
    Gspo,
    IcePop,
    Mis,
    Naive,
    Ppo,
    ReferenceKl,
    Run,
    Sapo,
    SeqMeanTokenMean,
    SeqMeanTokenSumNorm,
    Tis,
    TokenMean,
    ValueLoss,
    override,
)
from areal_q.errors import ConfigError
from bench.peers.losses import Padded, areal, areal_loss, trl_loss, trl_scored, verl_correction
from bench.peers.losses import verl_loss as verl

pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(300),  # the first use of each peer imports it
    pytest.mark.filterwarnings("ignore"),  # theirs
]

LENGTHS = torch.tensor([9, 4, 1, 12, 7, 12] * 4)
MASKED = [(0, 3), (3, 0), (3, 1), (5, 11)]
"""Tokens of tools, inside responses and at their ends"""


def responses(seed=0, per_token_advantage=False, lengths=LENGTHS, gap=0.5) -> Padded:
    g = torch.Generator().manual_seed(seed)
    shape = (len(lengths), 12)

    def normal(*size):
        return torch.randn(*(size or shape), generator=g, dtype=torch.float64)

    prox = -1.5 - normal().abs()
    advantages = normal() if per_token_advantage else normal(len(lengths), 1).expand(shape)
    mask = torch.arange(12) < lengths[:, None]
    for place in MASKED:
        mask[place] = False
    return Padded(
        logprobs=(prox + 0.3 * normal()).requires_grad_(),
        proximal=prox,
        behavior=prox + gap * normal(),
        advantages=advantages.contiguous(),
        mask=mask,
        lengths=lengths,
    )


def ours(batch: Padded, objective, aggregation=None, **more) -> Tensor:
    return loss_fn(batch.pack(), objective, aggregation, **more).loss


def apart(left: Tensor, right: Tensor, batch: Padded) -> tuple[float, float]:
    """Largest differences of the values and of the gradients, relative to the largest of the left side."""
    value = ((left - right) / left).abs().item()
    (a,) = torch.autograd.grad(left, batch.logprobs, retain_graph=True)
    (b,) = torch.autograd.grad(right, batch.logprobs, retain_graph=True)
    assert a.abs().max() > 0
    return value, ((a - b).abs().max() / a.abs().max()).item()


def agree(left: Tensor, right: Tensor, batch: Padded, within=1e-10) -> bool:
    return max(apart(left, right, batch)) < within


VERL = 1e-7
"""verl adds 1e-8 to a response's number of tokens"""
FLOAT32 = 2e-6
"""For what a peer rounds to float32 on the way"""

AGGREGATIONS = {
    "token-mean": TokenMean(),
    "seq-mean-token-mean": SeqMeanTokenMean(),
    "seq-mean-token-sum-norm": SeqMeanTokenSumNorm(length=12),
}
BAND = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
HIGHER = {"clip_low": 0.2, "clip_high": 0.28}


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_ppo_and_its_aggregations_equal_verls(mode):
    batch = responses()
    assert agree(
        ours(batch, Ppo(**HIGHER), AGGREGATIONS[mode]),
        verl(batch, aggregation=mode, **BAND),
        batch,
        VERL,
    )


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_dual_clip_equals_verls(mode):
    batch = responses()
    mine = ours(batch, Ppo(dual_clip=1.1), AGGREGATIONS[mode])
    assert agree(mine, verl(batch, aggregation=mode, clip_ratio_c=1.1), batch, VERL)
    assert not agree(mine, verl(batch, aggregation=mode), batch, 1e-3)


def test_naive_equals_verls_loss_with_engine_logprobs_as_old():
    batch = responses()
    assert agree(ours(batch, Naive()), verl(batch, old=batch.behavior), batch)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_gspo_equals_verls(mode):
    batch, band = responses(), {"clip_low": 0.05, "clip_high": 0.06}
    theirs = verl(batch, "gspo", mode, clip_ratio_low=0.05, clip_ratio_high=0.06)
    assert agree(ours(batch, Gspo(**band), AGGREGATIONS[mode]), theirs, batch, VERL)


def test_sapo_equals_verls():
    batch = responses()
    theirs = verl(batch, "sapo", tau_pos=1.0, tau_neg=1.05)
    assert agree(ours(batch, Sapo(), SeqMeanTokenMean()), theirs, batch, VERL)


def test_cispo_equals_verls_without_its_lower_bound():
    batch = responses()
    theirs = verl(batch, "cispo", clip_ratio_low=1.0, clip_ratio_high=0.25)
    assert agree(ours(batch, Cispo(clip_high=0.25)), theirs, batch)


@pytest.mark.parametrize(
    "objective, is_level, threshold",
    [
        (Tis(cap=1.3), "token", 1.3),
        (Tis(cap=1.3, level="product"), "sequence", 1.3),
        (Decoupled(), "token", 1e9),
        (IcePop(cap_low=0.6, cap_high=1.5), "token", "0.6_1.5"),
        (Mis(cap_low=0.6, cap_high=1.5), "token", "0.6_1.5"),
        (Mis(cap_low=0.2, cap_high=1.5, level="product"), "sequence", "0.2_1.5"),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_mismatch_weights_equal_verls_rollout_correction(objective, is_level, threshold, mode):
    batch = responses()
    weights, _ = verl_correction(batch, rollout_is=is_level, rollout_is_threshold=threshold)
    theirs = verl(batch, aggregation=mode, weights=weights)
    assert agree(ours(batch, objective, AGGREGATIONS[mode]), theirs, batch, VERL)


@pytest.mark.parametrize(
    "level, is_level, rejection",
    [("token", "token", "token_k1"), ("product", "sequence", "seq_sum_k1")],
)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_masks_equal_verls_rejection_with_its_bounds_inverted(level, is_level, rejection, mode):
    """verl compares -log w with the logarithms of its bounds: "a_b" keeps 1/b ≤ w ≤ 1/a."""
    batch, low, high = responses(), 0.3, 1.6
    weights, mask = verl_correction(
        batch,
        rollout_is=is_level,
        rollout_is_threshold=1e9,
        rollout_rs=rejection,
        rollout_rs_threshold=f"{1 / high}_{1 / low}",
    )
    assert 0 < mask.sum() < batch.mask.sum()
    objective = Mis(cap_low=low, cap_high=high, level=level, denominator="kept_tokens")
    theirs = verl(batch, aggregation=mode, weights=weights, mask=mask)
    assert agree(ours(batch, objective, AGGREGATIONS[mode]), theirs, batch, VERL)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_reference_kl_in_the_loss_equals_verls(estimator, mode):
    from verl.trainer.ppo.core_algos import agg_loss, kl_penalty

    batch = responses()
    reference = batch.proximal + 0.4 * torch.randn(batch.mask.shape, dtype=torch.float64)
    inputs = batch.pack(reference_logprobs=reference)
    cfg = ReferenceKl(coef=0.3, estimator=estimator)
    mine = loss_fn(inputs, Ppo(), AGGREGATIONS[mode], reference_kl=cfg).loss
    kl = kl_penalty(batch.logprobs, reference, estimator)
    theirs = verl(batch, aggregation=mode) + 0.3 * agg_loss(kl, batch.mask.double(), mode)
    assert agree(mine, theirs, batch, VERL)


def test_value_loss_equals_verls_and_areals():
    from verl.trainer.ppo.core_algos import compute_value_loss

    batch = responses()
    g = torch.Generator().manual_seed(1)
    old, returns = torch.randn(2, *batch.mask.shape, generator=g)
    values = (old + 0.4 * torch.randn(batch.mask.shape, generator=g)).requires_grad_()
    inputs = batch.pack(values=values, old_values=old, returns=returns)
    out = loss_fn(inputs, Ppo(), value=ValueLoss(coef=1.0, clip=0.2))
    mine = out.loss - loss_fn(inputs, Ppo()).loss
    of_verl, _ = compute_value_loss(values, returns, old, batch.mask.float(), 0.2)
    critic = areal("utils.functional.functional").ppo_critic_loss_fn
    of_areal, _ = critic(values, old, returns, 0.2, batch.mask)
    (expected,) = torch.autograd.grad(mine, values)
    for theirs in (of_verl, of_areal):
        torch.testing.assert_close(mine.float(), theirs)
        torch.testing.assert_close(torch.autograd.grad(theirs, values)[0], expected)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_micro_batches_add_up_as_verls_told_the_steps_counts(mode):
    batch = responses()
    counts = {
        "batch_num_tokens": int(batch.mask.sum()),
        "global_batch_size": 24,
        "loss_scale_factor": 12,
    }
    parts, theirs = [], []
    for rows in (slice(0, 7), slice(7, 24)):
        fields = {name: x[rows] for name, x in vars(batch).items()}
        parts.append(Padded(**fields))
        theirs.append(verl(parts[-1], aggregation=mode, global_batch_info=counts))
    inputs = [part.pack() for part in parts]
    totals = whole_step(inputs, Ppo())
    mine = [loss_fn(x, Ppo(), AGGREGATIONS[mode], totals).loss for x in inputs]
    for left, right in zip(mine, theirs, strict=True):
        assert agree(left, right, batch, VERL)


@pytest.mark.parametrize(
    "objective, settings",
    [
        (Ppo(), {}),
        (Ppo(**HIGHER), {"eps_clip_higher": 0.28}),
        (Ppo(dual_clip=1.1), {"c_clip": 1.1}),
        (
            Gspo(clip_low=0.05, clip_high=0.06),
            {"eps_clip": 0.05, "eps_clip_higher": 0.06, "importance_sampling_level": "sequence"},
        ),
        (Tis(cap=1.3), {"rejection": {"action": "clamp", "upper": 1.3}}),
        (
            Tis(cap=1.1, level="geometric"),
            {"rejection": {"action": "clamp", "upper": 1.1, "level": "sequence"}},
        ),
        (Decoupled(), {"rejection": {"action": "mask", "upper": 1e9}}),
        (
            IcePop(cap_low=0.6, cap_high=1.5),
            {"rejection": {"action": "mask", "upper": 1.5, "lower": 0.6}},
        ),
        (
            Mis(cap_low=0.9, cap_high=1.5, level="geometric"),
            {"rejection": {"action": "mask", "upper": 1.5, "lower": 0.9, "level": "sequence"}},
        ),
    ],
    ids=str,
)
def test_token_mean_losses_equal_areals(objective, settings):
    batch = responses()
    theirs = areal_loss(batch, **settings)
    assert agree(ours(batch, objective), theirs, batch, FLOAT32)


def test_naive_equals_areals_loss_that_is_not_decoupled():
    batch = responses()
    assert agree(ours(batch, Naive()), areal_loss(batch, proximal=batch.behavior), batch)


def test_sapo_equals_areals():
    batch = responses()
    theirs, _ = areal("utils.functional.functional").sapo_loss_fn(
        batch.logprobs, batch.proximal, batch.advantages, 1.0, 1.05, batch.mask
    )
    assert agree(ours(batch, Sapo()), theirs, batch)


@pytest.mark.parametrize(
    "objective, aggregation, settings",
    [
        (Ppo(), SeqMeanTokenMean(), {"loss_type": "grpo"}),
        (Ppo(**HIGHER), TokenMean(), {"loss_type": "bnpo", "epsilon_high": 0.28}),
        (Ppo(**HIGHER), TokenMean(), {"loss_type": "dapo", "epsilon_high": 0.28}),
        (Ppo(dual_clip=1.3), TokenMean(), {"loss_type": "dapo", "delta": 1.3}),
        (
            Ppo(),
            SeqMeanTokenSumNorm(length=12),
            {"loss_type": "dr_grpo", "max_completion_length": 12},
        ),
        (
            Gspo(clip_low=0.05, clip_high=0.06),
            SeqMeanTokenMean(),
            {
                "loss_type": "grpo",
                "importance_sampling_level": "sequence",
                "epsilon": 0.05,
                "epsilon_high": 0.06,
            },
        ),
        (
            Sapo(),
            SeqMeanTokenMean(),
            {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
        ),
        # TRL's bound is the ratio's, not its distance from 1.
        (Cispo(clip_high=0.25), TokenMean(), {"loss_type": "cispo", "epsilon_high": 1.25}),
    ],
    ids=str,
)
def test_losses_equal_trls(objective, aggregation, settings):
    batch = responses()
    within = FLOAT32 if isinstance(objective, Sapo) else 1e-10  # TRL's temperatures are float32
    assert agree(ours(batch, objective, aggregation), trl_loss(batch, **settings), batch, within)


@pytest.mark.parametrize(
    "objective, mode, bounds",
    [
        (Tis(cap=1.3), "token_truncate", {"max": 1.3}),
        (Tis(cap=1.3, level="product"), "sequence_truncate", {"max": 1.3}),
        (Mis(cap_low=0.6, cap_high=1.5), "token_mask", {"min": 0.6, "max": 1.5}),
        (
            Mis(cap_low=0.2, cap_high=1.5, level="product"),
            "sequence_mask",
            {"min": 0.2, "max": 1.5},
        ),
    ],
    ids=str,
)
def test_mismatch_weights_equal_trls_importance_correction(objective, mode, bounds):
    batch = responses()
    settings = {f"vllm_importance_sampling_clip_{name}": x for name, x in bounds.items()}
    settings |= {"vllm_importance_sampling_mode": mode}
    ratio = trl_scored(torch.randn(24), 3, batch, **settings)["importance_sampling_ratio"]
    theirs = trl_loss(batch, ratio=ratio, loss_type="dapo", **settings)
    assert agree(ours(batch, objective), theirs, batch, FLOAT32)


def test_k3_in_the_loss_equals_trls_without_its_correction():
    batch = responses()
    reference = batch.proximal + 0.4 * torch.randn(batch.mask.shape, dtype=torch.float64)
    mine = loss_fn(
        batch.pack(reference_logprobs=reference), Ppo(), reference_kl=ReferenceKl(coef=0.3)
    ).loss
    settings = {"loss_type": "dapo", "beta": 0.3, "reference": reference}
    assert agree(mine, trl_loss(batch, use_bias_correction_kl=False, **settings), batch)
    assert not agree(mine, trl_loss(batch, **settings), batch, 1e-3)


# ---- Known disagreements. Each says which side does what, and fails when a peer changes its mind.


def test_sequence_weight_is_a_product_but_a_mean_in_areal():
    batch = responses()
    weights, _ = verl_correction(batch, rollout_is="sequence", rollout_is_threshold=1.1)
    of_verl = verl(batch, weights=weights)
    of_areal = areal_loss(batch, rejection={"action": "clamp", "upper": 1.1, "level": "sequence"})
    assert not agree(of_verl, of_areal, batch, 1e-2)
    assert agree(ours(batch, Tis(cap=1.1, level="product")), of_verl, batch)
    assert agree(ours(batch, Tis(cap=1.1, level="geometric")), of_areal, batch, FLOAT32)


def test_verls_rejection_divides_by_kept_tokens_areals_by_all():
    batch, low, high = responses(), 0.6, 1.5
    weights, mask = verl_correction(
        batch,
        rollout_is="token",
        rollout_is_threshold=1e9,
        rollout_rs="token_k1",
        rollout_rs_threshold=f"{1 / high}_{1 / low}",
    )
    of_verl = verl(batch, weights=weights, mask=mask)
    of_areal = areal_loss(batch, rejection={"action": "mask", "upper": high, "lower": low})
    kept, all_tokens = mask.sum(), batch.mask.sum()
    assert kept < all_tokens
    torch.testing.assert_close(of_verl * kept, of_areal * all_tokens, rtol=FLOAT32, atol=0)
    for denominator, theirs in (("kept_tokens", of_verl), ("all_tokens", of_areal)):
        objective = Mis(cap_low=low, cap_high=high, denominator=denominator)
        assert agree(ours(batch, objective), theirs, batch, FLOAT32)


@pytest.mark.parametrize(
    "weight, kept_by_verl", [(0.61, False), (0.63, True), (1.5, True), (1.62, True), (1.67, False)]
)
def test_verls_k1_bounds_hold_for_the_inverse_of_the_weight(weight, kept_by_verl):
    """ "0.6_1.6" keeps 1/1.6 = 0.625 ≤ w ≤ 1/0.6 = 1.667; ours bounds w itself."""
    one = torch.zeros(1, 1, dtype=torch.float64)
    batch = Padded(
        logprobs=one.clone().requires_grad_(),
        proximal=one,
        behavior=one - torch.tensor(weight, dtype=torch.float64).log(),
        advantages=one + 1,
        mask=one == 0,
        lengths=torch.tensor([1]),
    )
    _, mask = verl_correction(batch, rollout_rs="token_k1", rollout_rs_threshold="0.6_1.6")
    assert bool(mask.item()) is kept_by_verl
    kept_by_us = ours(batch, Mis(cap_low=0.6, cap_high=1.6)).item() != 0
    assert kept_by_us is (0.6 <= weight <= 1.6)


def test_areals_decoupled_loss_has_no_weight_without_rejection():
    batch = responses()
    theirs = areal_loss(batch)
    assert agree(ours(batch, Ppo()), theirs, batch)
    assert not agree(ours(batch, Decoupled()), theirs, batch, 1e-2)


def test_verls_cispo_also_bounds_the_ratio_from_below():
    """MiniMax leaves the lower bound open; verl's default of 0.2 raises ratios below 0.8."""
    batch = responses()
    theirs = verl(batch, "cispo", clip_ratio_low=0.2, clip_ratio_high=0.25)
    assert not agree(ours(batch, Cispo(clip_high=0.25)), theirs, batch, 1e-3)


def test_gspo_with_an_advantage_per_token_differs_in_all_four():
    """verl keeps each token's advantage in its own gradient, areal takes the response's mean advantage;
    ours and TRL's weigh the one gradient of the response's ratio by all of its tokens' J."""
    batch = responses(per_token_advantage=True)
    band = {"eps_clip": 0.05, "eps_clip_higher": 0.06}
    mine = ours(batch, Gspo(clip_low=0.05, clip_high=0.06), SeqMeanTokenMean())
    of_trl = trl_loss(
        batch,
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=0.05,
        epsilon_high=0.06,
    )
    of_verl = verl(batch, "gspo", "seq-mean-token-mean", clip_ratio_low=0.05, clip_ratio_high=0.06)
    assert agree(mine, of_trl, batch)
    value, gradient = apart(mine, of_verl, batch)
    assert value < VERL and gradient > 1e-2
    of_areal = areal_loss(batch, importance_sampling_level="sequence", **band)
    token_mean = ours(batch, Gspo(clip_low=0.05, clip_high=0.06))
    assert not agree(token_mean, of_areal, batch, 1e-2)


def test_response_without_counted_tokens_counts_in_trl_alone():
    whole = responses()
    mask = whole.mask.clone()
    mask[1] = False
    batch = Padded(**{**vars(whole), "mask": mask})
    mine = ours(batch, Ppo(), SeqMeanTokenMean())
    assert agree(mine, verl(batch, aggregation="seq-mean-token-mean"), batch, VERL)
    assert agree(mine * 23 / 24, trl_loss(batch, loss_type="grpo"), batch)
    constant = ours(batch, Ppo(), SeqMeanTokenSumNorm(length=12))
    theirs = trl_loss(batch, loss_type="dr_grpo", max_completion_length=12)
    assert agree(constant * 23 / 24, theirs, batch)


def test_verl_and_areal_cap_a_tokens_k3_at_ten_and_ours_does_not():
    from verl.trainer.ppo.core_algos import kl_penalty

    logprobs, reference = torch.tensor([-8.0]), torch.tensor([-1.0])  # e⁷ - 7 - 1
    assert kl_penalty(logprobs, reference, "k3").item() == 10
    assert areal("utils.data").KLEstimator("k3")(logprobs, reference).item() == 10
    one = torch.zeros(1, 1, dtype=torch.float64)
    batch = Padded(
        logprobs=(one - 8).requires_grad_(),
        proximal=one - 8,
        behavior=one - 8,
        advantages=one,
        mask=one == 0,
        lengths=torch.tensor([1]),
    )
    inputs = batch.pack(reference_logprobs=one - 1)
    mine = loss_fn(inputs, Ppo(), reference_kl=ReferenceKl(coef=1.0)).loss
    assert mine.item() == pytest.approx(1096.6331584 - 8)


def test_trl_takes_a_truncated_distribution_for_the_whole():
    """The engine's log-probs are then of fewer tokens than the learner's, and no ratio is right. With a top_k
    ours records which ones."""
    from trl import GRPOConfig

    assert GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, top_p=0.9).top_p == 0.9
    with pytest.raises(ConfigError, match="top_p"):
        override(Run(), "rollout.sampling.top_p=0.9")
    assert override(Run(), "rollout.sampling={top_p=0.9, top_k=20}").rollout.sampling.truncated
