"""What is wrong with a table of settings, in words: the dotted path, what was given, what could be.

Object contains unknown field `max_lagg` - at `$.learner`
    → learner.max_lagg: no such setting; did you mean learner.max_lag?
Invalid enum value 'int7' - at `$.rollout.format`
    → rollout.format = 'int7': no such choice; did you mean 'int8'? It is one of bf16, fp8, …
"""

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from typing import Any

import msgspec
from msgspec.inspect import LiteralType, StructType, Type, UnionType

from areal_q.config.run import Run

Table = dict[str, Any]
_MESSAGE = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?")
_EXPECTED = re.compile(
    r"Expected `(?P<kinds>.*?)`(?: (?P<sign>[<>]=?) (?P<bound>\S+?))?(?: of length (?P<length>\d+))?"
    r"(?:, got `?(?P<got>\w+)`?)?"
)
BOUNDS = {">=": "at least", ">": "above", "<=": "at most", "<": "below"}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "object": "a table",
    "array": "a list",
    "null": "nothing",
}
PATTERNS = {
    "name": "letters, digits and . _ - after a letter or digit",
    "rollout.serve": "PORT or HOST:PORT",
}
"""What the texts of settings with a pattern consist of."""


def fault(error: msgspec.ValidationError, table: Table) -> str:
    """One sentence for what `error` says of `table`, which was to become a Run."""
    found = _MESSAGE.fullmatch(str(error))
    what, path = (found["what"], found["path"] or "") if found else (str(error), "")
    if name := _quoted(what, "Object contains unknown field"):
        return _unknown(_joined(path, name), table)
    if name := _quoted(what, "Object missing required field"):
        return f"{_joined(path, name)} is missing: {_needed_by(path, table)}"
    given = f"{path} = {_value(table, path)!r}"
    if what.startswith("Invalid") or path.rpartition(".")[2] == "type":
        return f"{given}: {_not_among(str(_value(table, path)), _choices(path, table))}"
    if "matching regex" in what and path in PATTERNS:
        return f"{given}: must be {PATTERNS[path]}"
    return f"{given}: {_expectation(what)}"


def suggestion(given: str, names: Iterable[str]) -> str:
    """Example: suggestion("arc", ["acr", "ppo"]) is "did you mean 'acr'?"; empty where none is near."""
    near = get_close_matches(given, list(names), n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def _quoted(what: str, beginning: str) -> str | None:
    found = re.fullmatch(f"{beginning} `(.*)`", what)
    return found[1] if found else None


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _unknown(path: str, table: Table) -> str:
    parent, _, name = path.rpartition(".")
    struct = _struct(parent, table)
    beside = [_joined(parent, field.name) for field in struct.fields] if struct else []
    if near := get_close_matches(path, beside, n=1, cutoff=0.7):
        return f"{path}: no such setting; did you mean {near[0]}?"
    if others := sorted(set(_elsewhere(parent, name, table))):
        return f"{path}: no such setting; did you mean {' or '.join(others[:3])}?"
    where = f"{parent} has" if parent else "there are"
    names = ", ".join(name.rpartition(".")[2] for name in beside)
    return f"{path}: no such setting; {where} {names} (areal-q settings lists all)"


def _elsewhere(parent: str, name: str, table: Table) -> Iterator[str]:
    """Settings of that very name under another choice of `parent`, or in another place."""
    tags = [s.tag for s in _structs(_type(parent, table)) if any(f.name == name for f in s.fields)]
    if tags:
        yield f"{parent}.type = {' or '.join(repr(tag) for tag in tags)}, which has it"
        return
    leaves = [path.rpartition(".")[2] for path in _all_paths()]
    near = get_close_matches(name, leaves, n=1, cutoff=0.8)
    yield from (path for path, leaf in zip(_all_paths(), leaves, strict=True) if leaf in near)


def _needed_by(path: str, table: Table) -> str:
    struct = _struct(path, table)
    tag = f"{path}.type = {struct.tag!r}" if struct and struct.tag else path
    return f"{tag} needs it"


def _not_among(given: str, choices: list[str]) -> str:
    near = suggestion(given, choices)
    return f"no such choice; {f'{near} It' if near else 'it'} is one of {', '.join(choices)}"


def _choices(path: str, table: Table) -> list[str]:
    parent, _, name = path.rpartition(".")
    if name == "type":
        return sorted(str(struct.tag) for struct in _structs(_type(parent, table)))
    kinds = _alternatives(_type(path, table))
    return [str(value) for kind in kinds if isinstance(kind, LiteralType) for value in kind.values]


def _expectation(what: str) -> str:
    """Example: "Expected `int` >= 1" → "must be a whole number, at least 1"."""
    found = _EXPECTED.fullmatch(what)
    if not found:
        return what
    kinds = " or ".join(_KINDS.get(kind, kind) for kind in found["kinds"].split(" | "))
    if found["length"]:
        return f"must be {kinds} of {found['length']}"
    bound = f", {BOUNDS[found['sign']]} {float(found['bound']):g}" if found["sign"] else ""
    return f"must be {kinds}{bound}{', not text' if found['got'] == 'str' else ''}"


def _value(table: Table, path: str) -> Any:
    """Example: _value({"a": {"b": [1, 2]}}, "a.b[1]") is 2; None where there is nothing."""
    value: Any = table
    for key in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, dict):
            value = value.get(key)
        else:
            value = value[int(key)] if isinstance(value, list) and key.isdigit() else None
    return value


def _type(path: str, table: Table) -> Type:
    """Returns the type of the setting at `path` of a Run, by the choices (`type = …`) that `table` makes."""
    kind, value = _run_type(), table
    for key in filter(None, path.split(".")):
        struct = _chosen(kind, value)
        fields = {field.name: field.type for field in struct.fields} if struct else {}
        kind = fields.get(key.partition("[")[0], msgspec.inspect.AnyType())
        value = _value(value, key) if isinstance(value, dict) else None
    return kind


def _struct(path: str, table: Table) -> StructType | None:
    return _chosen(_type(path, table), _value(table, path))


def _chosen(kind: Type, value: Any) -> StructType | None:
    structs = _structs(kind)
    tag = value.get("type") if isinstance(value, dict) else None
    return next((s for s in structs if s.tag in (None, tag)), None)


def _structs(kind: Type) -> list[StructType]:
    return [one for one in _alternatives(kind) if isinstance(one, StructType)]


def _alternatives(kind: Type) -> list[Type]:
    return list(kind.types) if isinstance(kind, UnionType) else [kind]


@cache
def _run_type() -> Type:
    return msgspec.inspect.type_info(Run)


@cache
def _all_paths() -> list[str]:
    """Every setting of every choice."""
    return sorted(set(_paths(_run_type(), "")))


def _paths(kind: Type, prefix: str) -> Iterator[str]:
    for struct in _structs(kind):
        for field in struct.fields:
            yield prefix + field.name
            yield from _paths(field.type, f"{prefix}{field.name}.")
