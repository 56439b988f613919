"""The interface of a teacher, and how its log-probs are put beside the responses."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from areal_q.messages import Group, with_teacher


class Teacher(Protocol):
    """Gives log π_T of every response token of a step's groups. It depends on the responses alone: the same
    response has the same log-probs at every step."""

    def scored(self, groups: Sequence[Group]) -> list[Group]:
        """Returns `groups` with `teacher_logprobs` in every trajectory, those of tokens that do not count among
        them. Raises ConfigError for what the teacher cannot score, and Stopped if the learner is to stop."""
        ...


def with_logprobs(groups: Sequence[Group], logprobs: Iterable[np.ndarray]) -> list[Group]:
    """Returns `groups` with these log-probs, [T] for each path of each trajectory, in order."""
    given = iter(logprobs)
    return [
        replace(
            group,
            trajectories=[
                with_teacher(t, [*islice(given, 1 + len(t.branches))]) for t in group.trajectories
            ],
        )
        for group in groups
    ]
