"""The episode as a tree: what its requests drew beside the first path, each drawn token once.

    path 0   prompt ─── turn 1 ─── result ─── turn 2      the trajectory's own tokens
    path 1                └─── result, in short ─── turn      Branch(parent=0, at=tokens up to the fork)
    path 2   pro ─── a sub-agent's instructions ─── turn      Branch(parent=0, at=tokens in common)

A path is a segment's own tokens and all that they were drawn after, from the prompt's first token on. What does
not extend a path hangs a branch at the longest beginning that it has in common with one.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from areal_q.errors import RecordError
from areal_q.messages.tokens import (
    Array,
    FinishReason,
    Tokens,
    TurnReward,
    VersionSpan,
    validate_sampling_mask,
    validate_tokens,
    validate_turn_rewards,
)

MOST_BRANCHES = 4096
"""Branches of one episode"""


class Branch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tokens of an episode that do not extend its first path. Without its first two fields it is as a
    Trajectory, of its own tokens only: those that it shares are its parent's.

    Example: after the prompt [5, 6] the model drew [7, 8, 9] and, asked again, [7, 3]. The second is
    Branch(parent=0, at=2, response_ids=[7, 3], …): the fork is where the request was the same, not the draw.
    """

    parent: Annotated[int, msgspec.Meta(ge=0, le=MOST_BRANCHES)]
    """The path that it hangs off: 0 is the trajectory's own, k that of branch k, counted from 1."""
    at: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    """Number of tokens of that path, those of the prompt included, that it shares."""
    response_ids: Array
    behavior_logprobs: Array
    loss_mask: Array
    spans: list[VersionSpan]
    finish_reason: FinishReason
    """Why its last turn ended"""
    teacher_logprobs: Array | None = None
    routes: Array | None = None
    """uint8 or uint16 [N, L, K]: the experts of the first N of its own tokens, as a trajectory has them of all
    of the first path, N ≤ T - 1"""
    sampling_mask: Array | None = None
    turn_rewards: tuple[TurnReward, ...] = ()


def validate_branches(
    first: Tokens,
    branches: Sequence[Branch],
    prompt_tokens: int,
    budget: int,
    masked: bool,
    where: str,
) -> None:
    """Raises RecordError, which begins with `where` and names the branch, unless each of the `branches` beside
    the `first` path hangs at tokens of an earlier one and has some of its own, at least one of them drawn. An
    episode draws at most `budget` tokens on all of its paths. `masked` is Ticket.masked."""
    if len(branches) > MOST_BRANCHES:
        raise RecordError(f"{where}: {len(branches)} branches, more than {MOST_BRANCHES}")
    lengths = [prompt_tokens + first.response_ids.shape[0]]
    drawn = _drawn(first.loss_mask)
    for number, branch in enumerate(branches, 1):
        place = f"{where}, branch {number}"
        if branch.parent >= number:
            raise RecordError(f"{place}: hangs off path {branch.parent}, which is no earlier one")
        if branch.at > lengths[branch.parent]:
            raise RecordError(
                f"{place}: shares {branch.at} tokens of path {branch.parent}, which has "
                f"{lengths[branch.parent]}"
            )
        validate_tokens(branch, place)
        validate_sampling_mask(branch, masked, place)
        validate_turn_rewards(branch, place)
        if not (own := _drawn(branch.loss_mask)):
            raise RecordError(f"{place}: none of its tokens was drawn")
        drawn += own
        lengths.append(branch.at + branch.response_ids.shape[0])
    if drawn > budget:
        raise RecordError(f"{where}: {drawn} tokens drawn on all paths, more than {budget}")


def _drawn(mask: Array) -> int:
    return int(np.count_nonzero(mask.numpy()))
