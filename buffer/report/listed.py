"""Columns of the logs that only the list of trajectories shows. They are read when they are first asked for,
since a file that holds many runs lists few steps of each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from areal_q.messages.trajectories import FailureCause
from buffer.logs.parquet_log import LogFormat, open_part, step_of
from buffer.logs.token_log import TOKEN_LOG_FORMAT
from buffer.logs.trajectory_schema import TRAJECTORY_LOG_FORMAT

PROMPT_CHARACTERS = 80
_LISTED = ["number", "index", "prompt", "reward", "failure", "finish_reason"]
_SCORES = ["number", "index", "largest_gap", "marked"]
CAUSES = ("", *get_args(FailureCause))
"""Meanings of the numbers in column `failed`; 0 is a response that was scored."""
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Located:
    """The place of one step's rows: a row group in a part."""

    path: Path
    row_group: int

    def read(self, columns: list[str]) -> pa.Table:
        """Returns the rows, with those of the columns that the part has."""
        with pq.ParquetFile(self.path) as file:
            return file.read_row_group(self.row_group, columns, use_threads=False)


class LogPart:
    """Columns of one part of a log, read as a whole, since it would take many times as long step by step."""

    def __init__(self, path: Path, format: LogFormat, columns: list[str]) -> None:
        self.path = path
        with open_part(path, format) as file:
            groups = range(file.num_row_groups)
            self.steps = [step_of(file, i) for i in groups]
            sizes = [file.metadata.row_group(i).num_rows for i in groups]
            self.table = file.read(columns, use_threads=False).combine_chunks()
        self.starts = np.cumsum([0, *sizes])
        """Index of the first row of each row group, and, as the last element, the number of rows"""

    def array(self, name: str, dtype: Any = np.int64) -> np.ndarray:
        return self.table[name].to_numpy().astype(dtype, copy=False)

    def rows(self, where: Located) -> slice:
        """Returns the slice of the arrays with the rows of one step."""
        return slice(*self.starts[where.row_group : where.row_group + 2].tolist())


class Scores:
    """The token log, as far as the list shows it. It holds the part read last, since steps are asked for in
    order."""

    def __init__(self) -> None:
        self._part: LogPart | None = None

    def forget(self) -> None:
        """Forgets the part, which a resumed run may have rewritten."""
        self._part = None

    def of(self, where: Located | None, number: np.ndarray, index: np.ndarray) -> Arrays:
        """Returns gap and marked, each float32 [N], of the responses `index` to the tickets `number`; NaN for
        those that are not in the token log."""
        if where is None:
            missing = np.full(len(number), np.nan, np.float32)
            return {"gap": missing, "marked": missing}
        if self._part is None or self._part.path != where.path:
            self._part = LogPart(where.path, TOKEN_LOG_FORMAT, _SCORES)
        rows, part = self._part.rows(where), self._part
        row = matching(number, index, part.array("number")[rows], part.array("index")[rows])
        gap, marked = (part.array(name, np.float32)[rows] for name in ("largest_gap", "marked"))
        return {"gap": _picked(gap, row), "marked": _picked(marked, row)}


def _picked(values: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Returns the value in each row, NaN for row -1."""
    return np.append(values, np.float32(np.nan))[row]


class Listed:
    """What the list says of the trajectories in one part; `first` is the row of each group's first one."""

    def __init__(self, part: LogPart, first: np.ndarray, scores: Scores) -> None:
        self._path, self._starts = part.path, part.starts.tolist()
        self._first, self._scores = first, scores
        self._groups = np.searchsorted(first, part.starts).tolist()

    @cached_property
    def _part(self) -> tuple[list[str], np.ndarray, Arrays]:
        """Prompt and ticket's number of each group, and the columns of its trajectories"""
        part = LogPart(self._path, TRAJECTORY_LOG_FORMAT, _LISTED)
        prompts = part.table["prompt"].take(self._first).to_pylist()
        columns = {
            "index": part.array("index", np.int32),
            "cut": _coded(part.table, "finish_reason", lambda reason: reason != "stop"),
            "failed": _coded(part.table, "failure", CAUSES.index),
            "reward": part.array("reward", np.float32),
        }
        return [p[:PROMPT_CHARACTERS] for p in prompts], part.array("number")[self._first], columns

    def prompts(self, where: Located) -> list[str]:
        return self._part[0][slice(*self._groups[where.row_group : where.row_group + 2])]

    def number(self, where: Located) -> np.ndarray:
        return self._part[1][slice(*self._groups[where.row_group : where.row_group + 2])]

    def columns(self, where: Located, tokens: Located | None, size: np.ndarray) -> Arrays:
        rows = slice(*self._starts[where.row_group : where.row_group + 2])
        own = {name: values[rows] for name, values in self._part[2].items()}
        return own | self._scores.of(tokens, np.repeat(self.number(where), size), own["index"])


def _coded(table: pa.Table, name: str, code: Callable[[str], int]) -> np.ndarray:
    """Returns int32 [N]: the code of each text in a column."""
    texts = table[name].combine_chunks().dictionary_encode()
    codes = np.array([code(text) for text in texts.dictionary.to_pylist()], np.int32)
    return codes[texts.indices.to_numpy()]


def matching(
    number: np.ndarray, index: np.ndarray, their_number: np.ndarray, their_index: np.ndarray
) -> np.ndarray:
    """Returns int64 [N]: for each pair (number, index) the row with the same pair in `their_number` and
    `their_index`, or -1 if there is none."""
    theirs, ours = _keys(their_number, their_index), _keys(number, index)
    if not len(theirs):
        return np.full(len(ours), -1)
    order = np.argsort(theirs)
    row = order[np.minimum(np.searchsorted(theirs, ours, sorter=order), len(order) - 1)]
    return np.where(theirs[row] == ours, row, -1)


def _keys(number: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Returns int64 [N]: one number for each pair. The index of a response in its group is below 2^24."""
    return (number.astype(np.int64) << 24) + index
