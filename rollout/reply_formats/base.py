"""What a parser of replies is: text goes in as it comes, parts of a message come out.

A parser gives a view of what was drawn, and never changes it: a call that cannot be read is content.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from areal_q.tasks.base import Tool

_PYTHON = {"True": True, "False": False, "None": None}
"""Values that some chat templates write as Python does"""
_KINDS = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}
"""A JSON schema's names of what a value is"""


class ReplyPart(NamedTuple):
    """A part of a reply, in the order of the reply. Neighbours of one kind, calls apart, are one text."""

    kind: Literal["content", "reasoning", "call"]
    text: str
    """The text itself, or the arguments of a call, a JSON object"""
    name: str = ""
    """The function that a call names"""


class Parser(Protocol):
    """Reads one reply. However its text is split, the parts are the same."""

    def feed(self, text: str) -> list[ReplyPart]:
        """Returns the parts that are certain after `text`, the next piece of the reply."""
        ...

    def end(self) -> list[ReplyPart]:
        """Returns what is left once the reply has ended. A call that has not been closed is content."""
        ...


class ReplyRequest(NamedTuple):
    """What a parser knows of the request."""

    tools: Sequence[Tool] = ()
    """Functions that may be called; without any, no call is looked for"""
    prompt: str = ""
    """The last characters of the prompt, which may have begun a thought"""

    def types_of(self, function: str) -> Mapping[str, Any]:
        """Returns the JSON schema of each argument of `function`, as far as the tools say."""
        for tool in self.tools:
            if tool["function"]["name"] == function:
                found = (tool["function"].get("parameters") or {}).get("properties")
                return found if isinstance(found, dict) else {}
        return {}


def joined(parts: Iterable[ReplyPart]) -> list[ReplyPart]:
    """Returns the parts, neighbours of one kind as one, but every call by itself."""
    out: list[ReplyPart] = []
    for part in parts:
        if out and out[-1].kind == part.kind != "call":
            out[-1] = ReplyPart(part.kind, out[-1].text + part.text)
        else:
            out.append(part)
    return out


class _JsonCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


def call_of_json(text: str | msgspec.Raw) -> ReplyPart | None:
    """Returns the call `{"name": …, "arguments": {…}}`, whose arguments may be named `parameters`; None for any
    other text."""
    try:
        found = msgspec.json.decode(text, type=_JsonCall)
    except (ValueError, RecursionError):
        return None
    given = (bytes(raw) for raw in (found.arguments, found.parameters))
    return call(found.name, next(filter(None, given), b"{}").decode())


def arguments_of(text: str) -> dict[str, Any] | None:
    """Returns the arguments of a call that are written in JSON; None for a text that is no object, or not JSON
    as its standard has it, such as one with NaN, 1e999 or half of a surrogate pair."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError):
        return None


def call(name: str, arguments: str) -> ReplyPart | None:
    """Returns the call of `name`; None if there is no name, or the arguments are not a JSON object."""
    sound = name.strip() and arguments_of(arguments) is not None
    return ReplyPart("call", arguments.strip(), name.strip()) if sound else None


def call_of_texts(
    name: str, texts: Iterable[tuple[str, str]], asked: ReplyRequest
) -> ReplyPart | None:
    """Returns the call of `name` with arguments that were written as bare texts: values in JSON, or Python's
    True, False and None; a text where the tool declares one and no other type that the value has, or where it
    is neither."""
    types = asked.types_of(name.strip())
    arguments = {key: _value(text, types.get(key)) for key, text in texts}
    return call(name, json.dumps(arguments, ensure_ascii=False))


def _value(text: str, schema: Any) -> Any:
    kinds = _kinds(schema)
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        value = _PYTHON.get(text, text)
    others = kinds - {"string"}
    return text if others != kinds and not others & _KINDS[type(value)] else value


def _kinds(schema: Any) -> set[str]:
    """Returns the types that a JSON schema allows, by its names; none if it does not say."""
    if not isinstance(schema, dict):
        return set()
    if isinstance(found := schema.get("type"), str | list):
        return (
            {found} if isinstance(found, str) else {kind for kind in found if isinstance(kind, str)}
        )
    if isinstance(values := schema.get("enum"), list):
        return set[str]().union(*(_KINDS[type(value)] for value in values))
    choices = schema.get("anyOf") or schema.get("oneOf")
    found = [_kinds(one) for one in choices] if isinstance(choices, list) else []
    return set[str]().union(*found) if all(found) else set()
