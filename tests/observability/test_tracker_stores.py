"""wandb, MLflow and trackio themselves, offline: what each keeps on this disk is what the run wrote."""

import importlib.util
import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from areal_q.observability.metrics_log import MetricsLog, Record, read_metrics, truncate_after

pytestmark = [
    pytest.mark.trackers,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # theirs are not ours
]
KINDS = ("wandb", "mlflow", "trackio")
BLOCK, HEADER = 32 * 1024, 7


@dataclass
class Kept:
    """What a tracker keeps of one run."""

    values: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    """Metrics by their names: pairs of step and value, sorted"""
    settings: dict[str, Any] = field(default_factory=dict)
    samples: list[list[Any]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    def sorted(self) -> "Kept":
        for pairs in self.values.values():
            pairs.sort()
        return self


def of_wandb(scratch: Path) -> Kept:
    """Reads the offline files of all sessions of a run: records of protobuf in the frames of LevelDB's log."""
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    kept, ids = Kept(), set()
    for file in sorted(scratch.glob("wandb/offline-run-*/*.wandb")):
        for frame in _frames(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(frame)
            match record.WhichOneof("record_type"):
                case "run":
                    ids.add(record.run.run_id)
                    for one in record.run.config.update:
                        kept.settings[one.key] = json.loads(one.value_json)
                case "history":
                    line = {
                        ".".join(i.nested_key) or i.key: json.loads(i.value_json)
                        for i in record.history.item
                    }
                    for key, value in line.items():
                        if isinstance(value, int | float) and not key.startswith("_"):
                            kept.values[key].append((line["step"], value))
                case "artifact":
                    kept.files += [e.path for e in record.artifact.manifest.contents]
        for table in sorted(file.parent.glob("files/media/table/**/*.table.json")):
            kept.samples += json.loads(table.read_text())["data"]
    assert len(ids) == 1, ids
    return kept.sorted()


def _frames(data: bytes) -> Iterator[bytes]:
    """Yields the records of a log in LevelDB's format, after wandb's own header: type 1 is a whole record, 2, 3
    and 4 are the first, middle and last part of one; a block ends with zeros where no header fits."""
    position, parts = HEADER, b""
    while position + HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER:
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + HEADER])
        parts += data[position + HEADER : position + HEADER + size]
        position += HEADER + size
        if kind in (1, 4):
            yield parts
            parts = b""


def of_mlflow(uri: str, experiment: str) -> Kept:
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    client, kept = MlflowClient(tracking_uri=uri), Kept()
    found = client.get_experiment_by_name(experiment)
    assert found
    (run,) = client.search_runs([found.experiment_id])
    kept.settings = {**run.data.params, **run.data.tags, "status": run.info.status}
    for key in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, key)
        kept.values[key] = [(one.step, one.value) for one in history]
    kept.files = [one.path for one in client.list_artifacts(run.info.run_id)]
    for one in client.list_artifacts(run.info.run_id, "samples"):
        file = client.download_artifacts(run.info.run_id, one.path)
        kept.samples += json.loads(Path(file).read_text())["data"]
    return kept.sorted()


def of_trackio(directory: Path, project: str) -> Kept:
    kept = Kept()
    with sqlite3.connect(directory / f"{project}.db") as store:
        for step, text in store.execute("select step, metrics from metrics order by id"):
            for key, value in json.loads(text).items():
                if isinstance(value, dict):
                    kept.samples += [[*row.values()] for row in value["_value"]]
                else:
                    kept.values[key].append((step, value))
        for (text,) in store.execute("select config from configs"):
            kept.settings = json.loads(text)
        names = store.execute("select name from artifacts").fetchall()
        kept.files = [name for (name,) in names]
    store.close()
    return kept.sorted()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    found = importlib.util.find_spec(request.param)
    if found is None or found.origin is None:
        pytest.skip(f"needs {request.param}: make test-trackers")
    return request.param


@pytest.fixture
def command(kind: str, tmp_path: Path) -> Callable[..., str]:
    """command(RUN, "a=b") hands the run to the tracker, as a user types it, and is what that printed."""
    options = {
        "wandb": ["project=sums", "mode=offline", 'tags=["a"]'],
        "mlflow": [f"uri=sqlite:///{tmp_path}/mlflow.db", "experiment=sums"],
        "trackio": ["project=sums"],
    }[kind]
    own = {"HOME": str(tmp_path / "home"), "TRACKIO_DIR": str(tmp_path / "trackio")}
    (tmp_path / "home").mkdir()

    def run(directory: Path, *more: str) -> str:
        words = [sys.executable, "-P", "-m", "areal_q", "track", str(directory), "--to", kind]
        environment = os.environ | own
        done = subprocess.run(
            [*words, *options, *more], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def kept_by(kind: str, directory: Path, tmp_path: Path) -> Kept:
    if kind == "wandb":
        return of_wandb(directory / "trackers" / "wandb")
    if kind == "mlflow":
        return of_mlflow(f"sqlite:///{tmp_path}/mlflow.db", "sums")
    return of_trackio(tmp_path / "trackio", "sums")


def learnt(records: list[Record], key: str) -> list[tuple[int, float]]:
    return [(r["step"], r[key]) for r in records if r.get(key) is not None]


def test_a_tracker_keeps_one_axis_of_steps_over_resumptions(
    write_run: Callable[..., Path], command: Callable[..., str], kind: str, tmp_path: Path
) -> None:
    directory = write_run(tmp_path / "demo", 6, "learner.max_lag=7")
    (directory / "commit").write_text("c0ffee\n")
    file = directory / "metrics.jsonl"
    first = read_metrics(file)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:4]))  # the run goes on
    assert "4 records of demo, 4 in all" in command(directory, "report=false")
    half = kept_by(kind, directory, tmp_path)
    assert half.values["reward/mean"] == learnt(first[:4], "reward/mean")
    file.write_text("".join(lines))
    command(directory)
    kept = kept_by(kind, directory, tmp_path)
    if kind == "mlflow":
        assert (half.settings["status"], kept.settings["status"]) == ("FAILED", "FINISHED")
    measured = [r for r in first if r["kind"] in ("step", "eval")]
    for key in ("reward/mean", "weights/delta_bytes", "eval/accuracy"):
        assert kept.values[key] == learnt(measured, key)
    # To MLflow a step and its evaluation, within a millisecond, have one and the same time.
    assert {*kept.values["elapsed_s"]} == {*learnt(measured, "elapsed_s")}
    assert "lag/max" not in kept.values  # it was never finite
    assert kept.samples == [["1+1=", "2", "3", False], ["1+1=", "2", "3", True]]
    assert any("report" in name for name in kept.files)
    assert kept.settings["commit"] == "c0ffee"
    nested = (
        kept.settings["learner"]["max_lag"] if kind == "wandb" else kept.settings["learner.max_lag"]
    )
    assert str(nested) == "7"

    truncate_after(file, 3)
    with MetricsLog(directory, tensorboard=False) as log:
        for step in range(4, 9):
            log.write("step", step, {"reward/mean": 100.0 + step})
        log.write("end", 8, {}, reason="done")
    command(directory, "report=false")
    now = kept_by(kind, directory, tmp_path).values["reward/mean"]
    before = learnt(first, "reward/mean")
    rewritten = before[3:] if kind != "trackio" else [(4, 104.0), (5, 105.0), (6, 106.0)]
    assert now == [*before[:3], *rewritten, (7, 107.0), (8, 108.0)]
