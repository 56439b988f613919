"""An index of all logged trajectories: the numbers that the token viewer lists, and where to read the rest.

A part of the log never changes once it has its final name, so that it is read only once; new parts of a live
run are added as they appear. The index takes about 40 bytes of memory for each trajectory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from areal_q.system.files import by_number
from buffer.logs.parquet_log import open_part, step_of
from buffer.logs.token_log import TOKEN_LOG_FORMAT
from buffer.logs.trajectory_schema import TRAJECTORY_LOG_FORMAT
from buffer.report.listed import CAUSES, Arrays, Listed, Located, LogPart, Scores

_SPANS = ["place", "admitted", "spans.list.element.version", "spans.list.element.tokens"]
Stamp = tuple[str, int, int]
"""Name, size and time of a part; they differ if a resumed run has rewritten the part."""


@dataclass(frozen=True, eq=False)
class StepIndex:
    """One step, with its G groups in the order in which they were used and their N trajectories, group by
    group."""

    step: int
    rows: Located
    tokens: Located | None
    place: np.ndarray
    """Position of each group in the batch, int32 [G]"""
    size: np.ndarray
    """Number of trajectories in each group, int32 [G]"""
    length: np.ndarray
    """Number of tokens of each trajectory, int32 [N]"""
    lag: np.ndarray
    """Largest lag of the tokens of each trajectory, int32 [N]"""
    lags: np.ndarray
    """Number of tokens with lag 0, 1, …, by version numbers, int64"""
    ages: np.ndarray
    """Number of groups that were used 0, 1, … versions after their admission, int64"""
    listed: Listed

    @cached_property
    def prompts(self) -> list[str]:
        """Prompt of each group, [G], cut to PROMPT_CHARACTERS"""
        return self.listed.prompts(self.rows)

    @cached_property
    def number(self) -> np.ndarray:
        """Number of each group's ticket, int32 [G]"""
        return self.listed.number(self.rows).astype(np.int32)

    @cached_property
    def columns(self) -> Arrays:
        """Columns by name, each [N]. int32: index, length, lag, cut (1 if the response did not end with a
        stop), failed (index in CAUSES). float32: reward, gap, marked; the last two are NaN without a token
        log."""
        own = self.listed.columns(self.rows, self.tokens, self.size)
        return own | {"length": self.length, "lag": self.lag}


class Index:
    """The steps in the logs of `run_dir`; `refresh` adds new ones."""

    def __init__(self, run_dir: Path) -> None:
        self._dir = run_dir
        self._scores = Scores()
        self._scored: dict[Stamp, dict[int, Located]] = {}
        self._read: dict[Stamp, list[StepIndex]] = {}
        self.steps: dict[int, StepIndex] = {}

    def refresh(self) -> None:
        """Reads new parts and forgets deleted ones. Raises RecordError for a part that is not a valid log."""
        self._scores.forget()
        self._scored = {
            stamp: self._scored.get(stamp) or _steps_in(path)
            for stamp, path in _parts(self._dir / "tokens")
        }
        scored = {step: where for part in self._scored.values() for step, where in part.items()}
        self._read = {
            stamp: [
                _beside(one, scored.get(one.step))
                for one in self._read.get(stamp) or _read_part(path, self._scores)
            ]
            for stamp, path in _parts(self._dir / "trajectories")
        }
        self.steps = {one.step: one for part in self._read.values() for one in part}

    @property
    def state(self) -> list[Stamp]:
        """Returns a value that changes whenever the index does."""
        return sorted(self._read)

    @property
    def num_trajectories(self) -> int:
        return sum(len(one.length) for one in self.steps.values())


def _parts(directory: Path) -> Iterator[tuple[Stamp, Path]]:
    for path in by_number(directory.glob("part-*.parquet")):
        stat = path.stat()
        yield (path.name, stat.st_size, stat.st_mtime_ns), path


def _steps_in(path: Path) -> dict[int, Located]:
    """Returns the steps of a part of the token log."""
    with open_part(path, TOKEN_LOG_FORMAT) as file:
        return {step_of(file, i): Located(path, i) for i in range(file.num_row_groups)}


def _beside(one: StepIndex, tokens: Located | None) -> StepIndex:
    """Returns the step with its place in the token log, which is written apart."""
    return one if one.tokens == tokens else replace(one, tokens=tokens)


def _read_part(path: Path, scores: Scores) -> Iterator[StepIndex]:
    """Yields the steps of a part of the trajectory log, in its order."""
    part = LogPart(path, TRAJECTORY_LOG_FORMAT, _SPANS)
    spans = part.table["spans"].combine_chunks()
    version, tokens = (spans.flatten().field(name).to_numpy() for name in ("version", "tokens"))
    offsets = spans.offsets.to_numpy() - spans.offsets[0].as_py()
    step_of_row = np.repeat(np.array(part.steps, np.int64), np.diff(part.starts))
    lag = np.maximum(np.repeat(step_of_row, np.diff(offsets)) - version, 0)
    age = np.maximum(step_of_row - part.array("admitted"), 0)
    oldest = np.minimum.reduceat(version, offsets[:-1])
    largest = (step_of_row - oldest).astype(np.int32)
    length = np.add.reduceat(tokens, offsets[:-1]).astype(np.int32)
    place = part.array("place", np.int32)
    first = np.flatnonzero(np.diff(place, prepend=-1) | np.diff(step_of_row, prepend=-1))
    size = np.diff(first, append=len(place)).astype(np.int32)
    place, age = place[first], age[first]
    groups_of = np.searchsorted(first, part.starts).tolist()
    spans_of, listed = offsets[part.starts].tolist(), Listed(part, first, scores)
    for i, step in enumerate(part.steps):
        rows, groups, own = (slice(*s[i : i + 2]) for s in (part.starts, groups_of, spans_of))
        yield StepIndex(
            step=step,
            rows=Located(path, i),
            tokens=None,
            place=place[groups],
            size=size[groups],
            length=length[rows],
            lag=largest[rows],
            lags=np.bincount(lag[own], weights=tokens[own]).astype(np.int64),
            ages=np.bincount(age[groups]).astype(np.int64),
            listed=listed,
        )


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
    return {"prompts": [p for s in steps for p in s.prompts], "causes": CAUSES}, arrays


def _joined(parts: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
