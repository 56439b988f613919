"""The bench beside TRL, with a program in the place of our run: what was measured is kept, whatever follows."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_q.checks.disk_use import check_room
from areal_q.config import Run, load
from bench import common, quickstart, trl_peer
from bench.learning_curve import Curve

STEPS = """#!{python}
import json, pathlib, signal, sys, time
if {deaf}:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
run = pathlib.Path({directory!r})
run.mkdir(exist_ok=True)
with open(run / "metrics.jsonl", "w") as file:
    for record in {records}:
        print(json.dumps(dict(step=0, **record)), file=file, flush=True)
time.sleep({sleep})
sys.exit({code})
"""
STEP = {
    "kind": "step",
    "response/tokens_mean": 4.0,
    "learner/step_s": 2.0,
    "learner/wait_s": 0.5,
    "rollout/idle_share": 0.75,
}
RECORDS = [{"kind": "warmstart", "elapsed_s": 3.0}, STEP | {"elapsed_s": 13.0}]
TRL = Curve(accuracy=[(0.0, 0.1), (40.0, 0.9)], ended=[40.0], cpu=[(0.0, 0.0), (40.0, 80.0)])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return load("configs/quickstart.toml", [f"root={json.dumps(str(tmp_path))}", "name=ours"])


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def make(records: list[dict[str, Any]], code: int = 0, sleep: int = 0) -> None:
        program = tmp_path / "python"
        directory = str(tmp_path / "ours")
        told = {"python": sys.executable, "directory": directory, "records": records}
        program.write_text(STEPS.format(**told, code=code, sleep=sleep, deaf=sleep > 0))
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))

    return make


@pytest.mark.parametrize("config", ["quickstart", "smollm2-sums"])
def test_checkpoints_to_be_evaluated_later_start_on_any_disk(config: str, tmp_path: Path):
    run = load(f"configs/{config}.toml", ["steps=1000000", *quickstart.unevaluated(10)])
    check_room(run, tmp_path)


def test_a_run_that_fails_keeps_the_steps_that_it_made(run: Run, stand_in):
    stand_in(RECORDS, code=3)
    (curve,) = quickstart.our_curves(run, [], 300.0, 0.9)
    assert (curve.ended, curve.accuracy, curve.training) == ([10.0], [], 0.75)


def test_a_run_that_does_not_end_is_killed(run: Run, stand_in, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quickstart, "END_S", 0.2)
    stand_in(RECORDS, sleep=60)
    (curve,) = quickstart.our_curves(run, [], 5.0, 0.9)
    assert curve.ended == [10.0]


def test_a_silent_run_is_ended(run: Run, stand_in, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quickstart, "END_S", 0.2)
    monkeypatch.setattr(quickstart, "SILENT_S", 0.2)
    stand_in(RECORDS[:1], sleep=60)
    with pytest.raises(quickstart.OursFailed, match=r"ours\.log"):
        list(quickstart.our_curves(run, [], 5.0, 0.9))


def test_trl_s_curve_is_on_the_disk_when_ours_fails(
    run: Run, stand_in, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(trl_peer, "train", lambda *_: (TRL, {"trl": "1"}))
    stand_in([], code=2)
    results = quickstart.Results("q", [], goal=0.5, layout=trl_peer.Layout(1, 1, 1), tried="| t |")
    with pytest.raises(quickstart.OursFailed):
        quickstart.beside_trl(results, run, [], tmp_path, {"time_limit_s": 300.0})
    text = (tmp_path / "q.md").read_text()
    assert "| 0    | –                   | 20  | –     |" in text and "| t |" in text
    (pair,) = json.loads((tmp_path / "q.json").read_text())["pairs"]
    assert pair["ours"] is None and pair["trl"]["accuracy"] == [[0.0, 0.1], [40.0, 0.9]]
