"""Whole groups, token by token, for the viewer: trajectory log and token log joined, with texts for ids."""

from collections import OrderedDict
from collections.abc import Iterator
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
_COLUMNS = [*_TICKET, *_GROUP, "prompt_ids", *_TRAJECTORY, *_TOKENS, "branches", "turn_rewards"]

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
                _with_branches(one.rows.read(_COLUMNS)),
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


def _with_branches(rows: pa.Table) -> pa.Table:
    """Returns the rows with the tokens of an episode's branches behind those of its first path, as the token
    log has them. Notes say where each begins, and after what, and which turns were given rewards."""
    if "branches" not in rows.column_names:
        return rows
    branches = rows["branches"].to_pylist()
    for name in (*_TOKENS, "spans"):
        joined = [
            sum((branch[name] for branch in others), own)
            for own, others in zip(rows[name].to_pylist(), branches, strict=True)
        ]
        field = rows.schema.field(name)
        rows = rows.set_column(
            rows.schema.get_field_index(name), field, pa.array(joined, field.type)
        )
    notes = [
        [*own, *_places(len(ids) - sum(len(b["loss_mask"]) for b in others), others, turns)]
        for own, ids, others, turns in zip(
            rows["reward_notes"].to_pylist(),
            rows["response_ids"].to_pylist(),
            branches,
            rows["turn_rewards"].to_pylist(),
            strict=True,
        )
    ]
    field = rows.schema.field("reward_notes")
    column = pa.array(notes, field.type)
    return rows.set_column(rows.schema.get_field_index("reward_notes"), field, column)


def _places(
    begin: int, branches: list[dict[str, Any]], turns: list[dict[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Yields for each branch its name, and where it begins, as a note; then one of all rewards of turns, with
    the first path's `turns`."""
    told = [f"{turn['reward']:g} at token {turn['token']}" for turn in turns]
    for number, branch in enumerate(branches, 1):
        after = f"after {branch['at']} tokens of path {branch['parent']}, the prompt's included"
        yield f"branch {number}", f"from token {begin} on, {after}"
        told += [f"{t['reward']:g} at token {begin + t['token']}" for t in branch["turn_rewards"]]
        begin += len(branch["loss_mask"])
    if told:
        yield "rewards of turns", ", ".join(told)


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
