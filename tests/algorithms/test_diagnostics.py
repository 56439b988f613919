"""The metrics of a loss against hand-computed ones and numpy's."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_q.algorithms import OBJECTIVES, LossInputs, loss_fn, reduce_metrics
from areal_q.algorithms.diagnostics import _cut
from areal_q.algorithms.lag_sums import LAGS, LagSums
from areal_q.algorithms.reducers import (
    BINS,
    EffectiveSampleShare,
    Max,
    Mean,
    RatioQuantile,
    Sum,
    merge_metrics,
)
from areal_q.config import Acr, Mis, Ppo, PythonObjective, ReferenceKl, Tbpo, ValueLoss

LN2 = math.log(2)


def five_tokens() -> LossInputs:
    """R 2, ½, 1, 2, ½;  w 4, 1, ½, 1, (masked) 9;  A 1, -1, 1, -1, 1;  lags 0, 0, 1, 6, 0."""
    r = torch.tensor([2.0, 0.5, 1.0, 2.0, 0.5], dtype=torch.float64)
    w = torch.tensor([4.0, 1.0, 0.5, 1.0, 9.0], dtype=torch.float64)
    theta = torch.tensor([-1.0, -2.0, -3.0, -4.0, -50.0], dtype=torch.float64)
    return LossInputs(
        logprobs=theta.clone().requires_grad_(),
        proximal_logprobs=theta - r.log(),
        behavior_logprobs=theta - r.log() - w.log(),
        advantages=torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64),
        mask=torch.tensor([True, True, True, True, False]),
        sequence_ids=torch.tensor([0, 0, 0, 1, 1]),
        num_sequences=2,
        version_lag=torch.tensor([0, 0, 1, 6, 0]),
    )


def metrics(inputs, cfg, **more):
    return reduce_metrics([loss_fn(inputs, cfg, **more).metrics])


def test_one_float64_input_makes_the_loss_float64():
    mixed = replace(five_tokens(), advantages=five_tokens().advantages.float())
    assert loss_fn(mixed, Acr(cap=2.0)).loss.dtype == torch.float64


def test_mismatch_metrics_by_hand():
    m = metrics(five_tokens(), Acr(cap=2.0))
    expected = {
        "tokens": 4,
        "weight_mean": 6.5 / 4,
        "weight_max": 4.0,
        # (Σw)² / (n Σw²) = 6.5² / (4 · 18.25)
        "ess": 42.25 / 73,
        # -mean(2 ln 2, 0, -ln 2, 0)
        "kl": -LN2 / 4,
        # mean(3 - 2 ln 2, 0, -½ + ln 2, 0)
        "kl_k3": (2.5 - LN2) / 4,
        "truncated_fraction": 0.25,
        "lag_0/tokens": 2,
        "lag_0/weight_max": 4.0,
        "lag_0/kl": -LN2,
        "lag_0/ess": 25 / 34,
        "lag_0/truncated_fraction": 0.5,
        "lag_1/kl": LN2,
        "lag_1/weight_max": 0.5,
        "lag_3/kl": 0.0,
        "lag_3/ess": 1.0,
        # the mean of lag 0 alone, (3 - 2 ln 2 + 0)/2, and what is missing to (2.5 - ln 2)/4
        "cause/engine_kl_k3": (3 - 2 * LN2) / 2,
        "cause/staleness_kl_k3": (2.5 - LN2) / 4 - (3 - 2 * LN2) / 2,
    }
    found = {key: m[f"mismatch/{key}"] for key in expected}
    assert found == pytest.approx(expected, abs=1e-12)
    assert not [key for key in m if "lag_2" in key]


NAMED = {
    "mismatch": (
        "weight_mean",
        "weight_max",
        "weight_p99",
        "ess",
        "kl",
        "kl_k3",
        "truncated_fraction",
    ),
    "policy": (
        *("ratio_mean", "ratio_max", "ratio_p99", "kl", "kl_k3", "entropy", "mask_fraction"),
        *("clip_fraction_up", "clip_fraction_down", "clip_fraction_dual"),
    ),
}


@pytest.mark.parametrize(
    "objective",
    [cfg() for cfg in OBJECTIVES if cfg is not PythonObjective],
    ids=lambda c: type(c).__name__,
)
def test_every_objective_reports_everything_in_all_and_by_lag(objective):
    m = metrics(five_tokens(), objective)
    for lag in ("", "lag_0/", "lag_1/", "lag_3/"):
        for kind, names in NAMED.items():
            assert {f"{kind}/{lag}{name}" for name in names} <= m.keys()
    # Of the raw ratios, whatever the objective does with them.
    assert (m["mismatch/weight_max"], m["policy/ratio_max"]) == pytest.approx((4.0, 2.0))
    assert m["mismatch/cause/engine_kl_k3"] + m["mismatch/cause/staleness_kl_k3"] == pytest.approx(
        m["mismatch/kl_k3"]
    )


def test_value_metrics_by_hand():
    inputs = five_tokens()
    values = torch.tensor([0.0, 1.0, 1.0, 3.0, 77.0], dtype=torch.float64)
    old = torch.tensor([0.0, 0.0, 1.0, 1.0, 99.0], dtype=torch.float64)
    returns = torch.tensor([0.0, 2.0, 0.0, 2.0, math.nan], dtype=torch.float64)
    inputs = replace(inputs, values=values, old_values=old, returns=returns.nan_to_num(5.0))
    m = metrics(inputs, Ppo(), value=ValueLoss(coef=2.0, clip=0.5))
    # Var(returns) = 1; errors 0, 2, -1, 1: mean ½, mean square 1.5, so Var = 1.25
    expected = {"explained_variance": -0.25, "mean": 0.5, "return_mean": 1.0}
    # clipped: 0, ½, 1, 1½: squares 0, 2.25, 1, 0.25 against the plain 0, 1, 1, 1: only the second is worse
    expected |= {"clip_fraction": 0.25}
    assert {k: m[f"value/{k}"] for k in expected} == pytest.approx(expected)
    assert m["loss/value"] == pytest.approx(2.0 * (0 + 2.25 + 1 + 1) / 2 / 4)


def test_reference_metrics_by_hand():
    inputs = five_tokens()
    d = torch.tensor([LN2, 0.0, -LN2, 0.0, math.inf], dtype=torch.float64)  # log π_ref - log π_θ
    inputs = replace(inputs, reference_logprobs=inputs.logprobs.detach() + d)
    m = metrics(inputs, Ppo(), reference_kl=ReferenceKl(place="reward"))
    assert m["reference/kl"] == pytest.approx(0.0)
    assert m["reference/kl_k3"] == pytest.approx((2 - 1 - LN2 + 0.5 - 1 + LN2) / 4)


def test_policy_metrics_by_hand():
    m = metrics(five_tokens(), Ppo(dual_clip=1.5))
    expected = {
        "ratio_mean": 5.5 / 4,
        "ratio_max": 2.0,
        "clip_fraction_up": 0.25,
        "clip_fraction_down": 0.25,
        "clip_fraction_dual": 0.25,
        "mask_fraction": 0.0,
        # -mean(ln 2, -ln 2, 0, ln 2)
        "kl": -LN2 / 4,
        # mean(1 - ln 2, -½ + ln 2, 0, 1 - ln 2)
        "kl_k3": (1.5 - LN2) / 4,
        "entropy": 2.5,
        "lag_0/clip_fraction_up": 0.5,
        "lag_0/clip_fraction_dual": 0.0,
        "lag_3/clip_fraction_dual": 1.0,
        "bounded_tokens": 0.0,
    }
    assert {key: m[f"policy/{key}"] for key in expected} == pytest.approx(expected, abs=1e-12)


def test_ratio_beyond_a_bound_that_is_idle_is_not_clipped():
    # A > 0 with R = ½, and A < 0 with R = 2: PPO's minimum takes the unclipped term of both.
    inputs = five_tokens()
    m = metrics(replace(inputs, advantages=-inputs.advantages), Ppo())
    # tokens 0 (2, A < 0) and 1 (½, A > 0) pass, token 2 is at 1, token 3 (2, A > 0) is clipped
    assert m["policy/clip_fraction_down"] == 0.0
    assert m["policy/clip_fraction_up"] == 0.25


def test_acr_widens_what_its_clip_fraction_counts():
    # token 0: R = 2 under 1.2·4/2 = 2.4
    assert metrics(five_tokens(), Acr(cap=2.0))["policy/clip_fraction_up"] == 0.0
    assert metrics(five_tokens(), Ppo())["policy/clip_fraction_up"] == 0.25


def test_mask_fraction_counts_what_the_objective_dropped():
    assert metrics(five_tokens(), Mis(cap_low=0.6))["policy/mask_fraction"] == 0.5
    # sequence 1 is one token of s = 2 with A < 0; token 1 has A < 0 and s = 1
    assert metrics(five_tokens(), Tbpo())["policy/mask_fraction"] == 0.25


def test_a_weight_at_its_very_cap_is_not_truncated():
    # w = (4, 1, ½, 1)
    assert metrics(five_tokens(), Acr(cap=1.0))["mismatch/truncated_fraction"] == 0.25
    # by sequence: the cube root of 2 for three tokens, 1 for one
    assert metrics(five_tokens(), Tbpo(cap=1.0))["mismatch/truncated_fraction"] == 0.75


@pytest.mark.parametrize("log_w", [20.0, -20.0])
def test_the_largest_and_smallest_ratios_have_bins_of_their_own(log_w):
    inputs = five_tokens()
    m = metrics(replace(inputs, behavior_logprobs=inputs.proximal_logprobs - log_w), Ppo())
    assert math.log(m["mismatch/weight_p99"]) == pytest.approx(log_w, rel=0.01)


def test_given_entropy_replaces_its_estimate():
    inputs = replace(five_tokens(), entropy=torch.tensor([1.0, 2.0, 3.0, 4.0, math.nan]))
    assert metrics(inputs, Ppo())["policy/entropy"] == 2.5
    inputs = replace(five_tokens(), entropy=torch.tensor([1.0, 1.0, 1.0, 1.0, math.nan]))
    assert metrics(inputs, Ppo())["policy/entropy"] == 1.0


def test_loss_metrics_add_up_to_the_loss():
    inputs = replace(five_tokens(), entropy=torch.ones(5, dtype=torch.float64))
    out = loss_fn(inputs, Ppo(), entropy_coef=0.5)
    m = reduce_metrics([out.metrics])
    assert m["loss/entropy"] == pytest.approx(-0.5)
    assert m["loss/policy"] + m["loss/entropy"] == pytest.approx(m["loss/total"])
    assert m["loss/total"] == pytest.approx(out.loss.item())


def test_tokens_whose_log_ratio_was_bounded_are_counted():
    inputs = five_tokens()
    far = inputs.behavior_logprobs.clone()
    far[1] -= 1000
    m = metrics(replace(inputs, behavior_logprobs=far), Ppo())
    assert m["policy/bounded_tokens"] == 1
    assert m["mismatch/weight_max"] == pytest.approx(math.exp(20))
    assert m["mismatch/kl"] == pytest.approx((-LN2 - 1000) / 4)


@pytest.mark.parametrize("spread", [1e-3, 0.1, 1.0, 5.0])
def test_p99_is_numpy_s_within_one_percent_of_the_logarithm(spread):
    g = torch.Generator().manual_seed(0)
    n = 20_000
    log_w = spread * torch.randn(n, generator=g, dtype=torch.float64)
    zeros = torch.zeros(n, dtype=torch.float64)
    inputs = LossInputs(
        logprobs=zeros,
        proximal_logprobs=zeros,
        behavior_logprobs=-log_w,
        advantages=zeros,
        mask=torch.ones(n, dtype=torch.bool),
        sequence_ids=torch.zeros(n, dtype=torch.int64),
        num_sequences=1,
        version_lag=torch.zeros(n, dtype=torch.int64),
    )
    expected = np.quantile(log_w.clamp(-20, 20).numpy(), 0.99)
    m = metrics(inputs, Ppo())
    assert math.log(m["mismatch/weight_p99"]) == pytest.approx(expected, rel=0.015)
    assert m["policy/ratio_p99"] == pytest.approx(1.0, abs=2e-5)


def test_reducers_merge_to_what_the_whole_would_give():
    counts = np.zeros(BINS, dtype=np.int64)
    counts[1024] = 5
    merged = merge_metrics(
        [
            {"a": Mean(1.0, 1), "b": Max(-1.0), "c": Sum(2.0), "e": RatioQuantile(counts)},
            {"a": Mean(5.0, 2), "b": Max(-3.0), "d": EffectiveSampleShare(3.0, 5.0, 2)},
            {"a": Mean(0.0, 0), "d": EffectiveSampleShare(1.0, 1.0, 1), "e": RatioQuantile(counts)},
        ]
    )
    e = merged["e"]
    assert isinstance(e, RatioQuantile) and e.counts[1024] == 10
    # (1 + 2 + 1)² / (3 · (1 + 4 + 1))
    values = reduce_metrics([merged])
    assert values.pop("e") == pytest.approx(1.0, abs=1e-5)
    assert values == pytest.approx({"a": 2.0, "b": -1.0, "c": 2.0, "d": 16 / 18})


def test_a_metric_without_a_count_is_left_out():
    empty = {
        "a": Mean(0.0, 0),
        "b": Max(-math.inf),
        "c": EffectiveSampleShare(0.0, 0.0, 0),
        "d": RatioQuantile(np.zeros(BINS, dtype=np.int64)),
        "e": EffectiveSampleShare(0.0, 0.0, 3),  # weights that are all 0
    }
    assert reduce_metrics([empty]) == {}


def test_a_part_of_the_tokens_is_a_record_of_the_same_kind():
    part = _cut(five_tokens(), slice(1, 3))
    assert type(part) is LossInputs
    assert torch.equal(part.advantages, five_tokens().advantages[1:3]) and len(part.mask) == 2


def test_metrics_do_not_depend_on_how_tokens_are_batched(monkeypatch):
    whole = metrics(five_tokens(), Acr(cap=2.0))
    monkeypatch.setattr("areal_q.algorithms.diagnostics.CHUNK", 2)
    assert metrics(five_tokens(), Acr(cap=2.0)) == pytest.approx(whole, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("longest_run", [1, 3, 5000])
def test_sums_by_lag_equal_numpy_s_over_each_class(longest_run):
    g = torch.Generator().manual_seed(longest_run)
    lengths = torch.randint(1, longest_run + 1, (20_000 // longest_run + 1,), generator=g)
    bucket = torch.randint(0, LAGS + 1, (len(lengths),), generator=g).repeat_interleave(lengths)
    log_w, log_r = (s * torch.randn(len(bucket), generator=g) for s in (0.1, 9.0))
    columns = {"log_w": log_w, "flag": log_w > 0, "bfloat16": log_r.bfloat16()}
    columns["float64"] = log_w.double().sin()
    classes = [bucket.numpy() == k for k in range(LAGS)]

    by_lag = LagSums(bucket)

    sums = by_lag.sums(columns | {"none": None}).numpy()
    assert (sums[-1] == 0).all()
    for found, column in zip(sums, columns.values(), strict=False):
        values = column.double().numpy()
        assert found == pytest.approx([values[k].sum() for k in classes], rel=1e-10, abs=1e-9)
    assert by_lag.maxima([log_w]).tolist() == [
        [log_w.numpy()[k].max(initial=-np.inf) for k in classes]
    ]
    (counts,) = by_lag.histograms([log_r])
    assert counts.sum(1).tolist() == [k.sum() for k in classes]
