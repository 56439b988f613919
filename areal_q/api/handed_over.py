"""What a script hands over, as files for other processes: rows as JSON lines, functions by their source.

A function of a file of its own is named by that file: `mine.py:reward`. One of the running script, or of a
notebook, is written out: its source, that of the functions and classes there that it uses, its imports and
constants. To run the script in another process would train again, and a notebook is no file. What it uses that
is none of these, such as an open connection, is refused by name. A file's name has a hash of what it holds, so
that it never changes, and runs on the same rows share it.
"""

import ast
import hashlib
import inspect
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
from msgspec import json

from areal_q.errors import TaskError
from areal_q.system.files import replacing_among_others

Code = str | Path | Callable[..., Any]
"""A function, or where one is: "mine.py", "mine.py:name" or "package.module:name"."""
_INSTEAD = 'write it to a file of its own and give "FILE.py:{}"'


def file_of_rows(rows: Iterable[Mapping[str, Any]], directory: Path, answers: bool) -> Path:
    """Returns a file of these rows, which may be a table of pandas, polars or pyarrow. Unless `answers`, a row
    without `answer` gets an empty one. Raises TaskError, with the row's number, for one that is no table or
    does not fit into JSON."""
    if hasattr(rows, "__arrow_c_stream__"):
        try:
            table = pa.table(rows)
            index = [name for name in table.column_names if name.startswith("__index_level_")]
            rows = table.drop_columns(index).to_pylist()  # of pandas; it is no column of the user's
        except (pa.ArrowException, TypeError) as error:
            raise TaskError(f"data: no table that Arrow can read: {error}") from error
    if not isinstance(rows, Iterable):
        what = type(rows).__name__
        raise TaskError(f"data: must be tables, a file or a data set of the Hub, not {what}")
    lines = []
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise TaskError(f"data[{index}]: a row must be a table, not {type(row).__name__}")
        try:
            lines.append(json.encode(({} if answers else {"answer": ""}) | dict(row)))
        except (TypeError, ValueError, RecursionError) as error:
            raise TaskError(f"data[{index}]: does not fit into JSON: {error}") from error
    return _kept(directory, "rows", ".jsonl", b"".join(line + b"\n" for line in lines))


def place_of_code(code: Code, directory: Path) -> str:
    """Returns where a function is; one that is handed over itself is written out, as `place_of_function` does
    it."""
    return str(code) if isinstance(code, str | Path) else place_of_function(code, directory)


def place_of_function(function: Callable[..., Any], directory: Path) -> str:
    """Returns `file:name` or `module:name`, by which other processes load a function, and writes it out if need
    be. Raises TaskError for one whose source, or what it uses, cannot be had."""
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if name.isidentifier() and module and module.__name__ != "__main__":
        file = getattr(module, "__file__", None) or ""
        if getattr(module, name, None) is function and Path(file).suffix == ".py":
            return f"{module.__name__ if '.' in module.__name__ else Path(file).resolve()}:{name}"
    return f"{_kept(directory, name or 'function', '.py', _written_out(function).encode())}:{name}"


def _kept(directory: Path, name: str, suffix: str, data: bytes) -> Path:
    digest = hashlib.blake2b(data, digest_size=8).hexdigest()
    file = directory.resolve() / f"{name}-{digest}{suffix}"
    if not file.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with replacing_among_others(file) as part:  # as the scripts of a sweep do
            part.write_bytes(data)
    return file


def _written_out(function: Callable[..., Any]) -> str:
    """Returns Python source that defines the function and all that it uses."""
    imports, rest = dict[str, None](), dict[str, str]()
    _add(function, getattr(function, "__name__", ""), imports, rest)
    beside = getattr(sys.modules["__main__"], "__file__", None)
    path = (
        f"import sys\n\nsys.path.append({str(Path(beside).resolve().parent)!r})\n" if beside else ""
    )
    parts = ("from __future__ import annotations\n", path, "\n".join(imports), *rest.values())
    return "\n".join(filter(None, parts)) + "\n"


def _add(thing: Any, name: str, imports: dict[str, None], rest: dict[str, str]) -> None:
    """Adds the definition of a function or class, after those of all names in it that are its module's own."""
    try:
        source = textwrap.dedent(inspect.getsource(thing))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        raise _refused(name, "its source cannot be found") from None
    if not isinstance(tree.body[0], ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        raise _refused(name or "a reward", "it is a lambda, or part of a line") from None
    surroundings = vars(sys.modules[thing.__module__])
    if inspect.isfunction(inspect.unwrap(thing)):
        if free := inspect.unwrap(thing).__code__.co_freevars:
            raise _refused(name, f"it uses {free[0]!r} of the function around it")
        surroundings = inspect.unwrap(thing).__globals__
    rest[name] = ""  # it may use itself
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    loaded = dict.fromkeys(node.id for node in names if isinstance(node.ctx, ast.Load))
    for used in filter(_global_names(source).__contains__, loaded):
        if used in rest or used not in surroundings:
            continue
        value = surroundings[used]
        if line := _imported(used, value):
            imports[line] = None
        elif inspect.isfunction(value) or inspect.isclass(value):
            _add(value, used, imports, rest)
        elif _is_literal(value):
            rest[used] = f"{used} = {value!r}"
        else:
            what = type(value).__name__
            raise _refused(name, f"it uses {used!r}, a {what} that is in this process alone")
    rest[name] = rest.pop(name) + source  # after what it uses


def _global_names(source: str) -> set[str]:
    """Returns the names in `source` that no function, class or comprehension of it has for itself."""
    found, tables = set[str](), [symtable.symtable(source, "source", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        found |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    return found


def _imported(name: str, value: Any) -> str:
    """Returns the line that imports a value under this name; "" if it is none of another module."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    home = sys.modules.get(getattr(value, "__module__", None) or "")
    own = getattr(value, "__qualname__", getattr(value, "__name__", ""))
    if home is None or home.__name__ == "__main__" or getattr(home, own or " ", None) is not value:
        return ""
    return f"from {home.__name__} import {own} as {name}"


def _is_literal(value: Any) -> bool:
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def _refused(name: str, why: str) -> TaskError:
    instead = _INSTEAD.format(name if name.isidentifier() else "NAME")
    return TaskError(f"{name}: {why}, and workers are other processes: {instead}")
