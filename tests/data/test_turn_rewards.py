"""Rewards of turns: returns and advantages against tables worked by hand and against loops over every path."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.policies import build_policy
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from areal_q.algorithms import group_advantages
from areal_q.config import (
    AdvantageConfig,
    BySource,
    DrGrpo,
    Gae,
    Grpo,
    ReinforcePlusPlus,
    Rloo,
    Run,
)
from areal_q.errors import RecordError
from areal_q.messages import (
    Array,
    Branch,
    Group,
    Trajectory,
    TurnReward,
    VersionSpan,
    mean_of_turns,
)
from areal_q.messages.tokens import LARGEST_REWARD
from bench import records
from buffer.admin.tables import group_facts, group_view
from buffer.logs.trajectory_schema import groups_from_table, groups_to_table
from buffer.sampling.replay_pool import SampledGroups
from learner.backends.messages import SentSample
from learner.data.packing import Sample, pack_samples, samples_of
from learner.data.staleness import VersionHistory
from learner.data.turn_rewards import is_uniform, returns_of
from learner.measure.token_recorder import TokenRecorder
from learner.policy_advantages import with_advantages
from learner.policy_update import SingleProcessUpdater, loss_inputs
from learner.train_step import train_step

ESTIMATORS: list[AdvantageConfig] = [
    Grpo(),
    Grpo(std="population"),
    DrGrpo(),
    Rloo(),
    ReinforcePlusPlus(),
    ReinforcePlusPlus(baseline="none"),
    BySource(sources={"": Rloo()}, otherwise=Grpo()),
]


def episode(
    turns: Sequence[float | None], own: float = 0.0, index: int = 0, given: int = 1
) -> Trajectory:
    """An episode of one path whose turns have these rewards, each of two tokens and `given` of a result."""
    mask = [*([1, 1] + [0] * given) * len(turns)][: (2 + given) * len(turns) - given]
    size = len(mask)
    ends = range(1, size, 2 + given)
    found = tuple(TurnReward(i, r) for i, r in zip(ends, turns, strict=True) if r is not None)
    return Trajectory(
        index=index,
        response_ids=Array.of(np.arange(size) % 20, "int32"),
        behavior_logprobs=Array.of([-1.0] * size, "float32"),
        loss_mask=Array.of(mask, "uint8"),
        spans=[VersionSpan(0, size, "a0")],
        finish_reason="stop",
        reward=own + sum(one.reward for one in found),
        turn_rewards=found,
    )


def branch(parent: int, at: int, tokens: int, reward: float | None = None) -> Branch:
    own = episode([None] * tokens, given=0)
    end = () if reward is None else (TurnReward(2 * tokens - 1, reward),)
    fields = ("response_ids", "behavior_logprobs", "loss_mask", "spans", "finish_reason")
    same: dict[str, Any] = {name: getattr(own, name) for name in fields}
    return Branch(parent=parent, at=at, turn_rewards=end, **same)


def group_of(*found: Trajectory) -> Group:
    ticket = records.make_ticket(group_size=len(found))
    ticket = replace(ticket, sampling=replace(ticket.sampling, max_tokens=1000))
    own = [replace(t, index=i) for i, t in enumerate(found)]
    return replace(records.make_group(ticket), ticket=ticket, trajectories=own).validate()


def sampled(group: Group, cfg: AdvantageConfig) -> list[Sample]:
    return samples_of(SampledGroups([group]), cfg, VersionHistory(4), 1)


def turns_of(sample: Sample, given: int = 1) -> list[float]:
    """The advantage of each turn, which is the same for both of its tokens."""
    found = sample.advantages.tolist()
    assert found[:: 2 + given] == found[1 :: 2 + given]
    return found[:: 2 + given]


def test_the_tree_of_the_docstring_has_its_returns():
    prompt = records.make_ticket().prompt_ids.shape[0]
    t = episode([0.5, 1], own=0.25)
    t = replace(t, branches=(branch(0, prompt + 2, 1, 0.0),), reward=0.25 + 0.5 + 0.5)
    assert mean_of_turns(prompt, t) == 1.0
    found = returns_of(prompt, t)
    tokens = np.where(found.row < 0, np.nan, found.values[found.row])
    expected = [1.25, 1.25, np.nan, 1.25, 1.25, 0.25, 0.25]
    np.testing.assert_array_equal(tokens, expected)
    assert found.after.tolist() == [1.25, 0.75]  # before turn 1, and of turns 2 and 3
    assert is_uniform(group_of(t)) is False


def test_turns_are_compared_after_as_many_rewards():
    """Episodes with 3, 2, 1, one that ends with its first turn, and nothing: by hand."""
    group = group_of(episode([1, 1, 1]), episode([2.0]), episode([None, None], own=1.0))
    samples = sampled(group, DrGrpo())
    # Returns [3, 2, 1], [2], [1]: means 2, 5/3, 4/3, since the others stand with their last.
    assert turns_of(samples[0]) == pytest.approx([1, 1 / 3, -1 / 3])
    assert turns_of(samples[1]) == [0]
    assert turns_of(samples[2]) == [-1, -1]
    assert samples[0].advantages[2] == 0  # a result's token
    rloo = sampled(group, Rloo())
    assert turns_of(rloo[0]) == pytest.approx([1.5, 0.5, -0.5])


def test_to_survive_for_longer_is_learnt():
    """One reward a turn, all equal: rewards that are normalised themselves would be 0 everywhere."""
    short, long = sampled(
        group_of(episode([1] * 2), episode([1] * 4)),
        Grpo(std="population"),
    )
    assert turns_of(short) == pytest.approx([-1, -1], rel=1e-4)
    assert turns_of(long) == pytest.approx([1, 1, 1, 0], rel=1e-4)


@pytest.mark.parametrize("cfg", ESTIMATORS)
def test_rewards_at_the_end_are_the_episodes_to_the_bit(cfg: AdvantageConfig):
    """As a gymnasium gives them, one a turn and 0 but for the last; and as an agent does, to its last turn."""
    ends = [0.1, 0.7, 0.7, -0.3, 1 / 3]
    own = [episode([None] * (i + 1), own=r) for i, r in enumerate(ends)]
    last = [episode([None] * i + [r]) for i, r in enumerate(ends)]
    steps = [episode([0.0] * i + [r]) for i, r in enumerate(ends)]
    plain, of_last, of_steps = (
        [s.advantages for s in sampled(group_of(*found), cfg)] for found in (own, last, steps)
    )
    for one, *others, t in zip(plain, of_last, of_steps, own, strict=True):
        counts = t.loss_mask.numpy() != 0
        for other in others:
            assert other[counts].tolist() == one[counts].tolist()
    group = group_of(*[episode([0.0] * i + [0.5]) for i in range(3)])
    assert is_uniform(group)
    assert not any(s.learns for s in sampled(group, cfg) if isinstance(cfg, Grpo | DrGrpo | Rloo))
    assert not is_uniform(group_of(episode([1, 0]), episode([0, 1])))


def paths_by_hand(prompt: int, t: Trajectory) -> list[list[tuple[int, int]]]:
    """Each path as (segment, token) of all its tokens behind the prompt, found by going up to the root."""

    def whole(number: int) -> list[tuple[int, int]]:
        if not number:
            return [(-1, i) for i in range(prompt)] + [(0, i) for i in range(t.num_tokens)]
        one = t.branches[number - 1]
        own = [(number, i) for i in range(one.response_ids.shape[0])]
        return whole(one.parent)[: one.at] + own

    return [[x for x in whole(n) if x[0] >= 0] for n in range(1 + len(t.branches))]


def tree(rng: np.random.Generator, prompt: int) -> Trajectory:
    """An episode with up to four branches anywhere, and rewards at some of its drawn tokens."""

    def rewarded(path: Any) -> Any:
        size = path.response_ids.shape[0]
        mask = rng.integers(0, 2, size)
        mask[-1] |= isinstance(path, Branch)
        ends = [i for i in np.flatnonzero(mask).tolist() if rng.random() < 0.5]
        found = tuple(TurnReward(i, float(rng.integers(-3, 4))) for i in ends)
        return replace(path, loss_mask=Array.of(mask, "uint8"), turn_rewards=found)

    t, lengths = rewarded(episode([None] * int(rng.integers(1, 4)))), list[int]()
    lengths, branches = [prompt + t.num_tokens], list[Branch]()
    for number in range(int(rng.integers(0, 5))):
        parent, own = int(rng.integers(0, number + 1)), int(rng.integers(1, 3))
        at = int(rng.integers(1, lengths[parent] + 1))
        branches.append(rewarded(branch(parent, at, own)))
        lengths.append(at + 2 * own)
    return replace(t, branches=tuple(branches))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([DrGrpo(), Grpo(), Rloo()]))
def test_returns_and_advantages_are_those_of_loops_over_paths(seed: int, cfg: AdvantageConfig):
    """For each token, over each path through it, over each token after it."""
    rng = np.random.default_rng(seed)
    prompt = records.make_ticket().prompt_ids.shape[0]
    own = [float(i) for i in range(int(rng.integers(1, 5)))]
    trees = [tree(rng, prompt) for _ in own]
    trees = [
        replace(t, reward=r + mean_of_turns(prompt, t)) for t, r in zip(trees, own, strict=True)
    ]
    group = group_of(*trees)
    returns: list[dict[tuple[int, int], float]] = []
    passed: list[dict[tuple[int, int], int]] = []
    stands: list[Callable[[int], float]] = []
    for t, r in zip(trees, own, strict=True):
        segments = (t, *t.branches)
        given_at = {(n, x.token): x.reward for n, s in enumerate(segments) for x in s.turn_rewards}
        counts = {
            (n, i)
            for n, s in enumerate(segments)
            for i in np.flatnonzero(s.loss_mask.numpy()).tolist()
        }
        paths = paths_by_hand(prompt, t)
        ahead: dict[tuple[int, int], list[float]] = {}
        before: dict[tuple[int, int], int] = {}
        ways: list[list[float]] = []
        for path in paths:
            way: list[float] = []
            for place, token in enumerate(path):
                rest = sum(given_at.get(x, 0.0) for x in path[place:])
                ahead.setdefault(token, []).append(rest)
                before[token] = sum(x in given_at for x in path[:place])
                if token in counts or not way:
                    way += [rest] * (before[token] + 1 - len(way))
            ways.append(way)
        returns.append({x: r + sum(ahead[x]) / len(ahead[x]) for x in counts})
        passed.append({x: before[x] for x in counts})
        stands.append(
            lambda k, ways=ways, r=r: r + sum(w[min(k, len(w) - 1)] for w in ways) / len(ways)
        )
    samples = sampled(group, cfg)
    for sample in samples:
        i, n = sample.trajectory.index, sample.branch
        for token in np.flatnonzero(sample.trajectory.loss_mask.numpy()).tolist():
            k = passed[i][n, token]
            rewards = [stand(k) for stand in stands]
            rewards[i] = returns[i][n, token]
            expected = estimated(rewards, cfg)[i]
            assert sample.advantages[token] == pytest.approx(expected, rel=1e-3, abs=1e-3)


def estimated(rewards: list[float], cfg: AdvantageConfig) -> list[float]:
    return group_advantages(
        torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.int64), cfg
    ).tolist()


def test_an_episode_weighs_as_one_in_the_mean_of_the_batch():
    """REINFORCE++: the tokens of both, with the mean of each episode's tokens, have mean 0 and spread 1."""
    found = [episode([1, 2, 3]), episode([0.5]), episode([None] * 4, own=2.0)]
    cfg = ReinforcePlusPlus(baseline="none")
    samples = sampled(group_of(*found), cfg)
    turns = [np.array(turns_of(s)) for s in samples]
    assert sum(x.mean() for x in turns) == pytest.approx(0, abs=1e-5)
    assert sum((x**2).mean() for x in turns) / 3 == pytest.approx(1, rel=1e-4)


def test_gae_finds_the_reward_of_a_turn_at_its_last_token(
    make_run: Callable[..., Run],
):
    """γ = λ = 1 and V = 0: an advantage is the return of its token on its own path."""
    prompt = records.make_ticket().prompt_ids.shape[0]
    t = episode([0.5, 1], own=0.25)
    t = replace(t, branches=(branch(0, prompt + 2, 1, 2.0),), reward=0.25 + 0.5 + 1.5)
    samples = sampled(group_of(t), Gae())
    batch = pack_samples(samples)
    scores = {"logprobs": batch.behavior_logprobs, "entropy": batch.behavior_logprobs}
    inputs = loss_inputs(batch, {**scores, "values": batch.behavior_logprobs * 0}, None)
    run = make_run(
        "learner.advantage={type='gae', trace=1.0, normalize=false}", "learner.critic={}"
    )
    (found,) = with_advantages([inputs], samples, run.learner)
    own = found.advantages.split([len(s.advantages) for s in samples])
    assert own[0].tolist() == [1.75, 1.75, 0, 1.25, 1.25]
    assert own[1].tolist() == [2.25, 2.25]


@pytest.mark.parametrize("settings", [[], ["learner.advantage.type=gae", "learner.critic={}"]])
def test_a_step_learns_the_same_from_the_log(make_run: Callable[..., Run], settings: list[str]):
    """A replay's step, to the bit, with a token's advantage as the token log has it; without the rewards of
    turns it learns something else."""
    prompt = records.make_ticket().prompt_ids.shape[0]
    first = replace(episode([0.5, 1]), branches=(branch(0, prompt + 2, 1, 2.0),), reward=2.0)
    group = group_of(first, episode([0, 1, 0], own=1.0))
    small = replace(group.ticket, prompt_ids=Array.of([1] * prompt, "int32"))
    group = replace(group, ticket=small)
    (read,) = groups_from_table(groups_to_table(0, 0, [group]))
    bare = [replace(t, turn_rewards=(), branches=()) for t in group.trajectories]
    run, found = make_run("learner.optimizer.warmup_steps=0", *settings), list[dict[str, Any]]()
    for one in (group, read, replace(group, trajectories=bare)):
        policy, recorder = build_policy(run), TokenRecorder()
        batch = SampledGroups([one])
        train_step(SingleProcessUpdater(policy), batch, VersionHistory(4), 1, recorder)
        found.append({**policy.model.state_dict(), "advantages": recorder.scores().advantages})
    for name, x in found[0].items():
        assert np.array_equal(np.asarray(x), np.asarray(found[1][name]))
    if not settings:
        own = np.concatenate([s.advantages for s in sampled(group, run.learner.advantage)])
        np.testing.assert_array_equal(found[0].pop("advantages"), own.astype(np.float32))
        assert any(not np.array_equal(np.asarray(x), found[2][n]) for n, x in found[0].items())


def test_penalties_come_off_the_episodes_own_reward(
    make_run: Callable[..., Run],
):
    """π_prox / π_ref is e at every token: 0.1 for each that counts, at every turn."""
    group = group_of(episode([1, 1]), episode([0, 1, 0]))
    samples = [
        SentSample.of(s).sample()
        for s in samples_of(SampledGroups([group], [2.0]), DrGrpo(), VersionHistory(4), 1)
    ]
    batch = pack_samples(samples)
    scores = {"logprobs": batch.behavior_logprobs, "entropy": batch.behavior_logprobs}
    inputs = loss_inputs(batch, scores, batch.behavior_logprobs - 1)
    run = make_run(
        "learner.advantage.type=dr_grpo",
        "learner.reference_kl={coef=0.1, place='reward', estimator='k1'}",
    )
    (found,) = with_advantages([inputs], samples, run.learner)
    # Returns [2, 1] - 0.4 and [1, 1, 0] - 0.6, halves of their differences, times the weight 2.
    first, second = found.advantages.split([len(s.advantages) for s in samples])
    assert first[batch.mask[:5]][::2].tolist() == pytest.approx([1.2, 0.2])
    assert second[batch.mask[5:]][::2].tolist() == pytest.approx([-1.2, -0.2, -1.2])


@pytest.mark.parametrize("cfg", [DrGrpo(), ReinforcePlusPlus(), Grpo()])
def test_a_masked_episode_stays_in_the_baseline(make_run: Callable[..., Run], cfg: AdvantageConfig):
    """With a KL in the reward it stood with its whole return after every turn, or weighed nothing."""
    cut = replace(episode([2, 0, 1]), finish_reason="length")
    group = group_of(episode([1, 1, 1]), cut)
    samples = [
        SentSample.of(s).sample()
        for s in samples_of(SampledGroups([group]), cfg, VersionHistory(4), 1, mask=("length",))
    ]
    batch = pack_samples(samples)
    scores = {"logprobs": batch.behavior_logprobs, "entropy": batch.behavior_logprobs}
    inputs = loss_inputs(batch, scores, batch.behavior_logprobs)  # no distance, so no penalty
    run = make_run("learner.reference_kl={coef=0.1, place='reward', estimator='k1'}")
    learner = replace(run.learner, advantage=cfg)
    (found,) = with_advantages([inputs], samples, learner)
    counted = batch.mask
    torch.testing.assert_close(found.advantages[counted], batch.advantages[counted])
    assert counted.sum() == 6 and batch.advantages[counted].any()


DEFECTS = {
    "of no token": ((TurnReward(5, 1.0),), "at token 5, which was not drawn"),
    "of a result": ((TurnReward(2, 1.0),), "at token 2, which was not drawn"),
    "twice": ((TurnReward(1, 1.0), TurnReward(1, 1.0)), "at token 1, .* out of order"),
    "not a number": ((TurnReward(1, np.nan),), "token 1: reward is nan"),
    "too large": ((TurnReward(1, 2 * LARGEST_REWARD),), "token 1: reward is 2000000000000000"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_wrong_reward_of_a_turn_is_named(defect: str):
    found, message = DEFECTS[defect]
    wrong = replace(episode([1, 1]), turn_rewards=found)
    with pytest.raises(RecordError, match=f"trajectory 0.*{message}"):
        group_of(wrong)
    tree = replace(branch(0, 1, 3), loss_mask=Array.of([1, 1, 0] * 2, "uint8"), turn_rewards=found)
    if defect != "of no token":
        with pytest.raises(RecordError, match=f"trajectory 0, branch 1.*{message}"):
            group_of(replace(episode([1]), branches=(tree,)))


def test_peek_shows_the_rewards_of_turns():
    tree = replace(episode([0.5, 1]), branches=(branch(0, 1, 1, 2.0),))
    group = group_of(tree)
    (told,) = group_facts(group)["trajectories"]
    assert told["turn_rewards"] == (TurnReward(1, 0.5), TurnReward(4, 1.0))
    assert told["branches"][0]["turn_rewards"] == (TurnReward(1, 2.0),)
    assert "turns: 0.5 at token 1, 1 at token 4" in str(group_view(group, None).__dict__)
