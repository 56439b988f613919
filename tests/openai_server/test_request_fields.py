"""Every field of the requests that OpenAI's own client can send: what becomes of it is decided, and tried."""

import json
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest
from msgspec import inspect
from openai.types import completion_create_params as completion_params
from openai.types.chat import chat_completion_assistant_message_param as assistant_params
from openai.types.chat import chat_completion_tool_message_param as tool_params
from openai.types.chat import completion_create_params as chat_params

from areal_q.errors import RecordError
from rollout.openai_server.dialects import messages, responses
from rollout.openai_server.request_fields import WITHOUT_EFFECT, decoded_request
from rollout.openai_server.schema import (
    BeginEpisode,
    ChatBody,
    CompletionBody,
    Message,
    RewardBody,
    decoded,
)
from rollout.openai_server.token_route import TokensBody, decoded_tokens

REFUSED: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"},
    "best_of": 2,
    "echo": True,
    "frequency_penalty": 0.5,
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "logit_bias": {"3": 5},
    "modalities": ["text", "audio"],
    "moderation": {"model": "m"},
    "prediction": {"type": "content", "content": "so"},
    "presence_penalty": 0.5,
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "suffix": "=",
    "top_logprobs": 5,
    "verbosity": "low",
    "web_search_options": {},
}
"""A value that would change the reply, by field that is not implemented"""
OF_MESSAGES = {
    "audio": {"id": "1"},
    "function_call": {"name": "f", "arguments": ""},
    "refusal": "no",
}
BODIES: dict[type, tuple[dict[str, Any], list[Any]]] = {
    ChatBody: (
        {"messages": [{"role": "user", "content": "?"}]},
        [
            chat_params.CompletionCreateParamsNonStreaming,
            chat_params.CompletionCreateParamsStreaming,
        ],
    ),
    CompletionBody: (
        {"prompt": "?"},
        [
            completion_params.CompletionCreateParamsNonStreaming,
            completion_params.CompletionCreateParamsStreaming,
        ],
    ),
}


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize("body", BODIES)
def test_every_field_of_the_sdk_is_decided(body: Any) -> None:
    """A field is implemented, without effect, or refused by its name; none is in two of the tables."""
    said, kinds = BODIES[body]
    fields = {name for kind in kinds for name in get_type_hints(kind)}
    assert {"model", "temperature", "stream", "stream_options", "seed"} <= fields
    tables = [set(body.__struct_fields__), set(WITHOUT_EFFECT), set(REFUSED)]
    for name in sorted(fields):
        assert sum(name in table for table in tables) == 1, name
        if name in WITHOUT_EFFECT:
            assert decoded_request(encoded({**said, name: "anything"}), body) == decoded_request(
                encoded(said), body
            )
        if name in REFUSED:
            with pytest.raises(RecordError, match=f"`{name}` is not implemented"):
                decoded_request(encoded({**said, name: REFUSED[name]}), body)
            decoded_request(encoded({**said, name: None}), body)


@pytest.mark.parametrize(
    ("role", "kind"),
    [
        ("assistant", assistant_params.ChatCompletionAssistantMessageParam),
        ("tool", tool_params.ChatCompletionToolMessageParam),
    ],
)
def test_every_field_of_a_message_is_decided(role: str, kind: Any) -> None:
    for name in get_type_hints(kind):
        assert (name in Message.__struct_fields__) != (name in OF_MESSAGES), name
        if name in OF_MESSAGES:
            messages = [{"role": role, "content": "?", name: OF_MESSAGES[name]}]
            with pytest.raises(RecordError, match=rf"`{name}` is not implemented in messages\[0\]"):
                decoded_request(encoded({"messages": messages}), ChatBody)


SOUND: dict[type, dict[str, Any]] = {
    **{kind: said for kind, (said, _) in BODIES.items()},
    TokensBody: {"prompt": [1]},
    responses.ResponsesRequest: {"input": "?"},
    messages.MessagesRequest: {"messages": [], "max_tokens": 5},
    messages.Counted: {"messages": []},
    RewardBody: {"reward": 1.0},
    BeginEpisode: {},
}
"""The least that each kind of request holds"""


def structs_inside(kind: inspect.Type) -> Iterator[inspect.StructType]:
    """Yields the tables that a `kind` may hold, at any depth, itself included."""
    match kind:
        case inspect.StructType():
            yield kind
            for field in kind.fields:
                yield from structs_inside(field.type)
        case inspect.UnionType():
            for one in kind.types:
                yield from structs_inside(one)
        case inspect.ListType():
            yield from structs_inside(kind.item_type)


@pytest.mark.parametrize("kind", SOUND)
def test_null_is_the_default_of_every_field(kind: Any) -> None:
    """OpenAI's client sends the None that a program gives it, and its types allow one nearly everywhere."""
    nulls = dict.fromkeys(kind.__struct_fields__)
    assert decoded(encoded(nulls | SOUND[kind]), kind) == decoded(encoded(SOUND[kind]), kind)
    _, *inside = structs_inside(inspect.type_info(kind))
    for struct in inside:
        for field in (f for f in struct.fields if not f.required):
            kinds = getattr(field.type, "types", [field.type])
            null = any(isinstance(one, inspect.NoneType | inspect.AnyType) for one in kinds)
            assert null, f"{struct.cls.__name__}.{field.name}"


def test_null_in_what_a_table_of_the_program_s_own_holds_stays() -> None:
    schema = {"type": "object", "properties": {"a": {"default": None, "enum": [None, 1]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    body = decoded_request(encoded({**BODIES[ChatBody][0], "tools": [tool]}), ChatBody)
    assert body.tools and body.tools[0].plain()["function"]["parameters"] == schema
    with pytest.raises(RecordError, match="messages is missing"):
        decoded_request(encoded({"messages": None}), ChatBody)


def test_null_among_the_sampling_params_of_ids_is_taken() -> None:
    said = {"token_ids": [1], "sampling_params": {"n": None, "stream": None, "top_k": 3}}
    assert decoded_tokens(encoded({**said, "model": None})).top_k == 3
    assert decoded_tokens(encoded({"token_ids": [1], "sampling_params": None})).n == 1


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**62, 2**63 - 1])
def test_a_seed_is_any_whole_number_of_64_bits(seed: int) -> None:
    """They are OpenAI's bounds; each engine takes from it the bits that it has room for."""
    assert decoded_request(encoded({"prompt": "?", "seed": seed}), CompletionBody).seed == seed


def test_a_field_of_another_kind_that_is_no_text_is_refused():
    """It was answered with 500."""
    with pytest.raises(RecordError, match="foo"):
        decoded_tokens(b'{"token_ids": [1], "sampling_params": {}, "foo": "\xff"}')
