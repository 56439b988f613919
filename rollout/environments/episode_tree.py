"""Finds the place of a turn in all that is recorded of its episode: at the end of a path, or on a branch.

A turn that was drawn after the whole of a path extends it. Any other hangs a branch at the longest beginning
that what it was drawn after has in common with a path: history in short, thoughts left out, a turn asked for
again, a sub-agent with its own instructions, requests at the same time. So each drawn token is recorded once.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from areal_q.messages.tokens import common
from areal_q.tasks.base import Message, Tool
from rollout.engines.base import Completion
from rollout.environments.base import Response


class TurnState(NamedTuple):
    """What an agent had sent and received of an episode when a turn had ended. Of text and messages the one
    that it did not use is None."""

    path: int
    """The turn's path: 0 is the first, k that of branch k, counted from 1."""
    length: int
    """Number of tokens of the path then, those of the prompt included"""
    text: str | None
    messages: list[Message] | None = None
    tools: Sequence[Tool] = ()
    """Those that the model has read"""
    id: str = ""
    """The id of the turn's reply"""


def path_of(response: Response, prompt: list[int], number: int) -> list[int]:
    """Returns all tokens of a path. `prompt` is the ticket's, for a response without one of its own."""
    if not number:
        return [*(prompt if response.prompt is None else response.prompt), *response.ids]
    branch = response.branches[number - 1]
    return [*path_of(response, prompt, branch.parent)[: branch.at], *branch.ids]


def give_reward(response: Response, prompt: list[int], state: TurnState, reward: float) -> None:
    """Gives the turn that ended with `state` a reward, in place of an earlier one. `prompt` is the ticket's."""
    path = response.paths[state.path]
    before = path.at if state.path else len(path_of(response, prompt, 0)) - len(path.ids)
    path.turn_rewards[state.length - 1 - before] = reward


def record(
    response: Response, prompt: list[int], context: list[int], done: Completion
) -> TurnState:
    """Adds a turn that was drawn after the tokens `context` to the episode, and returns where it is, as a state
    of no text. `prompt` is the ticket's; the first turn may have been drawn after another one."""
    if not response.ids:
        if context[: len(prompt)] != prompt:
            response.prompt = context
        number, shared, whole = 0, len(path_of(response, prompt, 0)), True
    else:
        number, shared, whole = _nearest(response, prompt, context)
    if whole:
        path = response.branches[number - 1] if number else response
    else:
        path = Response(parent=number, at=shared)
        response.branches.append(path)
        number = len(response.branches)
    path.add_given(context[shared:], path.spans[-1] if path.spans else done.spans[0])
    # Those of the tokens that a branch shares are its parent's.
    path.add_drawn(done if done.routes is None else replace(done, routes=done.routes[path.at :]))
    return TurnState(number, len(context) + len(done.response_ids), None)


def _nearest(response: Response, prompt: list[int], context: list[int]) -> tuple[int, int, bool]:
    """Returns the path that has the longest beginning in common with `context`, its number of tokens, and
    whether it is all of the path. Of several a whole path, the newest, comes before an earlier one."""
    own = path_of(response, prompt, 0)
    shared, lengths = [common(own, context)], [len(own)]
    for branch in response.branches:
        found = shared[branch.parent]
        if found >= branch.at:
            found = branch.at + common(branch.ids, context[branch.at :])
        shared.append(found)
        lengths.append(branch.at + len(branch.ids))

    def order(number: int) -> tuple[int, bool, int]:
        whole = shared[number] == lengths[number]
        return shared[number], whole, number if whole else -number

    best = max(range(len(shared)), key=order)
    return best, shared[best], shared[best] == lengths[best]
