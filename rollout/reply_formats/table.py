"""The table of reply formats. To add one: a parser in this folder, a line below, its name in
areal_q/config/tasks.py."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from areal_q.tasks.base import Tokenizer
from rollout.reply_formats.base import Asked, Parser
from rollout.reply_formats.tagged import Tagged, glm, hermes, mistral, qwen_xml
from rollout.reply_formats.untagged import Harmony, LlamaJson, Text


class ReplyFormat(NamedTuple):
    """How a family of models writes replies."""

    parser: Callable[[Asked], Parser]
    signs: tuple[str, ...]
    """Texts in a chat template that has this format; one of them is enough"""
    shown: tuple[str, ...] = ()
    """Special tokens that the parser reads; the others are no text to it"""
    ends: tuple[str, ...] = ()
    """Tokens that end a reply with a call, beside the tokenizer's stops"""


FORMATS: dict[str, ReplyFormat] = {
    "gpt-oss": ReplyFormat(
        Harmony,
        ("<|channel|>",),
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"),
        ("<|call|>",),
    ),
    "glm": ReplyFormat(partial(Tagged, read=glm), ("<arg_key>",), ends=("<|observation|>",)),
    "qwen-xml": ReplyFormat(partial(Tagged, read=qwen_xml), ("<function=",)),
    "mistral": ReplyFormat(
        partial(Tagged, read=mistral, call=("[TOOL_CALLS]", ""), think=("[THINK]", "[/THINK]")),
        ("[TOOL_CALLS]",),
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    ),
    "hermes": ReplyFormat(
        partial(Tagged, read=hermes),
        ("<tool_call>", "<think>", "</think>"),
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    ),
    "llama-json": ReplyFormat(
        LlamaJson,
        ('"parameters": dictionary of argument name and its value', "<|python_tag|>"),
        ("<|python_tag|>",),
        ("<|eom_id|>",),
    ),
    "text": ReplyFormat(Text, ()),
}
"""The formats by name. The first whose sign is in the template is taken, and `text` where there is none."""


def format_of(tokenizer: Tokenizer, name: str = "auto") -> ReplyFormat:
    """Returns the format `name`, "auto" being the one whose signs the tokenizer's chat template has."""
    if name != "auto":
        return FORMATS[name]
    found = (one for one in FORMATS.values() if any(s in tokenizer.template for s in one.signs))
    return next(found, FORMATS["text"])
