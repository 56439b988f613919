"""Generates docs/reference.md, every class and function of `areal_q`, from their signatures and docstrings.

`python -m areal_q.api.api_page` prints it; `make reference` writes it, and a test checks that it is current.
"""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import areal_q
from areal_q import api, errors
from areal_q.api import handed_over, rollout

_HEAD = """# API reference

Made by `make reference` from the code. [api.md](api.md) has examples; what each error means is in
`areal_q/errors.py`.
"""
_HOMES = (api, handed_over, rollout)
"""Modules that name types"""
_ERRORS = ("UserError", "ConfigError", "TaskError", "CheckpointError", "LogError", "RecordError")
_ERRORS += ("RewardUnavailable", "ChildDied", "EngineDied")


def page() -> str:
    """Returns the page."""
    parts = [_HEAD]
    for name in sorted(n for n in areal_q.__all__ if n[0] != "_"):
        parts += _described(name, getattr(areal_q, name))
    rows = [row for home in _HOMES for row in _documented(ast.parse(inspect.getsource(home)).body)]
    types = (f"| `{n}` | {_type(value)} | {text} |" for n, value, text in rows if n.istitle())
    parts.append("\n".join(["## Types\n", "| name | is | |", "|---|---|---|", *types, ""]))
    parts.append(
        "## Errors\n\nOf `areal_q.errors`; those that a user can correct are a `UserError`.\n"
    )
    lines = (f"| `{name}` | {_doc(getattr(errors, name))} |" for name in _ERRORS)
    parts.append("\n".join(["| error | raised when |", "|---|---|", *lines, ""]))
    return "\n".join(parts)


def _described(name: str, found: Any) -> Iterator[str]:
    yield f"## {name}\n"
    if not inspect.isclass(found):
        yield from _function(name, found)
        return
    if dataclasses.is_dataclass(found):
        yield f"{_doc(found)}\n"
        notes = _notes(found)
        rows = (
            f"| `{f.name}` | {_type(f.type)} | {notes[f.name]} |" for f in dataclasses.fields(found)
        )
        yield "\n".join(["| field | type | |", "|---|---|---|", *rows, ""])
    else:
        yield from _function(name, found.__init__, inspect.getdoc(found) or "")
    for method, value in vars(found).items():
        if method[0] == "_":
            continue
        if isinstance(value, property):
            yield f"**`.{method}`** {_doc(value)}\n"
        elif inspect.isfunction(inspect.unwrap(getattr(value, "__func__", value))):
            yield from _function(f".{method}", getattr(value, "__func__", value))


def _function(name: str, function: Any, before: str = "") -> Iterator[str]:
    """Yields the signature, and what the docstring says; a class's own comes before that of its `__init__`."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    node.args.args = [a for a in node.args.args if a.arg not in ("self", "cls")]
    given, wait = ast.unparse(node.args), "await " * isinstance(node, ast.AsyncFunctionDef)
    back = f" -> {ast.unparse(node.returns)}" if node.returns and not before else ""
    yield f"```python\n{wait}{name}({given}){back}\n```\n".replace("'", '"')
    for text in filter(None, (before, inspect.getdoc(function))):
        yield f"{_blocks(text)}\n"


def _blocks(text: str) -> str:
    """Returns a docstring with its indented examples as blocks of code."""
    out, code = list[str](), list[str]()
    for line in [*text.splitlines(), "."]:
        if line.startswith("    ") or (code and not line.strip()):
            code.append(line)
            continue
        if code:
            block = textwrap.dedent("\n".join(code)).strip()
            out += ["```python", block, "```", ""]
            code.clear()
        out.append(line)
    return "\n".join(out[:-1]).strip()


def _doc(found: Any) -> str:
    return " ".join((inspect.getdoc(found) or "").split())


def _type(given: Any) -> str:
    shown = given if isinstance(given, str) else inspect.formatannotation(given)
    return f"`{shown}`".replace("|", "\\|").replace("collections.abc.", "")


def _notes(of: type) -> dict[str, str]:
    """Returns the docstring below each field of a class."""
    notes = {field.name: "" for field in dataclasses.fields(of)}
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(of))).body
    assert isinstance(body, ast.ClassDef)
    return notes | {name: text for name, _, text in _documented(body.body)}


def _documented(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str, str]]:
    """Yields name, value and docstring of what is assigned or declared with one below it."""
    for node, after in pairwise(body):
        if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
            continue
        text = " ".join(str(after.value.value).split())
        if isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target), ast.unparse(node.annotation), text
        elif isinstance(node, ast.Assign):
            yield ast.unparse(node.targets[0]), ast.unparse(node.value), text


def main() -> None:
    """Prints the page."""
    print(page(), end="")


if __name__ == "__main__":
    main()
