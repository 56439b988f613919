"""The trajectory log: lossless, never torn, one history."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.strategies import groups
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_q.errors import LogError, RecordError
from areal_q.messages import encode
from buffer.logs import parquet_log
from buffer.logs import trajectory_log as log_module
from buffer.logs.step_log import StepLog, iter_steps
from buffer.logs.trajectory_log import TrajectoryLog, iter_log
from buffer.logs.trajectory_schema import TRAJECTORY_SCHEMA, groups_from_table, groups_to_table


@settings(max_examples=60, deadline=None)
@given(st.lists(groups(), min_size=1, max_size=3))
def test_groups_become_rows_and_groups_again_without_loss(batch):
    table = groups_to_table(5, 7, batch)
    assert table.schema.equals(TRAJECTORY_SCHEMA)
    assert table.num_rows == sum(len(g.trajectories) for g in batch)
    assert set(table["step"].to_pylist()) == {5} and set(table["version"].to_pylist()) == {7}
    assert groups_from_table(table) == batch


def test_the_log_reads_back_what_was_appended(tmp_path, make_ticket, make_group):
    batches = [[make_group(make_ticket(10 * s + n)) for n in range(3)] for s in range(4)]
    log = TrajectoryLog(tmp_path / "log")
    for step, batch in enumerate(batches):
        log.append(step, step, batch)
        if step == 1:
            log.flush()
    log.close()
    assert list(iter_log(tmp_path / "log")) == list(enumerate(batches))
    assert list(iter_log(tmp_path / "log", 1, 3)) == [(1, batches[1]), (2, batches[2])]


def test_log_probs_keep_every_bit_and_columns_their_types(tmp_path, make_group):
    group = make_group()
    log = TrajectoryLog(tmp_path)
    log.append(0, 0, [group])
    log.close()
    [path] = tmp_path.glob("*.parquet")
    table = pq.read_table(path)
    assert table.schema.field("behavior_logprobs").type == pa.list_(pa.float32())
    assert table.schema.field("response_ids").type == pa.list_(pa.int32())
    assert table.schema.metadata[b"areal-q-log-schema"] == b"1"
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"
    values = np.float32(table["behavior_logprobs"][1].as_py())
    assert values.tobytes() == group.trajectories[1].behavior_logprobs.data


def test_flushed_steps_outlive_a_killed_process(tmp_path, make_group):
    script = """
import sys, time
from areal_q.messages import decode_group
from buffer.logs.trajectory_log import TrajectoryLog
group = decode_group(open(sys.argv[2], "rb").read())
log = TrajectoryLog(sys.argv[1])
log.append(0, 0, [group]); log.flush(); log.append(1, 1, [group])
log._reap(0)
print("written", flush=True); time.sleep(60)
"""
    (tmp_path / "group").write_bytes(encode(make_group()))
    command = [sys.executable, "-c", script, str(tmp_path / "log"), str(tmp_path / "group")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"
        os.kill(child.pid, signal.SIGKILL)
    assert list(iter_log(tmp_path / "log")) == [(0, [make_group()])]
    log = TrajectoryLog(tmp_path / "log", resume_at=1)
    assert not list((tmp_path / "log").glob(".*"))
    log.append(1, 1, [make_group()])
    log.close()
    assert [step for step, _ in iter_log(tmp_path / "log")] == [0, 1]


@pytest.mark.parametrize("resume_at", range(8))
def test_reopening_at_a_step_drops_the_abandoned_steps(
    tmp_path, make_ticket, make_group, monkeypatch, resume_at
):
    monkeypatch.setattr(parquet_log, "PART_STEPS", 3)
    log = TrajectoryLog(tmp_path)
    for step in range(7):
        log.append(step, step, [make_group(make_ticket(step))])
    log.close()
    assert len(list(tmp_path.iterdir())) == 3
    log = TrajectoryLog(tmp_path, resume_at)
    for step in range(resume_at, 9):
        log.append(step, step, [make_group(make_ticket(100 + step))])
    log.close()
    numbers = [(step, g.ticket.number) for step, batch in iter_log(tmp_path) for g in batch]
    kept = [(s, s) for s in range(min(resume_at, 7))]
    assert numbers == kept + [(s, 100 + s) for s in range(resume_at, 9)]


@pytest.mark.parametrize("writer", ["goes on", "was killed"])
def test_a_live_log_opens_as_a_directory_of_parquet(tmp_path, make_group, writer):
    """As `pandas.read_parquet` opens it. An unfinished part once stood in the way: "magic bytes not found"."""
    script = """
import os, pathlib, sys, time
from areal_q.messages import decode_group
from buffer.logs.trajectory_log import TrajectoryLog
group = decode_group(pathlib.Path(sys.argv[2]).read_bytes())
log = TrajectoryLog(sys.argv[1])
for step in range(3):
    log.append(step, step, [group])
    if step == 0:
        log.flush()
while not any(path.name.endswith(".tmp") for path in pathlib.Path(sys.argv[1]).iterdir()):
    time.sleep(0.01)
print("writes", flush=True)
time.sleep(1e6)
"""
    (tmp_path / "group").write_bytes(encode(make_group()))
    command = [sys.executable, "-c", script, str(tmp_path / "log"), str(tmp_path / "group")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout and child.stdout.readline() == "writes\n"
        if writer == "was killed":
            child.kill()
            child.wait()
        assert len(list((tmp_path / "log").iterdir())) == 2
        assert set(pq.read_table(tmp_path / "log")["step"].to_pylist()) == {0}
        child.kill()
    TrajectoryLog(tmp_path / "log", resume_at=1).close()
    assert [path.name for path in (tmp_path / "log").iterdir()] == ["part-000000.parquet"]


def test_parts_beyond_a_million_stay_in_order(tmp_path, make_ticket, make_group, monkeypatch):
    monkeypatch.setattr(parquet_log, "PART_STEPS", 1)
    log = TrajectoryLog(tmp_path)
    log.append(0, 0, [make_group(make_ticket(0))])
    log.close()
    (tmp_path / "part-000000.parquet").rename(tmp_path / "part-999999.parquet")
    for step in (1, 2):
        log = TrajectoryLog(tmp_path, resume_at=step)
        log.append(step, step, [make_group(make_ticket(step))])
        log.close()
    assert [step for step, _ in iter_log(tmp_path)] == [0, 1, 2]


def test_append_waits_only_once_the_writers_queue_is_full(tmp_path, make_group, monkeypatch):
    gate, writing = threading.Event(), threading.Event()

    def slow(*args):
        writing.set()
        gate.wait()
        return groups_to_table(*args)

    monkeypatch.setattr(log_module, "groups_to_table", slow)
    log = TrajectoryLog(tmp_path)
    for step in range(parquet_log.QUEUE_STEPS):
        log.append(step, step, [make_group()])
    fifth = threading.Thread(target=log.append, args=(9, 9, [make_group()]))
    fifth.start()
    writing.wait()
    fifth.join(0.1)
    assert fifth.is_alive()  # back-pressure
    gate.set()
    fifth.join()
    log.close()
    assert len(list(iter_log(tmp_path))) == parquet_log.QUEUE_STEPS + 1


def test_an_error_of_the_writer_reaches_the_learner(tmp_path, make_group, monkeypatch):
    log = TrajectoryLog(tmp_path)

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(log_module, "groups_to_table", full)
    with pytest.raises(LogError, match="cannot be written: No space left"):
        log.append(0, 0, [make_group()])
        log.flush()
    with pytest.raises(LogError, match="No space"):
        log.close()
    assert list(iter_log(tmp_path)) == []


def test_a_part_of_a_newer_schema_or_of_somebody_else_is_refused(tmp_path, make_group):
    table = groups_to_table(0, 0, [make_group()])
    newer = {b"areal-q-log-schema": b"2"}
    for metadata in (newer, None):
        pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "part-000000.parquet")
        with pytest.raises(RecordError, match="log schema"):
            list(iter_log(tmp_path))
    (tmp_path / "part-000000.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(RecordError, match="part-000000"):
        list(iter_log(tmp_path))


FULL_DISK = """
import resource, sys
import pyarrow as pa
from pathlib import Path
from areal_q.errors import LogError
from buffer.logs.step_log import StepLog, StepRecord

def record(step):
    numbers = {f"metric/{i}": step * i / 7 for i in range(2000)}
    return StepRecord(step=step, tickets=[step], seeds=[step], base_digest="a", digest="b", fork=0, settings="",
                      machine="", metrics=numbers)

log = StepLog(sys.argv[1])
log.append(record(0))
log.flush()
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), hard))
failures = 0
for step in range(1, 4):
    try:
        log.append(record(step))
        log.flush()
    except LogError:
        failures += 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))  # the disk has room again
try:
    log.close()
except LogError:
    failures += 1
print(failures)
"""


@pytest.mark.parametrize("room", [1, 4, 1000, 3000, 5000])
def test_a_full_disk_leaves_no_torn_part(tmp_path, room):
    argv = [sys.executable, "-c", FULL_DISK, str(tmp_path), str(room)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4"]
    assert [r.step for r in iter_steps(tmp_path)] == [0]
    StepLog(tmp_path, resume_at=1).close()
    assert [p.name for p in tmp_path.iterdir()] == ["part-000000.parquet"]
