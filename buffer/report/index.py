"""Every logged trajectory in a few numbers: what the token viewer lists, and where the rest of it stands.

A part of the log never changes once it has its name, so that each is read once; a live run's next ones are
added as they appear. About 40 bytes a trajectory stay in memory.
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
CAUSES = ("", *get_args(FailureCause))
"""What the numbers of the column `failed` stand for; 0 is a response that was scored"""
_TOKEN_COLUMNS = ["number", "index", "largest_gap", "marked"]
Stamp = tuple[str, int, int]
"""Name, size and time of a part: a part that a resumed run wrote anew has another"""


@dataclass(frozen=True)
class Located:
    """Rows of one step in one part."""

    path: Path
    row_group: int

    def read(self, columns: list[str] | None = None) -> pa.Table:
        with pq.ParquetFile(self.path) as file:
            return file.read_row_group(self.row_group, columns)


class _Parts:
    """Columns of the newest part of each log, read in one piece: steps follow one another, and to open a part
    for each of its steps would take ten times as long."""

    def __init__(self) -> None:
        self._held: dict[Path, tuple[Path, pa.Table, list[int]]] = {}

    def read(self, where: Located, columns: list[str]) -> pa.Table:
        """The same as `where.read(columns)`."""
        held = self._held.get(where.path.parent)
        if held is None or held[0] != where.path:
            with pq.ParquetFile(where.path) as file:
                groups = range(file.num_row_groups)
                sizes = [file.metadata.row_group(i).num_rows for i in groups]
                starts = [0, *np.cumsum(sizes).tolist()]
                held = (where.path, file.read(columns), starts)
            self._held[where.path.parent] = held
        _, table, starts = held
        start, stop = starts[where.row_group : where.row_group + 2]
        return table.slice(start, stop - start)


@dataclass(frozen=True, eq=False)
class StepIndex:
    """One step: G groups in the order in which they were used, N trajectories group by group."""

    step: int
    rows: Located
    tokens: Located | None
    prompts: list[str]
    """Prompt of each group, [G], cut to PROMPT_CHARACTERS"""
    place: np.ndarray
    """Place of each group in the batch, int32 [G]"""
    number: np.ndarray
    """Number of each group's ticket, int32 [G]"""
    size: np.ndarray
    """Trajectories of each group, int32 [G]"""
    columns: dict[str, np.ndarray]
    """[N] each: index, length, lag (largest), cut (1: no end was drawn), failed (place in CAUSES) int32;
    reward, gap, marked float32, the last two NaN without a token log"""
    lags: np.ndarray
    """Number of tokens of lag 0, 1, …, int64, by version number"""
    ages: np.ndarray
    """Number of groups used 0, 1, … versions after they were admitted, int64"""


class Index:
    """The steps of the logs in `run_dir`; `refresh` looks for new ones."""

    def __init__(self, run_dir: Path) -> None:
        self._dir = run_dir
        self._located: dict[str, dict[Stamp, list[tuple[int, Located]]]] = {}
        self._read: dict[tuple[Stamp, int, bool], StepIndex] = {}
        self.steps: dict[int, StepIndex] = {}

    def refresh(self) -> None:
        """Raises RecordError for a part that is no log of ours."""
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
        """Changes whenever the index does."""
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
    table = parts.read(where, _COLUMNS).combine_chunks()
    place = table["place"].to_numpy()
    starts = np.flatnonzero(np.diff(place, prepend=-1))
    spans = table["spans"].combine_chunks()
    version, count = (spans.flatten().field(k).to_numpy() for k in ("version", "tokens"))
    first_span = spans.offsets.to_numpy()[:-1] - spans.offsets[0].as_py()
    length = np.add.reduceat(count, first_span)
    number, index = (table[name].to_numpy() for name in ("number", "index"))
    columns = {
        "index": index.astype(np.int32),
        "length": length.astype(np.int32),
        "lag": (step - np.minimum.reduceat(version, first_span)).astype(np.int32),
        "cut": (table["finish_reason"].to_numpy() != "stop").astype(np.int32),
        "failed": _failed(table),
        "reward": table["reward"].to_numpy().astype(np.float32),
        **_scores(number, index, scored, parts),
    }
    lag = np.maximum(step - version, 0)
    age = np.maximum(step - table["admitted"].to_numpy()[starts], 0)
    return StepIndex(
        step=step,
        rows=where,
        tokens=scored,
        prompts=[p[:PROMPT_CHARACTERS] for p in table["prompt"].take(starts).to_pylist()],
        place=place[starts].astype(np.int32),
        number=number[starts].astype(np.int32),
        size=np.diff(starts, append=len(place)).astype(np.int32),
        columns=columns,
        lags=np.bincount(lag, weights=count).astype(np.int64),
        ages=np.bincount(age).astype(np.int64),
    )


def _failed(table: pa.Table) -> np.ndarray:
    """int32 [N]: why each response has no reward, as its place in CAUSES. The log of before version 4 has no
    such column."""
    if "failure" not in table.column_names:
        return np.zeros(len(table), np.int32)
    return np.array([CAUSES.index(cause) for cause in table["failure"].to_pylist()], np.int32)


def matching(number: np.ndarray, index: np.ndarray, scored: pa.Table) -> np.ndarray:
    """int64 [N]: the row of `scored` for each (number, index), -1 where there is none."""
    theirs = _keys(scored["number"].to_numpy(), scored["index"].to_numpy())
    ours = _keys(number, index)
    if not len(theirs):
        return np.full(len(ours), -1)
    order = np.argsort(theirs)
    row = order[np.minimum(np.searchsorted(theirs, ours, sorter=order), len(order) - 1)]
    return np.where(theirs[row] == ours, row, -1)


def _keys(number: np.ndarray, index: np.ndarray) -> np.ndarray:
    """int64 [N]: one number for each pair; a response's index in its group is below 2^24."""
    return (number.astype(np.int64) << 24) + index


def _scores(
    number: np.ndarray, index: np.ndarray, where: Located | None, parts: _Parts
) -> dict[str, np.ndarray]:
    missing = np.full(len(number), np.nan, np.float32)
    if where is None:
        return {"gap": missing, "marked": missing}
    scored = parts.read(where, _TOKEN_COLUMNS)
    row = matching(number, index, scored)

    def pick(name: str) -> np.ndarray:
        values = scored[name].to_numpy().astype(np.float32)
        return np.where(row >= 0, values[np.maximum(row, 0)], missing)

    return {"gap": pick("largest_gap"), "marked": pick("marked")}


def summed(counts: list[np.ndarray]) -> np.ndarray:
    """float64: histograms of different lengths added up."""
    total = np.zeros(max((len(c) for c in counts), default=0))
    for one in counts:
        total[: len(one)] += one
    return total


def to_chunk(steps: list[StepIndex]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(meta, arrays) of the steps: `group/…` one a group, `trajectory/…` one a trajectory, in order."""
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
    return {"prompts": [p for s in steps for p in s.prompts], "causes": CAUSES}, arrays


def _joined(parts: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
