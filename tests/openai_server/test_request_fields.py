"""Every field of the requests that OpenAI's own client can send: what becomes of it is decided, and tried."""

import json
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import chat_completion_assistant_message_param as assistant_params
from openai.types.chat import chat_completion_tool_message_param as tool_params
from openai.types.chat import completion_create_params as chat_params

from areal_q.errors import RecordError
from rollout.openai_server.request_fields import WITHOUT_EFFECT, decoded_request
from rollout.openai_server.schema import ChatBody, CompletionBody, Message
from rollout.openai_server.token_route import decoded_tokens

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


def test_a_field_of_another_kind_that_is_no_text_is_refused():
    """It was answered with 500."""
    with pytest.raises(RecordError, match="foo"):
        decoded_tokens(b'{"token_ids": [1], "sampling_params": {}, "foo": "\xff"}')
