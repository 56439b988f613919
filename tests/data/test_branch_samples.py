"""Branches of episodes in the learner: each drawn token is learnt once, an episode weighs as one, and nothing
else changes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.policies import build_policy
from helpers.strategies import groups
from hypothesis import assume, given, settings
from msgspec.structs import replace

from areal_q.algorithms import LossInputs, count
from areal_q.algorithms.aggregation import token_weights
from areal_q.algorithms.ratios import ratios
from areal_q.config import (
    AggregationConfig,
    DrGrpo,
    Naive,
    Run,
    SeqMeanTokenMean,
    SeqMeanTokenSumNorm,
)
from areal_q.messages import Array, Branch, Group, VersionSpan, parts
from buffer.sampling.replay_pool import SampledGroups
from learner.backends.messages import SentSample
from learner.backends.single_device import token_logprobs
from learner.data.packing import Sample, pack_samples, samples_of, unlearnt_samples
from learner.data.staleness import VersionHistory
from learner.measure.token_recorder import TokenRecorder
from learner.policy_advantages import with_advantages
from learner.policy_update import cut_minibatches, loss_inputs, update_policy

MakeGroup = Callable[..., Group]


def with_branches(group: Group, seed: int = 0, vocabulary: int = 20) -> Group:
    """`group` with two branches on each of its trajectories but the first."""
    rng = np.random.default_rng(seed)

    def branch(parent: int, at: int, tokens: int) -> Branch:
        return Branch(
            parent=parent,
            at=at,
            response_ids=Array.of(rng.integers(0, vocabulary, tokens), "int32"),
            behavior_logprobs=Array.of(-rng.random(tokens), "float32"),
            loss_mask=Array.of([0] + [1] * (tokens - 1), "uint8"),
            spans=[VersionSpan(0, tokens, "a0")],
            finish_reason="length",
        )

    first, *others = group.trajectories
    prompt = group.ticket.prompt_ids.shape[0]
    grown = [replace(t, branches=(branch(0, prompt, 3), branch(1, 2, 4))) for t in others]
    small = [
        replace(t, response_ids=Array.of(t.response_ids.numpy() % vocabulary, "int32"))
        for t in (first, *grown)
    ]
    sampling = replace(group.ticket.sampling, max_tokens=50)
    ticket = replace(group.ticket, sampling=sampling)
    return replace(group, ticket=ticket, trajectories=small).validate()


def sampled(*found: Group, mask: Any = ()) -> list[Sample]:
    return samples_of(SampledGroups(list(found)), DrGrpo(), VersionHistory(4), 1, mask)


@settings(max_examples=40, deadline=None)
@given(groups(branches=True))
def test_each_token_is_in_one_sample_behind_its_path(group: Group) -> None:
    assume(all(span.version < 2**63 - 4096 for t in group.trajectories for span in t.all_spans))
    samples = sampled(group)
    expected = [
        pair for t in group.trajectories for pair in parts(group.ticket.prompt_ids.numpy(), t)
    ]
    assert len(samples) == len(expected)
    for place, (sample, (before, own)) in enumerate(zip(samples, expected, strict=True)):
        assert sample.prompt_ids.tolist() == before.tolist()
        assert sample.trajectory == own and len(sample.lag) == own.num_tokens
        assert SentSample.of(sample).sample().share == sample.share
        if not sample.branch:
            assert sample.shared == 0
            continue
        assert not own.reward_notes  # the first path has them
        branch = group.trajectories[own.index].branches[sample.branch - 1]
        above = samples[place - sample.branch + branch.parent]
        path = [*above.prompt_ids.tolist(), *above.trajectory.response_ids.numpy().tolist()]
        assert path[: sample.shared] == sample.prompt_ids.tolist()
    for index in range(len(group.trajectories)):
        mine = [s.share for s in samples if s.trajectory.index == index]
        assert sum(mine) == pytest.approx(1) or not any(mine) or mine == [1.0]
    assert [s.trajectory for s in unlearnt_samples([group])] == [s.trajectory for s in samples]


def test_a_reward_counts_once_whatever_the_branches(
    make_ticket: Any, make_group: MakeGroup
) -> None:
    group = make_group(make_ticket(group_size=4))
    plain = [s.advantage for s in sampled(group)]
    samples = sampled(with_branches(group))
    assert [s.advantage for s in samples if not s.branch] == plain
    assert all(s.advantage == plain[s.trajectory.index] for s in samples)
    assert len(samples) == 4 + 2 * 3


def test_a_branch_cut_off_is_masked_alone(make_group: MakeGroup) -> None:
    samples = sampled(with_branches(make_group()), mask=("length",))
    counted = [int(s.counted.sum()) for s in samples]
    assert [bool(n) for n in counted] == [True, True, False, False]
    assert [s.share for s in samples] == [1.0, 1.0, 0.0, 0.0]


def test_minibatches_keep_an_episode_whole(
    make_run: Callable[..., Run], make_group: MakeGroup
) -> None:
    samples = sampled(with_branches(make_group()))
    cuts = cut_minibatches(samples, make_run("learner.minibatches=2").learner)
    assert [[s.branch for s in cut] for cut in cuts] == [[0], [0, 1, 2]]


@pytest.mark.parametrize("aggregation", [SeqMeanTokenMean(), SeqMeanTokenSumNorm(length=10)])
def test_an_episode_weighs_as_one_row_of_its_tokens(
    make_group: MakeGroup, aggregation: AggregationConfig
) -> None:
    """The oracle is the same batch with all tokens of an episode in one sequence."""
    batch = pack_samples(sampled(with_branches(make_group())))
    names = ("advantages", "mask", "version_lag", "behavior_logprobs")
    columns: dict[str, Any] = {name: getattr(batch, name) for name in names}
    columns |= dict.fromkeys(("logprobs", "proximal_logprobs"), batch.behavior_logprobs)
    rows = torch.tensor([index for _, index, _ in batch.responses])[batch.sequence_ids]
    ours = LossInputs(
        **columns,
        sequence_ids=batch.sequence_ids,
        num_sequences=batch.num_sequences,
        share=batch.share,
    )
    whole = LossInputs(**columns, sequence_ids=rows, num_sequences=2)
    found = []
    for inputs in (ours, whole):
        totals, x = count(inputs, Naive()), ratios(inputs)
        assert totals.sequences == pytest.approx(2)
        found.append(token_weights(inputs.mask, x, aggregation, totals))
    torch.testing.assert_close(found[0], found[1])


def test_branches_are_scored_after_their_whole_path(
    make_run: Callable[..., Run], make_group: MakeGroup
) -> None:
    """Together, as packed, and each alone."""
    model = build_policy(make_run()).model
    samples = sampled(with_branches(make_group()))
    together = token_logprobs(model, pack_samples(samples), 1.0)[0]
    alone = [token_logprobs(model, pack_samples([sample]), 1.0)[0] for sample in samples]
    torch.testing.assert_close(together, torch.cat(alone))


def test_a_step_records_the_tokens_of_an_episode_in_one_row(
    make_run: Callable[..., Run], make_group: MakeGroup
) -> None:
    group, recorder = with_branches(make_group()), TokenRecorder()
    run = make_run("learner.microbatch_tokens=24", "learner.minibatches=2")
    update_policy(build_policy(run), sampled(group), recorder)
    scores = recorder.scores()
    assert scores.number.tolist() == [group.ticket.number] * 2
    lengths = dict(zip(scores.index.tolist(), scores.lengths.tolist(), strict=True))
    assert lengths == {t.index: t.all_tokens for t in group.trajectories}
    ends = np.cumsum(scores.lengths)
    for index, end in zip(scores.index.tolist(), ends.tolist(), strict=True):
        own = [
            column.behavior_logprobs.numpy()
            for column in (group.trajectories[index], *group.trajectories[index].branches)
        ]
        recorded = scores.behavior_logprobs[end - lengths[index] : end]
        assert recorded.tolist() == np.concatenate(own).tolist()


def test_penalties_of_all_paths_are_the_episodes(
    make_run: Callable[..., Run], make_group: MakeGroup
) -> None:
    """π_prox / π_ref is 2 at every token: the penalty is 0.1 ln 2 for each that counts."""
    samples = sampled(with_branches(make_group()))
    batch = pack_samples(samples)
    prox = torch.full((len(batch.targets),), -1.0)
    scores = {"logprobs": prox, "entropy": prox}
    inputs = loss_inputs(batch, scores, prox - np.log(2.0))
    run = make_run(
        "learner.advantage.type=dr_grpo",
        "learner.reference_kl={coef=0.1, place='reward', estimator='k1'}",
    )
    (found,) = with_advantages([inputs], samples, run.learner)
    counted = [
        sum(int(s.counted.sum()) for s in samples if s.trajectory.index == i) for i in range(2)
    ]
    rewards = np.array([0.0, 1.0]) - 0.1 * np.log(2) * np.array(counted)
    for sequence, sample in enumerate(samples):
        own = found.advantages[batch.sequence_ids == sequence].tolist()
        expected = rewards[sample.trajectory.index] - rewards.mean()
        assert own == pytest.approx([expected] * len(own), rel=1e-5)
