"""Rows of JSONL files, of GSM8K on the Hugging Face Hub, and their split. Imports no torch."""

import codecs
import importlib
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from areal_q.decode_errors import in_words, untyped
from areal_q.errors import ConfigError, TaskError

T = TypeVar("T")
_ONE_A_LINE = "; it takes JSON lines, one object a line"
_MAKE = f"{_ONE_A_LINE}:"


class Row(msgspec.Struct, frozen=True):
    """A question and its worked answer, such as "Natalia sold 48/2 = <<48/2=24>>24 …\\n#### 72"."""

    where: str
    """File and line, for messages: `train.jsonl:12`"""
    question: str
    answer: str


class _Line(msgspec.Struct, frozen=True):
    question: str
    answer: str


def read_rows(path: str) -> list[Row]:
    """Returns the rows of a JSONL file, or of the train split of a Hub data set such as `openai/gsm8k`. Raises
    TaskError, or ConfigError if the Hub needs an extra that is not installed."""
    is_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) and not path.endswith((".jsonl", ".json"))
    return _read_hub(path) if is_id and not Path(path).exists() else read_jsonl(path)


def read_jsonl(path: str) -> list[Row]:
    """Returns the rows of a JSONL file, without blank lines. Raises TaskError naming file and line."""
    return [Row(where, line.question, line.answer) for where, line in _lines(path, _Line)]


def read_objects(path: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns pairs of a place, such as `train.jsonl:12`, and the object there. Raises TaskError naming file
    and line."""
    return _lines(path, dict[str, Any])


def _lines(path: str, kind: type[T]) -> list[tuple[str, T]]:
    try:
        data = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise TaskError(f"{path}: {_way_out(path, b'') or error.strerror}") from error
    if refused := _way_out(path, data):
        raise TaskError(f"{path}: {refused}")
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


def _way_out(path: str, data: bytes) -> str:
    """Returns what a file or a directory is that others read, and how to make JSON lines of it; else ""."""
    frame = ".to_json('train.jsonl', orient='records', lines=True)"
    if Path(path).is_dir():
        split = "['train']" if (Path(path) / "dataset_dict.json").exists() else ""
        if split or (Path(path) / "dataset_info.json").exists():
            load = f"datasets.load_from_disk({path!r}){split}"
            return f"a data set of save_to_disk{_MAKE} {load}.to_json('train.jsonl')"
        return f"a directory{_ONE_A_LINE}"
    if data.startswith(b"PAR1"):
        return f"a Parquet file{_MAKE} pandas.read_parquet({path!r}){frame}"
    if path.endswith((".csv", ".tsv")):
        tabs = ", sep='\\t'" if path.endswith(".tsv") else ""
        return f"a table of text{_MAKE} pandas.read_csv({path!r}{tabs}){frame}"
    if data.lstrip().startswith(b"[") and isinstance(untyped(data), list):
        return f"one JSON array{_MAKE} jq -c '.[]' {shlex.quote(path)} > train.jsonl"
    return ""


def split_heldout(rows: Sequence[T], share: float, path: str) -> tuple[Sequence[T], Sequence[T]]:
    """Returns the rows to train on and the held-out ones, which are the last `share`. Raises TaskError if
    either is empty."""
    cut = len(rows) - round(share * len(rows))
    if not 0 < cut < len(rows):
        lost = "train on" if cut == 0 else "hold out"
        raise TaskError(f"{path}: task.heldout = {share} of {len(rows)} rows leaves none to {lost}")
    return rows[:cut], rows[cut:]


def _read_hub(name: str) -> list[Row]:
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{name}: no such file; a data set of the Hub needs pip install 'areal-q[hf]'"
        ) from error
    try:
        table: Iterable[dict[str, str]] = datasets.load_dataset(name, "main", split="train")
        return [
            Row(f"{name}:{i}", row["question"], row["answer"]) for i, row in enumerate(table, 1)
        ]
    except (OSError, ValueError, KeyError) as error:
        raise TaskError(f"{name}: cannot be loaded: {str(error).splitlines()[0]}") from error
