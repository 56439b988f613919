"""A task: problems to train on, problems held out, and a reward. Imports no torch."""

from collections.abc import Callable, Mapping, Sequence
from datetime import date, time, timedelta
from typing import Any, Protocol

from msgspec import Struct, json

from areal_q.errors import TaskError
from areal_q.messages.tokens import FinishReason
from areal_q.messages.trajectories import FailureCause, Ticket

Variables = Mapping[str, bool | int | float | str]
"""Variables of a chat template, such as {"enable_thinking": False}"""
NO_VARIABLES: Variables = {}
Columns = Sequence[str] | None
"""Columns of the rows that problems carry; None is all."""
Message = dict[str, Any]
"""`role` and `content`, which is text. An assistant's may have `tool_calls`, whose `arguments` are objects, and
`reasoning_content`; a tool's may have `tool_call_id` and `name`."""
Tool = dict[str, Any]
"""A function that the model may call, as OpenAI's API describes it: `type` and `function`"""


class Problem(Struct, frozen=True):
    """A prompt and its answer, such as Problem("12+34=", "64") in the reversed arithmetic task."""

    prompt: str
    answer: str
    messages: tuple[Message, ...] = ()
    """The prompt as a conversation, whose contents are `prompt`; empty if the prompt is one text"""
    columns: str = ""
    """The row of the data that it comes from, as a JSON object; "" if there is none, or nobody asks for it"""
    source: str = ""
    """The mixture's task, or evaluation set, whose reward judges the responses; "" is the run's one task"""

    @property
    def asked(self) -> str | Sequence[Message]:
        """The prompt as `Tokenizer.encode_prompt` takes it."""
        return self.messages or self.prompt

    @classmethod
    def of(cls, messages: Sequence[Message], answer: str) -> "Problem":
        """Returns a problem whose prompt is a conversation."""
        return cls("\n\n".join(m["content"] for m in messages), answer, tuple(messages))

    @classmethod
    def of_ticket(cls, ticket: Ticket) -> "Problem":
        """Returns the problem that a ticket asks for, as the learner read it."""
        return cls(ticket.prompt, ticket.answer, ticket.messages, ticket.columns, ticket.source)

    def ticket(self, **fields: Any) -> Ticket:
        """Returns a ticket that asks for this problem; `fields` are its other ones."""
        own = {name: getattr(self, name) for name in Problem.__struct_fields__}
        return Ticket(**own, **fields)


def columns_of(row: Mapping[str, Any], where: str) -> str:
    """Returns a row of data as the JSON of `Problem.columns`: times and decimals become text, bytes base64.
    Raises TaskError, which names the place, for what JSON does not know."""
    try:
        return json.encode(row, enc_hook=_text).decode()
    except (TypeError, ValueError, RecursionError) as error:
        if len(row) > 1:  # to name the one
            for name, value in row.items():
                columns_of({name: value}, where)
        name = ", ".join(map(str, row))
        raise TaskError(
            f"{where}: column `{name}` is neither text, number, list nor table: {error}"
        ) from error


def _text(value: Any) -> str:
    """Returns the text of a time that is none of Python's own, such as pandas' Timestamp or Timedelta."""
    if isinstance(value, date | time | timedelta):
        return getattr(value, "isoformat", value.__str__)()
    raise TypeError(f"it is of type {type(value).__name__}")


class Completed(Struct, frozen=True):
    """A response as rewards judge it."""

    text: str
    tokens: int = 0
    """Number of tokens that the model drew"""
    ids: Sequence[int] = ()
    """All its tokens, the end token and what tools inserted among them"""
    finish_reason: FinishReason = "stop"


class Score(Struct, frozen=True):
    """A reward and the parts that it is the sum of. `correct` counts as the accuracy in evaluations."""

    reward: float
    correct: bool
    parts: dict[str, float] = {}
    valid: bool = True
    """False if nothing is known about the response, since the reward function failed"""
    failure: FailureCause | None = None
    """Why the reward function failed; None if it did not"""
    notes: dict[str, str] = {}
    """Texts for the log, such as a judge's words"""

    @classmethod
    def failed(cls, cause: FailureCause) -> "Score":
        """Returns a score that is not valid: nothing is known about the response."""
        return cls(0.0, False, valid=False, failure=cause)

    @classmethod
    def zero(cls, cause: FailureCause, failure: FailureCause | None = None) -> "Score":
        """Returns a reward of 0 for a failure. `failure` is recorded if the settings say so and the response is
        not the cause."""
        parts = {"error": 1.0, "timeout": float(cause == "timeout")}
        return cls(0.0, False, parts, failure=failure)


class Stop(Struct, frozen=True):
    """A token that ends a response, such as Stop("<|im_end|>", ("tokenizer", "chat template"))."""

    token: str
    sources: tuple[str, ...]
    """What says so"""

    def __str__(self) -> str:
        return f"{self.token} ({', '.join(self.sources)})"


class Tokenizer(Protocol):
    """Converts text to ids and back. `save` writes files that `transformers.AutoTokenizer` loads."""

    vocab_size: int
    eos_id: int
    """The id with which a response that is written down ends"""
    stops: Mapping[int, Stop]
    """All ids that end a response when the model draws them; `eos_id` is one of them"""
    special_ids: frozenset[int]
    """Ids of tokens that control the model and are no text to a reader"""
    template: str
    """The chat template, and behind it the one for conversations with tools where that is another; empty where
    there is none"""
    prefill: str
    """Text with which the chat template begins every reply, such as "<think>\\n"; empty for most. It is part of
    the prompt's ids, and of the text that rewards judge."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text that stands behind other text, such as a reply or a part of one."""
        ...

    def encode_prompt(self, prompt: str | Sequence[Message]) -> list[int]:
        """Returns the ids of a problem's prompt, with the system message of the settings if it has none of its
        own, and of the beginning of the reply."""
        ...

    def encode_messages(
        self,
        messages: Sequence[Message],
        variables: Variables = NO_VARIABLES,
        tools: Sequence[Tool] = (),
    ) -> list[int]:
        """Returns the ids of a whole conversation and of the beginning of the reply to it. `variables` are of
        the chat template, before those of the settings. Raises TaskError for what the template leaves out or
        refuses, such as tools, and for any of them where there is no template."""
        ...

    def encode_transcript(
        self, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> tuple[list[int], list[bool]]:
        """Returns the ids of a whole conversation up to the end of its last reply, with the system message of
        the settings if it has none of its own, and for each id whether the assistant wrote it: thoughts,
        contents, calls of tools, and the token that ends each of its messages. Raises TaskError as
        `encode_messages` does, and for a conversation without a reply."""
        ...

    def opened(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Returns the messages after the system message of the settings, if they have none of their own."""
        ...

    def encode_turn(
        self,
        messages: Sequence[Message],
        ended: bool,
        variables: Variables = NO_VARIABLES,
        calls: Sequence[Any] = (),
    ) -> list[int]:
        """Returns the ids between the content of an assistant's message and that of its next one, with
        `messages` in between. `ended` is True if one of `stops` is there already, after the first one. `calls`
        are the first one's `tool_calls`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`, special tokens included."""
        ...

    def save(self, directory: str) -> None: ...


class Task(Protocol):
    """Problems to train on and problems to evaluate on; `train` and `heldout` share none."""

    train: Sequence[Problem]
    heldout: Sequence[Problem]


class Grader(Struct, frozen=True):
    """How a task scores responses, without its problems, which a worker does not need."""

    score: Callable[[Problem, str], Score]
    """Pure function from (problem, response) to a score, which raises for no response"""
    answer: Callable[[str], str | None]
    """Function that returns the answer in a response, for majority votes, in one spelling for equal answers;
    None if there is none"""
    slow: bool = False
    """True if it may take long or hang, so that it must run in a process that can be killed"""
    zero_on: tuple[FailureCause, ...] = ()
    """Failures that the response causes, whose reward is 0"""
    whole: bool = False
    """True if it compares the whole response with the answer, so that a stop string at its end must not be in
    it"""
    needs: str | None = None
    """A module that it imports, from the extra with the name of the grader"""
    confined: bool = False
    """True if it may run what stands in a response: its process is confined (areal_q/sandbox/confine.py)"""
