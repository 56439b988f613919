"""`POST /v1/messages`, Anthropic's Messages API."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from areal_q.errors import RecordError
from rollout.openai_server.dialects.blocks import Block, Blocks, Change
from rollout.openai_server.replies import Event, Reply
from rollout.openai_server.request_fields import (
    Neutral,
    decoded_request,
    refuse_others,
    refuse_unread,
)
from rollout.openai_server.schema import NULL, ChatBody, Told, anything, decoded

_WITHOUT_EFFECT = frozenset(["cache_control", "inference_geo", "metadata", "service_tier"])
"""Fields that leave what is drawn as it is, and are not read"""
_NEUTRAL: Neutral = {
    "container": {},
    "context_management": {"edits": ([],)},
    "mcp_servers": ([],),
    "output_config": {},
    "thinking": {"type": ("disabled",)},
}
"""Values, besides null, that ask for nothing"""
_HARMLESS = frozenset(["caller", "citations", "eager_input_streaming", "signature"])
"""Fields of blocks and tools that leave what is drawn as it is"""
_STOPPED = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Tells Anthropic's client, which by itself asks for a conversation that the server keeps, to send all of it"""


class ThreadRefused(RecordError):
    """A request for a conversation that the server keeps."""

    details = _NO_THREADS


class _Text(Struct, tag_field="type", tag="text"):
    text: str


class _Thinking(Struct, tag_field="type", tag="thinking"):
    thinking: str


class _Use(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class _Result(Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[_Text] | None = None
    is_error: bool | None = None


class _Message(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Text | _Thinking | _Use | _Result]


class _Tool(Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None


class _Choice(Struct):
    type: str
    disable_parallel_tool_use: bool | None = None


class Counted(Struct, kw_only=True):
    """A request whose tokens are counted."""

    messages: list[_Message]
    model: str = ""
    system: str | list[_Text] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    stream: bool | None = None


class MessagesRequest(Counted, kw_only=True):
    """One that is answered."""

    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)]


def decoded_chat(data: bytes, type: type[Counted] = MessagesRequest) -> ChatBody:
    """Returns the request in `data` as one for a chat. Raises RecordError for what is not valid or not
    implemented, by its name in this API."""
    found = decoded(data, dict[str, Raw])
    if found.get("thread", NULL) != NULL:
        raise ThreadRefused("`thread` is not implemented: send the whole conversation")
    refuse_others(found, {*type.__struct_fields__, *_WITHOUT_EFFECT}, _NEUTRAL)
    asked = decoded(data, type)
    for name in found.keys() & {"messages", "system", "tools"}:
        refuse_unread(anything(found[name]), getattr(asked, name), name, _HARMLESS)
    messages = [out for i, message in enumerate(asked.messages) for out in _plain(message, i)]
    if asked.messages and asked.messages[-1].role == "assistant":
        raise RecordError(
            "messages: to continue an assistant's message, the last, is not implemented"
        )
    if system := _joined(asked.system):
        messages.insert(0, {"role": "system", "content": system})
    kept = (
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "chat_template_kwargs",
        "stream",
    )
    fields = {name: getattr(asked, name, None) for name in kept}
    fields |= {"messages": messages, "stop": asked.stop_sequences or None}
    fields["tools"] = [_function(tool) for tool in asked.tools or ()] or None
    if asked.tool_choice:
        fields["tool_choice"] = asked.tool_choice.type
        if asked.tool_choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
    given = {name: value for name, value in fields.items() if value is not None}
    return decoded_request(msgspec.json.encode(given), ChatBody)


def _function(tool: _Tool) -> dict[str, Any]:
    named = {"description": tool.description, "strict": tool.strict}
    given = {name: value for name, value in named.items() if value is not None}
    function = {"name": tool.name, "parameters": tool.input_schema, **given}
    return {"type": "function", "function": function}


def _joined(content: str | list[_Text] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.text for block in content)


def _plain(message: _Message, place: int) -> list[dict[str, Any]]:
    """Returns a message as those of a chat: the results of tools are messages of their own, before the text."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, text, thought, calls = [], "", "", []
    for block in message.content:
        match block:
            case _Text(said):
                text += said
            case _Result(id, content, is_error):
                said = _joined(content)
                if is_error and not said.startswith("Error"):  # a chat has no field for it
                    said = f"Error: {said}"
                results.append({"role": "tool", "tool_call_id": id, "content": said})
            case _Thinking(said):
                thought += said
            case _Use(id, name, given):
                function = {"name": name, "arguments": msgspec.json.encode(given).decode()}
                calls.append({"id": id, "type": "function", "function": function})
    if (results and message.role != "user") or ((thought or calls) and message.role != "assistant"):
        raise RecordError(f"messages[{place}]: a block that is not the {message.role}'s")
    own: dict[str, Any] = {"role": message.role, "content": text}
    own |= {"reasoning_content": thought} if thought else {}
    own |= {"tool_calls": calls} if calls else {}
    return [*results, *([own] if text or message.role == "assistant" or not results else [])]


class MessagesReply(Reply):
    """The answer to one request, as a message and as its events."""

    done = b""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._blocks = Blocks()
        self._head |= {"id": f"msg_{self._head['id'].removeprefix('chatcmpl-')}"}

    def whole(self, told: list[Told]) -> dict[str, Any]:
        (one,) = told
        counted, content = self._usage(told), [_block(b) for b in self._blocks.of_whole(one)]
        return {
            **self._message(content),
            **self._stopped(one),
            "usage": {
                "input_tokens": counted["prompt_tokens"],
                "output_tokens": counted["completion_tokens"],
            },
            "prompt_token_ids": self._prompt,
            "token_ids": one.ids,
            "versions": one.versions,
        }

    def begin(self) -> list[Event]:
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None}
        message["usage"] = {"input_tokens": len(self._prompt), "output_tokens": 0}
        message["prompt_token_ids"] = self._prompt
        return [{"type": "message_start", "message": message}]

    def events(self, told: Told) -> list[Event]:
        return [_event(change) for change in self._blocks.add(told)]

    def end(self, told: list[Told]) -> list[Event]:
        (one,) = told
        usage = {"output_tokens": len(one.ids)}
        ids = {"token_ids": one.ids, "versions": one.versions}
        return [
            *(_event(change) for change in self._blocks.close()),
            {"type": "message_delta", "delta": self._stopped(one), "usage": usage, **ids},
            {"type": "message_stop"},
        ]

    def failed(self, why: str) -> Event:
        return {"type": "error", "error": {"type": "api_error", "message": why}}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message"}
        return {**head, "role": "assistant", "model": self._head["model"], "content": content}

    def _stopped(self, told: Told) -> dict[str, str | None]:
        """Returns why the reply ended, and the stop sequence that did it."""
        drawn, reason = self._decode(told.ids), told.finish_reason or ""
        found = next((stop for stop in self._stop_strings if stop in drawn), None)
        by_stop = found is not None and reason == "stop"
        return {
            "stop_reason": "stop_sequence" if by_stop else _STOPPED[reason],
            "stop_sequence": found if by_stop else None,
        }


def _block(block: Block) -> dict[str, Any]:
    match block.kind:
        case "content":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "call":
            given = Raw((block.text or "{}").encode())
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": given}


def _event(change: Change) -> Event:
    what, block, new = change
    match what, block.kind:
        case "opens", _:
            empty = Block(block.index, block.kind, block.id, block.name)
            begun = {"type": "content_block_start", "index": block.index}
            return {**begun, "content_block": _block(empty)}
        case "closes", _:
            return {"type": "content_block_stop", "index": block.index}
        case _, "content":
            delta = {"type": "text_delta", "text": new}
        case _, "reasoning":
            delta = {"type": "thinking_delta", "thinking": new}
        case _:
            delta = {"type": "input_json_delta", "partial_json": new}
    return {"type": "content_block_delta", "index": block.index, "delta": delta}
