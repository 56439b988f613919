"""Samplers: chances and weights against their formulas, and what they may draw over any life of a run."""

import asyncio
import threading
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import torch
from helpers.fixture_types import Buffers, MakeBuffers, MakeGroup, MakeRun
from helpers.policies import build_group_reader, build_pool, new_admission
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_q.algorithms.loss_types import LossInputs
from areal_q.algorithms.policy_losses import OBJECTIVES, policy_loss
from areal_q.algorithms.ratios import ratios
from areal_q.config import (
    Freshest,
    Prioritized,
    PythonObjective,
    PythonSampler,
    Run,
    Uniform,
    load,
)
from areal_q.errors import ConfigError, TaskError
from areal_q.messages import Group, Ticket, VersionSpan
from buffer.interface import Entry
from buffer.sampling.replay_pool import SampledGroups
from buffer.sampling.samplers import PooledGroup, build_sampler, inclusion, spread, systematic
from learner.data import group_reader as group_reader_module
from learner.data.packing import Sample, samples_of
from learner.data.staleness import VersionHistory
from learner.doctor import probe
from learner.replay import cli as replay_cli

TYPES = ["fifo", "freshest", "uniform", "prioritized"]
shared = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40
)


def rewarded(group: Group, *rewards: float) -> Group:
    pairs = zip(group.trajectories, rewards, strict=True)
    trajectories = [msgspec.structs.replace(t, reward=r) for t, r in pairs]
    return msgspec.structs.replace(group, trajectories=trajectories)


@given(
    sizes=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30),
    share=st.floats(0, 1),
)
def test_chances_sum_to_the_batch_and_follow_the_sizes(sizes: list[float], share: float):
    count = max(1, round(share * len(sizes)))
    chance = inclusion(np.array(sizes), count)
    assert chance.sum() == pytest.approx(count)
    assert chance.max() <= 1
    ratio = chance / np.array(sizes)
    below_1 = chance < 1
    assert np.allclose(ratio[below_1], ratio[below_1][:1])  # ∝ size
    assert np.all(
        ratio[~below_1] <= (ratio[below_1].min() if below_1.any() else np.inf) * (1 + 1e-9)
    )


def test_chances_of_a_worked_example():
    assert inclusion(np.array([8.0, 1.0, 1.0]), 2).tolist() == [1.0, 0.5, 0.5]
    assert inclusion(np.array([1.0, 2.0, 3.0]), 1) == pytest.approx([1 / 6, 2 / 6, 3 / 6])


def test_systematic_sampling_draws_by_chance_and_none_twice():
    rng = np.random.default_rng(3)
    chance = inclusion(np.array([5.0, 1, 2, 0.3, 40, 1, 1]), 3)
    draws = [systematic(chance, rng) for _ in range(6000)]
    assert all(len(set(d.tolist())) == len(d) == 3 for d in draws)
    seen = np.bincount(np.concatenate(draws), minlength=7) / 6000
    # 5 standard errors of a share.
    assert np.all(np.abs(seen - chance) <= 5 * np.sqrt(chance * (1 - chance) / 6000) + 1e-12)


def held(groups: list[Group]) -> list[PooledGroup]:
    return [PooledGroup(f"{i + 1}-0", g, nbytes=10, lag=0) for i, g in enumerate(groups)]


def test_weights_undo_the_priorities(make_ticket, make_group):
    """With beta 1 the weighted mean of any quantity, over many batches, is its mean over what is held."""
    groups = [
        rewarded(make_group(make_ticket(n)), *rewards)
        for n, rewards in enumerate([(0, 1), (0, 0), (0, 0.2), (1, 3), (0, 0), (0, 5)])
    ]
    values = np.array([3.0, -1.0, 4.0, 1.0, -5.0, 9.0])
    sampler = build_sampler(Prioritized(beta=1.0, alpha=0.8))
    items, rng = held(groups), np.random.default_rng(0)
    priorities = np.array([spread(g) for g in groups]) + Prioritized().floor
    chance = inclusion(priorities**0.8, 2)
    sums = []
    for _ in range(8000):
        chosen, weights = sampler.choose(items, 2, 0.0, rng)
        assert max(weights) == 1.0 and min(weights) > 0
        scale = (
            weights[0] * chance[chosen[0]]
        )  # w ∝ 1 / π: what the division by the largest took away
        assert weights[1] * chance[chosen[1]] == pytest.approx(scale)
        sums.append(np.dot(weights, values[chosen]) / scale / len(values))
    error = 5 * np.std(sums) / np.sqrt(len(sums))
    assert abs(np.mean(sums) - values.mean()) < error


def test_the_correction_grows_from_beta_to_beta_final(make_ticket, make_group):
    groups = [rewarded(make_group(make_ticket(n)), 0, 1 + 9 * n) for n in range(2)]
    sampler = build_sampler(Prioritized(alpha=1.0, beta=0.5, beta_final=1.0))

    def ratio(progress: float) -> float:
        choice = sampler.choose(held(groups), 1, progress, np.random.default_rng(0))
        return choice.weights[0]

    assert ratio(0.0) == ratio(1.0) == 1.0  # over the largest of the batch, and it is the only one
    three = [rewarded(make_group(make_ticket(n)), 0, r) for n, r in enumerate((1, 4, 16))]
    for progress, beta in ((0.0, 0.5), (0.5, 0.75), (1.0, 1.0), (7.0, 1.0)):
        rng = np.random.default_rng(1)
        chosen, weights = sampler.choose(held(three), 2, progress, rng)
        chance = inclusion(np.array([spread(g) for g in three]) + 0.01, 2)[chosen]
        expected = (chance / chance.min()) ** -beta
        assert weights == pytest.approx(expected.tolist())


def test_a_spread_is_the_mean_distance_from_the_mean(make_group):
    assert spread(rewarded(make_group(), 1, 1)) == 0
    assert spread(rewarded(make_group(), 0, 1)) == 0.5
    assert spread(rewarded(make_group(), -3, 1)) == 2


def test_without_alpha_priorities_are_uniform(make_ticket, make_group):
    groups = [rewarded(make_group(make_ticket(n)), 0, n) for n in range(9)]
    sampler = build_sampler(Prioritized(alpha=0.0))
    assert sampler.choose(held(groups), 4, 0.3, np.random.default_rng(0)).weights == [1.0] * 4


def test_uniform_draws_all_alike_and_none_twice(make_ticket, make_group):
    items = held([make_group(make_ticket(n)) for n in range(7)])
    sampler, rng = build_sampler(Uniform()), np.random.default_rng(0)
    draws = [sampler.choose(items, 3, 0.0, rng).indexes for _ in range(4000)]
    assert all(len(set(d)) == 3 for d in draws)
    seen = np.bincount(np.concatenate(draws), minlength=7) / 4000
    assert np.all(np.abs(seen - 3 / 7) < 5 * np.sqrt(3 / 7 * 4 / 7 / 4000))


def test_the_freshest_have_the_least_lag_then_the_last_commit(make_run, make_group):
    run = make_run("buffer.sampler.type=freshest")
    items = held([make_group()] * 4)
    for item, lag in zip(items, [2, 0, 1, 0], strict=True):
        item.lag = lag
    sampler = build_sampler(run.buffer.sampler)
    assert sampler.choose(items, 3, 0.0, np.random.default_rng(0)).indexes == [3, 1, 2]


OWN = """
import numpy as np
from buffer.sampling.samplers import inclusion, spread, systematic

def sampler(held, count, progress, rng, alpha, floor):
    chance = inclusion((np.array([spread(item.group) for item in held]) + floor) ** alpha, count)
    chosen = systematic(chance, rng)
    weights = (chance[chosen] * len(held) / count) ** -(0.4 + 0.6 * progress)
    return chosen, weights / weights.max()

def freshest(held, count, progress, rng):
    return sorted(range(len(held)), key=lambda i: (held[i].lag, -i))[:count]

def twice(held, count, progress, rng):
    return [0] * count

def few(held, count, progress, rng):
    return [0]

def outside(held, count, progress, rng):
    return range(len(held), len(held) + count)

def heavy(held, count, progress, rng):
    return range(count), [2.0] * count

def raises(held, count, progress, rng):
    return held[99]
"""


@pytest.mark.parametrize(
    ("name", "own", "builtin"),
    [
        ("sampler", {"alpha": 0.6, "floor": 0.01}, Prioritized()),
        ("freshest", {}, Freshest()),
    ],
)
def test_a_copy_of_a_sampler_in_a_file_draws_the_same(
    tmp_path, make_ticket, make_group, name: str, own: dict[str, float], builtin: Any
):
    (tmp_path / "mine.py").write_text(OWN)
    items = held([rewarded(make_group(make_ticket(n)), 0, n % 4) for n in range(12)])
    for place, item in enumerate(items):
        item.lag = place % 3
    mine = build_sampler(PythonSampler(path=f"{tmp_path}/mine.py:{name}", settings=own))
    for step in range(20):
        pair = (
            sampler.choose(items, 5, step / 20, np.random.default_rng([3, step]))
            for sampler in (mine, build_sampler(builtin))
        )
        assert next(pair) == next(pair)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *(
            (name, r"mine\.py:\d+: 2 different indices below 4 are due")
            for name in ("twice", "few")
        ),
        ("outside", r"mine\.py:\d+: 2 different indices below 4 are due"),
        ("heavy", r"mine\.py:\d+: 2 weights above 0 and at most 1 are due, or none"),
        ("raises", r"mine\.py:\d+: IndexError"),
    ],
)
def test_a_sampler_that_draws_no_batch_is_named_with_its_line(
    tmp_path, make_ticket, make_group, name: str, said: str
):
    (tmp_path / "mine.py").write_text(OWN)
    sampler = build_sampler(PythonSampler(path=f"{tmp_path}/mine.py:{name}"))
    items = held([make_group(make_ticket(n)) for n in range(4)])
    with pytest.raises(TaskError, match=said):
        sampler.choose(items, 2, 0.0, np.random.default_rng(0))


def test_a_weight_multiplies_the_advantages_of_its_group(make_run, make_ticket, make_group):
    groups = [rewarded(make_group(make_ticket(n)), 0, 1) for n in range(2)]
    cfg, history = make_run().learner.advantage, VersionHistory(4)
    plain = [s.advantage for s in samples_of(SampledGroups(groups), cfg, history, 1)]
    drawn = SampledGroups(groups, [1.0, 0.25])
    weighted = [s.advantage for s in samples_of(drawn, cfg, history, 1)]
    assert weighted == [*plain[:2], plain[2] / 4, plain[3] / 4]


def debugged(policy: Any, drawn: SampledGroups, patch: pytest.MonkeyPatch) -> list[Sample]:
    seen: list[Sample] = []
    patch.setattr("builtins.breakpoint", lambda: None)
    patch.setattr(
        "learner.policy_update.prepare_minibatches",
        lambda policy, samples: seen.extend(samples) or [[(None, None)]],
    )
    replay_cli.inspect(policy, 1, drawn, VersionHistory(4))
    return seen


def probed(policy: Any, drawn: SampledGroups, patch: pytest.MonkeyPatch) -> list[Sample]:
    seen: list[Sample] = []
    patch.setattr(probe, "VersionPolicies", lambda *args: None)
    patch.setattr(
        probe.Probe, "_measure", lambda self, policy, step, samples, *rest: seen.extend(samples)
    )
    run = load(None, ["learner.max_lag=0"])
    probe.Probe(run, first=1)(policy, 1, drawn, VersionHistory(4))
    return seen


@pytest.mark.parametrize("look", [debugged, probed])
def test_whoever_looks_into_a_step_sees_its_weights(
    look: Any, make_run: Any, make_ticket: Any, make_group: Any, monkeypatch: pytest.MonkeyPatch
):
    groups = [rewarded(make_group(make_ticket(n)), 0, 1) for n in range(2)]
    cfg, drawn = make_run().learner, SampledGroups(groups, [1.0, 0.25])
    learnt = samples_of(drawn, cfg.advantage, VersionHistory(4), 1, cfg.mask)
    policy = SimpleNamespace(cfg=cfg, model=None, sticky=None, smoothing=None)
    seen = look(policy, drawn, monkeypatch)
    assert [s.advantage for s in seen] == [s.advantage for s in learnt]


@pytest.mark.parametrize(
    "objective",
    [kind() for kind in OBJECTIVES if kind is not PythonObjective],
    ids=lambda c: type(c).__name__,
)
def test_every_objective_is_linear_in_the_advantage_for_its_sign(objective):
    """So a weight of a sample can go into its advantages, whatever the objective."""
    g = torch.Generator().manual_seed(0)

    def normal(scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(24, generator=g, dtype=torch.float64)

    prox = normal() - 3
    x = LossInputs(
        logprobs=prox + normal(0.3),
        proximal_logprobs=prox,
        behavior_logprobs=prox + normal(0.3),
        advantages=normal()[:6].repeat_interleave(4),
        mask=torch.ones(24, dtype=torch.bool),
        sequence_ids=torch.arange(24) // 4,
        num_sequences=6,
        version_lag=torch.zeros(24, dtype=torch.int64),
    )
    whole = policy_loss(ratios(x), objective).objective
    half = policy_loss(ratios(replace(x, advantages=x.advantages * 0.5)), objective).objective
    assert torch.allclose(half, whole * 0.5, rtol=1e-12, atol=0)
    assert whole.abs().max() > 0


@pytest.mark.parametrize(
    "overrides",
    [
        ["buffer.sampler.type=uniform", "buffer.sampler.min_groups=13"],
        ["buffer.sampler.path=mine.py", "buffer.sampler.min_groups=13"],
        ["buffer.removal.max_groups=3"],
        ["buffer.sampler.type=lifo"],
        ["buffer.sampler.alpha=1.0"],
    ],
)
def test_settings_that_would_starve_a_step_are_refused(overrides):
    with pytest.raises(ConfigError, match=r"buffer\.(sampler|removal)"):
        load(None, ["learner.groups=4", "learner.max_lag=2", *overrides])


@pytest.mark.parametrize("seconds", ["0.9", "2.9", "1e8"])
def test_a_claim_timeout_below_three_heartbeats_is_refused(seconds: str):
    with pytest.raises(
        ConfigError, match=r"buffer\.claim_timeout_s = .* renews its claims once a second"
    ):
        load(None, [f"buffer.claim_timeout_s={seconds}"])
    assert load(None, ["buffer.claim_timeout_s=3"]).buffer.claim_timeout_s == 3


class Looks(threading.Event):
    """Set after so many looks: nobody answers tickets while this learner waits."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def is_set(self) -> bool:
        self.left -= 1
        return self.left < 0


class Life:
    """A learner over a real buffer that steps, crashes and resumes from its checkpoints."""

    def __init__(self, run: Run, make_group: MakeGroup, buffers: Buffers) -> None:
        self.run, self.make_group, self.buffers = run, make_group, buffers
        self.version, self.digest = 0, 0
        self.batches: list[list[int]] = []
        """Tickets of every step that survives"""
        self.learner = self.buffers.learner()
        self.admission = new_admission(run, self.learner)
        self.history = VersionHistory(run.learner.versions_kept)
        self.history.add(0, "d0")
        self.group_reader = build_group_reader(run, self.learner, self.admission, self.history)
        self.save()

    def save(self) -> None:
        self.saved = {
            "version": self.version,
            "position": self.group_reader.position,
            "cursor": self.admission.cursor,
            "outstanding": set(self.admission.outstanding),
            "uses": self.group_reader.uses,
            "digests": dict(self.history.digests),
        }
        self.learner.trim(self.group_reader.position)

    def crash(self) -> None:
        saved = self.saved
        self.version = saved["version"]
        del self.batches[self.version :]
        self.learner = self.buffers.learner()
        self.learner.position = saved["position"]
        alive = self.learner.open_tickets() | set(self.learner.unread())
        alive = {n for n in alive if n >= saved["cursor"] or n in saved["outstanding"]}
        cursor = max(saved["cursor"], self.learner.cursor() or 0)
        self.admission = new_admission(self.run, self.learner, cursor, alive)
        self.history = VersionHistory(
            self.run.learner.versions_kept, dict(saved["digests"]), [self.version]
        )
        self.group_reader = build_group_reader(
            self.run, self.learner, self.admission, self.history, saved["uses"]
        )

    def answer(self, count: int) -> None:
        def drawn(ticket: Ticket) -> Group:
            group = self.make_group(ticket)
            digest = self.history.digests[self.version]
            trajectories = [
                msgspec.structs.replace(t, spans=[VersionSpan(self.version, t.num_tokens, digest)])
                for t in group.trajectories
            ]
            return msgspec.structs.replace(group, trajectories=trajectories)

        async def commit() -> None:
            async with self.buffers.worker(claim_timeout_s=0.0) as worker:
                worker.max_deliveries = 10**9
                for claim in await worker.claim(count, block_s=0.0):
                    await worker.commit(claim, drawn(claim.ticket))

        asyncio.run(commit())

    def step(self) -> None:
        self.admission.admit(self.version)
        for _ in range(60):
            self.answer(2)
            drawn = self.group_reader.take(self.version, Looks(2))
            if drawn:
                break
            self.admission.admit(self.version)
        else:
            raise AssertionError("starved")
        numbers = [g.ticket.number for g in drawn.groups]
        assert len(set(numbers)) == len(numbers) == self.run.learner.groups
        lags = [self.group_reader.lag(g, self.version) for g in drawn.groups]
        assert max(lags) <= self.run.learner.max_lag
        assert all(0 < w <= 1 for w in drawn.weights)
        self.batches.append(numbers)
        self.version += 1
        self.digest += 1
        self.history.add(self.version, f"d{self.digest}")
        self.group_reader.consumed()


@pytest.mark.parametrize("type", TYPES)
@shared
@given(moves=st.lists(st.sampled_from(["step", "step", "step", "save", "crash"]), max_size=14))
def test_over_a_crash_no_group_is_used_more_often_than_it_may(
    make_run: MakeRun,
    make_group: MakeGroup,
    make_buffers: MakeBuffers,
    type: str,
    moves: list[str],
):
    overrides = ["learner.max_lag=3", "learner.groups=2", "learner.minibatches=1", "steps=20"]
    run = make_run(*overrides, f"buffer.sampler.type={type}")
    max_uses = build_sampler(run.buffer.sampler).max_uses
    life = Life(run, make_group, make_buffers())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_reader_module, "POLL_S", 0.0)
        for move in moves:
            getattr(life, move)()
    uses = Counter(n for numbers in life.batches for n in numbers)
    assert max(uses.values(), default=0) <= max_uses
    assert len(life.batches) == life.version
    # What has a place is all that can still be used; nothing that is finished has one.
    if "crash" not in moves:  # an abandoned history has admitted more, which comes first
        assert len(life.admission.outstanding) <= 4 * run.learner.groups
    assert not {n for n, k in uses.items() if k >= max_uses} & life.admission.outstanding


def entries(groups: list[Group], nbytes: int = 10) -> list[Entry]:
    return [Entry(f"{i + 1}-0", group, nbytes) for i, group in enumerate(groups)]


def test_the_position_stays_before_the_oldest_group_that_is_held(make_run, make_ticket, make_group):
    run = make_run("buffer.sampler.type=freshest", "learner.groups=2", "learner.minibatches=1")
    pool = build_pool(run)
    for entry in entries([make_group(make_ticket(n)) for n in range(4)]):
        pool.add(entry)
    assert [g.ticket.number for g in (pool.draw(0) or ([], []))[0]] == [3, 2]
    assert pool.position == "0-0"
    pool.used()
    assert (pool.position, pool.numbers) == ("0-0", {0, 1})
    pool.draw(1)
    pool.used()
    assert (pool.position, pool.numbers) == ("4-0", set())


def test_a_run_is_done_at_its_last_step(make_run, make_ticket, make_group, monkeypatch):
    pool = build_pool(make_run("steps=5", "learner.groups=2", "learner.minibatches=1"))
    for entry in entries([make_group(make_ticket(n)) for n in range(2)]):
        pool.add(entry)
    choose = Mock(wraps=pool._sampler.choose)
    monkeypatch.setattr(pool._sampler, "choose", choose)
    for step in range(5):
        pool.draw(step)
    assert [call.args[2] for call in choose.call_args_list] == [0, 0.25, 0.5, 0.75, 1]


def test_what_is_passed_over_does_not_hold_up_the_position(make_run, make_ticket, make_group):
    """Its place in the stream is done with, whatever tickets are held behind it."""
    pool = build_pool(make_run("learner.groups=4", "learner.minibatches=1"))
    first, over, *others = entries([make_group(make_ticket(n)) for n in (0, 7, 1, 2)])
    pool.add(first)
    pool.pass_over(over)
    for entry in others:
        pool.add(entry)
    assert pool.position == "0-0"
    pool.remove_older(lambda group: -group.ticket.number, max_lag=-1)
    assert (pool.position, pool.numbers) == ("2-0", {1, 2})


@pytest.mark.parametrize(
    "bound, gone",
    [
        ("max_groups=3", [0, 1, 2]),
        ("max_bytes=45", [0, 1]),
        ("max_bytes=1", [0, 1, 2, 3]),  # never below the two that a step needs
        ("max_age_s=100", [0, 4]),
    ],
)
def test_what_is_over_a_bound_of_removal_leaves_the_oldest_first(
    make_run, make_ticket, make_group, bound, gone
):
    sampler = ["buffer.sampler.type=uniform", "learner.groups=2", "learner.minibatches=1"]
    run = make_run(*sampler, f"buffer.removal.{bound}")
    pool, ages = build_pool(run), {0: 200, 4: 101} if "age" in bound else {}
    skews = [0, -3600, 3600, -3600, 3600, 0]  # seconds by which the clocks of the workers are off
    now_s = 1e9
    for n, skew in enumerate(skews):
        group = make_group(make_ticket(n), finished_s=now_s + skew)
        pool.add(Entry(f"{int(1000 * (now_s - ages.get(n, 0)))}-{n}", group, nbytes=10))
    assert [item.number for item in pool.remove_excess(lambda: now_s)] == gone
    assert pool.numbers == set(range(6)) - set(gone)
    assert pool.remove_excess(lambda: now_s) == []
