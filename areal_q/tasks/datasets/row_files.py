"""Rows of files in the formats that data come in, told apart by their contents, and of data sets of the Hugging
Face Hub. Imports no torch.

JSON lines          one object a line
JSON                an array of objects
CSV, TSV            by the ending of the name; the first line has the names of the columns, all values are text
Parquet
save_to_disk        a directory of `datasets`; of several splits `train`, or the only one
the Hub             `org/name[:config][/split][@revision]`, such as openai/gsm8k:main/test; the split is `train`
                    where none is named. A path that exists here, or whose `org/name` does, is read here.
"""

import codecs
import csv
import importlib
import io
import json
import os.path
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

import msgspec

from areal_q.decode_errors import fitted, in_words, untyped
from areal_q.errors import ConfigError, TaskError, installing, os_errors_as, said_by

T = TypeVar("T")
_Object = dict[str, Any]
_FORMATS = "; it takes JSON lines, JSON, CSV, Parquet and directories of save_to_disk"
_PARQUET = b"PAR1"
_ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_ONE_A_LINE = "; it takes JSON lines, one object a line"
_ON_HUB = re.compile(
    r"([\w-][\w.-]*/[\w-][\w.-]*)(?::([^/:@\s]+))?(?:/(\w[\w.-]*(?:\[[^]]*\])?))?(?:@([\w./-]+))?"
)
"""Name, config, split, of which a slice such as train[:100] will do, and revision: a commit, branch or tag"""
_CONFIGS = {"openai/gsm8k": "main"}
"""The config that is meant where none is named, of data sets with several and no default"""
_LONGEST = 240
"""Characters of what `datasets` says that an error repeats"""


def read_objects(path: str) -> list[tuple[str, _Object]]:
    """Returns pairs of a place, such as `train.jsonl:12` or `train.parquet[11]`, and the row there, an object.
    Raises TaskError with the place, for data that cannot be read or are none, and ConfigError if the Hub needs
    an extra that is not installed."""
    if is_on_hub(path):
        return converted(_hub_rows(path), _Object)
    with os_errors_as(TaskError, path):
        if Path(path).is_dir():
            return converted(_saved_rows(path), _Object)
        data = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
        if data.startswith(_PARQUET) or path.lower().endswith(".parquet"):
            return converted(_parquet_rows(path), _Object)
        if path.lower().endswith((".csv", ".tsv")):
            return converted(_text_rows(path, data), _Object)
    if data.lstrip().startswith(b"[") and isinstance(rows := untyped(data), list):
        return converted(((f"{path}[{i}]", row) for i, row in enumerate(rows)), _Object)
    return _lines(path, data)


def is_columnar(path: str) -> bool:
    """Returns True for a format of columns, which fills what a row lacks with null. Raises OSError."""
    if is_on_hub(path) or Path(path).is_dir():
        return True
    with Path(path).open("rb") as file:
        return file.read(len(_PARQUET)) == _PARQUET


def is_on_hub(path: str) -> bool:
    """Returns True if `path` names rows of the Hugging Face Hub, and not a file, there or missing."""
    named = _ON_HUB.fullmatch(path)
    if named is None or path.lower().endswith(_ENDINGS):
        return False
    return not any(map(os.path.exists, (path, named[1])))


def _lines(path: str, data: bytes) -> list[tuple[str, _Object]]:
    decoder = msgspec.json.Decoder(_Object)
    rows = []
    for number, text in enumerate(data.splitlines(), 1):
        if text.strip():
            where = f"{path}:{number}"
            try:
                rows.append((where, decoder.decode(text)))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                why = _of_field(text) or in_words(error, _Object, untyped(text))
                fits = isinstance(error, msgspec.ValidationError) and not why.startswith("must be")
                raise TaskError(f"{where}: {why}{'' if fits else _ONE_A_LINE}") from error
    return rows


def _of_field(text: bytes) -> str:
    """Returns what is wrong with the first field that cannot be decoded, though it is JSON: a number that is
    too large; "" if there is none."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    for name, field in fields.items():
        try:
            msgspec.json.decode(field)
        except msgspec.ValidationError as error:
            return f"{name} = {shorten(bytes(field).decode(), 80)}: {in_words(error)}"
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return ""
    return ""


def converted(rows: Iterable[tuple[str, Any]], kind: type[T]) -> list[tuple[str, T]]:
    """Returns pairs of a place and a row, the rows as a `kind`. Raises TaskError with the place."""
    return [(where, fitted(row, kind, TaskError, f"{where}: ")) for where, row in rows]


def _text_rows(path: str, data: bytes) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(sys.maxsize)  # 131,072 characters would be the most otherwise
    try:
        text = io.StringIO(data.decode(), newline="")
        rows = csv.DictReader(
            text, delimiter="\t" if path.lower().endswith(".tsv") else ",", strict=True
        )
        _check_columns(rows.fieldnames or (), path)
        for row in rows:
            if None in row or None in row.values():
                columns = len(rows.fieldnames or ())
                raise TaskError(f"{path}:{rows.line_num}: a row of other than {columns} columns")
            yield f"{path}:{rows.line_num}", row
    except (csv.Error, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: {in_words(error)}") from error


def _check_columns(names: Sequence[str], path: str) -> None:
    twice = next((name for name, count in Counter(names).items() if name and count > 1), None)
    if twice:  # spreadsheets leave columns without a name behind the last one
        raise TaskError(
            f"{path}: there are several columns `{twice}`, and which is meant is unknown"
        )


def _parquet_rows(path: str) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            table = file.read()
    except pa.ArrowException as error:
        raise TaskError(f"{path}: no Parquet file: {said_by(error)}") from error
    yield from ((f"{path}[{i}]", row) for i, row in enumerate(_table_rows(table, path)))


def _saved_rows(path: str) -> Iterator[tuple[str, Any]]:
    """Yields the rows of a directory that `datasets` saved: Arrow streams, which its state.json lists."""
    import pyarrow as pa

    directory = Path(path)
    try:
        if (splits := directory / "dataset_dict.json").exists():
            names = json.loads(splits.read_bytes())["splits"]
            if len(names) > 1 and "train" not in names:
                raise TaskError(f"{path}: which of {', '.join(names)}? Name one: {path}/{names[0]}")
            directory /= "train" if "train" in names else names[0]
        if not (state := directory / "state.json").exists():
            raise TaskError(f"{path}: a directory that is none of save_to_disk{_FORMATS}")
        number = 0
        for file in json.loads(state.read_bytes())["_data_files"]:
            with pa.ipc.open_stream(directory / file["filename"]) as stream:
                for row in _table_rows(stream.read_all(), path):
                    yield f"{path}[{number}]", row
                    number += 1
    except (pa.ArrowException, ValueError, KeyError, TypeError, IndexError) as error:
        if isinstance(error, TaskError):
            raise
        raise TaskError(f"{path}: cannot be read: {said_by(error)}") from error


def _table_rows(table: Any, path: str) -> list[_Object]:
    """Returns the rows of Arrow's table. A column of nanoseconds, or with times out of Python's range, has text
    in their place. Raises TaskError, which names file and column, for one that cannot be read."""
    _check_columns(table.column_names, path)
    if not any("[ns" in str(kind) for kind in table.schema.types):
        with suppress(*_unread()):
            return table.to_pylist()
    columns = [
        _values(column, f"{path}: column `{name}`: ")
        for name, column in zip(table.column_names, table.columns, strict=True)
    ]
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _values(column: Any, where: str) -> list[Any]:
    import pyarrow as pa

    if "[ns" not in str(column.type):  # Python's times have none: they would be pandas'
        with suppress(*_unread()):
            return column.to_pylist()
    for kind in (pa.string(), pa.int64()):  # a number since 1970 where no such time zone is known
        with suppress(pa.ArrowException):
            column = column.cast(_without_times(column.type, kind))
            break
    try:
        return column.to_pylist()
    except _unread() as error:
        raise TaskError(where + in_words(error)) from error


def _unread() -> tuple[type[Exception], ...]:
    """Returns what Arrow raises for values that Python does not hold."""
    import pyarrow as pa

    return pa.ArrowException, ValueError, OverflowError


def _without_times(kind: Any, instead: Any) -> Any:
    """Returns a type of Arrow with `instead` in place of dates and times, also of those in lists and tables."""
    import pyarrow as pa
    from pyarrow import types

    if types.is_temporal(kind):
        return instead
    if types.is_dictionary(kind):
        return _without_times(kind.value_type, instead)
    if types.is_map(kind):
        return pa.map_(kind.key_type, _without_times(kind.item_type, instead))
    if types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return pa.struct([(f.name, _without_times(f.type, instead)) for f in fields])
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.large_list(_without_times(kind.value_type, instead))
    return kind


def _hub_rows(path: str) -> Iterator[tuple[str, Any]]:
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{path}: no such file; a data set of the Hub needs {installing('hf')}"
        ) from error
    named = _ON_HUB.fullmatch(path)
    assert named
    name, config, split, revision = named.groups()
    asked = (name, config or _CONFIGS.get(name))
    of = {"split": split or "train"} | ({"revision": revision} if revision else {})
    try:
        rows = list(datasets.load_dataset(*asked, **of))
    except Exception as error:  # those of httpx, pyarrow and whatever reads the files, too
        why = shorten(str(error) or type(error).__name__, _LONGEST, placeholder=" …").rstrip(".")
        call = ", ".join([*map(repr, filter(None, asked)), *(f"{n}={v!r}" for n, v in of.items())])
        raise TaskError(
            f"{path}: no such file, nor a data set of the Hub, ORG/NAME[:CONFIG][/SPLIT][@REVISION], that can "
            f"be loaded: {why}; where the Hub is reached, datasets.load_dataset({call}).save_to_disk('DIR'), "
            "and then here DIR in its place"
        ) from error
    yield from ((f"{path}[{i}]", row) for i, row in enumerate(rows))
