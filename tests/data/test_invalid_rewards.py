"""A failed reward is no reward: what could not be scored changes nothing of what could."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from helpers.fixture_types import MakeGroup, MakeRun
from helpers.policies import build_policy
from hypothesis import given
from hypothesis import strategies as st

from areal_q.config import (
    AdvantageConfig,
    DrGrpo,
    Gae,
    Grpo,
    Prioritized,
    ReinforcePlusPlus,
    Rloo,
)
from areal_q.errors import ConfigError, RecordError, TaskError
from areal_q.messages import Array, Group, Trajectory, WorkerStatus, decode_group, encode
from bench.records import make_group, make_ticket, make_trajectory
from buffer.logs.trajectory_schema import groups_from_table, groups_to_table
from buffer.sampling.replay_pool import SampledGroups
from buffer.sampling.samplers import PooledGroup, PrioritizedSampler, spread
from learner.data.invalid_rewards import (
    CAUSES,
    Failures,
    NeverScored,
    and_how,
    failure_metrics,
    judged,
)
from learner.data.packing import samples_of
from learner.data.staleness import VersionHistory
from learner.policy_update import SingleProcessUpdater, cut_minibatches, prepare_minibatches
from learner.train_step import train_step

VOCAB = 12
ESTIMATORS = [
    Grpo(),
    Grpo(std="population"),
    DrGrpo(),
    Rloo(),
    ReinforcePlusPlus(),
    ReinforcePlusPlus(baseline="group"),
    Gae(),
]


def trajectory(index: int, reward: float, seed: int = 0, finish: str = "stop") -> Trajectory:
    rng = np.random.default_rng([seed, index])
    tokens = int(rng.integers(1, 7))
    ids, logprobs = rng.integers(0, VOCAB, tokens), -3 * rng.random(tokens)
    parts = {"correct": float(reward >= 1), "style": reward}
    return make_trajectory(
        index, ids, logprobs, finish_reason=finish, reward=reward, reward_parts=parts
    )


def group_of(number: int, trajectories: Sequence[Trajectory]) -> Group:
    """A group whose members keep their places, whoever else is there."""
    ticket = make_ticket(number, group_size=len(trajectories))
    return make_group(ticket, trajectories=list(trajectories))


def failed(t: Trajectory, reward: float = 0.0, cause: str = "timeout") -> Trajectory:
    """`t` with a reward that means nothing."""
    nothing = {"reward": reward, "reward_parts": {}}
    return msgspec.structs.replace(t, valid=False, failure=cause, **nothing)  # type: ignore[arg-type]


REWARDS = st.floats(-3, 3, width=32) | st.sampled_from([0.0, 1.0])


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Group], list[Group]]:
    """(groups with failed members among the others, the same groups without them)"""
    mixed, clean = [], []
    for number in range(draw(st.integers(1, 3))):
        members = []
        for index in range(draw(st.integers(2, 6))):
            reward, fails = draw(REWARDS), index > 1 and draw(st.booleans())
            t = trajectory(index, reward, number)
            members.append(failed(t, draw(REWARDS)) if fails else t)
        mixed.append(group_of(number, draw(st.permutations(members))))
        clean.append(group_of(number, mixed[-1].valid_trajectories))
    return mixed, clean


@given(both=batches(), advantage=st.sampled_from(ESTIMATORS))
def test_an_invalid_member_changes_no_valid_advantage(
    both: tuple[list[Group], list[Group]], advantage: AdvantageConfig
):
    """The oracle is the batch without the invalid members, bit for bit."""
    mixed, clean = (
        samples_of(SampledGroups(groups), advantage, VersionHistory(4, {0: "a0"}), 1)
        for groups in both
    )
    assert [s.trajectory for s in mixed] == [s.trajectory for s in clean]
    assert [s.advantage for s in mixed] == [s.advantage for s in clean]


@given(both=batches())
def test_an_invalid_member_changes_no_priority(both: tuple[list[Group], list[Group]]):
    mixed, clean = both
    assert [spread(g) for g in mixed] == [spread(g) for g in clean]


def test_a_failure_gives_a_group_no_priority():
    """Every valid reward is 1, so the group teaches nothing, whatever its failed member holds."""
    uniform = group_of(0, [trajectory(0, 1.0), trajectory(1, 1.0), failed(trajectory(2, 0.0))])
    telling = group_of(1, [trajectory(0, 1.0), trajectory(1, 0.0), trajectory(2, 1.0)])
    sampler = PrioritizedSampler(Prioritized(alpha=4.0, floor=1e-6))
    held = [PooledGroup(str(g.ticket.number), g, 1, lag=0) for g in (uniform, telling)]
    chosen = {sampler.choose(held, 1, 0.0, np.random.default_rng(s)).indexes[0] for s in range(20)}
    assert chosen == {1}


SMALL = ("model.layers=1", "model.width=16", "model.heads=2", "model.kv_heads=1", "model.mlp=16")


def groups_with_failures(finish: str = "stop") -> list[Group]:
    """Six groups of up to five, in each of which something failed; valid rewards differ."""

    def member(number: int, index: int) -> Trajectory:
        t = trajectory(index, float((index + number) % 3), number, finish if index == 0 else "stop")
        return failed(t, reward=1.0) if index in (2, 3 + number % 2) else t

    return [group_of(n, [member(n, i) for i in range(5)]) for n in range(6)]


LEARNERS = {
    "grpo": ("learner.advantage.type=grpo",),
    "rloo, mean of responses": (
        "learner.advantage.type=rloo",
        "learner.aggregation.type=seq_mean_token_mean",
    ),
    "reinforce++": ("learner.advantage.type=reinforce++",),
    "gae": ("learner.advantage.type=gae", "learner.critic={}"),
    "kl in the reward": ('learner.reference_kl={place="reward", coef=0.1}',),
    "entropy bonus": ("learner.entropy_coef=0.01",),
}


@pytest.mark.parametrize("settings", LEARNERS.values(), ids=LEARNERS)
def test_a_step_is_that_of_the_groups_without_failures(
    make_run: MakeRun, settings: tuple[str, ...]
):
    """Loss, denominators, gradient and weights after the step, bit for bit."""
    run = make_run("learner.groups=6", "learner.minibatches=3", *SMALL, *settings)
    mixed = groups_with_failures()
    clean = [group_of(g.ticket.number, g.valid_trajectories) for g in mixed]
    history = VersionHistory(4, {0: "a0"})
    results = []
    for groups in (mixed, clean):
        policy = build_policy(run)
        metrics = train_step(SingleProcessUpdater(policy), SampledGroups(groups), history, 1)
        results.append((metrics, [p.detach().clone() for p in policy.model.parameters()]))
    (one, weights), (other, same) = results
    counts = {name for name in one if name.startswith("reward/invalid") or name == "reward/errors"}
    assert {k: v for k, v in one.items() if k not in counts} == {
        k: v for k, v in other.items() if k not in counts
    }
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    assert one["reward/invalid"] == one["reward/invalid/timeout"] == 12
    assert other["reward/invalid"] == 0


def test_groups_that_lost_responses_are_not_cut(make_run: MakeRun):
    """With the KL in the reward, responses of a group are compared after the batch was cut."""
    history = VersionHistory(4, {0: "a0"})
    samples = samples_of(SampledGroups(groups_with_failures()[:4]), Grpo(), history, 1)[1:]
    run = make_run("learner.minibatches=2", 'learner.reference_kl={place="reward"}')
    parts = cut_minibatches(samples, run.learner)
    assert [sorted({s.ticket for s in part}) for part in parts] == [[0, 1], [2, 3]]


def test_a_cut_off_response_has_no_loss_but_a_reward(make_run: MakeRun):
    """DAPO's overlong filtering: the baseline of the others is as before, the step is that of a batch in which
    the tokens of the first response of each group do not count."""
    run = make_run("learner.groups=6", 'learner.mask=["length"]', *SMALL)
    history = VersionHistory(4, {0: "a0"})
    groups = groups_with_failures(finish="length")
    drawn = SampledGroups(groups)
    plain = samples_of(drawn, Grpo(), history, 1)
    cut = samples_of(drawn, Grpo(), history, 1, mask=run.learner.mask)
    for before, after in zip(plain, cut, strict=True):
        if before.trajectory.finish_reason == "length":
            assert not after.counted.any() and after.advantage == 0.0
        else:
            assert after.advantage == before.advantage
            assert after.trajectory == before.trajectory
    policy = build_policy(run)
    counted = sum(int(s.counted.sum()) for s in cut)
    tokens = 0
    for part in prepare_minibatches(policy, cut):
        tokens += sum(int(x.mask.sum()) for _, x in part)
    assert tokens == counted
    timeouts = samples_of(drawn, Grpo(), history, 1, mask=["timeout"])
    assert [s.trajectory for s in timeouts] == [s.trajectory for s in plain]


def test_a_masked_response_moves_no_weight(make_run: MakeRun):
    """Whatever the tokens of a cut-off response are, the step is the same."""
    run = make_run("learner.groups=6", 'learner.mask=["length"]', *SMALL)
    history = VersionHistory(4, {0: "a0"})

    def other_tokens(t: Trajectory) -> Trajectory:
        if t.finish_reason != "length":
            return t
        ids = (t.response_ids.numpy() + 5) % VOCAB
        return msgspec.structs.replace(t, response_ids=Array.of(ids, "int32"))

    groups = groups_with_failures(finish="length")
    others = [
        msgspec.structs.replace(g, trajectories=[other_tokens(t) for t in g.trajectories])
        for g in groups
    ]
    weights = []
    for batch in (groups, others):
        policy = build_policy(run)
        train_step(SingleProcessUpdater(policy), SampledGroups(batch), history, 1)
        weights.append([p.detach().clone() for p in policy.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_failures_are_counted_by_cause_from_the_first_step():
    whole = group_of(0, [trajectory(0, 1.0), trajectory(1, 0.0)])
    nothing = failure_metrics([whole])
    assert nothing == {"reward/errors": 0.0, "reward/invalid": 0.0} | {
        f"reward/invalid/{cause}": 0.0 for cause in CAUSES
    }
    zero = msgspec.structs.replace(trajectory(2, 0.0), reward_parts={"error": 1.0})
    down = failed(trajectory(3, 0.0), cause="unavailable")
    found = failure_metrics([group_of(0, [*whole.trajectories, zero, down])])
    assert (found["reward/errors"], found["reward/invalid"]) == (2, 1)
    assert found["reward/invalid/unavailable"] == 1


def test_a_reward_that_never_worked_ends_the_learner():
    bad = group_of(0, [failed(trajectory(i, 0.0), cause="exception") for i in range(8)])
    counts = Failures(hopeless=512)
    for _ in range(63):
        counts.add(bad)
    with pytest.raises(TaskError, match=r"all of the first 512 responses \(512 exception\)"):
        counts.add(bad)


def test_the_end_waits_for_a_worker_to_tell_how_it_failed():
    zeros: dict[str, Any] = dict.fromkeys(WorkerStatus.__struct_fields__, 0)
    silent = msgspec.structs.replace(WorkerStatus(**zeros), worker="w0", failure="")
    told = msgspec.structs.replace(silent, worker="w1", failure="raised KeyError: 'a', in r.py:5")
    beats = iter([[], [silent], [silent, told]])
    said = and_how(NeverScored("it failed for all"), lambda: next(beats), wait_s=math.inf)
    end = "mend it, and continue with --resume"
    assert str(said) == f"it failed for all: raised KeyError: 'a', in r.py:5 (w1); {end}"
    without = and_how(NeverScored("it failed for all"), lambda: [silent], wait_s=0.0)
    assert str(without) == f"it failed for all: the workers' logs say how; {end}"


def test_a_reward_that_worked_once_may_fail_for_long():
    bad = group_of(0, [failed(trajectory(i, 0.0)) for i in range(8)])
    counts = Failures(hopeless=256)
    counts.add(group_of(0, [trajectory(0, 1.0)]))
    for _ in range(100):
        counts.add(bad)
    assert counts.metrics()["buffer/invalid/timeout"] == 800


def test_records_without_validity_are_valid(make_group: MakeGroup):
    """A worker of commit 5cc3ba6 sends neither field."""
    fields = msgspec.msgpack.decode(encode(make_group()))
    for t in fields["trajectories"]:
        del t["valid"], t["failure"]
    old = decode_group(msgspec.msgpack.encode(fields))
    assert all(t.valid and t.failure is None for t in old.trajectories)


def test_an_invalid_record_must_name_its_cause(make_group: MakeGroup):
    group = make_group()
    bad = [msgspec.structs.replace(t, valid=False) for t in group.trajectories]
    with pytest.raises(RecordError, match="no cause"):
        msgspec.structs.replace(group, trajectories=bad).validate()


def test_validity_and_cause_survive_redis_and_the_log(make_group: MakeGroup):
    group = make_group()
    first, second = group.trajectories
    group = msgspec.structs.replace(group, trajectories=[failed(first), second])
    assert decode_group(encode(group)) == group
    assert groups_from_table(groups_to_table(3, 3, [group])) == [group]


def test_a_replay_can_count_failures_as_0_or_drop_them():
    group = group_of(0, [trajectory(0, 1.0), trajectory(1, 1.0), failed(trajectory(2, 0.0))])
    lost = group_of(1, [failed(trajectory(0, 0.0)), trajectory(1, 1.0)])
    (zeros, others), weights = judged(SampledGroups([group, lost], [1.0, 0.5]), "zero", 2)
    assert [t.reward for t in zeros.valid_trajectories] == [1.0, 1.0, 0.0]
    assert len(others.valid_trajectories) == 2 and weights == [1.0, 0.5]
    assert judged(SampledGroups([zeros, others], [1.0, 0.5]), "drop", 2) == ([group], [1.0])
    with pytest.raises(ConfigError, match="leaves nothing to learn from"):
        judged(SampledGroups([others]), "retry", 2)
