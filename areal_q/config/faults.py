"""What is wrong with a table of settings, in words: the dotted path, what was given, what could be.

Object contains unknown field `max_lagg` - at `$.learner`
    → learner.max_lagg: no such setting; did you mean learner.max_lag?
Invalid enum value 'int7' - at `$.rollout.format`
    → rollout.format = 'int7': no such choice; did you mean 'int8'? It is one of bf16, fp8, …
"""

from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from typing import Any

import msgspec
from msgspec.inspect import StructType, Type, UnionType

from areal_q.config.run import Run
from areal_q.decode_errors import (
    choices,
    expectation,
    joined,
    not_among,
    parted,
    quoted,
    types_at,
    value_at,
)

Table = dict[str, Any]
KEYS = "the keys of "
PATTERNS = {
    "name": "letters, digits and . _ - after a letter or digit",
    "rollout.serve": "PORT or HOST:PORT",
}
"""What the texts of settings with a pattern consist of."""


_SETS = "; each set is a table of its own, [eval.sets.NAME] (docs/data.md)"
_INSTEAD_OF_LISTS = {
    "eval": _SETS,
    "eval.sets": _SETS,
    "task": '; several are type = "mix" with a table for each, [task.sources.NAME] (docs/data.md)',
}
"""What is written where other programs have a list of tables"""


def fault(error: msgspec.ValidationError, table: Table) -> str:
    """One sentence for what `error` says of `table`, which was to become a Run."""
    what, path = parted(error)
    path = _with_name(path, error, table)
    if name := quoted(what, "Object contains unknown field"):
        return _unknown(joined(path, name), table)
    if name := quoted(what, "Object missing required field"):
        struct = _struct(path, table)
        tag = f"{path}.type = {struct.tag!r}" if struct and struct.tag else path
        return f"{joined(path, name)} is missing: {tag} needs it"
    given = f"{path} = {value_at(table, path)!r}"
    if what.startswith("Invalid") or path.rpartition(".")[2] == "type":
        refusal = not_among(str(value_at(table, path)), choices(Run, path, table))
        return f"{given}: {refusal}{_of_ones_own(path)}"
    if "matching regex" in what and path in PATTERNS:
        return f"{given}: must be {PATTERNS[path]}"
    if path.startswith(KEYS):
        names = ", ".join(value_at(table, path.removeprefix(KEYS)))
        return f"{path}, {names}: letters, digits, _ and - after a letter or digit, 64 at most"
    return (
        f"{given}: {expectation(what)}{_INSTEAD_OF_LISTS.get(path, '') * ('got `array`' in what)}"
    )


def _with_name(path: str, error: msgspec.ValidationError, table: Table) -> str:
    """Returns `path` with the name of the entry at fault where msgspec says `[...]`: the first that gives the
    same error when all entries are as it is."""
    parent, several, rest = path.partition("[...]")
    entries = value_at(table, parent) if several else {}
    for name, entry in entries.items():
        alike = _put(table, parent.split("."), dict.fromkeys(entries, entry))
        try:
            msgspec.convert(alike, Run)
        except msgspec.ValidationError as found:
            if parted(found) == parted(error):
                return f"{parent}.{name}{rest}"
    return path


def _put(table: Table, keys: list[str], value: Any) -> Table:
    first, *rest = keys
    return {**table, first: _put(table[first], rest, value) if rest else value}


def _unknown(path: str, table: Table) -> str:
    parent, _, name = path.rpartition(".")
    struct = _struct(parent, table)
    beside = [joined(parent, field.name) for field in struct.fields] if struct else []
    if near := get_close_matches(path, beside, n=1, cutoff=0.7):
        return f"{path}: no such setting; did you mean {near[0]}?{_of_ones_own(path)}"
    if others := sorted(set(_elsewhere(parent, name, table))):
        return f"{path}: no such setting; did you mean {' or '.join(others[:3])}?"
    where = f"{parent} has" if parent else "there are"
    names = ", ".join(name.rpartition(".")[2] for name in beside)
    listed = f"{where} {names} (areal-q settings lists all)"
    return f"{path}: no such setting; {listed}{_of_ones_own(path)}"


def _of_ones_own(path: str) -> str:
    """Returns how to have one's own, for a loss or an advantage."""
    asked = path.rpartition(".")[0] in ("learner.objective", "learner.advantage")
    return f"; of your own: {path.rpartition('.')[0]}.path=FILE" if asked else ""


def _elsewhere(parent: str, name: str, table: Table) -> Iterator[str]:
    """Settings of that very name under another choice of `parent`, or in another place."""
    tags = [s.tag for s in _structs(parent, table) if any(f.name == name for f in s.fields)]
    if tags:
        yield f"{parent}.type = {' or '.join(repr(tag) for tag in tags)}, which has it"
        return
    leaves = [path.rpartition(".")[2] for path in _all_paths()]
    near = get_close_matches(name, leaves, n=1, cutoff=0.8)
    yield from (path for path, leaf in zip(_all_paths(), leaves, strict=True) if leaf in near)


def _struct(path: str, table: Table) -> StructType | None:
    """Returns the settings at `path`, by the choice (`type = …`) that `table` makes."""
    value = value_at(table, path)
    tag = value.get("type") if isinstance(value, dict) else None
    return next((s for s in _structs(path, table) if s.tag in (None, tag)), None)


def _structs(path: str, table: Table) -> list[StructType]:
    return [one for one in types_at(Run, path, table) if isinstance(one, StructType)]


@cache
def _all_paths() -> list[str]:
    """Every setting of every choice."""
    return sorted(set(_paths(msgspec.inspect.type_info(Run), "")))


def _paths(kind: Type, prefix: str) -> Iterator[str]:
    for struct in kind.types if isinstance(kind, UnionType) else (kind,):
        for field in struct.fields if isinstance(struct, StructType) else ():
            yield prefix + field.name
            yield from _paths(field.type, f"{prefix}{field.name}.")
