"""What msgspec says of data that do not fit, in this project's words: the place, what is there, what could be.

Expected `int`, got `str` - at `$.learner.max_lag`
    → learner.max_lag = 'two': must be a whole number, not text
Invalid enum value 'boredom' - at `$.failed`
    → failed = 'boredom': no such choice; it is one of environment, exception, …
JSON is malformed: invalid character (byte 0)
    → not JSON: invalid character (byte 0)

No other module shows msgspec's own words; areal_q/config/faults.py adds what it knows of settings.
"""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect
from msgspec.inspect import LiteralType, StructType, Type, UnionType

BOUNDS = {">=": "at least", ">": "above", "<=": "at most", "<": "below"}
_MESSAGE = re.compile(r"(?P<what>.*?)(?: - at `(?P<key>key` in `)?\$\.?(?P<path>.*)`)?", re.DOTALL)
_EXPECTED = re.compile(
    r"Expected `(?P<kinds>.*?)`"
    r"(?: (?P<sign>[<>]=?) (?P<bound>\S+?)| of (?:(?P<end>at least|at most) )?length (?P<length>.+?)"
    r"| matching regex (?P<pattern>.+))?(?:, got `?(?P<got>\w+)`?)?"
)
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "object": "a table",
    "array": "a list",
    "null": "nothing",
}
_EXACT = re.compile(r"(?!.*\.\.\.)[^ ]+")
"""Matches a path that leads to one value, which the keys of a table and "any of its entries" are not"""
_MOST_SHOWN = 80
"""Characters of a value that a message shows"""


def in_words(error: Exception, kind: Any = None, value: Any = msgspec.UNSET) -> str:
    """Returns one clause on why data cannot be read or decoded. `kind` is the type that they should have, for
    the choices; `value` what was to become it, for what is there."""
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8 text"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if not isinstance(error, msgspec.MsgspecError):
        return getattr(error, "strerror", None) or str(error)
    if not isinstance(error, msgspec.ValidationError):
        found = re.fullmatch(r"(JSON|MessagePack)(?: data)? is malformed: (.*)", str(error))
        return f"not {found[1]}: {found[2]}" if found else "it ends too early"
    what, path = parted(error)
    if name := quoted(what, "Object missing required field"):
        return f"{joined(path, name)} is missing"
    if name := quoted(what, "Object contains unknown field"):
        return f"{joined(path, name)}: there is no such field"
    shown = value is not msgspec.UNSET and _EXACT.fullmatch(path) is not None
    given = f"{path} = {short(value_at(value, path))}: " if shown else f"{path}: "
    if what.startswith("Invalid") and kind is not None:
        refusal = not_among(str(value_at(value, path)), choices(kind, path, value))
    else:
        refusal = expectation(what, shown)
    return f"{given if path else ''}{refusal}"


def fitted(value: Any, kind: Any, error: type[Exception], where: str = "") -> Any:
    """Returns `value` as a `kind`. Raises `error`, with one clause on why it does not fit after `where`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as misfit:
        raise error(where + in_words(misfit, kind, value)) from misfit


def untyped(data: bytes) -> Any:
    """Returns the content of JSON as plain values, for `in_words`; UNSET if it cannot be decoded."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.UNSET


def parted(error: msgspec.ValidationError) -> tuple[str, str]:
    """Returns what is wrong, in msgspec's words, and the dotted path, "" for the whole."""
    found = _MESSAGE.fullmatch(str(error))
    assert found is not None, "every part of the pattern is optional"
    return found["what"], ("the keys of " if found["key"] else "") + (found["path"] or "")


def quoted(what: str, beginning: str) -> str | None:
    """Returns the name that `what` gives after `beginning`, or None for another message."""
    found = re.fullmatch(f"{beginning} `(.*)`", what)
    return found[1] if found else None


def joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def short(value: Any) -> str:
    """Returns the representation of `value`, cut after _MOST_SHOWN characters."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def expectation(what: str, shown: bool = True) -> str:
    """Returns what a value must be. Unless it is `shown` before, the kind of what was given is named as well;
    that of a text always is, since a text may look like a number.

    Example: "Expected `int` >= 1" is "must be a whole number, at least 1".
    """
    found = _EXPECTED.fullmatch(what)
    if not found:
        # The rest are our own words, of a ValueError that a type raised.
        return "is too large" if what.endswith("out of range") else what
    kinds = " or ".join(_KINDS.get(kind, kind) for kind in found["kinds"].split(" | "))
    if found["pattern"]:
        return f"must be {kinds} that matches {found['pattern']}"
    if found["length"]:
        least = re.sub(r"[<>]=", lambda sign: BOUNDS[sign[0]], found["length"])
        size = f"{found['end']} {least}" if found["end"] else least
        return f"must be {kinds} of {size}{' characters' if kinds == 'text' else ''}"
    bound = f", {BOUNDS[found['sign']]} {float(found['bound']):g}" if found["sign"] else ""
    got = found["got"] if found["got"] == "str" or not shown else None
    return f"must be {kinds}{bound}{f', not {_KINDS.get(got, got)}' if got else ''}"


def suggestion(given: str, names: Iterable[str]) -> str:
    """Example: suggestion("arc", ["acr", "ppo"]) is "did you mean 'acr'?"; empty where none is near."""
    near = get_close_matches(given, list(names), n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def not_among(given: str, names: Sequence[str]) -> str:
    near = suggestion(given, names)
    return f"no such choice; {f'{near} It' if near else 'it'} is one of {', '.join(names)}"


def choices(kind: Any, path: str, value: Any) -> list[str]:
    """Returns what may stand at `path` of a `kind`: the values of a literal, or the tags of a union."""
    parent, _, name = path.rpartition(".")
    tagged = [s for s in types_at(kind, parent, value) if isinstance(s, StructType)]
    if tags := sorted(str(s.tag) for s in tagged if s.tag_field == name):
        return tags
    literals = (t for t in types_at(kind, path, value) if isinstance(t, LiteralType))
    return [str(one) for literal in literals for one in literal.values]


def value_at(value: Any, path: str) -> Any:
    """Example: value_at({"a": {"b": [1, 2]}}, "a.b[1]") is 2; None where there is nothing."""
    for key in _keys(path):
        if isinstance(value, dict):
            value = value.get(key)
        else:
            there = isinstance(value, list | tuple) and key.isdigit() and int(key) < len(value)
            value = value[int(key)] if there else None
    return value


def types_at(kind: Any, path: str, value: Any) -> list[Type]:
    """Returns the types that may stand at `path` of a `kind`, by the tags in `value`, which was to become it.
    There are none at a path that no such type has."""
    return _inner(_info(kind), _keys(path), value)


def _inner(kind: Type, keys: Sequence[str], value: Any) -> list[Type]:
    kinds = [*kind.types] if isinstance(kind, UnionType) else [kind]
    if not keys:
        return kinds
    first, *rest = keys
    inside = value_at(value, first) if isinstance(value, dict | list | tuple) else None
    return [
        t for one in kinds for item in _items(one, first, value) for t in _inner(item, rest, inside)
    ]


def _items(kind: Type, key: str, value: Any) -> list[Type]:
    """Returns the type at `key` of a `kind` as a list of one, or of none."""
    match kind:
        case inspect.StructType():
            tag = value.get(kind.tag_field or "type") if isinstance(value, dict) else None
            fits = kind.tag in (None, tag)
            return [field.type for field in kind.fields if fits and field.encode_name == key]
        case inspect.ListType() | inspect.VarTupleType():
            return [kind.item_type]
        case inspect.TupleType():
            return [*kind.item_types[: int(key) + 1][-1:]]
        case inspect.DictType():
            return [kind.value_type]
        case _:
            return []


def _keys(path: str) -> list[str]:
    return re.findall(r"[^.\[\]]+", path)


@cache
def _info(kind: Any) -> Type:
    return inspect.type_info(kind)
