"""Calls of tools as the renderers of verifiers write them, read back: parse(render(x)) = x."""

import json
import subprocess
from typing import Any

import pytest
from helpers.openai_server.verifiers_place import PYTHON, with_verifiers

from rollout.reply_formats.base import ReplyRequest, joined
from rollout.reply_formats.table import FORMATS

RENDERERS = {
    "hermes": ("qwen3", "qwen3-vl"),
    "qwen-xml": ("prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "nemotron-3", "nemotron-3.5"),
    "glm": ("glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "laguna-xs.2", "laguna-s-2.1"),
    "llama-json": ("llama-3",),
}
"""Those of gpt-oss need a file that is fetched; the library has none for Mistral's models."""
TYPES = {
    "n": {"type": "integer"},
    "s": {"type": "string"},
    "o": {"type": "object"},
    "b": {"type": "boolean"},
    "u": {"type": ["string", "null"]},
    "e": {"enum": ["1", "2"]},
    "a": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "any": {},
}
TEXTS = ("", " x ", "\nx\n", "a\n\nb", "2", "NaN", "None", "true", '{"x": 1}', "<think>", "é<\"'\\")
ARGUMENTS: list[dict[str, Any]] = [
    {},
    *({"s": text} for text in TEXTS),
    {"n": -(10**20), "o": {"x": [1, None, True, "é"]}, "s": "2"},
    {"b": False, "u": None, "a": None, "any": None},
    {"u": "1", "e": "1", "a": "3", "any": 2.5, "é": "x", "more": [[]]},
]
RENDER = """
import json, sys
from renderers import base

class Bytes:
    '''A tokenizer of bytes, to which every name that it is asked for is a token.'''
    name_or_path, unk_token_id, eos_token_id, names = "bytes", None, 0, []

    def convert_tokens_to_ids(self, token):
        if token not in self.names:
            self.names.append(token)
        return 256 + self.names.index(token)

    def encode(self, text, **_):
        return [*text.encode()]

    def decode(self, ids, **_):
        said = (bytes([i]) if i < 256 else self.names[i - 256].encode() for i in ids)
        return b"".join(said).decode(errors="replace")

    def __call__(self, text, **_):
        places = [(i, i + 1) for i, one in enumerate(text) for _ in one.encode()]
        return {"input_ids": self.encode(text), "offset_mapping": places}

name, talks, tools = json.load(sys.stdin)
base._populate_registry()
tokenizer = Bytes()
renderer = base.RENDERER_REGISTRY[name](tokenizer)
for messages in talks:
    made = renderer.render(messages, tools=tools)
    drawn = [i for i, sampled in enumerate(made.sampled_mask) if sampled]
    parts = made.token_ids[:drawn[0]], [made.token_ids[i] for i in drawn[:-1]], [made.token_ids[drawn[-1]]]
    print(json.dumps([tokenizer.decode(part) for part in parts]))
"""
"""Prints what stands before the tokens that the model has drawn, their text, and the last of them"""


@with_verifiers
@pytest.mark.parametrize(("format", "name"), [(f, n) for f in RENDERERS for n in RENDERERS[f]])
def test_calls_that_verifiers_writes_are_read_back(format: str, name: str) -> None:
    functions = [
        {"name": name, "description": "d", "parameters": {"type": "object", "properties": TYPES}}
        for name in "fg"
    ]
    calls = [[("f", given)] for given in ARGUMENTS]
    if format != "llama-json":  # whose template refuses several
        calls.append([("f", {"s": "2"}), ("g", {})])
    asked = [_talk(some) for some in calls]
    told = json.dumps([name, asked, functions])
    ran = subprocess.run([PYTHON, "-c", RENDER], input=told, capture_output=True, text=True)
    assert not ran.returncode, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    tools: Any = [{"type": "function", "function": function} for function in functions]
    for some, (prompt, text, end) in zip(calls, lines, strict=True):
        parser = FORMATS[format].parser(ReplyRequest(tools, prompt))
        parts = joined([*parser.feed(text + end * (end == "</tool_call>")), *parser.end()])
        found = [(part.name, json.loads(part.text)) for part in parts if part.kind == "call"]
        assert found == some, (text, parts)
        assert not [part for part in parts if part.kind == "content"], (text, parts)


def _talk(calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    made = [
        {"id": "call12345", "type": "function", "function": {"name": name, "arguments": given}}
        for name, given in calls
    ]
    return [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": made},
    ]
