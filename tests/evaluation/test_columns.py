"""Columns of files: their names, and whatever Arrow keeps in them."""

import json
import sys
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from areal_q.config.tasks import Jsonl
from areal_q.errors import TaskError
from areal_q.tasks import all_problems
from areal_q.tasks.base import columns_of

OUT_OF_RANGE = [pa.array([10**15], pa.timestamp("s")), pa.array([10**8], pa.date32())]
NANOSECONDS = [
    (pa.array([1], pa.timestamp("ns")), "1970-01-01 00:00:00.000000001"),
    (pa.array([1], pa.timestamp("ns", tz="UTC")), "1970-01-01 00:00:00.000000001Z"),
    (pa.array([1], pa.time64("ns")), "00:00:00.000000001"),
    (pa.array([1], pa.duration("ns")), "1"),
    (pa.array([[1]], pa.list_(pa.timestamp("ns"))), ["1970-01-01 00:00:00.000000001"]),
    (pa.array([{"a": 1}], pa.struct([("a", pa.duration("ns"))])), {"a": "1"}),
    (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.duration("ns"))), [["a", "1"]]),
    (pa.array([1], pa.timestamp("ns")).dictionary_encode(), "1970-01-01 00:00:00.000000001"),
]
AS_PYTHON_HAS_IT = [
    (pa.array([1], pa.timestamp("us")), "1970-01-01T00:00:00.000001"),
    (
        pa.array([datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=1)))]),
        "2026-01-02T00:00:00+01:00",
    ),
    (pa.array([1], pa.date32()), "1970-01-02"),
    (pa.array([Decimal("1.50")]), "1.50"),
    (pa.array([1], pa.timestamp("us", tz="Mars/Olympus")), 1),
]


def saved(directory: Path, table: pa.Table, kind: str) -> str:
    """Returns where a table is kept in a format of Arrow's."""
    path = directory / "d"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        path.mkdir()
        (path / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
        with pa.ipc.new_stream(path / "a.arrow", table.schema) as stream:
            stream.write_table(table)
    return str(path)


def more_of(directory: Path, more: pa.Array, kind: str) -> Any:
    """Returns what is read of a column."""
    path = saved(directory, pa.table({"prompt": ["p"], "answer": ["1"], "more": more}), kind)
    (problem,) = all_problems(Jsonl(path=path), None)
    assert (problem.prompt, problem.answer) == ("p", "1")
    return json.loads(problem.columns)["more"]


@pytest.mark.parametrize("kind", ["parquet", "save_to_disk"])
@pytest.mark.parametrize("pandas", [True, False])
@pytest.mark.parametrize(("more", "text"), NANOSECONDS + AS_PYTHON_HAS_IT)
def test_times_are_the_same_text_with_and_without_pandas(
    more: pa.Array, text: Any, pandas: bool, kind: str, tmp_path: Path, monkeypatch: Any
):
    if not pandas:
        monkeypatch.setitem(sys.modules, "pandas", None)
    assert more_of(tmp_path, more, kind) == text


@pytest.mark.parametrize("kind", ["parquet", "save_to_disk"])
@pytest.mark.parametrize("more", OUT_OF_RANGE)
def test_a_time_out_of_pythons_range_ends_no_run(more: pa.Array, kind: str, tmp_path: Path):
    assert "out of range" in more_of(tmp_path, more, kind)


@pytest.mark.parametrize("kind", ["parquet", "save_to_disk"])
def test_a_column_that_cannot_be_read_is_named(kind: str, tmp_path: Path):
    bad = pa.Array.from_buffers(pa.string(), 1, [None, *pa.array([b"\xff"]).buffers()[1:]])
    with pytest.raises(TaskError, match=r"/d: column `more`: not UTF-8 text$"):
        more_of(tmp_path, bad, kind)


@pytest.mark.parametrize("kind", ["parquet", "save_to_disk", "csv", "tsv"])
def test_a_column_that_is_there_twice_is_refused(kind: str, tmp_path: Path):
    """The last of them counted, and the answers were others than the ones that were looked at."""
    table = pa.table([["p"], ["1"], ["2"]], names=["prompt", "answer", "answer"])
    if kind in ("csv", "tsv"):
        path = tmp_path / f"d.{kind}"
        path.write_text(
            "\n".join(("prompt,answer,answer", "p,1,2")).replace(
                ",", "," if kind == "csv" else "\t"
            )
        )
    else:
        path = Path(saved(tmp_path, table, kind))
    with pytest.raises(TaskError, match=rf"{path.name}: there are several columns `answer`"):
        all_problems(Jsonl(path=str(path)))


class Stamp(datetime):
    """A time of another library, as pandas' Timestamp is"""


def test_a_value_that_is_no_data_is_told_by_its_column():
    """The place alone was told, of a row that may have dozens of columns."""
    with pytest.raises(
        TaskError, match=r"^rows:1: column `b` is neither text, .*: it is of type ob"
    ):
        columns_of({"a": 1, "b": [object()], "c": 2}, "rows:1")
    assert columns_of({"a": Stamp(2026, 1, 2)}, "rows:1") == '{"a":"2026-01-02T00:00:00"}'
