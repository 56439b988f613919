"""The fields of the endpoint's requests and answers: OpenAI's, and in addition `token_ids` and `versions`."""

from itertools import accumulate
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct

from areal_q.config.run import LARGEST_TEMPERATURE, LONGEST_STOP, MOST_STOPS
from areal_q.config.struct_types import TokenId
from areal_q.decode_errors import in_words, untyped
from areal_q.errors import RecordError
from areal_q.messages.tokens import LARGEST_REWARD
from areal_q.messages.trajectories import FailureCause, Name, Sentence
from areal_q.tasks.base import Message as PlainMessage
from areal_q.tasks.base import Tool
from rollout.reply_formats.base import ReplyPart, arguments_of

_Stop = Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP)]
_Stops = _Stop | Annotated[list[_Stop], Meta(max_length=MOST_STOPS)] | None
_MAX_CHOICES = 64
_MOST_TOOLS = 1024
MAX_STOP_IDS = 256
"""Most stop ids of a request, since each token drawn is compared with all of them, in every row of the
engine"""
_MAX_PROMPT = 1 << 20
"""Most token ids of a prompt, and most messages of a conversation"""
_Int32 = Annotated[int, Meta(ge=0, lt=2**31)]
_Number = Annotated[float, Meta(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]
"""A reward or a part of one, within the bounds that Group.validate accepts"""
_PartName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]
_MAX_PARTS = 32
NULL = Raw(b"null")
_T = TypeVar("_T")


def decoded(data: bytes, type: type[_T]) -> _T:
    """Returns `data` as a `type`; a field of a Struct that is null has its default, as clients send their None.
    Raises RecordError, which names the field, unless they are JSON that fits."""
    try:
        if hasattr(type, "__struct_fields__"):
            given = msgspec.json.decode(data, type=dict[str, Raw])
            data = msgspec.json.encode({k: raw for k, raw in given.items() if raw != NULL})
        return msgspec.json.decode(data, type=type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(in_words(error, type, untyped(data))) from error


def anything(data: bytes) -> Any:
    """Returns `data` as JSON of any kind. Raises RecordError where it is none."""
    return decoded(data, cast("type[object]", Any))


class StreamOptions(Struct):
    include_usage: bool | None = False


class _Body(Struct, kw_only=True):
    """The fields that both kinds of request have and that are implemented. What becomes of others:
    rollout/openai_server/request_fields.py."""

    model: str = ""
    temperature: Annotated[float, Meta(ge=0, le=LARGEST_TEMPERATURE)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: _Int32 | None = None
    min_p: Annotated[float, Meta(ge=0, lt=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=_MAX_CHOICES)] = 1
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _Stops = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionBody(_Body, kw_only=True):
    prompt: str | Annotated[list[TokenId], Meta(max_length=_MAX_PROMPT)]
    logprobs: Annotated[int, Meta(ge=0, le=1)] | None = None
    """Asks for the drawn tokens' log-probs, also by 0; more than 1 would ask for other tokens'"""

    @property
    def limit(self) -> int | None:
        return self.max_tokens


class TextPart(Struct, tag_field="type", tag="text"):
    text: str


class FunctionCall(Struct):
    name: str
    arguments: str | None = ""


class ToolCall(Struct, tag_field="type", tag="function"):
    function: FunctionCall
    id: str | None = ""

    def plain(self) -> dict[str, Any]:
        """Returns the call as a chat template takes it. Raises RecordError if its arguments are no object."""
        name = self.function.name
        found = arguments_of(self.function.arguments or "{}")
        if found is None:
            raise RecordError(f"the arguments of the call of {name!r} are no JSON object")
        return {
            "id": self.id or "",
            "type": "function",
            "function": {"name": name, "arguments": found},
        }


class Function(Struct):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}\Z")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Asks for arguments that keep to the schema; they come as they were drawn all the same."""


class FunctionTool(Struct, tag_field="type", tag="function"):
    function: Function

    def plain(self) -> Tool:
        """Returns the tool as a chat template takes it."""
        named = {
            name: getattr(self.function, name) for name in ("name", "description", "parameters")
        }
        function = {name: value for name, value in named.items() if value is not None}
        return {"type": "function", "function": function}


class Message(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = ""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None

    def plain(self) -> PlainMessage:
        """Returns the message as a chat template takes it, with its content as one text and the arguments of
        calls as objects. Raises RecordError for arguments that are none."""
        said = self.content or ""
        others = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.plain() for call in self.tool_calls or ()] or None,
            "reasoning_content": self.reasoning_content or None,
        }
        return {
            "role": self.role,
            "content": said if isinstance(said, str) else "".join(part.text for part in said),
            **{field: value for field, value in others.items() if value is not None},
        }


class ChatBody(_Body, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=_MAX_PROMPT)]
    logprobs: bool | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=_MOST_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class BeginEpisode(Struct):
    timeout_s: Annotated[float, Meta(ge=0, le=60)] = 10.0
    """Seconds to wait for a ticket"""


class RewardBody(Struct):
    reward: _Number | None = None
    failed: FailureCause | None = None
    """Why the episode failed through no fault of the model; given instead of a reward"""
    why: Sentence = ""
    """The same in words, for the run's screen"""
    parts: Annotated[dict[_PartName, _Number], Meta(max_length=_MAX_PARTS)] = {}
    """Parts of the reward, whose means are metrics; `correct` counts as the accuracy"""
    turn: int | Name | None = None
    """The id of a reply, or its number among those of the episode, -1 for the newest: the reward is that turn's
    alone, and the episode goes on"""

    def __post_init__(self) -> None:
        if (self.reward is None) == (self.failed is None):
            raise ValueError("an episode ends with either `reward` or `failed`")
        if self.turn is not None and (self.failed is not None or self.parts):
            raise ValueError("a turn has a `reward` alone")


class Told(Struct, frozen=True, kw_only=True):
    """The new tokens of one choice, as text and as ids."""

    index: int
    text: str
    offset: int = 0
    """Number of characters of text that were sent before"""
    ids: list[int]
    pieces: list[str]
    """Text of each token by itself"""
    logprobs: list[float]
    versions: list[int]
    """Version of the weights that drew each token"""
    finish_reason: str | None
    routes: np.ndarray | None = None
    sampling_mask: list[np.ndarray] | None = None
    """Both are those of the Completion, with the whole of a choice"""
    parts: list[ReplyPart] = []
    """The text of a chat, or what is new of it, as its parser reads it"""
    calls: int = 0
    """Number of calls that were sent before"""
    key: str = ""
    """Beginning of the ids of this choice's calls, six letters and digits"""

    def tool_calls(self) -> list[dict[str, Any]]:
        """Returns the calls. Their ids have nine letters and digits, since some chat templates ask for that."""
        calls = [part for part in self.parts if part.kind == "call"]
        return [
            {
                "id": f"{self.key}{i:03}",
                "type": "function",
                "function": {"name": one.name, "arguments": one.text},
            }
            for i, one in enumerate(calls, self.calls)
        ]

    def said(self, kind: str) -> str:
        return "".join(part.text for part in self.parts if part.kind == kind)


def completion_choice(told: Told, logprobs: bool) -> dict[str, Any]:
    found = {"tokens": told.pieces, "token_logprobs": told.logprobs, "top_logprobs": None}
    offsets = accumulate(map(len, told.pieces), initial=told.offset)
    found["text_offset"] = [*offsets][: len(told.ids)]
    return {**_common(told), "text": told.text, "logprobs": found if logprobs else None}


def message(told: Told) -> dict[str, Any]:
    """Returns the reply as a message, whose fields that have nothing to say are left out."""
    calls, thought = told.tool_calls(), told.said("reasoning")
    return {
        "role": "assistant",
        "content": told.said("content") or (None if calls else ""),
        **({"reasoning_content": thought} if thought else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def chat_choice(told: Told, logprobs: bool) -> dict[str, Any]:
    content = [
        {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, logprob in zip(told.pieces, told.logprobs, strict=True)
    ]
    found = {"content": content, "refusal": None}
    return {**_common(told), "message": message(told), "logprobs": found if logprobs else None}


def _common(told: Told) -> dict[str, Any]:
    return {
        "index": told.index,
        "finish_reason": told.finish_reason,
        "token_ids": told.ids,
        "versions": told.versions,
    }


def usage(prompt: int, drawn: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}
