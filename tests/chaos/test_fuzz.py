"""Decoders refuse, and do nothing else: the short form of `make fuzz`, and what it has found."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_q import messages
from areal_q.errors import CheckpointError, RecordError
from areal_q.messages import Array
from areal_q.models.hf.weight_files import load_config
from areal_q.observability.metrics_log import read_metrics
from bench.fuzz import Target, fuzz, fuzz_apart, targets
from buffer.logs.step_log import StepLog, iter_steps

DECODERS: list[Callable[[bytes], object]] = [
    messages.decode_ticket,
    lambda data: messages.decode_group(data).validate(),
    messages.decode_broadcast,
    messages.decode_manifest,
    messages.decode_request,
    messages.decode_reply,
    messages.decode_status,
]


@pytest.mark.timeout(60)
def test_every_decoder_takes_or_refuses_mutated_inputs(tmp_path: Path):
    for target in targets(tmp_path):
        if not target.apart:
            counted, found = fuzz(target, round(600 * target.share), seed=1)
            assert found == []
            assert counted.inputs > counted.taken


@given(st.binary(max_size=200))
def test_messages_take_or_refuse_any_bytes(data: bytes):
    for decode in DECODERS:
        try:
            decode(data)
        except RecordError:
            continue


def test_a_decoder_that_fails_otherwise_is_found():
    def decode(data: bytes) -> None:
        if data[:1] != b"a":
            raise KeyError("first")
        raise RecordError("refused")

    counted, found = fuzz(Target("x", decode, [b"abc"], (RecordError,)), 1000, seed=0)
    assert (len(found), counted.taken) == (5, 0)
    assert found[0].startswith("x: KeyError: 'first'")


def test_a_library_that_ends_the_process_is_counted():
    import os

    target = Target("x", lambda data: os._exit(3), [b"abc"], (), apart=True)
    counted, found = fuzz_apart(target, 100, seed=0)
    assert (counted.aborts, counted.inputs, found) == (2, 100, [])


def test_a_group_whose_response_has_no_dimension_is_refused(make_group):
    """It once ended the learner, again at each start, since a group stays in Redis until it is trimmed."""
    group = make_group()
    scalar = Array("int32", (), b"\0\0\0\0")
    bad = msgspec.structs.replace(group.trajectories[0], response_ids=scalar)
    broken = msgspec.structs.replace(group, trajectories=[bad, *group.trajectories[1:]])
    with pytest.raises(RecordError, match="response_ids is not int32"):
        broken.validate()


def test_claimed_number_of_responses_costs_no_memory(make_group, make_ticket):
    """It once took all memory that there was."""
    group = make_group()
    ticket = msgspec.structs.replace(group.ticket, group_size=2**60)
    with pytest.raises(RecordError, match="has not the"):
        msgspec.structs.replace(group, ticket=ticket).validate()


def test_metrics_that_are_not_utf_8_are_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind":"st\x80ep"}\n')
    with pytest.raises(RecordError, match="line 1"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_a_number_that_is_none_in_config_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3", "vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1,'
        '"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8,'
        '"max_position_embeddings": 16, "rope_theta": "int8", "rms_norm_eps": 1e-6}'
    )
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_config(tmp_path)


@pytest.mark.parametrize("at", [-12, -40, -200, -800])
def test_a_log_with_a_damaged_footer_is_refused(at):
    with tempfile.TemporaryDirectory() as place:
        StepLog(place).close()
        path = Path(place) / "part-000000.parquet"
        path.write_bytes(b"PAR1" + bytes(900) + b"\x40\0\0\0PAR1"[:8])
        data = bytearray(path.read_bytes())
        data[at] ^= 255
        path.write_bytes(data)
        with pytest.raises(RecordError, match="part-000000"):
            list(iter_steps(place))
