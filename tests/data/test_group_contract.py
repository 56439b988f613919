"""A group that breaks its contract is refused with the place that does; its arrays are never copied."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from areal_q.errors import RecordError
from areal_q.messages import (
    Array,
    Group,
    VersionSpan,
    decode_group,
    encode,
    encode_group,
    trajectories,
)

DEFECTS: dict[str, tuple[dict[str, Any], str]] = {
    "a NaN": ({"behavior_logprobs": Array.of([-1.0, np.nan, -1.0], "float32")}, "token 1: .* nan"),
    "minus infinity": (
        {"behavior_logprobs": Array.of([-1.0, -1.0, -np.inf], "float32")},
        "token 2: .* -inf",
    ),
    "a positive log-prob": (
        {"behavior_logprobs": Array.of([0.002, 0.0, -1.0], "float32")},
        "token 0: .* 0.002",
    ),
    "too few log-probs": (
        {"behavior_logprobs": Array.of([-1.0, -1.0], "float32")},
        "is not float32",
    ),
    "log-probs of another type": (
        {"behavior_logprobs": Array.of([-1.0, -1.0, -1.0], "float16")},
        "is not float32",
    ),
    "a shape that the bytes do not fill": (
        {"behavior_logprobs": Array("float32", (3,), b"\0" * 11)},
        "array of 11 bytes",
    ),
    "tokens of another type": ({"response_ids": Array.of([1, 2, 3], "int64")}, "is not int32"),
    "a negative token": ({"response_ids": Array.of([1, -2, 3], "int32")}, "negative token id"),
    "no tokens": (
        {
            "response_ids": Array.of([], "int32"),
            "behavior_logprobs": Array.of([], "float32"),
            "loss_mask": Array.of([], "uint8"),
            "spans": [],
        },
        "empty response",
    ),
    "two dimensions": ({"response_ids": Array.of([[1, 2, 3]], "int32")}, "is not int32"),
    "a mask too long": ({"loss_mask": Array.of([1, 1, 1, 1], "uint8")}, "loss_mask is not"),
    "a negative size": ({"loss_mask": Array("uint8", (-3,), b"")}, "cannot be uint8"),
    "spans too short": ({"spans": [VersionSpan(0, 2, "a")]}, "cover 2 of 3"),
    "a span of no tokens": (
        {"spans": [VersionSpan(0, 3, "a"), VersionSpan(1, 0, "b")]},
        "cover 3 of 3",
    ),
    "no spans": ({"spans": []}, "cover 0 of 3"),
    "a failure without a cause": ({"valid": False}, "no cause"),
    "an infinite reward": ({"reward": float("inf")}, "reward is inf"),
    "a reward that is no number": ({"reward": float("nan")}, "reward is nan"),
}


def spoilt(group: Group, changes: dict[str, Any]) -> Group:
    first, second = group.trajectories
    return replace(group, trajectories=[first, replace(second, **changes)])


@pytest.mark.parametrize("defect", DEFECTS)
@pytest.mark.parametrize("together", ["all", "each column", "nothing"])
def test_a_defect_is_named_with_its_response(
    make_group: Callable[..., Group],
    monkeypatch: pytest.MonkeyPatch,
    defect: str,
    together: str,
) -> None:
    """Checked all together, as long responses are, and, as the oracle, one after the other."""
    if together == "each column":
        monkeypatch.setattr(trajectories, "CHECKED_TOKENS", 1)
    if together == "nothing":
        monkeypatch.setattr(trajectories, "_are_valid", lambda _: False)
    changes, message = DEFECTS[defect]
    with pytest.raises(RecordError, match=message) as raised:
        spoilt(make_group(), changes).validate()
    assert "array of" in str(raised.value) or "trajectory 1" in str(raised.value)


@pytest.mark.parametrize("together", [True, False])
def test_a_log_prob_may_round_above_zero(
    make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    if not together:
        monkeypatch.setattr(trajectories, "_are_valid", lambda _: False)
    rounded = Array.of([9e-4, -1.0, 0.0], "float32")
    group = spoilt(make_group(), {"behavior_logprobs": rounded})
    assert group.validate() is group


def test_decoded_arrays_are_views_of_the_record(make_group: Callable[..., Group]) -> None:
    group = make_group()
    record = encode(group)
    decoded = decode_group(record)
    assert decoded == group and encode(decoded) == record
    memory = np.frombuffer(record, np.uint8)
    for t in decoded.trajectories:
        for array in (t.response_ids, t.behavior_logprobs, t.loss_mask):
            assert np.shares_memory(memory, array.numpy())
            assert not array.numpy().flags.writeable


@pytest.mark.parametrize("nbytes", [2, 8191, 8192, 65535, 65536])
@pytest.mark.parametrize("column", ["response_ids", "loss_mask", "routes"])
def test_parts_of_a_group_are_the_bytes_of_its_record(
    make_group: Callable[..., Group], column: str, nbytes: int
) -> None:
    """Whichever array is long, and on either side of the lengths at which msgpack's header changes."""
    array = Array("uint8", (nbytes,), np.random.default_rng(nbytes).bytes(nbytes))
    group = spoilt(make_group(), {column: array})
    parts = encode_group(group)
    assert b"".join(parts) == encode(group)
    if len(parts) > 1:
        assert any(part is array.data for part in parts) == (nbytes >= 8192)


def test_long_arrays_of_a_group_are_not_copied(make_group: Callable[..., Group]) -> None:
    record = encode(spoilt(make_group(), {"response_ids": Array.of(np.arange(5000), "int32")}))
    parts = encode_group(decode_group(record))
    assert b"".join(parts) == record
    shared = [
        p for p in parts if np.shares_memory(np.frombuffer(p, "u1"), np.frombuffer(record, "u1"))
    ]
    assert [len(part) for part in shared] == [20_000]
