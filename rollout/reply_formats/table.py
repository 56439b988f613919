"""The table of reply formats. To add one: a parser in this folder, a line below, its name in
areal_q/config/tasks.py, and its signs in areal_q/tasks/encoding/reply_signs.py."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from areal_q.tasks.base import Tokenizer
from areal_q.tasks.encoding.reply_signs import reply_format_of
from rollout.reply_formats.base import Parser, ReplyRequest
from rollout.reply_formats.tagged import Tagged, glm, hermes, mistral, qwen_xml
from rollout.reply_formats.untagged import Harmony, LlamaJson, Untagged


class ReplyFormat(NamedTuple):
    """How a family of models writes replies."""

    parser: Callable[[ReplyRequest], Parser]
    shown: tuple[str, ...] = ()
    """Special tokens that the parser reads; the others are no text to it"""
    ends: tuple[str, ...] = ()
    """Tokens that end a reply with a call, beside the tokenizer's stops"""


FORMATS: dict[str, ReplyFormat] = {
    "gpt-oss": ReplyFormat(
        Harmony,
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"),
        ("<|call|>",),
    ),
    "glm": ReplyFormat(partial(Tagged, read=glm), ends=("<|observation|>",)),
    "qwen-xml": ReplyFormat(partial(Tagged, read=qwen_xml)),
    "mistral": ReplyFormat(
        partial(Tagged, read=mistral, call=("[TOOL_CALLS]", ""), think=("[THINK]", "[/THINK]")),
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    ),
    "hermes": ReplyFormat(
        partial(Tagged, read=hermes), ("<tool_call>", "</tool_call>", "<think>", "</think>")
    ),
    "llama-json": ReplyFormat(LlamaJson, ("<|python_tag|>",), ("<|eom_id|>",)),
    "text": ReplyFormat(Untagged),
}
"""The formats by name"""


def format_of(tokenizer: Tokenizer, name: str = "auto") -> ReplyFormat:
    """Returns the format `name`, "auto" being that of the tokenizer's chat template."""
    return FORMATS[reply_format_of(tokenizer.template, name)]
