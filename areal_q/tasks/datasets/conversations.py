"""Prompts that are conversations: lists of messages in place of a text. Imports no torch."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from areal_q.errors import TaskError
from areal_q.tasks.base import Message, Problem


def problem_of(
    prompt: Any, answer: str, template: str, where: str, columns: str = "", table: str = "task"
) -> Problem:
    """Returns the problem with a prompt that is a text or a list of messages, the last of them not the
    assistant's; `template` is a setting of `table`. Raises TaskError, which names the place, for anything
    else."""
    problem = (
        Problem(prompt, answer)
        if isinstance(prompt, str)
        else _asked(prompt, answer, template, where, table)
    )
    if not problem.prompt.strip():
        raise TaskError(f"{where}: the prompt is empty: there is nothing to answer")
    return replace(problem, columns=columns)


def _asked(prompt: Sequence[Any], answer: str, template: str, where: str, table: str) -> Problem:
    messages = [_message(entry, where) for entry in prompt]
    if not messages or messages[-1]["role"] == "assistant":
        ends = "a conversation must end with a message that is to be answered"
        reply = "; leave out the last reply, or give it as `answer`" if messages else ""
        raise TaskError(f"{where}: {ends}{reply}")
    if template != "chat":
        raise TaskError(f"{where}: a list of messages needs {table}.template = 'chat'")
    return Problem.of(messages, answer)


def _message(entry: Any, where: str) -> Message:
    if isinstance(entry, dict):  # Parquet fills what some messages lack
        entry = {key: value for key, value in entry.items() if value is not None}
    match entry:
        case {"role": str(role), "content": str(content)} if len(entry) == 2:
            return {"role": role, "content": content}
        case _:
            raise TaskError(
                f"{where}: {str(entry)[:80]} is no message: role and content, both text"
            )
