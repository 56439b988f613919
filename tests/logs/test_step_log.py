"""The step log: lossless, one history, never torn."""

import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_q.errors import RecordError
from buffer.logs.step_log import StepLog, StepRecord, iter_steps

NUMBERS = st.lists(st.integers(0, 2**63 - 1), max_size=4)
records = st.builds(
    StepRecord,
    step=st.integers(0, 2**40),
    tickets=NUMBERS,
    seeds=NUMBERS,
    base_digest=st.text(max_size=5),
    digest=st.text(max_size=5),
    fork=st.integers(0, 9),
    settings=st.text(max_size=5),
    machine=st.text(max_size=5),
    metrics=st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=4),
)


def record(step: int, **fields) -> StepRecord:
    defaults = {
        "step": step, "tickets": [step], "seeds": [7], "base_digest": "a", "digest": "b", "fork": 0,
        "settings": "s", "machine": "m", "metrics": {"train/loss": 0.1},
    }  # fmt: skip
    return StepRecord(**(defaults | fields))


def written(directory: Path, steps: list[StepRecord], resume_at: int = 0) -> None:
    log = StepLog(directory, resume_at)
    for one in steps:
        log.append(one)
    log.close()


@settings(max_examples=40, deadline=None)
@given(records)
def test_a_record_comes_back_with_every_bit(tmp_path_factory, one):
    directory = tmp_path_factory.mktemp("steps")
    written(directory, [one])
    assert list(iter_steps(directory)) == [one]


def test_numbers_that_are_none_are_kept(tmp_path):
    written(tmp_path, [record(0, metrics={"x": math.nan, "y": math.inf})])
    [one] = iter_steps(tmp_path)
    assert math.isnan(one.metrics["x"]) and one.metrics["y"] == math.inf


@pytest.mark.parametrize("resume_at", range(6))
def test_a_resume_drops_the_abandoned_steps(tmp_path, resume_at):
    written(tmp_path, [record(step) for step in range(5)])
    written(tmp_path, [record(step, fork=9) for step in range(resume_at, 7)], resume_at)
    found = [(one.step, one.fork) for one in iter_steps(tmp_path)]
    kept = min(resume_at, 5)
    assert found == [(s, 0) for s in range(kept)] + [(s, 9) for s in range(resume_at, 7)]


def test_a_window_is_half_open(tmp_path):
    written(tmp_path, [record(step) for step in range(5)])
    assert [one.step for one in iter_steps(tmp_path, 1, 4)] == [1, 2, 3]


def test_somebody_elses_parquet_is_refused(tmp_path):
    written(tmp_path, [record(0)])
    [part] = tmp_path.glob("*.parquet")
    pq.write_table(pq.read_table(part).replace_schema_metadata(None), part)
    with pytest.raises(RecordError, match="log schema"):
        list(iter_steps(tmp_path))
