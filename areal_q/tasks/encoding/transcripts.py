"""The parts of a whole conversation that its assistant wrote, which supervised training learns from. No torch.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                                          └── learnt ───┘

They are found in what the chat template renders, and not by the template's own `{% generation %}`, which few
have: a part begins where the prompt for that reply ends, and ends with the token that ends the message.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from areal_q.errors import TaskError
from areal_q.tasks.base import Message

Render = Callable[[Sequence[Message], bool], str]
"""A function of messages and of whether the beginning of a reply to them is to follow; returns their text"""


class TextSpan(NamedTuple):
    """The place of a part in the text, in characters."""

    start: int
    stop: int


def assistant_parts(
    render: Render,
    messages: Sequence[Message],
    prefills: Sequence[str],
    special: re.Pattern[str],
    ends: re.Pattern[str],
) -> tuple[str, list[TextSpan]]:
    """Returns the text of the conversation, and what its assistant wrote: thoughts, contents, calls of tools,
    and the token that ends each message.

    `prefills` are texts with which the prompt for a reply may end and a message in a conversation need not
    begin, such as "<think>\\n". `special` matches any special token, `ends` those that end a message. Raises
    TaskError for a conversation without a reply, and for a template that writes what came before a reply
    otherwise once the conversation goes on.
    """
    text = render(messages, False)
    parts = [
        _part(render, messages, place, text, prefills, special, ends)
        for place, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    if not parts:
        raise TaskError("no message of the assistant: there is nothing to learn")
    return text, parts


def _part(
    render: Render,
    messages: Sequence[Message],
    place: int,
    text: str,
    prefills: Sequence[str],
    special: re.Pattern[str],
    ends: re.Pattern[str],
) -> TextSpan:
    prompt = render(messages[:place], True)
    shorter = (prompt.removesuffix(prefill) for prefill in ("", *prefills))
    start = next((len(before) for before in shorter if text.startswith(before)), None)
    if start is None:
        raise TaskError(
            f"message {place + 1}: the chat template writes what comes before otherwise as the talk goes on: "
            "no prompt looks like that; give each reply a row of its own, as its last message"
        )
    so_far = render(messages[: place + 1], False)
    if text.startswith(so_far):
        found = [*special.finditer(text, start, len(so_far))]
        return TextSpan(start, found[-1].end() if found else len(so_far))
    # A template that writes a last message otherwise than an earlier one, such as with an empty thought.
    end = ends.search(text, start)
    if end is None:
        raise TaskError(f"message {place + 1}: the chat template ends it with no special token")
    return TextSpan(start, end.end())
