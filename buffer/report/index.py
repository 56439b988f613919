"""An index of all logged trajectories: the numbers that the token viewer lists, and where to read the rest.

A part of the log never changes once it has its final name, so that it is read only once; new parts of a live
run are added as they appear. The index takes about 40 bytes of memory for each trajectory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from areal_q.messages.trajectories import FailureCause
from areal_q.system.files import by_number
from buffer.logs.parquet_log import LogFormat, row_groups
from buffer.logs.token_log import TOKEN_LOG_FORMAT
from buffer.logs.trajectory_schema import TRAJECTORY_LOG_FORMAT

PROMPT_CHARACTERS = 80
_COLUMNS = [
    "place", "number", "index", "admitted", "prompt", "reward", "failure", "finish_reason", "spans",
]  # fmt: skip
_CAUSES = ("", *get_args(FailureCause))
"""Meanings of the numbers in column `failed`; 0 is a response that was scored."""
_TOKEN_COLUMNS = ["number", "index", "largest_gap", "marked"]
Stamp = tuple[str, int, int]
"""Name, size and time of a part; they differ if a resumed run has rewritten the part."""


@dataclass(frozen=True)
class Located:
    """The place of one step's rows: a row group in a part."""

    path: Path
    row_group: int

    def read(self, columns: list[str] | None = None) -> pa.Table:
        with pq.ParquetFile(self.path) as file:
            return file.read_row_group(self.row_group, columns)


Arrays = dict[str, np.ndarray]


class _Part:
    """One part of a log, read and turned into arrays as a whole, since it would take many times as long to do
    so for each of its steps."""

    def __init__(self, path: Path, columns: list[str]) -> None:
        self.path = path
        with pq.ParquetFile(path) as file:
            metadata = file.metadata
            sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            self.table = file.read(columns, use_threads=False).combine_chunks()
        self._starts = [0, *np.cumsum(sizes).tolist()]

    def rows(self, where: Located) -> slice:
        """Returns the slice of the arrays with the rows of one step."""
        return slice(*self._starts[where.row_group : where.row_group + 2])


class _Trajectories(_Part):
    def __init__(self, path: Path) -> None:
        super().__init__(path, _COLUMNS)
        table = self.table
        self.prompts = table["prompt"].combine_chunks()
        spans = table["spans"].combine_chunks()
        self.offsets = spans.offsets.to_numpy() - spans.offsets[0].as_py()
        """Index of each row's first span, and, as the last element, the number of spans"""
        self.version, self.count = (
            spans.flatten().field(name).to_numpy() for name in ("version", "tokens")
        )
        first = self.offsets[:-1]
        self.oldest = np.minimum.reduceat(self.version, first)
        cut = table["finish_reason"].to_numpy() != "stop"
        self.admitted, self.number = (table[k].to_numpy() for k in ("admitted", "number"))
        self.place = table["place"].to_numpy()
        self.columns: Arrays = {
            "index": table["index"].to_numpy().astype(np.int32),
            "length": np.add.reduceat(self.count, first).astype(np.int32),
            "cut": cut.astype(np.int32),
            "failed": _failed(table),
            "reward": table["reward"].to_numpy().astype(np.float32),
        }


class _Scores(_Part):
    def __init__(self, path: Path) -> None:
        super().__init__(path, _TOKEN_COLUMNS)
        self.number, self.index = (self.table[k].to_numpy() for k in ("number", "index"))
        self.gap, self.marked = (
            self.table[k].to_numpy().astype(np.float32) for k in ("largest_gap", "marked")
        )


class _Parts:
    """A cache of the part read last of each log, since steps are read in order."""

    def __init__(self) -> None:
        self._rows: _Trajectories | None = None
        self._scores: _Scores | None = None

    def rows(self, where: Located) -> _Trajectories:
        if self._rows is None or self._rows.path != where.path:
            self._rows = _Trajectories(where.path)
        return self._rows

    def scores(self, where: Located) -> _Scores:
        if self._scores is None or self._scores.path != where.path:
            self._scores = _Scores(where.path)
        return self._scores


@dataclass(frozen=True, eq=False)
class StepIndex:
    """One step, with its G groups in the order in which they were used and their N trajectories, group by
    group."""

    step: int
    rows: Located
    tokens: Located | None
    prompts: list[str]
    """Prompt of each group, [G], cut to PROMPT_CHARACTERS"""
    place: np.ndarray
    """Position of each group in the batch, int32 [G]"""
    number: np.ndarray
    """Number of each group's ticket, int32 [G]"""
    size: np.ndarray
    """Number of trajectories in each group, int32 [G]"""
    columns: dict[str, np.ndarray]
    """Columns by name, each [N]. int32: index, length, lag (the largest of the tokens), cut (1 if the response
    did not end with a stop), failed (index in _CAUSES). float32: reward, gap, marked; the last two are NaN
    without a token log."""
    lags: np.ndarray
    """Number of tokens with lag 0, 1, …, by version numbers, int64"""
    ages: np.ndarray
    """Number of groups that were used 0, 1, … versions after their admission, int64"""


class Index:
    """The steps in the logs of `run_dir`; `refresh` adds new ones."""

    def __init__(self, run_dir: Path) -> None:
        self._dir = run_dir
        self._located: dict[str, dict[Stamp, list[tuple[int, Located]]]] = {}
        self._read: dict[tuple[Stamp, int, bool], StepIndex] = {}
        self.steps: dict[int, StepIndex] = {}

    def refresh(self) -> None:
        """Reads new parts and forgets deleted ones. Raises RecordError for a part that is not a valid log."""
        scored = {
            step: where for _, step, where in self._locate(self._dir / "tokens", TOKEN_LOG_FORMAT)
        }
        read, parts = {}, _Parts()
        for stamp, step, where in self._locate(self._dir / "trajectories", TRAJECTORY_LOG_FORMAT):
            key = (stamp, step, step in scored)
            read[key] = self._read.get(key) or read_step(step, where, scored.get(step), parts)
        self._read = read
        self.steps = {one.step: one for one in read.values()}

    @property
    def state(self) -> list[Stamp]:
        """Returns a value that changes whenever the index does."""
        return sorted({stamp for stamp, _, _ in self._read})

    @property
    def num_trajectories(self) -> int:
        return sum(len(one.columns["index"]) for one in self.steps.values())

    def _locate(self, directory: Path, format: LogFormat) -> Iterator[tuple[Stamp, int, Located]]:
        known = self._located.get(format.key.decode(), {})
        found: dict[Stamp, list[tuple[int, Located]]] = {}
        for path in by_number(directory.glob("part-*.parquet")):
            stat = path.stat()
            stamp = (path.name, stat.st_size, stat.st_mtime_ns)
            found[stamp] = known.get(stamp) or [
                (r.step, Located(path, r.number)) for r in row_groups(directory, format, path.name)
            ]
            for step, where in found[stamp]:
                yield stamp, step, where
        self._located[format.key.decode()] = found


def read_step(step: int, where: Located, scored: Located | None, parts: _Parts) -> StepIndex:
    part = parts.rows(where)
    rows = part.rows(where)
    place, number = part.place[rows], part.number[rows]
    starts = np.flatnonzero(np.diff(place, prepend=-1))
    spans = slice(part.offsets[rows.start], part.offsets[rows.stop])
    # Copies, so that a step does not keep the whole part in memory.
    columns = {name: values[rows].copy() for name, values in part.columns.items()}
    columns["lag"] = (step - part.oldest[rows]).astype(np.int32)
    columns |= _scores(number, columns["index"], scored, parts)
    lag = np.maximum(step - part.version[spans], 0)
    age = np.maximum(step - part.admitted[rows][starts], 0)
    prompts = part.prompts.take(pa.array(rows.start + starts)).to_pylist()
    return StepIndex(
        step=step,
        rows=where,
        tokens=scored,
        prompts=[p[:PROMPT_CHARACTERS] for p in prompts],
        place=place[starts].astype(np.int32),
        number=number[starts].astype(np.int32),
        size=np.diff(starts, append=len(place)).astype(np.int32),
        columns=columns,
        lags=np.bincount(lag, weights=part.count[spans]).astype(np.int64),
        ages=np.bincount(age).astype(np.int64),
    )


def _failed(table: pa.Table) -> np.ndarray:
    """Returns int32 [N]: why each response has no reward, as an index into _CAUSES. It is 0 for a log of a
    schema before 4, which has no such column."""
    if "failure" not in table.column_names:
        return np.zeros(len(table), np.int32)
    causes = table["failure"].combine_chunks().dictionary_encode()
    codes = np.array([_CAUSES.index(cause) for cause in causes.dictionary.to_pylist()], np.int32)
    return codes[causes.indices.to_numpy()]


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


def _scores(number: np.ndarray, index: np.ndarray, where: Located | None, parts: _Parts) -> Arrays:
    missing = np.full(len(number), np.nan, np.float32)
    if where is None:
        return {"gap": missing, "marked": missing}
    part = parts.scores(where)
    rows = part.rows(where)
    row = matching(number, index, part.number[rows], part.index[rows])

    def pick(values: np.ndarray) -> np.ndarray:
        return np.where(row >= 0, values[rows][np.maximum(row, 0)], missing)

    return {"gap": pick(part.gap), "marked": pick(part.marked)}


def segment_sums(counts: list[np.ndarray]) -> np.ndarray:
    """Returns the sum of histograms of different lengths, float64."""
    total = np.zeros(max((len(c) for c in counts), default=0))
    for one in counts:
        total[: len(one)] += one
    return total


def to_chunk(steps: list[StepIndex]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns (meta, arrays) of the steps, in order. Arrays `group/…` have a value for each group, and arrays
    `trajectory/…` one for each trajectory."""
    groups = {
        "step": [np.full(len(s.place), s.step, np.int32) for s in steps],
        "place": [s.place for s in steps],
        "number": [s.number for s in steps],
        "size": [s.size for s in steps],
    }
    arrays = {f"group/{name}": _joined(parts, np.int32) for name, parts in groups.items()}
    for name, dtype in (
        ("index", np.int32), ("length", np.int32), ("lag", np.int32), ("cut", np.int32), ("failed", np.int32),
        ("reward", np.float32), ("gap", np.float32), ("marked", np.float32),
    ):  # fmt: skip
        arrays[f"trajectory/{name}"] = _joined([s.columns[name] for s in steps], dtype)
    return {"prompts": [p for s in steps for p in s.prompts], "causes": _CAUSES}, arrays


def _joined(parts: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
