"""What a script hands over: a file that another process loads and that does the same, or one line why not."""

import asyncio
import json
import linecache
import math
import re
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

from areal_q.api.handed_over import file_of_rows, place_of_function
from areal_q.errors import TaskError
from areal_q.plugins import load_function
from areal_q.system import files

DEFINITIONS = """
import math as m
import re
from collections import Counter
from dataclasses import dataclass
from beside import scaled

SCALE = {"right": (2.0, -1)}
SPARE = iter([])

@dataclass
class Rule:
    worth: float = SCALE["right"][0]

def once(function):
    return function

def even(n):
    return n == 0 or odd(n - 1)

def odd(n):
    return n != 0 and even(n - 1)

@once
async def reward(response: "str", power=m.tau):
    digits = re.sub(r"[^0-9]", "", response)
    return sum(Rule().worth * scaled(int(d)) for d in Counter(digits) if odd(int(d))), power
"""
SCRIPT = f"""{DEFINITIONS}
from areal_q.api.handed_over import place_of_function
PATH = place_of_function(reward, INPUTS)
"""


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a module that the scripts and notebooks in it import."""
    (tmp_path / "beside.py").write_text("def scaled(n):\n    return 10 * n\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def ran_in_a_cell(monkeypatch: pytest.MonkeyPatch, text: str) -> dict[str, Any]:
    """Returns what a cell of a notebook defines, whose lines Python finds as it finds those of IPython."""
    cell = "<ipython-input-7-of-this-test>"
    linecache.cache[cell] = (len(text), None, text.splitlines(keepends=True), cell)
    monkeypatch.setitem(sys.modules, "__main__", main := ModuleType("__main__"))
    exec(compile(text, cell, "exec"), vars(main))
    return vars(main)


def test_a_function_of_the_running_script_is_written_out(beside: Path) -> None:
    (beside / "script.py").write_text(SCRIPT)
    ran = runpy.run_path(str(beside / "script.py"), {"INPUTS": beside / "inputs"}, "__main__")
    (file,) = (beside / "inputs").iterdir()
    assert ran["PATH"] == f"{file}:reward"
    assert asyncio.run(load_function(ran["PATH"])("a1 b2 c3")) == (80.0, math.tau)
    assert "SPARE" not in file.read_text()


@pytest.mark.parametrize("dataclass", [False, True])
def test_a_function_of_a_notebook_is_written_out(
    beside: Path, monkeypatch: pytest.MonkeyPatch, dataclass: bool
) -> None:
    """The source of its classes cannot be found, which is said."""
    text = DEFINITIONS if dataclass else DEFINITIONS.replace("Rule().worth", "SCALE['right'][0]")
    cell = ran_in_a_cell(monkeypatch, text)
    if dataclass:
        with pytest.raises(TaskError, match=r"Rule: its source cannot be found, .*FILE\.py:"):
            place_of_function(cell["reward"], beside / "inputs")
        return
    path = place_of_function(cell["reward"], beside / "inputs")
    assert path == place_of_function(cell["reward"], beside / "inputs")
    assert asyncio.run(load_function(path)("a1 b2 c3")) == (80.0, math.tau)


@pytest.mark.parametrize("name", ["of_this_test", "areal_q.plugins:parted"])
def test_a_function_of_a_file_goes_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module, _, function = name.partition(":")
    if not function:
        monkeypatch.syspath_prepend(str(tmp_path))
        (tmp_path / f"{module}.py").write_text("def mine(response): return 3.0")
    given = getattr(__import__(module, fromlist=["x"]), function or "mine")
    path = place_of_function(given, tmp_path / "inputs")
    assert path == (name if function else f"{tmp_path / module}.py:mine")
    assert load_function(path).__code__ == given.__code__
    assert not (tmp_path / "inputs").exists()


REFUSED = {
    "reward = lambda response: 1.0": "it is a lambda, or part of a line",
    "def reward(response): return next(judge)": "it uses 'judge', a list_iterator that is in this process",
    "def around(limit):\n    def inner(response): return limit\n    return inner\nreward = around(2)": (
        "inner: it uses 'limit' of the function around it"
    ),
    "class Judge:\n    def __call__(self, response): return 1\nreward = Judge()": "its source cannot be found",
}


@pytest.mark.parametrize("source", REFUSED)
def test_what_only_this_process_has_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    cell = ran_in_a_cell(monkeypatch, f"judge = iter([])\n{source}\n")
    with pytest.raises(TaskError) as refused:
        place_of_function(cell["reward"], tmp_path)
    assert REFUSED[source] in str(refused.value) and "\n" not in str(refused.value)
    assert re.search(r'give "FILE\.py:\w+"$', str(refused.value))


OWN_NAMES = """
judge = iter([])

def reward(response):
    judge = len(response)
    return judge

def inner(response):
    return max((lambda judge: judge)(1), *[judge for judge in response], *{judge: 1 for judge in response})

def declared(response, judge=1):
    def deeper(judge):
        return judge
    return deeper(judge) + judge
"""


@pytest.mark.parametrize("name", ["reward", "inner", "declared"])
def test_a_functions_own_names_are_not_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One that the script has too was taken for what this process alone has, or for data to copy."""
    cell = ran_in_a_cell(monkeypatch, OWN_NAMES)
    path = place_of_function(cell[name], tmp_path)
    given = [1, 2, 3]
    assert load_function(path)(given) == cell[name](given)


def test_rows_become_lines_once(tmp_path: Path) -> None:
    rows = [{"prompt": "é\n", "answer": 4, "level": [1, None]}, {"prompt": "b"}]
    file = file_of_rows(iter(rows), tmp_path, answers=True)
    assert [json.loads(line) for line in file.read_text("utf-8").splitlines()] == rows
    assert file_of_rows(rows, tmp_path, answers=True) == file
    other = file_of_rows(rows, tmp_path, answers=False)
    assert [json.loads(line)["answer"] for line in other.read_text().splitlines()] == [4, ""]


def test_two_starts_at_once_write_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two scripts of a sweep removed what the first had half written."""
    rows, sync, others = [{"prompt": "2+2?"}], files.sync, list[Path]()

    def other_start(path: Path) -> None:
        monkeypatch.setattr(files, "sync", sync)
        others.append(file_of_rows(rows, tmp_path, answers=True))
        sync(path)

    monkeypatch.setattr(files, "sync", other_start)
    file = file_of_rows(rows, tmp_path, answers=True)
    assert others == [file] and [*tmp_path.iterdir()] == [file]
    assert json.loads(file.read_text()) == rows[0]


@pytest.mark.parametrize("kind", ["pyarrow", "pandas"])
def test_a_table_of_columns_is_its_rows(tmp_path: Path, kind: str) -> None:
    rows = [{"prompt": f"{n}?", "answer": "4", "x": n / 2, "few": [n]} for n in range(4)]
    table = pa.Table.from_pylist(rows)
    if kind == "pandas":
        frame = pytest.importorskip("pandas").DataFrame(rows)
        table, rows = frame[frame["x"] != 1.0], [rows[0], rows[1], rows[3]]
    file = file_of_rows(table, tmp_path, answers=True)
    assert [json.loads(line) for line in file.read_text("utf-8").splitlines()] == rows


class NoTable:
    def __arrow_c_stream__(self, schema: object = None) -> object:
        raise TypeError("mixed")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (NoTable(), "data: no table that Arrow can read: mixed"),
        ([{}, "text"], r"data\[1\]: a row must be a table, not str"),
        ([{"x": object()}], r"data\[0\]: does not fit into JSON"),
    ],
)
def test_rows_that_are_none_are_named(tmp_path: Path, rows: Iterable[Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        file_of_rows(rows, tmp_path, answers=True)
