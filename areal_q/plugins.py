"""Code of the user's own, which is trusted: how it is found, loaded, hashed, and named where it fails.

    path = "mine.py"              the function with the name of its place: objective, advantage, problems …
    path = "mine.py:other"        another of its functions
    path = "package.module:name"  one of a module that can be imported, also from the current directory

A function gets what its place hands over, and the settings of the place as keyword arguments. Imports no torch.
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from areal_q.errors import AReaLQError, TaskError


def parted(path: str) -> tuple[str, str]:
    """Returns (file or module, function), the second empty if `path` names none.

    Examples: "mine.py:loss" → ("mine.py", "loss"); "mine.py" → ("mine.py", "").
    """
    before, colon, name = path.rpartition(":")
    return (before, name) if colon and name.isidentifier() else (path, "")


def absolute(path: str) -> str:
    """Returns `path` with the file in it made absolute. What is no file here, such as a module, stays."""
    where, name = (path, "") if Path(path).exists() else parted(path)
    if not Path(where).exists():
        return path
    return str(Path(where).resolve()) + (f":{name}" if name else "")


def load_function(path: str, *defaults: str) -> Callable[..., Any]:
    """Runs the code and returns the function that `path` names, or the first that there is of `defaults`.
    Raises TaskError with the file, and the line if there is one at fault."""
    where, name = parted(path)
    names = [name] if name else defaults
    with user_code(path):
        if where.endswith(".py"):
            module = _load_file(where)
        else:
            _origin(where)
            module = importlib.import_module(where)
    found = (function for name in names if callable(function := getattr(module, name, None)))
    if function := next(found, None):
        return function
    raise TaskError(f"{where}: no function {' or '.join(map(repr, names))}")


RAISED = (Exception, SystemExit)
"""What a user's code may raise: its sys.exit is not the end of the process that others use"""


def place_of(function: Callable[..., Any]) -> str:
    """Returns `file:line` of the definition of a function, or of what an object that is called does; what it is
    if it is neither."""
    bare = inspect.unwrap(function)
    code = getattr(bare, "__code__", None) or getattr(type(bare).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


@contextmanager
def user_code(
    path: str, doing: str = "", function: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Turns what the user's code raises in the block into a TaskError that names their file and line: that of
    `function`, if the call of it is at fault."""
    try:
        yield
    except AReaLQError:
        raise
    except RAISED as error:
        what = f"{doing}{type(error).__name__}: {error}"
        place = place_of(function) if function else path
        raise TaskError(f"{line_of(error, path, place)}: {what}") from error


def line_of(error: BaseException, path: str, otherwise: str = "") -> str:
    """Returns `file:line` of the last line of the user's own files in the traceback of `error`, or where they
    cannot be parsed; `otherwise`, or `path` alone, if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    try:
        own = {str(file) for file in files_of(path)}
    except (OSError, SyntaxError, TaskError):
        own = set[str]()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{f.filename}:{f.lineno}" for f in frames if str(Path(f.filename).resolve()) in own]
    return lines[-1] if lines else otherwise or path


def digest_of(path: str) -> str:
    """Returns a hash of the file and of all beside it that it imports, by their names and contents. Raises
    TaskError for a file that is missing or cannot be parsed."""
    digest = hashlib.blake2b(digest_size=16)
    with user_code(path):
        files = files_of(path)
        for file in sorted(files):
            digest.update(f"{os.path.relpath(file, files[0].parent)}\0".encode())
            digest.update(hashlib.blake2b(file.read_bytes()).digest())
    return digest.hexdigest()


def files_of(path: str) -> list[Path]:
    """Returns the file that `path` names, and the files beside it, or in its package, that it imports, directly
    or through one another. Raises SyntaxError, OSError or TaskError for one that cannot be read."""
    where, _ = parted(path)
    first = Path(where).resolve() if where.endswith(".py") else _origin(where)
    if not first.is_file():
        raise TaskError(f"{where}: no such Python file")
    roots = {first.parent}
    if not where.endswith(".py"):
        roots.add(first.parents[where.count(".") + (first.name == "__init__.py")])
    found: list[Path] = []
    ahead = [first]
    while ahead:
        file = ahead.pop()
        if file not in found:
            found.append(file)
            ahead += _imported(file, roots)
    return found


def _imported(file: Path, roots: set[Path]) -> Iterator[Path]:
    """Yields the files below `roots` that `file` imports anywhere in its code."""
    for node in ast.walk(ast.parse(file.read_bytes(), str(file))):
        bases, names = roots, list[str]()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            bases = {file.parents[node.level - 1]} if node.level else roots
            names = [f"{node.module or ''}.{alias.name}".lstrip(".") for alias in node.names]
        for name in names:
            parts = name.split(".")
            for base in bases:
                for end in range(1, len(parts) + 1):
                    place = base.joinpath(*parts[:end])
                    files = (place.with_name(f"{place.name}.py"), place / "__init__.py")
                    yield from (one.resolve() for one in files if one.is_file())


def _load_file(path: str) -> ModuleType:
    # The directory goes last, so that the file can import its neighbours, but they hide no other module.
    _search_last(Path(path).resolve().parent)
    spec = importlib.util.spec_from_file_location(_module_name(path), path)
    if not Path(path).is_file() or spec is None or spec.loader is None:
        raise TaskError(f"{path}: no such Python file")
    # Dataclasses look for their module while it runs, and pickle for that of a class.
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _origin(name: str) -> Path:
    """Returns the file of a module. Raises TaskError if there is none."""
    _search_last(Path.cwd())
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:
        spec = None
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # it is there, and imports what is not
            raise
        spec = None
    if spec is None or not spec.origin:
        raise TaskError(f"{name}: no such Python file, and no module that can be imported")
    return Path(spec.origin).resolve()


def _search_last(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.append(str(directory))


def _module_name(path: str) -> str:
    """Returns the name by which an import finds the file, as that of a pickled class in another process does;
    if it is the name of another module, one that hides none."""
    name = Path(path).stem
    found = importlib.util.find_spec(name) if name.isidentifier() and name != "__main__" else None
    mine = found is not None and found.origin == str(Path(path).resolve())
    return name if mine else f"users_{name.replace('.', '_')}"
