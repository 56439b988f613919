"""Rows of files in the formats that data come in, told apart by their contents. Imports no torch.

JSON lines          one object a line
JSON                an array of objects
CSV, TSV            by the ending of the name; the first line has the names of the columns, all values are text
Parquet
save_to_disk        a directory of `datasets`; of several splits `train`, or the only one
"""

import codecs
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from areal_q.decode_errors import in_words, untyped
from areal_q.errors import TaskError

T = TypeVar("T")
_FORMATS = "; it takes JSON lines, JSON, CSV, Parquet and directories of save_to_disk"
_PARQUET = b"PAR1"
_ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_ONE_A_LINE = "; it takes JSON lines, one object a line"


def read_rows_as(path: str, kind: type[T]) -> list[tuple[str, T]]:
    """Returns pairs of a place, such as `train.jsonl:12` or `train.parquet[11]`, and the row there as a `kind`.
    Raises TaskError with the place, for data that cannot be read or do not fit the kind."""
    try:
        if Path(path).is_dir():
            return converted(_saved_rows(path), kind)
        data = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
        if data.startswith(_PARQUET) or path.endswith(".parquet"):
            return converted(_parquet_rows(path), kind)
        if path.endswith((".csv", ".tsv")):
            return converted(_text_rows(path, data), kind)
    except OSError as error:
        hint = f"; {saved_first(path)}" if is_hub_id(path) else ""
        raise TaskError(f"{path}: {error.strerror or error}{hint}") from error
    if data.lstrip().startswith(b"[") and isinstance(rows := untyped(data), list):
        return converted(((f"{path}[{i}]", row) for i, row in enumerate(rows)), kind)
    return _lines(path, data, kind)


def is_columnar(path: str) -> bool:
    """Returns True for a format of columns, which fills what a row lacks with null. Raises OSError."""
    if Path(path).is_dir():
        return True
    with Path(path).open("rb") as file:
        return file.read(len(_PARQUET)) == _PARQUET


def is_hub_id(path: str) -> bool:
    """Returns True if `path` is no file here and may be the id of a data set on the Hugging Face Hub."""
    is_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) and not path.endswith(_ENDINGS)
    return bool(is_id) and not Path(path).exists()


def saved_first(name: str, *config: str) -> str:
    """Returns how to read a data set of the Hub where it cannot be reached from."""
    asked = ", ".join(map(repr, (name, *config)))
    return (
        f"a data set of the Hub? Where that is reached, datasets.load_dataset({asked}).save_to_disk('DIR'), "
        "and then here task.path=DIR"
    )


def _lines(path: str, data: bytes, kind: type[T]) -> list[tuple[str, T]]:
    decoder = msgspec.json.Decoder(kind)
    rows = []
    for number, text in enumerate(data.splitlines(), 1):
        if text.strip():
            where = f"{path}:{number}"
            try:
                rows.append((where, decoder.decode(text)))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                why = in_words(error, kind, untyped(text))
                fits = isinstance(error, msgspec.ValidationError) and not why.startswith("must be")
                raise TaskError(f"{where}: {why}{'' if fits else _ONE_A_LINE}") from error
    return rows


def converted(rows: Iterable[tuple[str, Any]], kind: type[T]) -> list[tuple[str, T]]:
    """Returns pairs of a place and a row, the rows as a `kind`. Raises TaskError with the place."""
    found = []
    for where, row in rows:
        try:
            found.append((where, msgspec.convert(row, kind)))
        except msgspec.ValidationError as error:
            raise TaskError(f"{where}: {in_words(error, kind, row)}") from error
    return found


def _text_rows(path: str, data: bytes) -> Iterator[tuple[str, Any]]:
    try:
        text = io.StringIO(data.decode(), newline="")
        rows = csv.DictReader(text, delimiter="\t" if path.endswith(".tsv") else ",", strict=True)
        for row in rows:
            if None in row or None in row.values():
                columns = len(rows.fieldnames or ())
                raise TaskError(f"{path}:{rows.line_num}: a row of other than {columns} columns")
            yield f"{path}:{rows.line_num}", row
    except (csv.Error, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: {in_words(error)}") from error


def _parquet_rows(path: str) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            rows = file.read().to_pylist()
    except pa.ArrowException as error:
        raise TaskError(f"{path}: no Parquet file: {str(error).splitlines()[0]}") from error
    yield from ((f"{path}[{i}]", row) for i, row in enumerate(rows))


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
                for row in stream.read_all().to_pylist():
                    yield f"{path}[{number}]", row
                    number += 1
    except (pa.ArrowException, ValueError, KeyError, TypeError, IndexError) as error:
        if isinstance(error, TaskError):
            raise
        raise TaskError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from error
