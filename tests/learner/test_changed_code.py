"""A run that goes on with other code says so by the name of its file."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.engines import worker_beside

from areal_q.config import Run
from areal_q.observability.metrics_log import read_metrics
from areal_q.system.run_dir import METRICS_FILE, with_digests
from learner.build import build_learner


@pytest.mark.timeout(60)
def test_other_code_is_noted_by_its_file(
    make_run: Callable[..., Run], redis_url: str, tmp_path: Path, short_dir: Path
):
    file, stop = tmp_path / "mine.py", threading.Event()
    for step in (1, 2):
        file.write_text(f"def reward(response):\n    return len(response) + {step}\n")
        own = [f"reward.path={file}", f"steps={step}", "warmstart.steps=0", "eval.problems=1"]
        run = with_digests(make_run(*own))
        announce, fetch = (f"ipc://{short_dir}/{name}-{step}" for name in ("announce", "fetch"))
        learner = build_learner(run, tmp_path, redis_url, announce, fetch, step > 1, stop)
        try:
            with worker_beside(redis_url, run.name):
                assert learner.train(stop) == step
            learner.save(step)
        finally:
            learner.close()
    records = read_metrics(tmp_path / METRICS_FILE)
    notes = [(r["step"], r["message"]) for r in records if r["kind"] == "note"]
    changed = f"from step 1 on: {file} is not what it was; steps = 2, was 1"
    assert [note for note in notes if "from step" in note[1]] == [(1, changed)]
