"""Decodes a request and refuses, by name, each field that would change the reply and is not implemented."""

from collections.abc import Container, Mapping
from typing import Any, TypeVar

from msgspec import Raw, Struct

from areal_q.errors import RecordError
from rollout.openai_server.schema import ChatBody, CompletionBody, anything, decoded

B = TypeVar("B", CompletionBody, ChatBody)
Neutral = Mapping[str, "tuple[Any, ...] | Neutral"]
"""The values of fields, besides null, that ask for nothing; of a table those of its own fields"""

WITHOUT_EFFECT = frozenset(
    [
        "cache_salt",
        "metadata",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "safety_identifier",
        "service_tier",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "store",
        "user",
    ]
)
"""Fields of OpenAI's API, vLLM's and SGLang's that leave what is drawn as it is, and are not read"""
NEUTRAL: Neutral = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "functions": ([],),
    "ignore_eos": (False,),
    "length_penalty": (1,),
    "logit_bias": {},
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": {"type": ("text",)},
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}
"""Those of fields that are not implemented; one that is not named here has none"""
_OF_TOOLS: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
}
"""Values of a chat's fields that do not bind what is drawn, which no engine here does"""
_EMPTY = (None, "", [], {}, False)
"""What a field of a message or tool that is not implemented may hold, as in a reply that a client sends back"""
_NESTED = frozenset(
    [
        "annotations",
        "cache_control",
        "id",
        "index",
        "parsed_arguments",
        "prompt_cache_breakpoint",
        "type",
    ]
)
"""Fields of messages and tools that leave what is drawn as it is"""


def decoded_request(data: bytes, type: type[B]) -> B:
    """Returns the request in `data`. Raises RecordError if it is not JSON, for a value that does not fit its
    field, and for a field, or one of a message, that is not implemented."""
    found = decoded(data, dict[str, Raw])
    refuse_others(found, {*type.__struct_fields__, *WITHOUT_EFFECT}, NEUTRAL)
    body = decoded(data, type)
    if isinstance(body, ChatBody):
        for name, neutral in _OF_TOOLS.items():
            value = getattr(body, name)
            binds = value is not None and value not in neutral
            if binds and (body.tools or name == "tool_choice"):
                raise RecordError(f"`{name}` is not implemented: it is {value!r}")
        for i, message in enumerate(body.messages):
            for name in ("tool_calls", "reasoning_content"):
                if message.role != "assistant" and getattr(message, name):
                    raise RecordError(f"messages[{i}]: `{name}` is the assistant's alone")
        for name in ("messages", "tools"):
            given = anything(found[name]) if name in found else None
            refuse_unread(given, getattr(body, name), name)
    return body


def refuse_others(found: Mapping[str, Raw], known: Container[str], neutral: Neutral) -> None:
    """Raises RecordError for a field that is not known, unless its value is null or one of its `neutral` ones,
    which ask for nothing."""
    for name, raw in found.items():
        if name not in known and not _asks_nothing(anything(raw), neutral.get(name, ())):
            raise RecordError(f"`{name}` is not implemented")


def _asks_nothing(value: Any, neutral: tuple[Any, ...] | Neutral) -> bool:
    if isinstance(value, dict) and isinstance(neutral, Mapping):
        return all(_asks_nothing(inner, neutral.get(name, ())) for name, inner in value.items())
    return value is None or (isinstance(neutral, tuple) and value in neutral)


def refuse_unread(given: Any, read: Any, where: str, harmless: Container[str] = ()) -> None:
    """Raises RecordError for a field in `given`, at any depth, that holds something and is not one of the
    Structs in `read`, which were decoded from it, nor harmless. `where` is its place in the request."""
    if isinstance(read, list):
        for i, pair in enumerate(zip(given, read, strict=True)):
            refuse_unread(*pair, f"{where}[{i}]", harmless)
    elif isinstance(read, Struct):
        for name, value in given.items():
            if name in read.__struct_fields__:
                refuse_unread(value, getattr(read, name), f"{where}.{name}", harmless)
            elif name not in _NESTED and name not in harmless and value not in _EMPTY:
                raise RecordError(f"`{name}` is not implemented in {where}")
