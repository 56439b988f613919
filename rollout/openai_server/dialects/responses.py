"""`POST /v1/responses`, OpenAI's Responses API, without a memory of its own: a request brings all of its items.

An assistant's items that follow one another (thoughts, texts, calls) are one message of a chat, and a call's
output is a tool's message.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from areal_q.decode_errors import fitted
from areal_q.errors import RecordError
from rollout.openai_server.dialects.blocks import Block, Blocks, Change
from rollout.openai_server.replies import Event, Reply
from rollout.openai_server.request_fields import (
    Neutral,
    decoded_request,
    refuse_others,
    refuse_unread,
)
from rollout.openai_server.schema import ChatBody, Told, anything, decoded

_WITHOUT_EFFECT = frozenset(
    [
        "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        "safety_identifier", "service_tier", "store", "stream_options", "user",
    ]
)  # fmt: skip
"""Fields that leave what is drawn as it is, and are not read"""
_NEUTRAL: Neutral = {
    "background": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "text": {"format": {"type": ("text",)}, "verbosity": ("medium",)},
    "reasoning": {"context": ("auto",), "generate_summary": ("auto",), "summary": ("auto",)},
}
"""Values, besides null, that ask for nothing"""


_HARMLESS = frozenset(
    ["annotations", "encrypted_content", "id", "logprobs", "output_schema", "status"]
)
"""Fields of items and tools that leave what is drawn as it is"""


class _Text(Struct):
    text: str
    type: str


class _Message(Struct, tag_field="type", tag="message"):
    role: str
    content: str | list[_Text]
    name: str | None = None


class _Call(Struct, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str | None = ""


class _Output(Struct, tag_field="type", tag="function_call_output"):
    call_id: str
    output: str | list[_Text]


class _Reasoning(Struct, tag_field="type", tag="reasoning"):
    content: list[_Text] | None = None


class _Function(Struct, tag_field="type", tag="function"):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


_Item = _Message | _Call | _Output | _Reasoning


class ResponsesRequest(Struct):
    input: str | list[dict[str, Any]]
    model: str = ""
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[_Function] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    stream: bool | None = None
    include: list[str] | None = None


def decoded_chat(data: bytes) -> ChatBody:
    """Returns the request in `data` as one for a chat. Raises RecordError for what is not valid or not
    implemented, by its name in this API."""
    found = decoded(data, dict[str, Raw])
    refuse_others(found, {*ResponsesRequest.__struct_fields__, *_WITHOUT_EFFECT}, _NEUTRAL)
    asked = decoded(data, ResponsesRequest)
    if "tools" in found:
        refuse_unread(anything(found["tools"]), asked.tools, "tools", _HARMLESS)
    if "message.output_text.logprobs" in (asked.include or ()):
        raise RecordError("`include` of message.output_text.logprobs is not implemented")
    items = asked.input
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    messages = _messages([{"type": "message", **item} for item in items])
    if asked.instructions:
        messages.insert(0, {"role": "system", "content": asked.instructions})
    tools = [
        {"type": "function", "function": msgspec.structs.asdict(tool)} for tool in asked.tools or ()
    ]
    kept = ("model", "temperature", "top_p", "tool_choice", "chat_template_kwargs", "stream")
    fields = {name: getattr(asked, name) for name in kept}
    fields |= {"max_completion_tokens": asked.max_output_tokens, "messages": messages}
    fields |= {"tools": tools or None, "parallel_tool_calls": asked.parallel_tool_calls}
    given = {name: value for name, value in fields.items() if value is not None}
    return decoded_request(msgspec.json.encode(given), ChatBody)


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for i, raw in enumerate(items):
        item = fitted(raw, _Item, RecordError, f"input[{i}]: ")
        refuse_unread(raw, item, f"input[{i}]", _HARMLESS)
        match item:
            case _Message(role="assistant", content=said):
                message = _assistant(out)
                message["content"] += _said(said, i)
            case _Message(role, said):
                out.append({"role": role, "content": _said(said, i)})
            case _Reasoning(content):
                message = _assistant(out)
                thought = "".join(part.text for part in content or ())
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
            case _Call(id, name, arguments):
                function = {"name": name, "arguments": arguments}
                call = {"id": id, "type": "function", "function": function}
                _assistant(out).setdefault("tool_calls", []).append(call)
            case _Output(id, output):
                said = _said(output, i)
                out.append({"role": "tool", "tool_call_id": id, "content": said})
    return out


def _assistant(out: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the assistant's message that is being put together at the end of `out`."""
    if not out or out[-1]["role"] != "assistant":
        out.append({"role": "assistant", "content": ""})
    return out[-1]


def _said(content: str | list[_Text], item: int) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in ("input_text", "output_text", "text"):
            raise RecordError(f"input[{item}]: a part of type {part.type!r} is not implemented")
    return "".join(part.text for part in content)


class ResponsesReply(Reply):
    """The answer to one request, as an object `response` and as its events."""

    done = b""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._blocks, self._count = Blocks(), 0
        self._head |= {"id": f"resp_{self._head['id'].removeprefix('chatcmpl-')}"}

    def whole(self, told: list[Told]) -> dict[str, Any]:
        (one,) = told
        if not self._blocks.all:
            self._blocks.of_whole(one)
        cut = one.finish_reason == "length"
        counted = self._usage(told)
        return {
            **self._response("incomplete" if cut else "completed", self._blocks.all),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counted["total_tokens"],
            },
            "prompt_token_ids": self._prompt,
            "token_ids": one.ids,
            "versions": one.versions,
        }

    def begin(self) -> list[Event]:
        response = self._response("in_progress", [])
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=response) for name in names]

    def events(self, told: Told) -> list[Event]:
        return [event for change in self._blocks.add(told) for event in self._of_change(change)]

    def end(self, told: list[Told]) -> list[Event]:
        closed = self._blocks.close(told[0].finish_reason)
        last = [event for change in closed for event in self._of_change(change)]
        whole = self.whole(told)
        return [*last, self._event(f"response.{whole['status']}", response=whole)]

    def failed(self, why: str) -> Event:
        return self._event("error", code="server_error", message=why, param=None)

    def _event(self, type: str, **fields: Any) -> Event:
        self._count += 1
        return {"type": type, "sequence_number": self._count - 1, **fields}

    def _response(self, status: str, blocks: list[Block]) -> dict[str, Any]:
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "model": self._head["model"],
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "output": [_item(block) for block in blocks],
            "parallel_tool_calls": True,
            "temperature": None,
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
        }

    def _of_change(self, change: Change) -> list[Event]:
        what, block, new = change
        at: dict[str, Any] = {"output_index": block.index}
        inside = {"item_id": _id(block), **at}
        if block.kind != "call":
            inside["content_index"] = 0
        name = f"response.{_STREAMED[block.kind]}"
        if what == "grows":
            extra = {"logprobs": []} if block.kind == "content" else {}
            return [self._event(f"{name}.delta", **inside, delta=new, **extra)]
        item = _item(block)
        parts = item.get("content") or []
        if what == "opens":
            opened = self._event(
                "response.output_item.added", **at, item={**item, **_EMPTY[block.kind]}
            )
            if block.kind == "call":
                return [opened]
            part = {**_part(block), "text": ""}
            return [opened, self._event("response.content_part.added", **inside, part=part)]
        if block.kind == "call":
            closed = [self._event(f"{name}.done", **inside, name=block.name, arguments=block.text)]
        else:
            extra = {"logprobs": []} if block.kind == "content" else {}
            closed = [
                self._event(f"{name}.done", **inside, text=block.text, **extra),
                self._event("response.content_part.done", **inside, part=parts[0]),
            ]
        return [*closed, self._event("response.output_item.done", **at, item=item)]


_STREAMED = {
    "content": "output_text",
    "reasoning": "reasoning_text",
    "call": "function_call_arguments",
}
_EMPTY: dict[str, dict[str, Any]] = {
    "content": {"content": []},
    "reasoning": {"content": []},
    "call": {"arguments": ""},
}


def _id(block: Block) -> str:
    return {"content": "msg_", "reasoning": "rs_", "call": "fc_"}[block.kind] + block.id


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _item(block: Block) -> dict[str, Any]:
    item = {"id": _id(block), "status": block.status}
    match block.kind:
        case "content":
            return {**item, "type": "message", "role": "assistant", "content": [_part(block)]}
        case "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": [_part(block)]}
        case "call":
            call = {"call_id": block.id, "name": block.name, "arguments": block.text}
            return {**item, "type": "function_call", **call}
