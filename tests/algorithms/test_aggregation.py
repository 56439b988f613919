"""A step's loss, gradient and metrics do not depend on how its tokens were cut, ordered or packed."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_q.algorithms import LossInputs, Totals, count, loss_fn, reduce_metrics, whole_step
from areal_q.config import (
    Acr,
    Cispo,
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

CHOICES = [
    Naive(),
    Ppo(dual_clip=1.2),
    Tis(),
    Tis(level="product"),
    Tis(level="geometric"),
    Mis(cap_high=1.2, denominator="kept_tokens"),
    Mis(cap_high=1.2, level="geometric", denominator="kept_tokens"),
    IcePop(cap_low=0.8, denominator="kept_tokens"),
    Acr(cap=1.1),
    Gspo(clip_high=0.05),
    Sapo(),
    Cispo(clip_high=0.1),
    Tbpo(clip_high=0.1, negative_clip_low=0.1, negative_clip_high=0.1),
]
objectives = st.sampled_from(CHOICES)
aggregations = st.sampled_from([TokenMean(), SeqMeanTokenMean(), SeqMeanTokenSumNorm(length=5)])


@st.composite
def batches(draw) -> LossInputs:
    """1 to 6 sequences of 1 to 5 tokens, some of them masked, of lags 0 to 5."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def normal():
        return torch.randn(len(ids), generator=g, dtype=torch.float64)

    prox = -1 + 0.3 * normal()
    return LossInputs(
        logprobs=prox + 0.2 * normal(),
        proximal_logprobs=prox,
        behavior_logprobs=prox + 0.3 * normal(),
        advantages=torch.randn(len(lengths), generator=g, dtype=torch.float64)[ids],
        mask=torch.rand(len(ids), generator=g) > 0.25,
        sequence_ids=ids,
        num_sequences=len(lengths),
        version_lag=torch.randint(0, 6, (len(ids),), generator=g),
        entropy=normal().abs(),
        reference_logprobs=prox + 0.1 * normal(),
        values=normal(),
        old_values=normal(),
        returns=normal(),
    )


def take(inputs: LossInputs, sequences: list[int]) -> tuple[LossInputs, torch.Tensor]:
    """These sequences in this order, as a micro-batch of their own, and their tokens' places."""
    rows = [(inputs.sequence_ids == s).nonzero().squeeze(-1) for s in sequences]
    index = torch.cat(rows)
    tensors = {
        f.name: getattr(inputs, f.name)[index]
        for f in fields(inputs)
        if isinstance(getattr(inputs, f.name), torch.Tensor)
    }
    ids = torch.cat([torch.full_like(row, i) for i, row in enumerate(rows)])
    cut = replace(inputs, **tensors | {"sequence_ids": ids, "num_sequences": len(sequences)})
    return cut, index


OTHER_TERMS = {
    "reference_kl": ReferenceKl(coef=0.3),
    "entropy_coef": 0.2,
    "value": ValueLoss(clip=0.4),
}


def step(parts, objective, aggregation, totals=None):
    """Loss, gradients and metrics of one optimizer step that consists of these micro-batches, or of a rank's
    share of one with these `totals`; with every term that a loss can have."""
    totals = totals or whole_step(parts, objective)
    losses, gradients, metrics = [], [], []
    for part in parts:
        theta = part.logprobs.clone().requires_grad_()
        inputs = replace(part, logprobs=theta)
        out = loss_fn(inputs, objective, aggregation, totals, **OTHER_TERMS)
        gradients.append(torch.autograd.grad(out.loss, theta)[0])
        losses.append(out.loss.item())
        metrics.append(out.metrics)
    return sum(losses), gradients, reduce_metrics(metrics)


def assert_same_metrics(left, right):
    left.pop("loss/all_masked_count")  # counts micro-batches
    right.pop("loss/all_masked_count")
    assert left == pytest.approx(right, rel=1e-9, abs=1e-12)


@pytest.mark.timeout(60)
@given(batches(), objectives, aggregations, st.data())
@settings(max_examples=150, deadline=None)
def test_order_and_cut_of_micro_batches_change_nothing(inputs, objective, aggregation, data):
    order = data.draw(st.permutations(range(inputs.num_sequences)))
    cut = data.draw(st.integers(0, inputs.num_sequences))
    pieces = [take(inputs, list(p)) for p in (order[:cut], order[cut:]) if p]
    loss, (gradient,), metrics = step([inputs], objective, aggregation)
    cut_loss, cut_gradients, cut_metrics = step([p for p, _ in pieces], objective, aggregation)
    assert cut_loss == pytest.approx(loss, rel=1e-9, abs=1e-12)
    for (_, index), cut_gradient in zip(pieces, cut_gradients, strict=True):
        torch.testing.assert_close(cut_gradient, gradient[index])
    assert_same_metrics(cut_metrics, metrics)


@pytest.mark.timeout(60)
@given(batches(), objectives, aggregations, st.integers(1, 3), st.data())
@settings(max_examples=100, deadline=None)
def test_a_cut_over_data_parallel_ranks_changes_nothing(
    inputs, objective, aggregation, ranks, data
):
    """Each rank has sequences of its own, in two micro-batches; all that ranks exchange are Totals, the sum of
    gradients and metrics."""
    owner = data.draw(st.lists(st.integers(0, ranks), min_size=inputs.num_sequences,
                               max_size=inputs.num_sequences))  # fmt: skip
    loss, (gradient,), metrics = step([inputs], objective, aggregation)
    shares = []
    for rank in range(ranks + 1):
        mine = [s for s in range(inputs.num_sequences) if owner[s] == rank]
        pieces = [take(inputs, p) for p in (mine[::2], mine[1::2]) if p]
        shares.append(([p for p, _ in pieces], [index for _, index in pieces]))
    totals = sum((whole_step(parts, objective) for parts, _ in shares), Totals(0, 0))
    total_loss, merged = 0.0, []
    summed = torch.zeros_like(gradient)
    for parts, places in shares:
        losses, gradients, _ = step(parts, objective, aggregation, totals)
        total_loss += losses
        for place, part in zip(places, gradients, strict=True):
            summed[place] += part
        merged += [loss_fn(p, objective, aggregation, totals, **OTHER_TERMS).metrics for p in parts]
    assert total_loss == pytest.approx(loss, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(summed, gradient)
    assert_same_metrics(reduce_metrics(merged), metrics)


@given(batches(), objectives, aggregations, st.data())
@settings(max_examples=60, deadline=None)
def test_cut_over_ranks_and_micro_batches_changes_nothing(inputs, objective, aggregation, data):
    rank_of = [data.draw(st.integers(0, 2)) for _ in range(inputs.num_sequences)]
    ranks = [[s for s, r in enumerate(rank_of) if r == rank] for rank in range(3)]
    parts = [[take(inputs, [s]) for s in sequences] for sequences in ranks]
    counts = [whole_step([part for part, _ in rank], objective) for rank in parts]
    totals = sum(counts, Totals(0, 0))

    def loss_and_gradient(part):
        theta = part.logprobs.clone().requires_grad_()
        out = loss_fn(replace(part, logprobs=theta), objective, aggregation, totals)
        return out.loss.item(), torch.autograd.grad(out.loss, theta)[0]

    loss, gradient = loss_and_gradient(inputs)
    cut_loss = 0.0
    for part, index in (piece for rank in parts for piece in rank):
        share, cut_gradient = loss_and_gradient(part)
        cut_loss += share
        torch.testing.assert_close(cut_gradient, gradient[index])
    assert cut_loss == pytest.approx(loss, rel=1e-9, abs=1e-12)


@given(batches(), objectives, aggregations)
@settings(max_examples=100, deadline=None)
def test_padding_with_masked_tokens_of_any_value_changes_nothing(inputs, objective, aggregation):
    """Every sequence padded to 7 tokens, as a [B, T] implementation would hold it."""
    padded_ids = torch.arange(inputs.num_sequences).repeat_interleave(7)
    places = torch.cat(
        [
            s * 7 + torch.arange(int((inputs.sequence_ids == s).sum()))
            for s in range(inputs.num_sequences)
        ]
    )

    def pad(x, fill):
        return torch.full((len(padded_ids),), fill, dtype=x.dtype).index_copy(0, places, x)

    padded = LossInputs(
        logprobs=pad(inputs.logprobs, torch.nan),
        proximal_logprobs=pad(inputs.proximal_logprobs, -torch.inf),
        behavior_logprobs=pad(inputs.behavior_logprobs, 0.0),
        advantages=pad(inputs.advantages, torch.inf),
        mask=pad(inputs.mask, False),
        sequence_ids=padded_ids,
        num_sequences=inputs.num_sequences,
        version_lag=pad(inputs.version_lag, -9),
        entropy=pad(inputs.entropy, torch.nan),
        reference_logprobs=pad(inputs.reference_logprobs, torch.nan),
        values=pad(inputs.values, torch.nan),
        old_values=pad(inputs.old_values, torch.inf),
        returns=pad(inputs.returns, torch.nan),
    )
    loss, (gradient,), metrics = step([inputs], objective, aggregation)
    padded_loss, (padded_gradient,), padded_metrics = step([padded], objective, aggregation)
    assert padded_loss == pytest.approx(loss, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(padded_gradient, pad(gradient, 0.0))
    assert_same_metrics(padded_metrics, metrics)


def five_tokens(mask=(True, True, False, True, True)) -> LossInputs:
    """J of naive on policy is A: 1, 2, 3 (masked) in sequence 0, 10, 20 in sequence 1."""
    zeros = torch.zeros(5, dtype=torch.float64)
    return LossInputs(
        logprobs=zeros,
        proximal_logprobs=zeros,
        behavior_logprobs=zeros,
        advantages=torch.tensor([1.0, 2.0, 3.0, 10.0, 20.0], dtype=torch.float64),
        mask=torch.tensor(mask),
        sequence_ids=torch.tensor([0, 0, 0, 1, 1]),
        num_sequences=2,
        version_lag=torch.zeros(5, dtype=torch.int64),
    )


@pytest.mark.parametrize(
    "aggregation, expected",
    [
        (TokenMean(), (1 + 2 + 10 + 20) / 4),
        (SeqMeanTokenMean(), ((1 + 2) / 2 + (10 + 20) / 2) / 2),
        (SeqMeanTokenSumNorm(length=6), ((1 + 2) / 6 + (10 + 20) / 6) / 2),
    ],
)
def test_aggregations_equal_hand_computed_means(aggregation, expected):
    assert loss_fn(five_tokens(), Naive(), aggregation).loss.item() == pytest.approx(-expected)


def test_a_sequence_without_a_counted_token_is_no_sequence():
    inputs = five_tokens(mask=(False, False, False, True, True))
    assert count(inputs, Naive()) == Totals(tokens=2, sequences=1)
    assert loss_fn(inputs, Naive(), SeqMeanTokenMean()).loss.item() == pytest.approx(-15)


def test_a_sequence_of_a_single_counted_token_is_one():
    inputs = five_tokens(mask=(False, True, False, True, True))
    assert count(inputs, Naive()) == Totals(tokens=3, sequences=2)


def test_totals_of_ranks_add_up():
    assert Totals(3, 1) + Totals(4, 2) == Totals(7, 3)
