"""The reference of all settings, read from the code: what `areal-q settings` lists, and docs/settings.md."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import msgspec
from msgspec import inspect as types

from areal_q.config import Run
from areal_q.config.struct_types import GENERAL

_UNITS = {
    "_per_s": "tokens/s",
    "_s": "seconds",
    "_bytes": "bytes",
    "_nats": "nats",
    "_tokens": "tokens",
    "_lag": "versions",
    "_ids": "token ids",
}
"""Unit of a setting by the ending of its name"""


@dataclass(frozen=True)
class Setting:
    """One setting, which is one line of the reference.

    Example: Setting("learner.max_lag", "", "integer ≥ 0", "2", "versions", "η: versions by which …")
    """

    name: str
    variant: str
    """The `type` of the table that has this setting, if the table has a choice of types; empty otherwise"""
    kind: str
    default: str
    unit: str
    meaning: str


@dataclass(frozen=True)
class Section:
    """The settings of one table of the TOML file."""

    name: str
    variant: str
    meaning: str
    settings: list[Setting]


def sections() -> list[Section]:
    """Returns every table of settings in the order of the code, each once, and each variant of a choice as its
    own table."""
    found = _sections(types.type_info(Run), "", "")
    return list({(one.name, one.variant): one for one in found}.values())


def settings_text(word: str = "") -> str:
    """Returns the settings whose name or meaning contains `word`, in two or more lines each, for a terminal."""
    lines = []
    for section in sections():
        for s in section.settings:
            if word.lower() not in f"{s.name} {s.variant} {s.meaning}".lower():
                continue
            variant = f"  (type = {s.variant})" if s.variant else ""
            unit = f", {s.unit}" if s.unit else ""
            told = f"{s.name}{variant}: {s.kind}{unit}; default {s.default}"
            lines.append(told.replace("`", ""))
            lines += textwrap.wrap(s.meaning, 74, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def _sections(table: types.Type, prefix: str, variant: str) -> Iterator[Section]:
    """Yields `table` itself and then the tables below it."""
    assert isinstance(table, types.StructType)
    docs, nested, own = attribute_docs(table.cls), [], []
    if table.tag_field and variant != str(table.tag):
        variant = str(table.tag)
    for field in table.fields:
        name = f"{prefix}{field.name}"
        choices = _structs(field.type)
        meaning = docs.get(field.name, "")
        nested += [(choice, f"{name}.") for choice in choices]
        if choices and len(choices) > 1:
            tags, default = " or ".join(f"`{c.tag}`" for c in choices), _tag_of(_default(field))
            listed = isinstance(field.type, types.VarTupleType)
            place, kind = (
                (name, f"list of tables, type {tags}") if listed else (f"{name}.type", tags)
            )
            own.append(Setting(place, variant, kind, default, "", meaning))
        elif not choices or isinstance(field.type, types.UnionType):
            kind, default = _kind(field.type), _shown(_default(field))
            unit = next((unit for end, unit in _UNITS.items() if field.name.endswith(end)), "")
            own.append(Setting(name, variant, kind, default, unit, meaning))
    # An inherited docstring describes another class.
    doc = " ".join((table.cls.__dict__.get("__doc__") or "").split())
    yield Section(prefix.rstrip("."), variant if table.tag_field else "", doc, own)
    for choice, place in nested:
        yield from _sections(choice, place, "" if choice.tag_field else variant)


def attribute_docs(cls: type) -> dict[str, str]:
    """Returns the strings below the fields of a class and of its bases, as one line each."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        module = inspect.getmodule(base)
        if module is not None and module.__name__.startswith("areal_q."):
            docs |= _docs_of_module(module).get(base.__name__, {})
    return docs


@cache
def _docs_of_module(module: ModuleType) -> dict[str, dict[str, str]]:
    """Returns the strings below fields, by class and field. Python drops these strings when it compiles, so
    they are read from the source."""
    tree = ast.parse(inspect.getsource(module))
    return {
        node.name: dict(_docs_of_class(node))
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def _docs_of_class(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in zip(node.body, node.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(below, ast.Expr):
            continue
        if isinstance(below.value, ast.Constant) and isinstance(field.target, ast.Name):
            text = " ".join(str(below.value.value).split())
            yield field.target.id, text if text.endswith(".") else f"{text}."


def _structs(kind: types.Type) -> list[types.StructType]:
    """Returns the tables that a setting may be, or that may be in its list."""
    kind = kind.item_type if isinstance(kind, types.VarTupleType) else kind
    members = kind.types if isinstance(kind, types.UnionType) else (kind,)
    return [member for member in members if isinstance(member, types.StructType)]


def _kind(kind: types.Type) -> str:
    """Returns the type in words, with its bounds or its choices."""
    match kind:
        case types.Metadata():
            return _kind(kind.type)
        case types.UnionType():
            members = [m for m in kind.types if not isinstance(m, types.NoneType)]
            return " or ".join(_kind(member) for member in members)
        case types.StructType():
            return "a table"
        case types.LiteralType():
            return " or ".join(f"`{value}`" for value in kind.values)
        case types.IntType() | types.FloatType():
            word = "integer" if isinstance(kind, types.IntType) else "number"
            return f"{word} {_bounds(kind)}".strip()
        case types.BoolType():
            return "`true` or `false`"
        case types.StrType():
            return f"text matching `{kind.pattern}`".replace("|", "\\|") if kind.pattern else "text"
        case types.VarTupleType():
            return f"list of {_kind(kind.item_type)}"
        case types.DictType():
            return f"table of {_kind(kind.value_type)}"
        case types.TupleType():
            return " and ".join(_kind(item) for item in kind.item_types)
        case _:
            return type(kind).__name__.removesuffix("Type").lower()


def _bounds(kind: types.IntType | types.FloatType) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    told = [(sign, getattr(kind, name)) for name, sign in signs.items()]
    # An upper bound that no run reaches is left out.
    meant = [(sign, value) for sign, value in told if value is not None and value < GENERAL]
    return " and ".join(f"{sign} {value:g}" for sign, value in meant)


def _default(field: types.Field) -> Any:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return msgspec.NODEFAULT


def _shown(value: Any) -> str:
    if value is msgspec.NODEFAULT:
        return "must be given"
    if value is None:
        return "none"
    return f"`{msgspec.json.encode(value).decode()}`"


def _tag_of(value: Any) -> str:
    config = getattr(value, "__struct_config__", None)
    return f"`{config.tag}`" if config else _shown(value)
