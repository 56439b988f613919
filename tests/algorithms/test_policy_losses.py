"""Each objective against tables worked out by hand.

Tokens 0-2 are sequence 0, tokens 3-4 sequence 1:

    token        0     1     2     3     4
    R           1.5   0.5   2.0   4.0   0.5     ε_l = ε_h = 0.2: [0.8, 1.2]
    w           3     0.5   3     1     4       C = 2
    A           1     2     1    -1    -1
    log π_θ    -1    -2    -1    -0.5  -3
"""

from typing import get_args

import pytest
import torch
from msgspec import structs

from areal_q.algorithms import OBJECTIVES, LossInputs, loss_fn, reduce_metrics
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
    ObjectiveConfig,
    Ppo,
    PythonObjective,
    ReferenceKl,
    Run,
    Sapo,
    SeqMeanTokenMean,
    Tbpo,
    Tis,
    ValueLoss,
    dump_toml,
    override,
    parse,
)
from areal_q.errors import ConfigError, RecordError

R = [1.5, 0.5, 2.0, 4.0, 0.5]
W = [3.0, 0.5, 3.0, 1.0, 4.0]
A = [1.0, 2.0, 1.0, -1.0, -1.0]
LOGPROBS = [-1.0, -2.0, -1.0, -0.5, -3.0]


def batch(r=R, w=W, a=A, ids=(0, 0, 0, 1, 1), dtype=torch.float64, **more):
    theta = torch.tensor(LOGPROBS, dtype=torch.float64)
    prox = theta - torch.tensor(r, dtype=torch.float64).log()
    behavior = prox - torch.tensor(w, dtype=torch.float64).log()
    return LossInputs(
        **{
            "logprobs": theta.to(dtype).requires_grad_(),
            "proximal_logprobs": prox.to(dtype),
            "behavior_logprobs": behavior.to(dtype),
            "advantages": torch.tensor(a, dtype=dtype),
            "mask": torch.ones(len(r), dtype=torch.bool),
            "sequence_ids": torch.tensor(ids),
            "num_sequences": max(ids) + 1,
            "version_lag": torch.zeros(len(r), dtype=torch.int64),
        }
        | more
    )


def objective_and_gradient(inputs, cfg):
    out = policy_loss(ratios(inputs), cfg).objective
    (gradient,) = torch.autograd.grad(out.sum(), inputs.logprobs)
    return out.detach().tolist(), gradient.tolist()


# The gradient by log π_θ of c·R is c·R itself, and 0 where the ratio was replaced by a bound.
TABLES = {
    # R·w = 4.5 0.25 6 4 2: tokens 0 and 2 at 1.2, 1 below and 3, 4 above their inactive bounds.
    "naive": (Naive(), [1.2, 0.5, 1.2, -4.0, -2.0], [0, 0.5, 0, -4.0, -2.0]),
    # 1.2·1, 0.5·2 (A > 0: no lower bound), 1.2·1, 4·-1 (A < 0: no upper bound), 0.8·-1
    "ppo": (Ppo(), [1.2, 1.0, 1.2, -4.0, -0.8], [0, 1.0, 0, -4.0, 0]),
    "clip higher": (Ppo(clip_high=0.5), [1.5, 1.0, 1.5, -4.0, -0.8], [1.5, 1.0, 0, -4.0, 0]),
    # token 3: min(4, 3)·-1
    "dual clip": (Ppo(dual_clip=3.0), [1.2, 1.0, 1.2, -3.0, -0.8], [0, 1.0, 0, 0, 0]),
    # ppo times 3, 0.5, 3, 1, 4
    "decoupled": (Decoupled(), [3.6, 0.5, 3.6, -4.0, -3.2], [0, 0.5, 0, -4.0, 0]),
    # ppo times 2, 0.5, 2, 1, 2
    "tis": (Tis(cap=2.0), [2.4, 0.5, 2.4, -4.0, -1.6], [0, 0.5, 0, -4.0, 0]),
    # products 3·0.5·3 = 4.5 and 1·4 = 4; cap 4.2 cuts the first
    "tis product": (
        Tis(cap=4.2, level="product"),
        [5.04, 4.2, 5.04, -16.0, -3.2],
        [0, 4.2, 0, -16.0, 0],
    ),
    # geometric means ³√4.5 = 1.650963624 and √4 = 2; cap 1.8 cuts the second
    "tis geometric": (
        Tis(cap=1.8, level="geometric"),
        [1.981156349, 1.650963624, 1.981156349, -7.2, -1.44],
        [0, 1.650963624, 0, -7.2, 0],
    ),
    # weights 3 and 3 stay inside [0.6, 3.5] with 1; 0.5 and 4 are outside
    "mis": (
        Mis(cap_low=0.6, cap_high=3.5),
        [3.6, 0, 3.6, -4.0, 0],
        [0, 0, 0, -4.0, 0],
    ),
    # product 4.5 is outside, 4 inside and the weight
    "mis product": (
        Mis(cap_high=4.2, level="product"),
        [0, 0, 0, -16.0, -3.2],
        [0, 0, 0, -16.0, 0],
    ),
    # geometric 1.65 inside, 2 outside
    "mis geometric": (
        Mis(cap_high=1.8, level="geometric"),
        [1.981156349, 1.650963624, 1.981156349, 0, 0],
        [0, 1.650963624, 0, 0, 0],
    ),
    # only 0.5 is outside [0.6, 5]
    "icepop": (IcePop(cap_low=0.6), [3.6, 0, 3.6, -4.0, -3.2], [0, 0, 0, -4.0, 0]),
    # tokens 0 and 2: w = 3 > 2 widens 1.2 to 1.2·3/2 = 1.8. 1.5 passes: 2·1.5; 2.0 does not: 2·1.8.
    # token 4: w = 4, but the lower bound stays 0.8: 2·0.8·-1
    "acr": (Acr(cap=2.0), [3.0, 0.5, 3.6, -4.0, -1.6], [3.0, 0.5, 0, -4.0, 0]),
    # widening at most 1.2: bound 1.44
    "acr ceiling": (
        Acr(cap=2.0, max_widening=1.2),
        [2.88, 0.5, 2.88, -4.0, -1.6],
        [0, 0.5, 0, -4.0, 0],
    ),
    # s = ³√1.5 = 1.144714243, over 1.1, and √2 = 1.414213562 with A < 0. The gradient of the sum of a
    # sequence's J: T·s·A/T at each token
    "gspo": (
        Gspo(clip_low=0.1, clip_high=0.1),
        [1.1, 2.2, 1.1, -1.414213562, -1.414213562],
        [0, 0, 0, -1.414213562, -1.414213562],
    ),
    # 4·σ(0.5), 4·σ(-0.5)·2, 4·σ(1); 2·σ(2·3)·-1, 2·σ(2·-0.5)·-1.  Gradient 4σ(1-σ)·R·A:
    # 4·0.235003712·1.5, 4·0.235003712·0.5·2, 4·0.196611933·2, -4·0.002466509·4, -4·0.196611933·0.5
    "sapo": (
        Sapo(temperature_positive=1.0, temperature_negative=2.0),
        [2.489837325, 3.020325349, 2.924234315, -1.995054754, -0.537882843],
        [1.410022273, 0.940014848, 1.572895466, -0.039464147, -0.393223866],
    ),
    # min(R, 2)·A = 1.5, 1, 2, -2, -0.5, times log π_θ; the weight is constant
    "cispo": (
        Cispo(clip_high=1.0),
        [-1.5, -2.0, -2.0, 1.0, 1.5],
        [1.5, 1.0, 2.0, -2.0, -0.5],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_objective_and_its_gradient_equal_the_table(name):
    cfg, expected, expected_gradient = TABLES[name]
    objective, gradient = objective_and_gradient(batch(), cfg)
    assert objective == pytest.approx(expected, rel=1e-8)
    assert gradient == pytest.approx(expected_gradient, rel=1e-7)


# TBPO with ε_h = 0.05, negative band [0.9, 1.2], C = 2; sequence 0 is tokens 0-1, then one token each.
#   s: √(2·0.605) = 1.1 with A > 0, bound 1.05;  1.19 inside;  1.21 and 0.89 just outside;  w̄: below
#   w: √(8·0.125) = 1;                4 → 2;        0.25 → 0.5,  1.5 inside the cap
BAND = Tbpo(clip_high=0.05, negative_clip_low=0.1, negative_clip_high=0.2, cap=2.0)


@pytest.mark.parametrize(
    "outside, last_r, expected, expected_gradient",
    [
        # 1.05, 1.05;  2·1.19·-1;  outside;  outside
        ("drop", 0.89, [1.05, 1.05, -2.38, 0, 0], [0, 0, -2.38, 0, 0]),
        # outside: 0.5·1.2·-1 and 1.5·0.9·-1, constants
        ("clamp", 0.89, [1.05, 1.05, -2.38, -0.6, -1.35], [0, 0, -2.38, 0, 0]),
        # the lower edge from inside: 1.5·0.91·-1
        ("drop", 0.91, [1.05, 1.05, -2.38, 0, -1.365], [0, 0, -2.38, 0, -1.365]),
    ],
)
def test_tbpo_equals_the_table_at_edges_of_its_negative_band(
    outside, last_r, expected, expected_gradient
):
    inputs = batch(
        r=[2.0, 0.605, 1.19, 1.21, last_r],
        w=[8.0, 0.125, 4.0, 0.25, 1.5],
        a=[1.0, 1.0, -1.0, -1.0, -1.0],
        ids=(0, 0, 1, 2, 3),
    )
    objective, gradient = objective_and_gradient(inputs, structs.replace(BAND, outside=outside))
    assert objective == pytest.approx(expected, rel=1e-9)
    assert gradient == pytest.approx(expected_gradient, rel=1e-9)


def test_tbpo_below_its_bound_has_the_geometric_mean_s_gradient():
    inputs = batch(r=[1.02] * 5, w=[1.0] * 5, a=[1.0] * 3 + [-1.0] * 2)
    objective, gradient = objective_and_gradient(inputs, BAND)
    assert objective == pytest.approx([1.02, 1.02, 1.02, -1.02, -1.02])
    assert gradient == pytest.approx([1.02, 1.02, 1.02, -1.02, -1.02])


def test_tbpo_defaults_are_qarl_s_and_widen_for_short_responses():
    cfg = Tbpo()
    assert (cfg.clip_high, cfg.negative_clip_low, cfg.negative_clip_high, cfg.cap) == (
        0.0004,
        0.0003,
        0.0007,
        2.0,
    )
    assert cfg.bands == (0.0004, 0.0003, 0.0007)
    short = Tbpo(response_tokens=64)  # √(16384/64) = 16
    assert short.bands == pytest.approx((0.0064, 0.0048, 0.0112))
    assert Tbpo(response_tokens=16384).bands == cfg.bands
    assert Tbpo(response_tokens=1, negative_clip_low=0.1).bands[1] == 1.0


@pytest.mark.parametrize(
    "r, a, inside",
    [
        # At T = 64 the negative band is [1 - 0.0048, 1 + 0.0112] and the positive bound 1 + 0.0064.
        (0.9951, -1.0, False),
        (0.9953, -1.0, True),
        (1.0111, -1.0, True),
        (1.0113, -1.0, False),
        (1.0063, 1.0, True),
        (1.0065, 1.0, False),
    ],
)
def test_tbpos_bands_act_where_the_response_length_puts_them(r, a, inside):
    inputs = batch(r=[r] * 5, w=[1.0] * 5, a=[a] * 5)
    _, gradient = objective_and_gradient(inputs, Tbpo(response_tokens=64))
    assert gradient == pytest.approx([r * a if inside else 0.0] * 5)


def test_every_objective_of_the_union_has_a_function():
    assert set(OBJECTIVES) == set(get_args(ObjectiveConfig))


CLIPPED = {
    "naive": (Naive(dual_clip=1.8), [0], [8], [2]),
    "ppo": (Ppo(dual_clip=1.8), [0], [8], [2]),
    "gspo": (Gspo(dual_clip=1.8), [0], [8], [2]),
    "cispo": (Cispo(clip_high=0.2), [0], [], [2]),
    "tbpo": (Tbpo(), [0], [8], [2]),
}
"""Tokens that are clipped up, down and by the bound for A < 0, of nine responses of one token each"""


@pytest.mark.parametrize("name", CLIPPED)
def test_clip_diagnostics_name_the_tokens_over_a_bound(name):
    """A token at R = 1 is inside every bound, and one without an advantage is not clipped."""
    objective, *expected = CLIPPED[name]
    ratio = torch.tensor([1.9] * 3 + [1.0] * 3 + [0.1] * 3, dtype=torch.float64)
    theta = torch.full((9,), -1.0, dtype=torch.float64)
    inputs = LossInputs(
        logprobs=theta,
        proximal_logprobs=theta - ratio.log(),
        behavior_logprobs=theta - ratio.log(),
        advantages=torch.tensor([1.0, 0, -1] * 3, dtype=torch.float64),
        mask=torch.ones(9, dtype=torch.bool),
        sequence_ids=torch.arange(9),
        num_sequences=9,
        version_lag=torch.zeros(9, dtype=torch.int64),
    )
    found = policy_loss(ratios(inputs), objective)
    masks = (found.clipped_up, found.clipped_down, found.clipped_dual)
    assert [[] if m is None else m.nonzero().flatten().tolist() for m in masks] == expected


def test_kept_tokens_leave_the_denominator_and_all_tokens_do_not():
    # w·ppo over w ≤ 2 keeps 0.5·1 and 1·-4: sum -3.5, over 5 tokens or over 2.
    assert loss_fn(batch(), Mis()).loss.item() == pytest.approx(3.5 / 5)
    kept = Mis(denominator="kept_tokens")
    assert loss_fn(batch(), kept).loss.item() == pytest.approx(3.5 / 2)
    # One kept token in each sequence: the means are 0.5 / 1 and -4 / 1, else 0.5 / 3 and -4 / 2.
    by_sequence = SeqMeanTokenMean()
    assert loss_fn(batch(), kept, by_sequence).loss.item() == pytest.approx(3.5 / 2)
    assert loss_fn(batch(), Mis(), by_sequence).loss.item() == pytest.approx((2 - 0.5 / 3) / 2)


@pytest.mark.parametrize(
    # log π_ref - log π_θ = -ln 2 at the first token and 0 elsewhere
    "estimator, nats",
    [("k1", 0.693147181), ("k2", 0.240226507), ("k3", 0.5 + 0.693147181 - 1)],
)
def test_reference_kl_adds_its_estimate_to_the_loss(estimator, nats):
    reference = torch.tensor(LOGPROBS, dtype=torch.float64)
    reference[0] -= 0.693147181
    inputs = batch(reference_logprobs=reference)
    cfg = ReferenceKl(coef=0.5, estimator=estimator)
    plain = loss_fn(inputs, Ppo()).loss
    out = loss_fn(inputs, Ppo(), reference_kl=cfg)
    assert (out.loss - plain).item() == pytest.approx(0.5 * nats / 5, rel=1e-6)
    in_reward = ReferenceKl(coef=0.5, estimator=estimator, place="reward")
    assert loss_fn(inputs, Ppo(), reference_kl=in_reward).loss.item() == plain.item()


def test_entropy_bonus_lowers_the_loss_and_pulls_entropy_up():
    entropy = torch.full((5,), 2.0, dtype=torch.float64, requires_grad=True)
    inputs = batch(entropy=entropy)
    out = loss_fn(inputs, Ppo(), entropy_coef=0.1)
    assert (loss_fn(inputs, Ppo()).loss - out.loss).item() == pytest.approx(0.2)
    (gradient,) = torch.autograd.grad(out.loss, entropy)
    assert gradient.tolist() == pytest.approx([-0.02] * 5)


def test_value_loss_takes_the_worse_of_clipped_and_plain_error():
    # old 0, clip 0.5.   V: 0.4 plain (target 1): 0.36;  2 → 0.5 clipped (target 0): plain 4 is worse;
    # 2 → 0.5 (target 2): clipped 2.25 is worse, and constant;  -1 → -0.5 (target 1): plain 4; 0: 0
    values = torch.tensor([0.4, 2.0, 2.0, -1.0, 0.0], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0], dtype=torch.float64)
    inputs = batch(values=values, old_values=torch.zeros_like(returns), returns=returns)
    out = loss_fn(inputs, Ppo(), value=ValueLoss(coef=1.0, clip=0.5))
    expected = (0.36 + 4 + 2.25 + 4 + 0) / 2 / 5
    assert (out.loss - loss_fn(inputs, Ppo()).loss).item() == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(out.loss, values)
    assert gradient.tolist() == pytest.approx([-0.12, 0.4, 0.0, -0.4, 0.0])


def test_value_inside_the_band_is_not_clipped_for_a_rounding():
    for old, now, returns in torch.rand(100, 3, 5, generator=torch.Generator().manual_seed(0)):
        values = {"values": now / 10, "old_values": old / 10, "returns": returns}
        out = loss_fn(batch(dtype=torch.float32, **values), Ppo(), value=ValueLoss(clip=0.2))
        assert reduce_metrics([out.metrics])["value/clip_fraction"] == 0


def test_value_that_is_as_wrong_when_clipped_counts_as_unclipped():
    value, old, returns = torch.tensor([[1.0], [0.0], [0.75]], dtype=torch.float64).expand(3, 5)
    inputs = batch(values=value, old_values=old, returns=returns)
    out = loss_fn(inputs, Ppo(), value=ValueLoss(clip=0.5))
    assert reduce_metrics([out.metrics])["value/clip_fraction"] == 0


ALL = [cfg() for cfg in OBJECTIVES if cfg is not PythonObjective]


@pytest.mark.parametrize("cfg", ALL, ids=lambda cfg: type(cfg).__name__)
def test_fully_masked_batch_gives_zero_loss_and_is_counted(cfg):
    nan = torch.full((5,), torch.nan)
    inputs = batch(mask=torch.zeros(5, dtype=torch.bool), advantages=nan, behavior_logprobs=nan)
    out = loss_fn(inputs, cfg)
    out.loss.backward()
    assert out.loss.item() == 0
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.tolist() == [0.0] * 5
    metrics = reduce_metrics([out.metrics])
    assert metrics["loss/all_masked_count"] == 1
    assert "mismatch/kl" not in metrics


def test_an_empty_micro_batch_is_a_fully_masked_one():
    empty = torch.zeros(0)
    inputs = LossInputs(
        logprobs=empty.clone().requires_grad_(),
        proximal_logprobs=empty,
        behavior_logprobs=empty,
        advantages=empty,
        mask=empty.bool(),
        sequence_ids=empty.long(),
        num_sequences=0,
        version_lag=empty.long(),
    )
    out = loss_fn(inputs, Acr())
    out.loss.backward()
    assert out.loss.item() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize(
    "name", ["logprobs", "proximal_logprobs", "behavior_logprobs", "advantages"]
)
def test_non_finite_input_raises_naming_sequence_and_token(name, bad):
    values = getattr(batch(), name).detach().clone()
    values[4] = bad
    with pytest.raises(RecordError, match=rf"sequence 1, token 1: {name} is (nan|-inf)"):
        loss_fn(batch(**{name: values}), Ppo())


def test_a_term_whose_input_is_missing_or_not_finite_is_an_error():
    cfg = ReferenceKl()
    with pytest.raises(RecordError, match="reference_logprobs"):
        loss_fn(batch(), Ppo(), reference_kl=cfg)
    reference = torch.tensor([0.0, 0.0, -torch.inf, 0.0, 0.0])
    with pytest.raises(RecordError, match="sequence 0, token 2: reference_logprobs is -inf"):
        loss_fn(batch(reference_logprobs=reference), Ppo(), reference_kl=cfg)
    with pytest.raises(RecordError, match="needs values"):
        loss_fn(batch(), Ppo(), value=ValueLoss())


@pytest.mark.parametrize("cfg", ALL, ids=lambda cfg: type(cfg).__name__)
def test_huge_log_ratios_give_a_finite_loss_and_gradient(cfg):
    inputs = batch(r=[1e200, 1e-200, 1e100, 1.0, 1.0], w=[1.0, 1e200, 1e-200, 1e150, 1e-150])
    inputs = batch(
        dtype=torch.float32,
        **{n: getattr(inputs, n).detach().float() for n in ("behavior_logprobs",)},
        proximal_logprobs=inputs.proximal_logprobs.float(),
    )
    out = loss_fn(inputs, cfg)
    out.loss.backward()
    assert out.loss.isfinite()
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ratios_are_float32_whatever_the_input_and_float64_stays(dtype):
    inputs = batch(dtype=dtype)
    x = ratios(inputs)
    assert x.log_ratio.dtype == x.log_mismatch.dtype == torch.float32
    # The difference of the rounded inputs, itself not rounded to bfloat16.
    expected = inputs.logprobs.detach().float() - inputs.proximal_logprobs.float()
    assert torch.equal(x.log_ratio.detach(), expected)
    assert ratios(batch()).log_ratio.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cfg", ALL, ids=lambda cfg: type(cfg).__name__)
def test_low_precision_input_gives_its_values_loss_in_float32(cfg, dtype):
    low = batch(dtype=dtype)
    names = ("logprobs", "proximal_logprobs", "behavior_logprobs", "advantages")
    rounded = {name: getattr(low, name).detach().float() for name in names}
    rounded["logprobs"].requires_grad_()
    one, other = loss_fn(low, cfg), loss_fn(batch(**rounded), cfg)
    assert one.loss.dtype == torch.float32
    assert torch.equal(one.loss, other.loss)
    one.loss.backward()
    assert low.logprobs.grad is not None and low.logprobs.grad.dtype == dtype
    assert low.logprobs.grad.isfinite().all()


def test_log_ratios_are_bounded_at_20_and_counted():
    inputs = batch(r=[1e30, 1.0, 1.0, 1.0, 1.0], w=[1.0, 1e30, 1.0, 1.0, 1.0])
    out = loss_fn(inputs, Decoupled(clip_high=1e12))
    metrics = reduce_metrics([out.metrics])
    assert (
        metrics["policy/ratio_max"]
        == metrics["mismatch/weight_max"]
        == pytest.approx(
            4.85165195e8  # e^20
        )
    )
    assert metrics["policy/bounded_tokens"] == 2
    (gradient,) = torch.autograd.grad(out.loss, inputs.logprobs)
    assert gradient[0] == 0 and gradient.isfinite().all()


@pytest.mark.parametrize("cfg", ALL, ids=lambda cfg: type(cfg).__name__)
def test_each_objective_is_chosen_by_its_type_in_the_settings(cfg):
    tag = type(cfg).__struct_config__.tag
    run = override(Run(), f"learner.objective.type={tag}")
    assert run.learner.objective == cfg
    assert parse(dump_toml(run), "run.toml") == run


def test_a_bound_or_choice_out_of_range_names_its_path():
    for setting, path in (
        ("learner.objective.cap=0.5", r"learner.objective.cap"),
        ("learner.objective.dual_clip=1.0", r"learner.objective.dual_clip"),
        ("learner.aggregation.type=seq_mean_token_sum_norm", "length"),
        ("learner.advantage.std=biased", r"learner.advantage.std"),
    ):
        with pytest.raises(ConfigError, match=path):
            override(Run(), setting)
