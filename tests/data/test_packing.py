"""Packing against the plainest construction: one sequence at a time, one token at a time."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_q.config import DrGrpo
from areal_q.errors import RecordError
from areal_q.messages import Array, Group, Ticket, VersionSpan
from buffer.sampling.replay_pool import SampledGroups
from learner.data.packing import (
    Sample,
    microbatches,
    pack_samples,
    samples_of,
)
from learner.data.staleness import VersionHistory
from learner.train_step import lag_metrics

Make = Callable[..., list[Sample]]
shared = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@shared
@given(count=st.integers(1, 12), seed=st.integers(0, 2**32 - 1))
def test_packing_equals_the_naive_construction(make_samples: Make, count: int, seed: int):
    samples = make_samples(count, seed)
    token_ids, predict, targets, behavior, advantages, mask, lags, ids = ([] for _ in range(8))
    positions: list[int] = []
    prompt_end = -1
    for number, sample in enumerate(samples):
        t = sample.trajectory
        response = t.response_ids.numpy().tolist()
        if number == 0 or samples[number - 1].ticket != sample.ticket:
            positions += range(len(sample.prompt_ids))
            token_ids += sample.prompt_ids.tolist()
            prompt_end = len(token_ids) - 1
        for place, token in enumerate(response):
            predict.append(len(token_ids) - 1 if place else prompt_end)
            if place < len(response) - 1:  # the last token predicts nothing
                positions.append(len(sample.prompt_ids) + place)
                token_ids.append(token)
            targets.append(token)
            behavior.append(t.behavior_logprobs.numpy()[place])
            advantages.append(sample.advantage)
            mask.append(bool(t.loss_mask.numpy()[place]))
            lags.append(sample.lag[place])
            ids.append(number)

    batch = pack_samples(samples)

    for tensor, expected, dtype in (
        (batch.token_ids, token_ids, torch.int64),
        (batch.predict, predict, torch.int64),
        (batch.targets, targets, torch.int64),
        (batch.behavior_logprobs, behavior, torch.float32),
        (batch.advantages, advantages, torch.float32),
        (batch.mask, mask, torch.bool),
        (batch.version_lag, lags, torch.int64),
        (batch.sequence_ids, ids, torch.int64),
    ):
        assert tensor.dtype == dtype
        np.testing.assert_array_equal(
            tensor.numpy(), np.array(expected).astype(tensor.numpy().dtype)
        )
    assert batch.num_sequences == count
    assert batch.layout.lengths == tuple(s.num_tokens - 1 for s in samples)
    assert batch.layout.positions.tolist() == positions


@shared
@given(count=st.integers(0, 30), seed=st.integers(0, 2**32 - 1), limit=st.integers(1, 60))
def test_micro_batches_hold_whole_sequences_in_order(
    make_samples: Make, count: int, seed: int, limit: int
):
    samples = make_samples(count, seed)
    cuts = [list(cut) for cut in microbatches(samples, limit)]
    assert [s for cut in cuts for s in cut] == samples
    tokens = [sum(s.num_tokens for s in cut) for cut in cuts]
    assert all(n <= limit or len(cut) == 1 for n, cut in zip(tokens, cuts, strict=True))
    for n, following in zip(tokens, cuts[1:], strict=False):  # no cut is needless
        assert n + following[0].num_tokens > limit


def test_every_token_has_the_lag_of_the_weights_that_drew_it(
    make_ticket: Callable[..., Ticket], make_group: Callable[..., Group]
):
    history = VersionHistory(keep=5)
    for version, digest in enumerate(["a0", "b1", "c2", "d3"]):
        history.add(version, digest)
    groups = [make_group(make_ticket(n, group_size=3)) for n in range(2)]
    samples = samples_of(SampledGroups(groups), DrGrpo(), history, version=3)
    # make_group draws the first token with version 0 and all others with version 1.
    assert [s.lag.tolist() for s in samples] == 2 * [[3, 2], [3, 2, 2], [3, 2, 2, 2]]
    metrics = lag_metrics(samples)
    assert metrics["lag/max"] == 3
    assert metrics["lag/mean"] == pytest.approx((6 * 3 + 12 * 2) / 18)


def test_samples_keep_the_groups_order_and_their_advantages(
    make_ticket: Callable[..., Ticket], make_group: Callable[..., Group]
):
    groups = [make_group(make_ticket(n, group_size=4)) for n in (7, 3)]
    # Rewards are 0, 1, 0, 1, so the mean is 1/2.
    samples = samples_of(SampledGroups(groups), DrGrpo(), VersionHistory(keep=4), version=1)
    assert [s.trajectory for s in samples] == [t for g in groups for t in g.trajectories]
    assert [s.advantage for s in samples] == 4 * [-0.5, 0.5]


def test_a_token_of_unknown_weights_lags_as_far_as_can_be(
    make_ticket: Callable[..., Ticket], make_group: Callable[..., Group]
):
    (group,) = [make_group(make_ticket(0, group_size=2))]
    history = VersionHistory(keep=4)
    history.add(0, "a0")
    history.add(1, "another")
    first, _ = samples_of(SampledGroups([group]), DrGrpo(), history, version=1)
    assert first.trajectory.spans == [VersionSpan(0, 1, "a0"), VersionSpan(1, 1, "b1")]
    assert first.lag[0] == 1
    assert first.lag[1] > 1


def test_bytes_that_do_not_fill_their_shapes_are_refused():
    whole, short = Array.of([7, 9], "int32"), Array("int32", (2,), b"\x07\0\0\0")
    assert Array.concatenate([whole, whole]).tolist() == [7, 9, 7, 9]
    with pytest.raises(RecordError, match="do not fill"):
        Array.concatenate([whole, short])


def test_arrays_of_a_received_record_are_copied_not_written_to(make_samples: Make):
    samples = make_samples(3)
    before = [bytes(s.trajectory.behavior_logprobs.data) for s in samples]
    batch = pack_samples(samples)
    batch.behavior_logprobs.zero_()
    batch.token_ids.zero_()
    assert [s.trajectory.behavior_logprobs.data for s in samples] == before
    assert all(isinstance(s.trajectory.response_ids, Array) for s in samples)
