"""Rates of the workers between two steps, from counts in heartbeats; the oracle is what the worker did."""

from typing import Any

import pytest

from areal_q.messages import WorkerStatus
from bench.records import make_beat
from learner.measure.worker_rates import WorkerRates


def beat(worker: str, time_s: float, tokens: int, busy_s: float, **fields: Any) -> WorkerStatus:
    """A heartbeat of a worker that has drawn nothing in its last ten seconds."""
    counts = {"time_s": time_s, "tokens": tokens, "busy_s": busy_s}
    return make_beat(worker, **({"idle_share": 1.0} | counts | fields))


def told(rates: WorkerRates, *workers: WorkerStatus) -> tuple[float, float]:
    found = rates.metrics(workers)
    return found["rollout/tokens_per_s"], found["rollout/idle_share"]


def test_a_long_step_counts_what_was_drawn_in_it():
    """A worker drew 310 tokens in 6 of 20 s, and had run out of tickets long before the step's end."""
    rates = WorkerRates()
    told(rates, beat("w", 100.0, 848, 50.0))
    assert told(rates, beat("w", 120.0, 1158, 56.0)) == (15.5, pytest.approx(0.7))


@pytest.mark.parametrize("step_s", [0.2, 0.7, 1.0, 3.3, 15.0])
def test_rates_do_not_depend_on_the_steps_length(step_s: float):
    """A worker draws 40 tokens/s, half of the time, and sends a heartbeat a second."""
    rates, found = WorkerRates(), []
    told(rates, beat("w", 0.0, 0, 0.0))
    told(rates, beat("w", 1.0, 40, 0.5))
    for step in range(round(60 / step_s)):
        second = 2 + int(step * step_s)
        found.append(told(rates, beat("w", second, 40 * second, second / 2)))
    assert len(found) > 1
    assert all(one == (pytest.approx(40.0), pytest.approx(0.5)) for one in found)


def test_workers_add_up_and_their_idle_shares_are_averaged():
    rates = WorkerRates()
    told(rates, beat("a", 0.0, 0, 0.0), beat("b", 0.5, 100, 7.0))
    later = beat("a", 10.0, 100, 10.0), beat("b", 5.5, 150, 7.0)
    assert told(rates, *later) == (20.0, 0.5)


def test_a_worker_that_comes_has_counted_from_zero(monkeypatch: pytest.MonkeyPatch):
    """So it is at the first step, when the learner has seen no worker before."""
    clock = iter((1000.0, 1040.0, 1050.0))
    monkeypatch.setattr("learner.measure.worker_rates.time.time", lambda: next(clock))
    rates = WorkerRates()
    assert told(rates, beat("a", 1039.0, 390, 13.0)) == (10.0, pytest.approx(2 / 3))
    new = beat("b", 1050.0, 300, 5.0)
    assert told(rates, beat("a", 1049.0, 490, 23.0), new) == (40.0, 0.25)


def test_a_worker_that_comes_in_a_short_step_says_its_rate(monkeypatch: pytest.MonkeyPatch):
    """Its heartbeat came 8 ms after a step, with the tokens of its first second."""
    monkeypatch.setattr("learner.measure.worker_rates.time.time", lambda: 1000.0)
    rates = WorkerRates()
    told(rates)
    first = beat("w", 1000.008, 274, 0.04, tokens_per_s=272.0, idle_share=0.96)
    assert told(rates, first) == (272.0, 0.96)
    assert told(rates, first) == (272.0, 0.96)
    assert told(rates, beat("w", 1002.008, 474, 1.04)) == (pytest.approx(100), pytest.approx(0.5))


def test_a_worker_older_than_the_learner_says_its_rate(monkeypatch: pytest.MonkeyPatch):
    """A learner that was restarted has a first step of 14 s; the worker has drawn for a day."""
    monkeypatch.setattr("learner.measure.worker_rates.time.time", lambda: 1000.0)
    rates = WorkerRates()
    first = beat("w", 1014.0, 5_000_000, 83_000.0, tokens_per_s=60.0, idle_share=0.1)
    assert told(rates, first) == (60.0, 0.1)


@pytest.mark.parametrize("fields", [{"pid": 2}, {"busy_s": 1.0}, {"tokens": 3}])
def test_a_worker_that_began_anew_has_counted_from_zero(fields: dict[str, Any]):
    """In a container every process has the same number; only its counts are smaller than before."""
    rates = WorkerRates()
    told(rates, beat("w", 0.0, 900, 90.0))
    again: dict[str, Any] = {"tokens": 1000, "busy_s": 95.0} | fields
    tokens_per_s = again["tokens"] / 100
    idle_share = 1 - again["busy_s"] / 100
    assert told(rates, beat("w", 100.0, **again)) == (tokens_per_s, pytest.approx(idle_share))


def test_a_worker_that_went_counts_no_more_and_may_come_back():
    rates = WorkerRates()
    told(rates, beat("a", 0.0, 0, 0.0), beat("b", 0.0, 0, 0.0))
    assert told(rates, beat("a", 10.0, 100, 10.0)) == (10.0, 0.0)
    assert told(rates, beat("a", 20.0, 200, 20.0), beat("b", 20.0, 100, 10.0)) == (15.0, 0.25)
    assert told(rates) == (0.0, 0.0)
