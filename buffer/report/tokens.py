"""Whole groups, token by token, for the viewer: trajectory log and token log joined, with texts for ids."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pyarrow as pa

from buffer.report.index import Index, StepIndex
from buffer.report.listed import matching
from buffer.report.packed_arrays import pack_arrays
from buffer.report.text import Pieces

HELD_STEPS = 3
"""Number of steps whose rows stay in memory, since a reader often goes on to the neighbours of a group"""
_PER_TOKEN = {
    "proximal_logprobs": np.float32,
    "logprobs": np.float32,
    "entropy": np.float32,
    "advantages": np.float32,
    "lag": np.int32,
    "marks": np.uint8,
}
_TICKET = (
    *("number", "prompt", "answer", "admitted", "seed", "purpose", "sampling"),
    *("source", "why"),
)
_GROUP = ("worker", "engine", "weight_format", "started_s", "finished_s", "version", "place")
_TRAJECTORY = (
    "index",
    "reward",
    "failure",
    "reward_parts",
    "reward_notes",
    "finish_reason",
    "spans",
)
_TOKENS = ("response_ids", "behavior_logprobs", "loss_mask")
_COLUMNS = [*_TICKET, *_GROUP, "prompt_ids", *_TRAJECTORY, *_TOKENS]

Rows = tuple[pa.Table, pa.Table | None]


class Groups:
    """Reads groups from the logs of `index` and returns them as chunks."""

    def __init__(self, index: Index, pieces: Pieces) -> None:
        self._index, self._pieces = index, pieces
        self._held: OrderedDict[StepIndex, Rows] = OrderedDict()

    def chunk(self, step: int, first: int = 0, count: int = 1) -> bytes:
        """Returns the chunk of `count` groups of a step, from the group with index `first` on. Raises KeyError
        if there is no such step or group."""
        one = self._index.steps[step]
        if not 0 <= first < len(one.size) or count < 1:
            raise KeyError(first)
        ends = np.cumsum(one.size)
        start, stop = ends[first] - one.size[first], ends[min(first + count, len(ends)) - 1]
        rows, scored = self._rows(one)
        rows = rows.slice(start, stop - start)
        found = np.full(len(rows), -1)
        if scored is not None:
            ours, theirs = (
                [table[name].to_numpy() for name in ("number", "index")] for table in (rows, scored)
            )
            found = matching(*ours, *theirs)
            scored = scored.take(found[found >= 0]) if (found >= 0).any() else None
        return pack_arrays(*self._content(one, rows, scored, found >= 0))

    def _rows(self, one: StepIndex) -> Rows:
        if one not in self._held:
            self._held[one] = (
                one.rows.read(_COLUMNS),
                one.tokens.read(["number", "index", *_PER_TOKEN]) if one.tokens else None,
            )
            while len(self._held) > HELD_STEPS:
                self._held.popitem(last=False)
        return self._held[one]

    def _content(
        self, one: StepIndex, rows: pa.Table, scored: pa.Table | None, learnt: np.ndarray
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Returns (meta, arrays) of `rows`. `learnt` is True for the rows that the step learnt from, and
        `scored` are their rows of the token log; a response without a valid reward has none."""
        ids = _flat(rows, "response_ids")
        pieces = [text for ids in rows["response_ids"].to_pylist() for text in self._pieces(ids)]
        texts, piece = np.unique(np.array(pieces, dtype=object), return_inverse=True)
        arrays = {
            "id": ids.astype(np.int32),
            "piece": piece.astype(np.int32),
            "behavior_logprobs": _flat(rows, "behavior_logprobs").astype(np.float32),
            "mask": _flat(rows, "loss_mask").astype(np.uint8),
        }
        if scored is not None:
            of_learnt = np.repeat(learnt, rows["response_ids"].combine_chunks().value_lengths())
            for name, dtype in _PER_TOKEN.items():
                arrays[name] = _missing(name, one.step, rows).astype(dtype)
                arrays[name][of_learnt] = _flat(scored, name)
        return {"step": one.step, "pieces": texts.tolist(), "groups": self._groups(rows)}, arrays

    def _groups(self, rows: pa.Table) -> list[dict[str, Any]]:
        place = rows["place"].to_numpy()
        starts = np.flatnonzero(np.diff(place, prepend=-1)).tolist()
        groups = rows.select([*_TICKET, *_GROUP, "prompt_ids"]).take(starts).to_pylist()
        trajectories = [_trajectory(row) for row in rows.select(_TRAJECTORY).to_pylist()]
        for group, start, stop in zip(groups, starts, [*starts[1:], len(rows)], strict=True):
            # JavaScript cannot represent all integers beyond 2^53.
            group["seed"] = str(group["seed"])
            group["prompt_pieces"] = self._pieces(group.pop("prompt_ids"))
            group["trajectories"] = trajectories[start:stop]
        return groups


def _trajectory(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "index": row["index"],
        "length": sum(span["tokens"] for span in row["spans"]),
        "reward": row["reward"],
        "failure": row["failure"],
        "parts": row["reward_parts"],
        "notes": row["reward_notes"],
        "finish": row["finish_reason"],
        "spans": [[s["version"], s["tokens"], s["digest"]] for s in row["spans"]],
    }


def _missing(name: str, step: int, rows: pa.Table) -> np.ndarray:
    """Returns the values of column `name` for tokens that were not learnt from: the lag by version numbers, no
    marks, and NaN for everything else."""
    spans = rows["spans"].combine_chunks().flatten()
    version, tokens = (spans.field(field).to_numpy() for field in ("version", "tokens"))
    lag = np.repeat(np.maximum(step - version, 0), tokens)
    return {"lag": lag, "marks": np.zeros(len(lag))}.get(name, np.full(len(lag), np.nan))


def _flat(rows: pa.Table, name: str) -> np.ndarray:
    """Returns the values of a column of lists, one list after the other."""
    return rows[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
