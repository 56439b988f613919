"""Parsers of replies beside replies as the models' own templates write them, in every split of their text."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any
from unicodedata import normalize

import pytest
from helpers.paths import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_q.config import Chat
from areal_q.tasks import CharTokenizer, load_tokenizer
from areal_q.tasks.encoding.reply_signs import OF_CALLS
from rollout.reply_formats.base import ReplyPart, ReplyRequest, joined
from rollout.reply_formats.table import FORMATS, format_of


def tool(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("f", n="integer", s="string"), tool("g")]
HERE = '<tool_call>\n{"name": "f", "arguments": {"n": 1, "s": "2"}}\n</tool_call>'
XML = "<function=f>\n<parameter=n>\n1\n</parameter>\n<parameter=s>\n2\n</parameter>\n</function>"
GLM = "f\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n<arg_key>s</arg_key>\n<arg_value>2</arg_value>\n"
TO_F = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 1, "s": "2"}'
F, G = ReplyPart("call", '{"n": 1, "s": "2"}', "f"), ReplyPart("call", "{}", "g")
BROKEN = "<tool_call>\n{'name': f}\n</tool_call>"
NUMBER = '<tool_call>{"name": "f", "arguments": 3}</tool_call>'
JSON_F = '{"name": "f", "arguments": {"n": 1, "s": "2"}, "id": "a23456789"}'
LLAMA_F = '{"name": "f", "parameters": {"n": 1, "s": "2"}}'
HM, SO = ReplyPart("reasoning", "hm"), ReplyPart("content", "so")
NEXT = "<|end|><|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>hm"
ODD = ("NaN", "-Infinity", "1e999", '"\\ud800"')
"""What Python's JSON reads and the standard does not know"""
REPLIES: dict[str, list[tuple[str, list[ReplyPart]]]] = {
    "hermes": [
        (HERE, [F]),
        (f'so\n{HERE}\n<tool_call>\n{{"name": "g"}}\n</tool_call>', [SO, F, G]),
        (f"<think>\nhm\n</think>\n\nso\n{HERE}", [HM, SO, F]),
        (f"<think>\n{HERE}\n</think>\n\nno", [ReplyPart("reasoning", HERE), ReplyPart("content", "no")]),
        ("<think>\n\n</think>\n\nyes\n", [ReplyPart("content", "yes\n")]),
        ("so <think>", [ReplyPart("content", "so <think>")]),
        (BROKEN, [ReplyPart("content", BROKEN)]),
        (HERE[:-3], [ReplyPart("content", HERE[:-3])]),
        (NUMBER, [ReplyPart("content", NUMBER)]),
        (" < so <tool", [ReplyPart("content", " < so <tool")]),
    ],
    "qwen-xml": [
        (f"<think>\nhm\n</think>\n\n<tool_call>\n{XML}\n</tool_call>", [HM, F]),
        ("<tool_call>\n<function=g>\n</function>\n</tool_call>", [G]),
        ("<tool_call>\nf(1)\n</tool_call>", [ReplyPart("content", "<tool_call>\nf(1)\n</tool_call>")]),
    ],
    "glm": [
        (f"<think>hm</think>\nso\n<tool_call>{GLM}</tool_call>", [HM, SO, F]),
        (f"<tool_call>{GLM}</tool_call>\n<tool_call>g\n</tool_call>", [F, G]),
        (f"</think>\n<tool_call>{GLM}</tool_call>", [F]),
    ],
    "mistral": [
        ('[TOOL_CALLS] [' + JSON_F + ', {"name": "g", "arguments": {}}]', [F, G]),
        ('so[TOOL_CALLS]f[ARGS]{"n": 1, "s": "2"}[TOOL_CALLS]g[CALL_ID]a23456789[ARGS]{}', [SO, F, G]),
        ("[THINK]hm[/THINK]so", [HM, SO]),
        ("[TOOL_CALLS]f(1)", [ReplyPart("content", "[TOOL_CALLS]f(1)")]),
    ],
    "llama-json": [
        (LLAMA_F, [F]),
        (f'<|python_tag|>{LLAMA_F}; {{"name": "g", "parameters": {{}}}}', [F, G]),
        ("{so", [ReplyPart("content", "{so")]),
        ('so {"name": "g"}', [ReplyPart("content", 'so {"name": "g"}')]),
    ],
    "gpt-oss": [
        (f"{ANALYSIS}{NEXT}{TO_F}<|call|>", [HM, F]),
        (f"{ANALYSIS}{NEXT}<|channel|>final<|message|>so", [HM, SO]),
        (f"{TO_F}<|call|>", [F]),
        ('<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>', [G]),
        (TO_F, [ReplyPart("content", '{"n": 1, "s": "2"}')]),
        (' to=functions.g<|channel|>commentary json<|message|>{}<|call|>', [G]),
        ("to=g <|channel|>commentary<|message|>{}<|call|>", [G]),
        (" to=g", [ReplyPart("content", " to=g")]),
        ("so to=g<|channel|>final<|message|>.", [ReplyPart("content", "so to=g.")]),
        ("so", [SO]),
    ],
    "text": [(f"<think>{HERE}", [ReplyPart("content", f"<think>{HERE}")])],
}  # fmt: skip
CASES = [(name, *case) for name, cases in REPLIES.items() for case in cases]
OF_JSON = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": %s}}</tool_call>'),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"n": %s}}]'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"n": %s}'),
    ("llama-json", '{"name": "f", "parameters": {"n": %s}}'),
]
OF_TEXTS = [
    ("qwen-xml", "<tool_call><function=f><parameter=n>%s</parameter></function></tool_call>"),
    ("glm", "<tool_call>f<arg_key>n</arg_key><arg_value>%s</arg_value></tool_call>"),
]
for odd in ODD:
    CASES += [(name, text % odd, [ReplyPart("content", text % odd)]) for name, text in OF_JSON]
    CASES += [
        (name, text % odd, [ReplyPart("call", json.dumps({"n": odd}), "f")])
        for name, text in OF_TEXTS
    ]
    as_json = f'{{"n": {odd}}}'
    CASES.append(
        ("gpt-oss", f"{TO_F[: -len(F.text)]}{as_json}<|call|>", [ReplyPart("content", as_json)])
    )


WITH_TOOLS = ReplyRequest(TOOLS)


def parsed(name: str, pieces: Sequence[str], asked: ReplyRequest = WITH_TOOLS) -> list[ReplyPart]:
    parser = FORMATS[name].parser(asked)
    return joined([part for piece in pieces for part in parser.feed(piece)] + parser.end())


def comparable(parts: Sequence[ReplyPart]) -> list[Any]:
    """With arguments as values, since a call that was written as XML has JSON of ours."""
    return [(p.kind, p.name, json.loads(p.text) if p.kind == "call" else p.text) for p in parts]


def test_every_format_has_replies() -> None:
    assert REPLIES.keys() == FORMATS.keys() == {*OF_CALLS, "text"}


@pytest.mark.parametrize(("name", "text", "parts"), CASES)
def test_a_reply_is_read_in_every_split(name: str, text: str, parts: list[ReplyPart]) -> None:
    """Whole, in two pieces wherever one may cut, and character by character."""
    splits = [[text], [*text], *([text[:i], text[i:]] for i in range(1, len(text)))]
    for pieces in splits:
        assert comparable(parsed(name, pieces)) == comparable(parts)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_text_is_read_alike_in_any_split(name: str, data: st.DataObject) -> None:
    """Whatever a model draws: tags in any order, whole and broken ones."""
    tags = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[THINK]",
    ]
    tags += [
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "analysis",
        " to=f",
        "{",
        "}",
        "{}",
        "g",
    ]
    tags += [HERE, XML, GLM, TO_F, " ", "\n", "é", "<", "<t", '{"name": "g"}']
    pieces = data.draw(st.lists(st.sampled_from(tags), max_size=12))
    text = "".join(pieces)
    whole = parsed(name, [text])
    assert parsed(name, pieces) == whole == parsed(name, [*text])
    if name == "text":
        assert whole == [ReplyPart("content", text)] * bool(text)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "text"])
def test_without_tools_no_call_is_looked_for(name: str) -> None:
    for _, text, _ in (case for case in CASES if case[0] == name):
        assert all(part.kind != "call" for part in parsed(name, [text], ReplyRequest()))


def test_a_prompt_may_have_begun_the_thought() -> None:
    asked = ReplyRequest(TOOLS, "<|im_start|>assistant\n<think>\n")
    found = parsed("hermes", ["hm\n</think>\n\nso"], asked)
    assert found == [HM, SO]
    assert parsed("hermes", ["hm"], asked) == [HM]


TYPES: list[tuple[Any, str, Any]] = [
    ({}, "2", 2),
    ({}, "False", False),
    ({}, "None", None),
    ({}, "none", "none"),
    ({"type": "string"}, "2", "2"),
    ({"type": "string"}, '"2"', '"2"'),
    ({"type": "string"}, "True", "True"),
    ({"type": "boolean"}, "True", True),
    ({"type": "integer"}, "two", "two"),
    ({"type": ["string", "null"]}, "2", "2"),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "number"]}, "2", 2),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "2", "2"),
    ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/x"}]}, '{"x": 1}', {"x": 1}),
    ({"enum": ["1", "2"]}, "2", "2"),
    ({"enum": [1, 2]}, "2", 2),
    ({"anyOf": 3, "enum": "x", "type": 5}, "2", 2),
    ("no schema", "2", 2),
]


@pytest.mark.parametrize(("schema", "text", "value"), TYPES)
def test_a_bare_text_is_of_the_type_that_the_tool_declares(schema: Any, text: str, value: Any):
    """`2` is the text "2" where the schema wants a text, and a number where it says nothing."""
    parameters = {"type": "object", "properties": {"x": schema}}
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    call = f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    found = json.loads(parsed("glm", [call], ReplyRequest(tools))[0].text)["x"]
    assert (found, type(found)) == (value, type(value))


# Qwen's tokenizer composes characters (NFC), as others do: what is not composed does not come back.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).map(
    partial(normalize, "NFC")
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(texts, v, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(texts, values, max_size=3)


@pytest.mark.timeout(60)
@settings(max_examples=25, deadline=None)
@given(calls=st.lists(st.tuples(st.sampled_from("fg"), arguments), min_size=1, max_size=3))
def test_qwen_s_own_template_is_read_back(calls: list[tuple[str, dict[str, Any]]]) -> None:
    """parse(render(x)) = x, for any arguments, and through the tokens."""
    path = ROOT / "models/tokenizers/qwen3"
    if not path.is_dir():
        pytest.skip("no models/tokenizers/qwen3: make tokenizers")
    tokenizer = _loaded(str(path))
    made = [
        {"type": "function", "id": "c", "function": {"name": n, "arguments": a}} for n, a in calls
    ]
    user = {"role": "user", "content": "?"}
    message = {"role": "assistant", "content": "", "tool_calls": made}
    begun = tokenizer.encode_messages([user], tools=TOOLS)
    ids = tokenizer.encode_messages([user, message, user], tools=TOOLS)
    text = tokenizer.decode(ids[len(begun) :]).partition("<|im_end|>")[0]
    if any("<|im_end|>" in json.dumps(a) or "</tool_call>" in json.dumps(a) for _, a in calls):
        return
    found = joined(
        [*(parser := format_of(tokenizer).parser(ReplyRequest(TOOLS))).feed(text), *parser.end()]
    )
    assert [(p.name, json.loads(p.text)) for p in found] == calls


_LOADED: dict[str, Any] = {}


def _loaded(path: str) -> Any:
    return _LOADED.setdefault(path, load_tokenizer(path, Chat()))


def test_bare_text_has_no_format() -> None:
    assert format_of(CharTokenizer()) is FORMATS["text"]
    assert format_of(CharTokenizer(), "glm") is FORMATS["glm"]
