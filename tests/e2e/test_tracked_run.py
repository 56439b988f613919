"""A real run with trackers that hang, die and have a full disk: it learns all its steps, and each goes on
afterwards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import areal_q

from areal_q.observability.metrics_log import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FATEFUL = """
import json, os, resource, signal, time

def tracker(run, out, fate):
    seen = 0
    def log(record):
        nonlocal seen
        if record["kind"] == "step":
            seen += 1
            if seen == 3 and not os.path.exists(out + ".cured"):
                match fate:
                    case "hang":
                        time.sleep(1e6)
                    case "die":
                        os.kill(os.getpid(), signal.SIGKILL)
                    case "full":  # what it has written is longer, what it says fits
                        resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))
        with open(out, "a") as file:
            file.write(json.dumps(record) + "\\n")
    return log
"""
SETTINGS = [
    *(
        "name=demo",
        "steps=6",
        "task.digits=1",
        "task.heldout=20",
        "model.layers=2",
        "model.width=64",
    ),
    *("model.mlp=128", "warmstart.steps=30", "rollout.sampling.max_tokens=4", "learner.groups=16"),
    *("eval.problems=20", "eval.every=1000"),
]


FATES = ("die", "hang", "full")


def test_trackers_that_hang_die_or_are_full_cost_a_run_nothing(tmp_path: Path) -> None:
    (tmp_path / "fateful.py").write_text(FATEFUL)
    own = [
        f'{{type="python", path="fateful.py", settings={{out="{tmp_path}/{fate}", fate="{fate}"}}}}'
        for fate in FATES
    ]
    driver = tmp_path / "briefly.py"  # the command itself, which waits for 60 s else
    driver.write_text(
        "from areal_q.cli import app\nfrom areal_q.runner import launcher\n"
        "launcher.TRACKERS_STOP_S = 2.0\napp.main()\n"
    )
    command = [
        sys.executable,
        str(driver),
        "run",
        "quickstart",
        *SETTINGS,
        f"trackers=[{', '.join(own)}]",
    ]
    environment = {k: v for k, v in os.environ.items() if k != "REDIS_URL"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tracker-python was killed by SIGKILL, and the run goes on" in done.stdout
    assert "tracker-python-2 has not ended, and is killed" in done.stdout
    ended = [line for line in done.stdout.splitlines() if "tracker-python-3 ended" in line]
    assert len(ended) == 1 and "and the run goes on" in ended[0] and "File too large" in ended[0]
    assert "demo: done after 6 steps" in done.stdout
    records = read_metrics(tmp_path / "runs" / "demo" / "metrics.jsonl")
    for fate in FATES:
        (tmp_path / f"{fate}.cured").touch()
    areal_q(tmp_path, "track", "runs/demo")
    for fate in FATES:
        taken = [json.loads(line) for line in (tmp_path / fate).read_text().splitlines()]
        assert taken == records
    assert "trackers" in (tmp_path / "runs" / "demo" / "config.toml").read_text()
