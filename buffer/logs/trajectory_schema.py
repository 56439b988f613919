"""Converts groups to Parquet rows, one for each trajectory, and back without loss.

Of the step:        step, version (the learner's, when it took the group), place (of the group in the batch)
Of the ticket:      ticket_schema, run, number, purpose, admitted (the ticket's `step`), prompt, answer,
                    prompt_ids, group_size, seed, sampling, stop (of the sampling, as JSON), run_id,
                    messages (as JSON; empty if there are none), columns, source, problem, why
Of the group:       group_schema, worker, engine, weight_format, started_s, finished_s
Of the trajectory:  index, response_ids, behavior_logprobs, loss_mask, spans, finish_reason, reward,
                    reward_parts, reward_notes, routes (raw little-endian bytes, empty where there are none),
                    routes_shape ([N, L, K]; [] where there are none), valid, failure (the cause; empty where
                    the reward did not fail), teacher_logprobs (empty without a teacher), sampling_mask (a
                    list of ids for each token; empty where all could be drawn)
Of an agent's:      branches and turn_rewards, lists of structs; left out while no episode of the run has either

The names are those of areal_q.messages, which gives their units and shapes. After the first release a column
that is added needs a default for the files that lack it, and a higher _SCHEMA_VERSION.
"""

import math
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from areal_q.config import Sampling
from areal_q.decode_errors import in_words
from areal_q.errors import RecordError
from areal_q.messages import Array, Branch, Group, Ticket, Trajectory, TurnReward, VersionSpan
from areal_q.messages.tokens import NOTHING, mask_array, mask_rows, padded, unpadded
from buffer.logs.parquet_log import LogFormat

_SCHEMA_VERSION = 1
_TOKEN_FIELDS = ("response_ids", "behavior_logprobs", "loss_mask")
_METADATA_KEY = b"areal-q-log-schema"

_SAMPLING = pa.struct(
    [
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int64()),
        ("max_tokens", pa.int64()),
        ("min_p", pa.float64()),
    ]
)
_SPANS = pa.list_(
    pa.struct([("version", pa.int64()), ("tokens", pa.int64()), ("digest", pa.string())])
)
TRAJECTORY_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("version", pa.int64()),
        ("place", pa.int32()),
        ("ticket_schema", pa.int32()),
        ("run", pa.string()),
        ("number", pa.int64()),
        ("purpose", pa.string()),
        ("admitted", pa.int64()),
        ("prompt", pa.string()),
        ("answer", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("group_size", pa.int64()),
        ("seed", pa.int64()),
        ("sampling", _SAMPLING),
        ("group_schema", pa.int32()),
        ("worker", pa.string()),
        ("engine", pa.string()),
        ("weight_format", pa.string()),
        ("started_s", pa.float64()),
        ("finished_s", pa.float64()),
        ("index", pa.int64()),
        ("response_ids", pa.list_(pa.int32())),
        ("behavior_logprobs", pa.list_(pa.float32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("spans", _SPANS),
        ("finish_reason", pa.string()),
        ("reward", pa.float64()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        ("routes", pa.binary()),
        ("routes_shape", pa.list_(pa.int32())),
        ("stop", pa.string()),
        ("valid", pa.bool_()),
        ("failure", pa.string()),
        ("run_id", pa.string()),
        ("messages", pa.string()),
        ("columns", pa.string()),
        ("reward_notes", pa.map_(pa.string(), pa.string())),
        ("source", pa.string()),
        ("problem", pa.int64()),
        ("why", pa.string()),
        ("teacher_logprobs", pa.list_(pa.float32())),
        ("sampling_mask", pa.list_(pa.large_list(pa.int32()))),
    ],
    metadata={_METADATA_KEY: str(_SCHEMA_VERSION)},
)
_TURN_REWARDS = pa.list_(pa.struct([("token", pa.int32()), ("reward", pa.float64())]))
_BRANCHES = pa.list_(
    pa.struct(
        [
            ("parent", pa.int32()),
            ("at", pa.int32()),
            *map(TRAJECTORY_SCHEMA.field, (*_TOKEN_FIELDS, "spans", "finish_reason")),
            TRAJECTORY_SCHEMA.field("teacher_logprobs"),
            ("turn_rewards", _TURN_REWARDS),
            *map(TRAJECTORY_SCHEMA.field, ("routes", "routes_shape", "sampling_mask")),
        ]
    )
)
"""What a branch has as its trajectory has it is of the same type."""
EPISODE_SCHEMA = pa.schema(
    [*TRAJECTORY_SCHEMA, ("branches", _BRANCHES), ("turn_rewards", _TURN_REWARDS)],
    metadata={_METADATA_KEY: str(_SCHEMA_VERSION)},
)
TRAJECTORY_LOG_FORMAT = LogFormat(
    EPISODE_SCHEMA,
    _METADATA_KEY,
    _SCHEMA_VERSION,
    optional=frozenset(EPISODE_SCHEMA.names) - frozenset(TRAJECTORY_SCHEMA.names),
)

_TICKET_FIELDS = (
    *("run", "run_id", "number", "purpose", "prompt", "answer", "group_size", "seed"),
    *("source", "problem", "why"),
)
_GROUP_FIELDS = ("worker", "engine", "weight_format", "started_s", "finished_s")
_TRAJECTORY_FIELDS = ("index", "finish_reason", "reward", "valid")


def groups_to_table(
    step: int, version: int, groups: Sequence[Group], episodes: bool = False
) -> pa.Table:
    """Returns the rows of one step's groups, in order, with the columns of agents' episodes if `episodes` or
    one of them has anything there. The groups must be valid (Group.validate)."""
    rows = [(place, g, t) for place, g in enumerate(groups) for t in g.trajectories]
    tickets = [g.ticket for _, g, _ in rows]
    columns: dict[str, Any] = {
        "step": [step] * len(rows),
        "version": [version] * len(rows),
        "place": [place for place, _, _ in rows],
        "ticket_schema": [t.schema for t in tickets],
        "admitted": [t.step for t in tickets],
        "prompt_ids": _lists([t.prompt_ids for t in tickets]),
        "sampling": [msgspec.to_builtins(t.sampling) for t in tickets],
        "stop": [msgspec.json.encode(t.sampling.stop).decode() for t in tickets],
        "messages": [
            msgspec.json.encode(t.messages).decode() if t.messages else "" for t in tickets
        ],
        "columns": [t.columns for t in tickets],
        "group_schema": [g.schema for _, g, _ in rows],
        "spans": [msgspec.to_builtins(t.spans) for _, _, t in rows],
        "reward_parts": [list(t.reward_parts.items()) for _, _, t in rows],
        "reward_notes": [list(t.reward_notes.items()) for _, _, t in rows],
        "failure": [t.failure or "" for _, _, t in rows],
        "routes": [bytes(t.routes.data) if t.routes else b"" for _, _, t in rows],
        "routes_shape": [list(t.routes.shape) if t.routes else [] for _, _, t in rows],
        "teacher_logprobs": [_numbers(t.teacher_logprobs) for _, _, t in rows],
        "sampling_mask": _mask_column([t.sampling_mask for _, _, t in rows]),
    }
    columns |= {name: [getattr(t, name) for t in tickets] for name in _TICKET_FIELDS}
    columns |= {name: [getattr(g, name) for _, g, _ in rows] for name in _GROUP_FIELDS}
    columns |= {name: [getattr(t, name) for _, _, t in rows] for name in _TRAJECTORY_FIELDS}
    columns |= {name: _lists([getattr(t, name) for _, _, t in rows]) for name in _TOKEN_FIELDS}
    schema = TRAJECTORY_SCHEMA
    if episodes or has_episodes(groups):
        schema = EPISODE_SCHEMA
        columns["branches"] = [[_branch_row(b) for b in t.branches] for _, _, t in rows]
        columns["turn_rewards"] = [_turn_rewards_row(t.turn_rewards) for _, _, t in rows]
    return pa.Table.from_arrays([_column(columns[f.name], f) for f in schema], schema=schema)


def has_episodes(groups: Sequence[Group]) -> bool:
    """Returns True if any response has what only episodes have: branches, or rewards of turns."""
    return any(t.branches or t.turn_rewards for group in groups for t in group.trajectories)


def groups_from_table(table: pa.Table, validate: bool = True) -> list[Group]:
    """Returns the groups of one step's rows. Raises RecordError for rows that do not make a valid group;
    without `validate`, only for rows that cannot be decoded."""
    arrays: dict[str, Sequence[Array | None]] = {
        name: _arrays(table.column(name).combine_chunks())
        for name in ("prompt_ids", *_TOKEN_FIELDS)
    }
    arrays |= {"sampling_mask": _masks(table.column("sampling_mask").combine_chunks())}
    rows = table.drop_columns(list(arrays)).to_pylist()
    for i, row in enumerate(rows):
        row.update({name: values[i] for name, values in arrays.items()})
    by_place = groupby(rows, key=lambda row: row["place"])
    groups = [_group(list(members)) for _, members in by_place]
    return [group.validate() for group in groups] if validate else groups


def _group(rows: list[dict[str, Any]]) -> Group:
    first = rows[0]
    ticket = Ticket(
        schema=first["ticket_schema"],
        step=first["admitted"],
        sampling=_sampling(first),
        prompt_ids=first["prompt_ids"],
        messages=_messages(first),
        columns=first["columns"],
        **{name: first[name] for name in _TICKET_FIELDS},
    )
    return Group(
        schema=first["group_schema"],
        ticket=ticket,
        trajectories=[_trajectory(row) for row in rows],
        **{name: first[name] for name in _GROUP_FIELDS},
    )


def _sampling(row: dict[str, Any]) -> Sampling:
    try:
        stop = msgspec.json.decode(row["stop"])
        return msgspec.convert({**row["sampling"], "stop": stop}, Sampling)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise RecordError(
            f"sampling settings of ticket {row['number']}: {in_words(error)}"
        ) from error


def _messages(row: dict[str, Any]) -> tuple[dict[str, str], ...]:
    try:
        return msgspec.json.decode(row["messages"] or "[]", type=tuple[dict[str, str], ...])
    except msgspec.DecodeError as error:
        raise RecordError(f"messages of ticket {row['number']}: {in_words(error)}") from error


def _trajectory(row: dict[str, Any]) -> Trajectory:
    given = row["teacher_logprobs"]
    return Trajectory(
        spans=[VersionSpan(**span) for span in row["spans"]],
        reward_parts=dict(row["reward_parts"]),
        reward_notes=dict(row["reward_notes"]),
        routes=_routes(row),
        failure=row["failure"] or None,
        teacher_logprobs=Array.of(given, "float32") if given else None,
        sampling_mask=row["sampling_mask"],
        branches=tuple(_branch(branch) for branch in row.get("branches", ())),
        turn_rewards=_turn_rewards(row.get("turn_rewards", ())),
        **{name: row[name] for name in (*_TRAJECTORY_FIELDS, *_TOKEN_FIELDS)},
    )


def _branch_row(branch: Branch) -> dict[str, Any]:
    return {
        "parent": branch.parent,
        "at": branch.at,
        "spans": msgspec.to_builtins(branch.spans),
        "finish_reason": branch.finish_reason,
        "teacher_logprobs": _numbers(branch.teacher_logprobs),
        "turn_rewards": _turn_rewards_row(branch.turn_rewards),
        "routes": bytes(branch.routes.data) if branch.routes else b"",
        "routes_shape": list(branch.routes.shape) if branch.routes else [],
        "sampling_mask": _mask_row(branch),
        **{name: getattr(branch, name).numpy() for name in _TOKEN_FIELDS},
    }


def _branch(row: dict[str, Any]) -> Branch:
    given = row["teacher_logprobs"]
    try:
        return Branch(
            parent=row["parent"],
            at=row["at"],
            response_ids=Array.of(row["response_ids"], "int32"),
            behavior_logprobs=Array.of(row["behavior_logprobs"], "float32"),
            loss_mask=Array.of(row["loss_mask"], "uint8"),
            spans=[VersionSpan(**span) for span in row["spans"]],
            finish_reason=row["finish_reason"],
            teacher_logprobs=Array.of(given, "float32") if given else None,
            turn_rewards=_turn_rewards(row["turn_rewards"]),
            routes=_routes(row),
            sampling_mask=_sampling_mask(row),
        )
    except (TypeError, ValueError) as error:
        raise RecordError(f"a branch lacks values: {error}") from error


def _turn_rewards_row(found: Sequence[TurnReward]) -> list[dict[str, Any]]:
    return [msgspec.structs.asdict(one) for one in found]


def _turn_rewards(rows: Sequence[dict[str, Any]]) -> tuple[TurnReward, ...]:
    if any(None in row.values() for row in rows):
        raise RecordError("a turn's reward lacks values")
    return tuple(TurnReward(**row) for row in rows)


def _mask_row(branch: Branch) -> list[np.ndarray]:
    mask = branch.sampling_mask
    return [] if mask is None else mask_rows(mask, branch.response_ids.shape[0])


def _mask_column(masks: Sequence[Array | None]) -> pa.ListArray:
    """Returns a list of ids for each token of each row; no list for a row without a mask."""
    told = [unpadded(mask) for mask in masks if mask]
    lengths, ids = (
        np.concatenate([NOTHING, *parts]) for parts in zip(*told, ([], []), strict=True)
    )
    tokens = [mask.shape[0] if mask else 0 for mask in masks]
    ends, places = np.cumsum([0, *tokens], dtype=np.int32), np.cumsum([0, *lengths])
    inner = pa.LargeListArray.from_arrays(pa.array(places), pa.array(ids, pa.int32()))
    return pa.ListArray.from_arrays(pa.array(ends), inner)


def _masks(lists: pa.ListArray) -> list[Array | None]:
    """Returns what `_mask_column` was given."""
    places, ids = lists.values.offsets.to_numpy(), lists.values.values.to_numpy()
    return [
        padded(np.diff(places[a : b + 1]), ids[places[a] : places[b]])
        if places[b] > places[a]
        else None
        for a, b in pairwise(lists.offsets.to_numpy())
    ]


def _sampling_mask(row: dict[str, Any]) -> Array | None:
    told = row["sampling_mask"]
    return mask_array([np.array(ids, np.int32) if ids else NOTHING for ids in told])


def _routes(row: dict[str, Any]) -> Array | None:
    """Returns the experts that tokens were sent to; None if there are none."""
    shape = tuple(row["routes_shape"])
    if not shape:
        return None
    wide = len(row["routes"]) == 2 * math.prod(shape)
    return Array("uint16" if wide else "uint8", shape, row["routes"])


def _column(values: Any, field: pa.Field) -> pa.Array:
    return values if isinstance(values, pa.Array) else pa.array(values, type=field.type)


def _numbers(array: Array | None) -> np.ndarray | tuple[()]:
    return () if array is None else array.numpy()


def _lists(arrays: list[Array]) -> pa.ListArray:
    offsets = np.cumsum([0, *(array.shape[0] for array in arrays)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(Array.concatenate(arrays)))


def _arrays(lists: pa.ListArray) -> list[Array]:
    offsets = lists.offsets.to_numpy()
    values = lists.values.to_numpy()
    return [Array.of(values[a:b]) for a, b in pairwise(offsets)]
