"""What supervised training learns from: rows of a file, or a task's problems with their answers.

A row is a conversation, whose assistant's messages are learnt, or a prompt and an answer, encoded as a rollout
would see the one and write the other. What the assistant did not write is context.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from areal_q.config import Run, Sft, SmallModel
from areal_q.config.tasks import chat_of
from areal_q.errors import TaskError
from areal_q.messages import Array, Trajectory, VersionSpan
from areal_q.tasks import CharTokenizer, Problem, Tokenizer, build_tokenizer, load_tokenizer
from areal_q.tasks.base import Message, Task, columns_of
from areal_q.tasks.datasets.benchmark_fields import text_of
from areal_q.tasks.datasets.conversations import problem_of
from areal_q.tasks.datasets.jsonl_rows import check_rows, kept_for_training
from areal_q.tasks.datasets.row_files import is_columnar, read_objects
from areal_q.tasks.lazy import Lazy
from areal_q.tasks.ordering.mixture import MixedProblems, parts_of
from areal_q.tasks.shuffle import shuffled
from learner.data.packing import Sample

logger = logging.getLogger(__name__)
Tell = Callable[[int, int], None]
"""A function that is called with (rows encoded, rows in all)"""
TELL_EVERY = 1000
"""Rows from one such call to the next"""


class DemonstrationRow(Problem, frozen=True):
    where: str = ""
    """File and line, for messages"""


@dataclass
class Rows:
    """The rows of files, each as a Problem. That of a conversation has neither prompt nor answer: its `columns`
    are the JSON of its `messages` and `tools`."""

    train: Sequence[Problem]
    heldout: Sequence[Problem]


def tokenizer_of(run: Run) -> Tokenizer:
    """Returns the tokenizer with the template that the rows of `run` ask for."""
    if run.sft is None or run.sft.path is None:
        return build_tokenizer(run.model, run.task)
    if isinstance(run.model, SmallModel):
        return CharTokenizer()
    return load_tokenizer(run.model.path, chat_of(run.sft))


def read_demonstrations(cfg: Sft) -> Rows:
    """Returns the rows that the settings name; those that are held out are nowhere learnt from. Raises
    TaskError naming file and line."""
    path = str(cfg.path)
    rows = _read(cfg, path)
    if isinstance(cfg.heldout, str):
        train, heldout = rows, _read(cfg, cfg.heldout)
    else:
        cut = kept_for_training(len(rows), cfg.heldout)
        train, heldout = rows[:cut], rows[cut:]
        if not train:
            raise TaskError(
                f"{path}: sft.heldout = {cfg.heldout} of {len(rows)} rows leaves none to learn from"
            )
    kept = set(map(_content, heldout))
    train = [row for row in train if _content(row) not in kept]
    if not train:
        raise TaskError(f"{path}: every row to learn from is also held out")
    return Rows(train, heldout)


def _content(row: Problem) -> bytes:
    return msgspec.json.encode((row.prompt, row.answer, row.messages, row.columns))


def _read(cfg: Sft, path: str) -> list[Problem]:
    rows = read_objects(path)
    check_rows(rows, path)
    filled = is_columnar(path)
    return [_row(_without_null(row) if filled else row, cfg, where) for where, row in rows]


def _row(row: dict[str, Any], cfg: Sft, where: str) -> Problem:
    if "messages" in row and cfg.answer not in row:
        entries = row["messages"] if isinstance(row["messages"], list) else []
        messages = [_message(entry, where) for entry in entries]
        if not any(m["role"] == "assistant" and (m["content"] or len(m) > 2) for m in messages):
            raise TaskError(f"{where}: `messages` has none of the assistant: nothing to learn")
        talk = {"messages": messages, "tools": _tools(row, where)}
        return DemonstrationRow("", "", columns=columns_of(talk, where), where=where)
    given = row.get(cfg.prompt)
    answer = text_of(row, cfg.answer, where)
    if not answer:
        raise TaskError(f"{where}: field `{cfg.answer}` is empty: nothing to learn")
    prompt = given if isinstance(given, list) else text_of(row, cfg.prompt, where)
    asked = problem_of(prompt, answer, cfg.template, where, table="sft")
    return DemonstrationRow(asked.prompt, asked.answer, asked.messages, where=where)


def _message(entry: Any, where: str) -> Message:
    """Returns a message without the fields that are null, and arguments of calls as objects, where OpenAI's API
    has their JSON."""
    entry = _without_null(entry, but="arguments")
    match entry:
        case {"role": str(), **rest} if isinstance(rest.get("content", ""), str):
            message = {"content": "", **entry}
        case _:
            raise TaskError(
                f"{where}: {str(entry)[:80]} is no message: role and content, both text"
            )
    try:
        calls = [_call(call) for call in message.get("tool_calls", [])]
    except (KeyError, TypeError, ValueError) as error:
        raise TaskError(f"{where}: `tool_calls` are not as in OpenAI's API: {error!r}") from error
    return {**message, "tool_calls": calls} if calls else message


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


def _tools(row: dict[str, Any], where: str) -> list[Any]:
    """Returns the tools of a row: a list, or its JSON, as many data sets have it."""
    tools = row.get("tools") or []
    try:
        tools = json.loads(tools) if isinstance(tools, str) else _without_null(tools)
    except ValueError as error:
        raise TaskError(f"{where}: `tools` is no JSON: {error}") from error
    if not isinstance(tools, list):
        raise TaskError(f"{where}: `tools` is not a list")
    return tools


def _without_null(value: Any, but: str = "") -> Any:
    """Returns `value` without fields that are null at any depth, but within those of the name `but`."""
    if isinstance(value, dict):
        present = ((name, v) for name, v in value.items() if v is not None)
        return {name: v if name == but else _without_null(v, but) for name, v in present}
    return [_without_null(v, but) for v in value] if isinstance(value, list) else value


def encoded(row: Problem, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Returns the ids of a row, and for each whether it is learnt. Raises TaskError for what the chat template
    refuses or leaves out."""
    if not row.prompt:
        talk = json.loads(row.columns)
        return tokenizer.encode_transcript(talk["messages"], talk["tools"])
    prompt = tokenizer.encode_prompt(row.asked)
    answer = [*tokenizer.encode(row.answer), tokenizer.eos_id]
    return [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)


def sample_of(number: int, ids: Sequence[int], learnt: Sequence[bool]) -> Sample:
    """Returns the sample with this number of its ticket: a response that begins with the first id that is
    learnt, of advantage 1, whose other ids do not count. Nothing predicts a row's first id, which is never
    learnt."""
    mask = np.asarray(learnt, np.uint8)
    start = max(1, int(mask.argmax()))
    tokens = len(mask) - start
    response = Trajectory(
        index=0,
        response_ids=Array.of(np.asarray(ids[start:]), "int32"),
        behavior_logprobs=Array.of(np.zeros(tokens), "float32"),
        loss_mask=Array.of(mask[start:], "uint8"),
        spans=[VersionSpan(0, tokens, "")],
        finish_reason="stop",
        reward=0.0,
    )
    prompt = np.asarray(ids[:start], np.int32)
    return Sample(number, prompt, response, 1.0, np.zeros(tokens, np.int64))


class Demonstrations:
    """Samples to learn from and held-out ones, in the order that numbers and the seed alone decide, and the
    weights of a mixture."""

    def __init__(self, rows: Task | Rows, tokenizer: Tokenizer, longest: int, seed: int) -> None:
        self._rows, self._tokenizer = rows, tokenizer
        self._longest, self._seed = longest, seed
        self._parts: dict[str, Sequence[Problem] | Sequence[Sample]] = {**parts_of(rows.train)}
        self.heldout: Sequence[Sample] = ()

    @property
    def size(self) -> int:
        """Number of rows to learn from."""
        return sum(map(len, self._parts.values()))

    def encode(self, problems: int, tell: Tell) -> None:
        """Encodes all rows, so that a fault in one is found before training, but generated ones when they are
        learnt from, and at most `problems` of the held-out ones. Leaves out rows of more than `longest` tokens.
        Raises TaskError as `encoded` does, or if no row of a mixture's task, or none at all, is left."""
        self.heldout = self._short(self._rows.heldout[:problems], "held-out rows")
        for name, rows in parts_of(self._rows.train).items():
            if isinstance(rows, Lazy):
                encoded(rows[0], self._tokenizer)  # the others are like it
                continue
            of = f" of task.sources.{name}" if name else ""
            found = self._short(rows, f"rows{of}", tell)
            if not found:
                raise TaskError(f"every row{of} has more than {self._longest} tokens")
            self._parts[name] = found

    def _short(
        self, rows: Sequence[Problem], what: str, tell: Tell = lambda done, of: None
    ) -> Sequence[Sample]:
        samples = []
        for number, row in enumerate(rows):
            if number % TELL_EVERY == 0:
                tell(number, len(rows))
            try:
                sample = sample_of(number, *encoded(row, self._tokenizer))
            except TaskError as error:
                where = getattr(row, "where", f"row {number + 1}")
                raise TaskError(f"{where}: {error}") from error
            if sample.num_tokens <= self._longest:
                samples.append(sample)
        if left_out := len(rows) - len(samples):
            logger.warning(
                "%d %s are left out: they have more than %d tokens", left_out, what, self._longest
            )
        return samples

    def at(self, number: int) -> Sample:
        """Returns sample `number` of an endless sequence, in which each pass has all rows in another order; of
        a mixture that of the task whose turn it is (areal_q/tasks/shuffle.py, `problem_at`)."""
        train = self._rows.train
        name, turn = train.turn(number) if isinstance(train, MixedProblems) else ("", number)
        rows = self._parts[name]
        row = rows[shuffled(turn, len(rows), self._seed)]
        if isinstance(row, Problem):
            return sample_of(number, *encoded(row, self._tokenizer))
        return replace(row, ticket=number)
