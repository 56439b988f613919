"""The quickstart bench's definition of gain per minute, against numbers worked out by hand."""

import pytest

from bench.learning_curve import Curve, gain_per_minute, ours, time_to, trls, value_at

RISING = [(0.0, 0.3), (60.0, 0.6), (120.0, 1.0), (180.0, 0.7)]


def test_goal_is_reached_on_the_line_between_two_measurements():
    assert time_to(RISING, 0.8) == pytest.approx(90)
    assert time_to(RISING, 0.6) == pytest.approx(60)


def test_a_goal_that_was_never_reached_has_no_time():
    assert time_to(RISING, 1.1) is None


def test_gain_per_minute_stops_counting_at_the_goal():
    assert gain_per_minute(RISING, 0.8) == pytest.approx((0.8 - 0.3) / 1.5)


def test_gain_per_minute_covers_all_time_if_the_goal_is_missed():
    assert gain_per_minute(RISING, 1.1) == pytest.approx((0.7 - 0.3) / 3)


def test_the_value_at_a_time_is_the_last_one_known():
    assert [value_at(RISING, t) for t in (0, 59, 60, 1000)] == [0.3, 0.3, 0.6, 0.7]


def test_smoothed_rewards_average_the_last_five_batches():
    curve = Curve(reward=[(float(t), r) for t, r in enumerate((0.1, 0.2, 0.3, 0.4, 0.5, 1.1), 1)])
    seconds, values = zip(*curve.smooth_reward, strict=True)
    assert seconds == (0.0, 5.0, 6.0)
    assert values == pytest.approx((0.1, 0.3, 0.5))


def test_our_clock_starts_at_the_end_of_the_warm_start():
    step = {
        "kind": "step",
        "reward/mean": 0.5,
        "response/tokens_mean": 4.0,
        "learner/step_s": 2.0,
        "learner/wait_s": 0.5,
        "rollout/tokens_per_s": 100.0,
        "rollout/idle_share": 0.75,
    }
    curve = ours(
        [
            {"kind": "warmstart", "step": 0, "elapsed_s": 3.0},
            {"kind": "warmstart", "step": 0, "elapsed_s": 10.0},
            {"kind": "eval", "step": 0, "elapsed_s": 12.0, "eval/accuracy": 0.3},
            {**step, "step": 1, "elapsed_s": 13.0},
            {**step, "step": 2, "elapsed_s": 15.0},
            {"kind": "eval", "step": 2, "elapsed_s": 16.0, "eval/accuracy": 0.4},
        ],
        batch_responses=8,
    )
    assert curve.accuracy == [(0.0, 0.3), (6.0, 0.4)]
    assert curve.reward == [(3.0, 0.5), (5.0, 0.5)]
    assert (curve.tokens, curve.seconds, curve.batches) == (64, 5.0, 2)
    assert curve.rates == pytest.approx(
        {"train": 64 / 3, "generate": 400.0, "learner_idle": 0.25, "worker_idle": 0.75}
    )


def test_trl_is_charged_for_training_what_is_not_drawing():
    step = {"kind": "step", "reward": 0.5, "tokens": 300, "generate_s": 1.0}
    curve = trls(
        [
            {"kind": "eval", "step": 0, "elapsed_s": 0.0, "accuracy": 0.3},
            {**step, "step": 1, "elapsed_s": 4.0},
        ]
    )
    assert curve.rates == pytest.approx({"train": 100.0, "generate": 300.0})
    assert (curve.batches, curve.seconds) == (1, 4.0)
