"""Branches of an episode: their contract, their paths, and their way through the wire and the log."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers.strategies import groups
from hypothesis import given, settings
from msgspec.structs import replace

from areal_q.errors import RecordError
from areal_q.messages import (
    Array,
    Branch,
    Group,
    Trajectory,
    VersionSpan,
    branches,
    decode_group,
    encode,
    encode_group,
    parts,
)
from buffer.admin.tables import group_facts
from buffer.logs.trajectory_log import TrajectoryLog, iter_log
from buffer.logs.trajectory_schema import groups_from_table, groups_to_table, has_episodes

MakeGroup = Callable[..., Group]


def a_branch(ids: list[int], **changes: Any) -> Branch:
    """A branch of the tokens `ids`, all drawn after the first token of the prompt, with `changes`."""
    sound = Branch(
        parent=0,
        at=1,
        response_ids=Array.of(ids, "int32"),
        behavior_logprobs=Array.of([-1.0] * len(ids), "float32"),
        loss_mask=Array.of([1] * len(ids), "uint8"),
        spans=[VersionSpan(0, len(ids), "a0")],
        finish_reason="stop",
    )
    return replace(sound, **changes)


def branched(group: Group, *found: Branch) -> Group:
    first, second = group.trajectories
    return replace(group, trajectories=[first, replace(second, branches=found)])


SOUND = a_branch([7, 8])
DEFECTS: dict[str, tuple[tuple[Branch, ...], str]] = {
    "its own child": ((replace(SOUND, parent=1),), "branch 1: hangs off path 1"),
    "a later one's child": ((SOUND, replace(SOUND, parent=2)), "branch 2: hangs off path 2"),
    "too many shared": ((replace(SOUND, at=1000),), "branch 1: shares 1000 tokens of path 0"),
    "more than the parent has": (
        (SOUND, replace(SOUND, parent=1, at=4)),
        "branch 2: shares 4 tokens of path 1, which has 3",
    ),
    "nothing drawn": ((replace(SOUND, loss_mask=Array.of([0, 0], "uint8")),), "none .* drawn"),
    "no tokens": ((a_branch([]),), "branch 1: empty response"),
    "a negative token": ((a_branch([3, -1]),), "branch 1: negative token id"),
    "a NaN": (
        (replace(SOUND, behavior_logprobs=Array.of([-1, np.nan], "float32")),),
        "branch 1, token 1: .* nan",
    ),
    "spans too short": ((replace(SOUND, spans=[VersionSpan(0, 1, "a")]),), "cover 1 of 2"),
    "more than the budget": ((SOUND, a_branch([5] * 10_000)), "drawn on all paths, more than"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_named_with_its_branch(make_group: MakeGroup, defect: str) -> None:
    found, message = DEFECTS[defect]
    with pytest.raises(RecordError, match=f"trajectory 1.*{message}"):
        branched(make_group(), *found).validate()


def test_there_are_only_so_many_branches(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branches, "MOST_BRANCHES", 2)
    assert branched(make_group(), SOUND, SOUND).validate()
    with pytest.raises(RecordError, match="trajectory 1: 3 branches, more than 2"):
        branched(make_group(), SOUND, SOUND, SOUND).validate()


@pytest.mark.parametrize("field", [{"parent": -1}, {"at": 0}, {"at": 2**31}, {"parent": 1 << 20}])
def test_numbers_out_of_bounds_are_refused_at_the_wire(
    make_group: MakeGroup, field: dict[str, int]
) -> None:
    with pytest.raises(RecordError, match="record refused"):
        decode_group(encode(branched(make_group(), replace(SOUND, **field))))


def path(prompt: list[int], t: Trajectory, number: int) -> list[int]:
    """The tokens of a path, found by going up to the root."""
    if not number:
        return prompt + t.response_ids.numpy().tolist()
    branch = t.branches[number - 1]
    return path(prompt, t, branch.parent)[: branch.at] + branch.response_ids.numpy().tolist()


@settings(max_examples=60, deadline=None)
@given(groups(branches=True))
def test_parts_are_the_paths_and_hold_each_token_once(group: Group) -> None:
    assert group.validate() is group
    prompt = group.ticket.prompt_ids.numpy()
    for t in group.trajectories:
        found = list(parts(prompt, t))
        assert found[0][1] is t and len(found) == 1 + len(t.branches)
        for number, (before, own) in enumerate(found):
            whole = [*before.tolist(), *own.response_ids.numpy().tolist()]
            assert whole == path(prompt.tolist(), t, number)
            assert (own.index, own.reward) == (t.index, t.reward)
        assert sum(own.num_tokens for _, own in found) == t.all_tokens
        assert [s for _, own in found for s in own.spans] == t.all_spans


@settings(max_examples=60, deadline=None)
@given(groups(branches=True))
def test_branches_survive_the_wire_and_the_log(group: Group) -> None:
    assert decode_group(encode(group)) == group
    assert b"".join(encode_group(group)) == encode(group)
    table = groups_to_table(5, 7, [group])
    for column in ("branches", "turn_rewards"):
        assert (column in table.column_names) == has_episodes([group])
    assert groups_from_table(table) == [group]


def test_peek_shows_branches(make_group: MakeGroup) -> None:
    told = group_facts(branched(make_group(), SOUND))["trajectories"]
    assert "branches" not in told[0]
    assert told[1]["branches"][0]["response_ids"] == [7, 8]


def test_a_log_without_branches_is_as_it_was(tmp_path, make_group: MakeGroup) -> None:
    """The part before the first branch has the bytes that a log without one has."""
    plain, tree = make_group(), branched(make_group(), SOUND)
    with_tree, without = TrajectoryLog(tmp_path / "tree"), TrajectoryLog(tmp_path / "plain")
    without.append(0, 0, [plain])
    for step, group in enumerate([plain, tree, plain]):
        with_tree.append(step, step, [group])
    without.close()
    with_tree.close()
    first, later = sorted((tmp_path / "tree").iterdir())
    (only,) = (tmp_path / "plain").iterdir()
    assert first.read_bytes() == only.read_bytes()
    assert ["branches" in pq.read_schema(p).names for p in (first, later)] == [False, True]
    assert list(iter_log(tmp_path / "tree")) == [(0, [plain]), (1, [tree]), (2, [plain])]
