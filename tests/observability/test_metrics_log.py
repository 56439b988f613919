"""The record of a run: what is written comes back, whatever happened to the file in between."""

import json
import os
import time

import pytest
from helpers.commands import full_disk
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from areal_q.errors import RecordError
from areal_q.observability import metrics_log
from areal_q.observability.metrics_log import MetricsLog, Tail, read_metrics, truncate_after
from bench.records import make_beat

finite = st.floats(allow_nan=False, allow_infinity=False)


@pytest.fixture
def log(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        yield log


def test_a_record_comes_back_with_its_values_and_extras(tmp_path, log):
    log.write("step", 3, {"reward/mean": 0.5}, workers=[{"worker": "rollout-0", "version": 2}])
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (record["kind"], record["step"], record["reward/mean"]) == ("step", 3, 0.5)
    assert record["workers"] == [{"worker": "rollout-0", "version": 2}]


@pytest.mark.parametrize("room", [1, 100, 190])
def test_a_full_disk_leaves_whole_records_alone(tmp_path, log, room, caplog):
    """The one that fills it is written in part, without an error; the next was glued on to it."""
    log.write("step", 1, {"reward/mean": 0.5})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    with full_disk(size + room):
        log.write("step", 2, {"reward/mean": 0.5}, note="x" * 200)
    log.write("step", 3, {"reward/mean": 0.5})
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    assert "metrics.jsonl: [Errno 28]" in caplog.text


@given(st.dictionaries(st.text(min_size=1), finite))
def test_every_finite_value_survives_exactly(tmp_path_factory, values):
    run_dir = tmp_path_factory.mktemp("run")
    prefixed = {f"a/{key}": value for key, value in values.items()}
    with MetricsLog(run_dir, tensorboard=False) as log:
        log.write("step", 0, prefixed)
    (record,) = read_metrics(run_dir / "metrics.jsonl")
    assert {k: v for k, v in record.items() if "/" in k} == prefixed


def test_each_line_is_plain_json_on_disk_once_it_is_written(tmp_path, log):
    log.write("eval", 1, {"eval/accuracy": 0.25})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["eval/accuracy"] for line in lines] == [0.25]


def test_structs_are_written_as_tables(tmp_path, log):
    log.write("step", 1, {}, workers=[make_beat(version=4)])
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert record["workers"][0]["version"] == 4


def test_non_finite_values_become_null_and_are_counted(tmp_path, log):
    log.write("step", 0, {"a/x": float("nan"), "a/y": float("inf"), "a/z": 1.0})
    log.write("step", 1, {"a/x": 2.0})
    bad, good = read_metrics(tmp_path / "metrics.jsonl")
    assert (bad["a/x"], bad["a/y"], bad["a/z"], bad["nonfinite"]) == (None, None, 1.0, 2)
    assert "nonfinite" not in good


def test_elapsed_time_goes_on_after_a_pause_without_the_pause(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(metrics_log.time, "monotonic", lambda: clock[0])
    with MetricsLog(tmp_path, tensorboard=False) as log:
        clock[0] = 107.5
        log.write("step", 1, {})
    clock[0] = 1000.0
    with MetricsLog(tmp_path, tensorboard=False) as log:
        clock[0] = 1002.0
        log.write("step", 2, {})
    assert [r["elapsed_s"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [7.5, 9.5]


def test_torn_last_line_is_not_read_and_spoils_no_next_record(tmp_path, log):
    path = tmp_path / "metrics.jsonl"
    log.write("step", 1, {"a/x": 1.0})
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole + whole[:end])
        assert [r["step"] for r in read_metrics(path)] == [1]
        with MetricsLog(tmp_path, tensorboard=False) as again:
            again.write("step", 2, {})
        assert [r["step"] for r in read_metrics(path)] == [1, 2]


def test_a_line_that_is_no_record_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind":"step","step":1}\nnonsense\n')
    with pytest.raises(RecordError, match="line 2"):
        read_metrics(path)


def test_truncation_drops_later_steps_and_the_abandoned_end(tmp_path, log):
    for step in range(5):
        log.write("step", step, {"a/x": step / 2})
    log.write("end", 2, {}, reason="drained")
    path = tmp_path / "metrics.jsonl"
    assert truncate_after(path, 2) == 3
    assert [(r["step"], r["a/x"]) for r in read_metrics(path)] == [(0, 0.0), (1, 0.5), (2, 1.0)]


def test_truncating_a_missing_file_leaves_it_missing(tmp_path):
    assert truncate_after(tmp_path / "metrics.jsonl", 0) == 0
    assert not (tmp_path / "metrics.jsonl").exists()


def test_both_sinks_hold_the_surviving_history_after_a_rewind(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in range(6):
            log.write("step", step, {"reward/mean": 0.1})
    # TensorBoard orders files by name, and a name holds the second and then a process's count: 10 before 9.
    began = int(time.time())
    while int(time.time()) == began:
        time.sleep(0.05)
    with MetricsLog(tmp_path) as log:
        assert log.rewind(2) == 3
        log.write("step", 3, {"reward/mean": 0.9})
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    points = [(e.step, round(e.value, 3)) for e in board.Scalars("reward/mean")]
    assert points == [(0, 0.1), (1, 0.1), (2, 0.1), (3, 0.9)]


def test_tensorboard_gets_the_scalars_and_nothing_else(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write("step", 7, {"reward/mean": 0.5, "a/bad": float("nan")}, workers=[{"x/y": 1.0}])
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert board.Tags()["scalars"] == ["reward/mean"]
    assert [(e.step, e.value) for e in board.Scalars("reward/mean")] == [(7, 0.5)]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_full_disk_costs_records_not_the_run_and_is_logged_once(tmp_path, caplog):
    log = MetricsLog(tmp_path, tensorboard=False)
    with open("/dev/full", "ab") as full:
        os.dup2(full.fileno(), log._file.fileno())
    log.write("step", 1, {"a/x": 1.0})
    log.write("step", 2, {"a/x": 1.0})
    log.close()
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "No space left" in caplog.text


def test_a_directory_that_cannot_be_made_fails_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        MetricsLog(tmp_path / "file" / "run")


def test_a_tail_sees_each_record_once_and_notices_a_rewind(tmp_path, log):
    tail = Tail(tmp_path / "metrics.jsonl")
    log.write("step", 0, {})
    log.write("step", 1, {})
    records, restarted = tail.read()
    assert ([r["step"] for r in records], restarted) == ([0, 1], True)
    assert tail.read() == ([], False)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind":"step","st')
        file.flush()
        assert tail.read() == ([], False)
        file.write(b'ep":2}\n')
    assert [r["step"] for r in tail.read()[0]] == [2]
    log.rewind(0)
    log.write("step", 1, {})
    records, restarted = tail.read()
    assert ([r["step"] for r in records], restarted) == ([0, 1], True)


def test_a_tail_waits_for_a_file_that_is_not_there_yet(tmp_path):
    assert Tail(tmp_path / "metrics.jsonl").read() == ([], False)


def test_a_line_holds_a_bounded_number_of_workers(tmp_path, log):
    seen = []
    log.also("exporter", seen.append)
    log.write("step", 1, {"reward/mean": 0.5}, workers=[{"worker": f"w{i}"} for i in range(5_000)])

    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert len(record["workers"]) == metrics_log.MOST_WORKERS
    assert record["workers_left_out"] == 5_000 - metrics_log.MOST_WORKERS
    assert len(seen[0]["workers"]) == 5_000


def test_names_of_reward_parts_are_bounded_over_a_run(tmp_path, log):
    for step in range(300):
        log.write("step", step, {f"reward/part_{step}": 1.0, "reward/part_correct": 0.5})

    records = read_metrics(tmp_path / "metrics.jsonl")
    names = {name for record in records for name in record if name.startswith("reward/part_")}
    assert len(names) == metrics_log.MOST_PARTS
    assert all(record["reward/part_correct"] == 0.5 for record in records)
    assert [r["reward/parts_left_out"] for r in records[-2:]] == [1.0, 1.0]


def test_a_rewind_and_a_start_read_no_more_than_they_need(tmp_path, log, monkeypatch):
    for step in range(50):
        log.write("step", step, {"reward/mean": 0.5}, reason="x" * 5_000)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "st')
    monkeypatch.setattr(metrics_log, "read_metrics", None)

    with MetricsLog(tmp_path, tensorboard=False) as again:
        assert again.rewind(20) == 29

    monkeypatch.undo()
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == list(range(21))
