"""The curves of the quickstart's bench, against numbers worked out by hand."""

from typing import Any

import pytest

from bench.learning_curve import ours, time_to, trls, value_at

RISING = [(0.0, 0.3), (60.0, 0.6), (120.0, 1.0), (180.0, 0.7)]


def test_goal_is_reached_on_the_line_between_two_measurements():
    assert time_to(RISING, 0.8) == pytest.approx(90)
    assert time_to(RISING, 0.6) == pytest.approx(60)


def test_a_goal_that_was_never_reached_has_no_time():
    assert time_to(RISING, 1.1) is time_to([], 0.5) is None


def test_the_value_at_a_time_is_the_last_one_known():
    assert [value_at(RISING, t) for t in (0, 59, 60, 1000)] == [0.3, 0.3, 0.6, 0.7]


@pytest.mark.parametrize(
    "begun", [{"kind": "warmstart"}, {"kind": "start", "doing": "publishing the first weights"}]
)
def test_our_clock_starts_with_the_first_weights(begun: dict[str, Any]):
    """A pretrained model has no warm start."""
    step = {
        "kind": "step",
        "response/tokens_mean": 4.0,
        "learner/step_s": 2.0,
        "learner/wait_s": 0.5,
        "rollout/idle_share": 0.75,
    }
    curve = ours(
        [
            {"kind": "start", "doing": "loading the model", "step": 0, "elapsed_s": 2.0},
            {**begun, "step": 0, "elapsed_s": 3.0},
            {**begun, "step": 0, "elapsed_s": 10.0},
            {"kind": "start", "doing": "evaluating", "step": 0, "elapsed_s": 12.0},
            {**step, "step": 1, "elapsed_s": 13.0},
            {**step, "step": 2, "elapsed_s": 15.0},
        ],
        accuracies={0: 0.3, 2: 0.4},
        batch_responses=8,
    )
    assert curve.accuracy == [(0.0, 0.3), (5.0, 0.4)]
    assert (curve.tokens, curve.ended) == (64, [3.0, 5.0])
    assert (curve.training, curve.drawing) == pytest.approx((0.75, 0.25))


def test_trl_trains_while_it_does_not_draw():
    step = {"kind": "step", "tokens": 300, "generate_s": 1.0, "cpu_s": 7.0}
    curve = trls(
        [
            {"kind": "eval", "step": 0, "elapsed_s": 0.0, "accuracy": 0.3},
            {**step, "step": 1, "elapsed_s": 4.0},
        ]
    )
    assert (curve.drawing, curve.training) == pytest.approx((0.25, 0.75))
    assert (curve.ended, curve.cpu) == ([4.0], [(0.0, 0.0), (4.0, 7.0)])
