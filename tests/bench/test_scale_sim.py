"""The simulation behind docs/sizing.md, against what queueing theory and arithmetic say."""

import numpy as np
import pytest

from bench.scale.load import LIMITS, Load, remedies, shares
from bench.scale.redis_costs import RedisCosts, group_bytes, measure
from bench.scale.simulation import Simulation, simulate

FREE = RedisCosts(group_s=0.0, byte_s=0.0, beat_s=0.0)
SMALL = Load(workers=20, tokens_per_s=6400.0, response_tokens=100, step_s=10.0, in_flight=4)
"""4 groups/s a worker, so 80 in all; B is 800"""


def simulated(load: Load, costs: RedisCosts, nbytes: int = 0, steps: int = 8):
    return Simulation(load, costs, nbytes).run(steps)


def test_queue_at_redis_has_the_length_of_pollaczek_khinchine():
    """M/D/1: mean wait ρ·s / (2·(1 − ρ)) before a service of s."""
    service_s, load = 0.001, 0.6
    simulation, waits = Simulation(SMALL, FREE, 0), []
    for gap_s in np.random.default_rng(1).exponential(service_s / load, 100_000):
        simulation.now += gap_s
        waits.append(simulation.serve(service_s) - simulation.now - service_s)
    assert np.mean(waits) == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.05)


@pytest.mark.parametrize(("beat_s", "busy"), [(0.02, 0.4), (0.1, 1.0)])
def test_heartbeats_take_their_share_of_redis(beat_s: float, busy: float):
    """20 workers, one heartbeat a second each; where they are more than Redis serves, it is full of them."""
    found = simulated(SMALL, RedisCosts(group_s=0.0, byte_s=0.0, beat_s=beat_s))
    assert found.redis_busy == pytest.approx(busy, rel=0.03)


def test_with_everything_free_the_workers_are_the_limit():
    found = simulated(SMALL, FREE)
    assert found.groups_per_s == pytest.approx(SMALL.groups_per_s, rel=0.05)
    assert found.idle < 0.02 and found.redis_busy == 0


def test_a_full_redis_is_the_limit():
    costs = RedisCosts(group_s=0.03, byte_s=0.0, beat_s=0.0)
    found = simulated(SMALL, costs)
    assert found.groups_per_s == pytest.approx(1 / 0.03, rel=0.1)
    assert found.redis_busy > 0.97 and found.idle > 0.4


def test_bytes_cost_what_was_measured():
    costs = RedisCosts(group_s=0.0, byte_s=1e-9, beat_s=0.0)
    found = simulated(SMALL, costs, nbytes=1_000_000)
    assert found.redis_busy == pytest.approx(SMALL.groups_per_s * 1e-3, rel=0.1)


def test_no_group_is_older_than_admission_lets_it_be():
    found = simulated(SMALL, RedisCosts(group_s=0.001, byte_s=0.0, beat_s=0.0001), steps=12)
    assert 0 < found.lag_max <= SMALL.max_lag


def test_relays_bring_the_weights_sooner_than_one_card():
    direct = Load(workers=10_000)
    relayed = Load(workers=10_000, fan_out=64)
    one = direct.delta_bytes / direct.network_bytes_per_s
    assert direct.arrival_s(9_999) == pytest.approx(10_000 * one)
    assert relayed.arrival_s(9_999) == pytest.approx((157 + 16) * one)


def test_reading_holds_up_the_learner_for_what_it_costs():
    """B is 800 groups of 1 kB, each of which takes 1 ms: 0.8 s of every 10.8."""
    found = simulated(SMALL, RedisCosts(0.0, 0.0, 0.0, read_byte_s=1e-6), nbytes=1000)
    assert found.learner_wait == pytest.approx(0.8 / 10.8, rel=0.1)


def test_ten_thousand_workers_are_too_many_for_one_run():
    costs = RedisCosts(group_s=40e-6, byte_s=1.5e-9, beat_s=50e-6, read_byte_s=1e-9)
    _, (_, alone), (runs, shared) = remedies(Load(10_000, step_s=10.0, in_flight=1), costs, 64)
    assert runs * shared.workers >= 10_000
    assert shares(alone, costs)["Redis's core"] > 1
    assert shares(shared, costs)["Redis's core"] <= LIMITS["Redis's core"]
    one, several = (simulate(part, costs, steps=6) for part in (alone, shared))
    assert one.groups_per_s < alone.groups_per_s / 2 and one.learner_wait > 0.4
    assert several.groups_per_s == pytest.approx(shared.groups_per_s, rel=0.1)


def test_the_same_seed_is_the_same_history():
    costs = RedisCosts(group_s=0.001, byte_s=0.0, beat_s=0.0001)
    assert simulated(SMALL, costs, steps=3) == simulated(SMALL, costs, steps=3)


@pytest.mark.timeout(60)
def test_costs_of_a_real_redis_are_positive_and_grow_with_size():
    found = measure()
    assert 1e-11 < found.byte_s < 1e-6
    assert found.beat_s > 0
    assert 0 < found.of_group(group_bytes(20)) < found.of_group(group_bytes(2000)) < 1
