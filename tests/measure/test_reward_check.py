"""A user's reward is compared with a second opinion, on one response of each group."""

from collections.abc import Callable

import numpy as np
from helpers.fixture_types import MakeRun
from msgspec.structs import replace

from areal_q.messages import Array, Group, Ticket
from areal_q.tasks import build_tokenizer
from learner.measure.reward_check import RewardCheck


def test_answers_that_the_reward_judges_otherwise_are_counted(
    make_run: MakeRun, make_ticket: Callable[..., Ticket], make_group: Callable[..., Group]
):
    run = make_run("reward.path=mine.py")
    tokenizer = build_tokenizer(run.model, run.task)

    def group(text: str, correct: bool, first_is_valid: bool = True) -> Group:
        made = make_group(make_ticket(prompt="1+1=", answer="2", group_size=2))
        ids = Array.of(np.array([*tokenizer.encode(text), tokenizer.eos_id]), "int32")
        first, second = made.trajectories
        said = replace(first, response_ids=ids, reward_parts={"correct": float(correct)})
        if first_is_valid:
            return replace(made, trajectories=[said, second])
        return replace(made, trajectories=[replace(second, valid=False), said])

    groups = [group("2", True), group("2", False, first_is_valid=False)]
    groups += [group("3", False), group("3", True), group("22", True)]
    assert RewardCheck(run, tokenizer).metrics(groups) == {
        "reward/right": 2,
        "reward/right_refused": 1,
        "reward/wrong": 3,
        "reward/wrong_accepted": 2,
    }
    assert RewardCheck(make_run(), tokenizer).metrics(groups) == {}
