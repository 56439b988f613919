import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_q.algorithms import (
    gae,
    group_advantages,
    informative_groups,
    reward_penalty,
)
from areal_q.algorithms.advantages import alone
from areal_q.config import BySource, DrGrpo, Gae, Grpo, ReferenceKl, ReinforcePlusPlus, Rloo
from areal_q.errors import ConfigError

# Two prompts with their responses interleaved: group 0 has 1, 0, 0, 1; group 1 has 3, 1.
REWARDS = torch.tensor([1.0, 3.0, 0.0, 0.0, 1.0, 1.0])
GROUPS = torch.tensor([0, 1, 0, 0, 1, 0])


@pytest.mark.parametrize(
    "cfg, expected",
    [
        # means 0.5 and 2; sums of squares 1 over 3 and 2 over 1: std 0.577350269 and 1.414213562
        (
            Grpo(eps=0.0),
            [0.866025404, 0.707106781, -0.866025404, -0.866025404, -0.707106781, 0.866025404],
        ),
        # over 4 and 2: std 0.5 and 1
        (Grpo(eps=0.0, std="population"), [1, 1, -1, -1, -1, 1]),
        (Grpo(eps=0.5, std="population"), [0.5, 2 / 3, -0.5, -0.5, -2 / 3, 0.5]),
        (DrGrpo(), [0.5, 1, -0.5, -0.5, -1, 0.5]),
        # 1 - (0+0+1)/3, 3 - 1, 0 - (1+0+1)/3, …
        (Rloo(), [2 / 3, 2, -2 / 3, -2 / 3, -2, 2 / 3]),
        # batch mean 1, variance (0+4+1+1+0+0)/6 = 1
        (ReinforcePlusPlus(eps=0.0), [0, 2, -1, -1, 0, 0]),
        # r - group mean has mean 0 and variance (4·0.25 + 2·1)/6 = 0.5
        (
            ReinforcePlusPlus(eps=0.0, baseline="group"),
            [0.707106781, 1.414213562, -0.707106781, -0.707106781, -1.414213562, 0.707106781],
        ),
    ],
)
def test_group_advantages_equal_hand_computed_ones(cfg, expected):
    assert group_advantages(REWARDS, GROUPS, cfg).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        # a has 1, 0, 0, 1: mean ½, std 1/√3; b has 3, 1, each against the other one
        (
            BySource(sources={"a": Grpo(eps=0.0), "b": Rloo()}),
            [0.866025404, 2, -0.866025404, -0.866025404, -2, 0.866025404],
        ),
        # over the batch of b alone: mean 2, variance 1
        (
            BySource(sources={"b": ReinforcePlusPlus(eps=0.0)}, otherwise=DrGrpo()),
            [0.5, 1, -0.5, -0.5, -1, 0.5],
        ),
        # of both together, since neither is named: mean 1, variance 1
        (
            BySource(sources={"c": Rloo()}, otherwise=ReinforcePlusPlus(eps=0.0)),
            [0, 2, -1, -1, 0, 0],
        ),
    ],
)
def test_advantages_by_source_equal_hand_computed_ones(cfg, expected):
    found = group_advantages(REWARDS, GROUPS, cfg, sources=["ab"[i] for i in GROUPS])
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


def test_one_advantage_by_source_is_that_advantage_bit_for_bit():
    for cfg in (Grpo(), DrGrpo(), Rloo(), ReinforcePlusPlus(baseline="group")):
        rewards = torch.randn(6, generator=torch.Generator().manual_seed(2))
        by_source = BySource(sources={"a": Rloo()}, otherwise=cfg)
        found = group_advantages(rewards, GROUPS, by_source, sources=["b"] * 6)
        assert found.equal(group_advantages(rewards, GROUPS, cfg))


@pytest.mark.parametrize("cfg", [Grpo(eps=0.0), Grpo(), DrGrpo(), Rloo(), ReinforcePlusPlus()])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1e8])
def test_equal_rewards_give_exactly_zero_advantage(cfg, reward):
    advantages = group_advantages(torch.full((7,), reward), torch.zeros(7).long(), cfg)
    assert advantages.tolist() == [0.0] * 7


@pytest.mark.parametrize("cfg", [Grpo(), DrGrpo(), Rloo()])
def test_a_group_of_one_has_advantage_zero(cfg):
    assert group_advantages(torch.tensor([5.0]), torch.tensor([0]), cfg).tolist() == [0.0]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5)), min_size=4, max_size=20), st.randoms()
)
@settings(max_examples=60, deadline=None)
def test_group_advantages_follow_a_permutation_of_responses(pairs, random):
    order = list(range(len(pairs)))
    random.shuffle(order)
    rewards = torch.tensor([r for _, r in pairs], dtype=torch.float64)
    ids = torch.tensor([g for g, _ in pairs])
    for cfg in (Grpo(), DrGrpo(), Rloo(), ReinforcePlusPlus(baseline="group")):
        plain = group_advantages(rewards, ids, cfg)[order]
        permuted = group_advantages(rewards[order], ids[order], cfg)
        torch.testing.assert_close(permuted, plain, rtol=1e-4, atol=1e-6)


def test_gae_by_hand():
    # γ = 0.5, λ = 0.5.  δ = 0 + 0.5·2 - 1 = 0,  0 + 0.5·4 - 2 = 0,  3 - 4 = -1 | 1 - 2 = -1
    # A = 0 + ¼·(-¼) = -0.0625,  -0.25,  -1 | -1;  returns = A + V
    rewards = torch.tensor([0.0, 0.0, 3.0, 1.0])
    values = torch.tensor([1.0, 2.0, 4.0, 2.0])
    cfg = Gae(discount=0.5, trace=0.5, normalize=False)
    ids = torch.tensor([0, 0, 0, 1])
    advantages, returns = gae(rewards, values, torch.ones(4).bool(), ids, cfg)
    assert advantages.tolist() == [-0.0625, -0.25, -1.0, -1.0]
    assert returns.tolist() == [0.9375, 1.75, 3.0, 1.0]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 2**31),
)
@settings(max_examples=80, deadline=None)
def test_gae_equals_the_recursion_and_steps_over_masked_tokens(lengths, discount, trace, seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rewards, values = torch.randn(2, len(ids), generator=g, dtype=torch.float64)
    mask = torch.rand(len(ids), generator=g) > 0.3
    expected, returns = torch.zeros(2, len(ids), dtype=torch.float64)
    for s in range(len(lengths)):
        following = advantage = 0.0
        for t in reversed(((ids == s) & mask).nonzero().squeeze(-1).tolist()):
            delta = rewards[t] + discount * following - values[t]
            advantage = delta + discount * trace * advantage
            following = values[t]
            expected[t], returns[t] = advantage, advantage + values[t]
    cfg = Gae(discount=discount, trace=trace, normalize=False)
    out = gae(rewards, values, mask, ids, cfg)
    torch.testing.assert_close(out[0], expected)
    torch.testing.assert_close(out[1], returns)


def test_gae_normalizes_over_counted_tokens_only():
    rewards = torch.tensor([1.0, 2.0, 99.0, 3.0])
    mask = torch.tensor([True, True, False, True])
    advantages, returns = gae(rewards, torch.zeros(4), mask, torch.arange(4), Gae())
    # mean 2, population standard deviation √(2/3)
    assert advantages.tolist() == pytest.approx([-1.224744871, 0, 0, 1.224744871], rel=1e-6)
    assert returns.tolist() == [1.0, 2.0, 0.0, 3.0]


class Ranks:
    """As many threads; `combine` is an all-reduce among them."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self.given: list[torch.Tensor] = [torch.zeros(0)] * count

    def combine(self, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def all_reduce(sums: torch.Tensor) -> torch.Tensor:
            self.given[rank] = sums
            self.barrier.wait()
            total = torch.stack(self.given).sum(0)
            self.barrier.wait()
            return total

        return all_reduce

    def run(self, work: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        with ThreadPoolExecutor(len(self.given)) as pool:
            return list(pool.map(work, range(len(self.given))))


@pytest.mark.parametrize("cut", [0, 3, 7])
def test_batch_normalisation_does_not_depend_on_the_ranks(cut):
    g = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(2, 10, generator=g)
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 3])
    mask = torch.rand(10, generator=g) > 0.2
    parts = [slice(0, cut), slice(cut, 10)]  # between sequences

    def tokens(p: slice, *combine) -> torch.Tensor:
        return gae(rewards[p], values[p], mask[p], ids[p], Gae(trace=0.9), *combine)[0]

    def responses(p: slice, *combine) -> torch.Tensor:
        return group_advantages(rewards[p], ids[p], ReinforcePlusPlus(), *combine)

    def by_source(p: slice, *combine) -> torch.Tensor:
        cfg = BySource(sources={"a": ReinforcePlusPlus(), "b": Rloo()})
        (sums,) = combine or (alone,)
        return group_advantages(rewards[p], ids[p], cfg, sums, ["aabb"[i] for i in ids[p]])

    for whole in (tokens, responses, by_source):
        ranks = Ranks(2)
        found = ranks.run(lambda rank, f=whole, r=ranks: f(parts[rank], r.combine(rank)))
        torch.testing.assert_close(torch.cat(found), whole(slice(0, 10)))


def test_gae_of_no_token_is_zero():
    advantages, _ = gae(
        torch.ones(3), torch.ones(3), torch.zeros(3).bool(), torch.zeros(3).long(), Gae()
    )
    assert advantages.tolist() == [0.0] * 3


def test_gae_is_refused_where_only_group_rewards_are_at_hand():
    with pytest.raises(ConfigError, match="critic"):
        group_advantages(REWARDS, GROUPS, Gae())


def test_informative_groups_are_those_with_unequal_rewards():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5])
    ids = torch.tensor([0, 1, 0, 1, 2, 2, 2])
    assert informative_groups(rewards, ids).tolist() == [True, False, False]


def test_reward_penalty_is_the_kl_estimate_of_counted_tokens():
    # d = -ln 2: k1 = ln 2, k3 = 1/2 - 1 + ln 2
    logprobs = torch.tensor([-1.0, -1.0])
    reference = torch.tensor([-1.0 - 0.693147181, torch.nan])
    mask = torch.tensor([True, False])
    for cfg, nats in (
        (ReferenceKl(coef=0.5, estimator="k1", place="reward"), 0.693147181),
        (ReferenceKl(coef=0.5, estimator="k2", place="reward"), 0.240226507),
        (ReferenceKl(coef=0.5, estimator="k3", place="reward"), 0.193147181),
    ):
        out = reward_penalty(logprobs, reference, mask, cfg)
        assert out.tolist() == pytest.approx([0.5 * nats, 0.0], rel=1e-5)
