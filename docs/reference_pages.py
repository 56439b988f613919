"""Makes the pages of settings, metrics and the Python API from the code's signatures and docstrings.

`python docs/reference_pages.py settings` prints docs/settings.md, `metrics` and `reference` the others.
`make reference` writes all three, and tests check that they are current.
"""

import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import areal_q
from areal_q import api, errors
from areal_q.api import handed_over, rollout
from areal_q.cli.reference import Section, sections
from areal_q.observability.metric_table import METRICS, WORKER_METRICS, Metric

_SETTINGS_HEAD = """# All settings

Made by `make reference` from the code; `areal-q settings [WORD]` prints the same. A setting is written in a
TOML file (`[learner]`, then `max_lag = 4`) or on the command line (`learner.max_lag=4`). Where a table has a
choice of types, each type has settings of its own; a table whose `type` changes starts from that type's
defaults.
"""
_METRICS_HEAD = """# All metrics

Made by `make reference` from the code. They are written to `metrics.jsonl`, one JSON object a line, and to
TensorBoard; those of a learner step are also in the Parquet files under `steps/`. A `*` stands for a part of
the name that depends on the run. A value that was not finite is `null`.
"""
_REFERENCE_HEAD = """# API reference

Made by `make reference` from the code. [api.md](api.md) has examples; what each error means is in
`areal_q/errors.py`.
"""
_HOMES = (api, handed_over, rollout)
"""Modules that name types"""
_ERRORS = ("UserError", "ConfigError", "TaskError", "CheckpointError", "LogError", "RecordError")
_ERRORS += ("RewardUnavailable", "ChildDied", "EngineDied")


def settings_page() -> str:
    """Returns the text of docs/settings.md."""
    parts = [_SETTINGS_HEAD]
    for section in sections():
        parts.append(_title(section))
        rows = [[f"`{s.name}`", s.kind, s.default, s.unit, s.meaning] for s in section.settings]
        parts.append(_table(["setting", "type", "default", "unit", "meaning"], rows))
    return "\n".join(parts)


def metrics_page() -> str:
    """Returns the text of docs/metrics.md."""
    return "\n".join(
        [
            _METRICS_HEAD,
            _metric_table(METRICS),
            "## Of each worker\n\nA `step` record has a list `workers`, one entry for each live worker.\n",
            _metric_table(WORKER_METRICS),
        ]
    )


def reference_page() -> str:
    """Returns the text of docs/reference.md."""
    parts = [_REFERENCE_HEAD]
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


def _title(section: Section) -> str:
    name = section.name or "The run"
    title = f'`{name}`, type "{section.variant}"' if section.variant else name
    title = title if section.variant or not section.name else f"`{name}`"
    return f"## {title}\n\n{section.meaning}\n" if section.meaning else f"## {title}\n"


def _metric_table(metrics: tuple[Metric, ...]) -> str:
    return _table(
        ["metric", "unit", "meaning"], [[f"`{m.key}`", m.unit, m.meaning] for m in metrics]
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return "No setting of its own.\n"
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


PAGES = {"settings": settings_page, "metrics": metrics_page, "reference": reference_page}

if __name__ == "__main__":
    print(PAGES[sys.argv[1]](), end="")
