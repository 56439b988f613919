"""Whole runs on a device, by the commands that a user types, each replayed at once."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch

from bench.common import ROOT
from bench.gpu import Row

RUNS = {"the quickstart": "quickstart", "SmolLM2-135M on sums": "smollm2-sums"}
"""Configurations by what they are called in the table"""
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"


def runs(device: torch.device, small: bool) -> Iterator[Row]:
    """Whole runs, learner and torch engine on the device: seconds until step 0 is known, and of a step;
    accuracy before and after; the learner's time and the worker's pause for a version; whether a replay has the
    same bits."""
    for title, config in RUNS.items():
        if config == "smollm2-sums" and (small or not MODEL.is_dir()):
            yield Row(title, {}, "a rehearsal" if small else "not here: make real-model")
            continue
        with tempfile.TemporaryDirectory() as root:
            given = [f"{place}.device={device}" for place in ("learner", "rollout.engine")]
            given += [f"steps={2 if small else 12}", f'root="{root}"']
            given += ["eval.problems=64", "name=run"]
            done = areal_q("run", config, *given)
            if done.returncode:
                yield Row(title, {}, last_line(done))
                continue
            replayed = areal_q("replay", str(Path(root, "run")))
            yield Row(title, figures(Path(root, "run")), last_line(replayed))


def areal_q(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "areal_q", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Returns what a command said last, or that the replay was exact."""
    text = done.stdout + done.stderr
    if not done.returncode and "bit for bit" in text:
        return "replay: bit for bit"
    return (text.strip().splitlines() or [f"status {done.returncode}"])[-1][:200]


def figures(directory: Path) -> dict[str, float]:
    """Returns a run's row, from its metrics.jsonl."""
    records = [json.loads(x) for x in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if r["kind"] == "step"]
    evals = [r for r in records if r["kind"] == "eval"]
    between = sorted(b["elapsed_s"] - a["elapsed_s"] for a, b in pairwise(steps))
    # A short run may end before a heartbeat tells of a swap.
    swaps = [w["swap_s"] for r in records for w in r.get("workers", ())]
    return {
        "step 0, s": evals[0]["elapsed_s"],
        "step, s": between[len(between) // 2],
        "before": evals[0]["eval/accuracy"],
        "after": evals[-1]["eval/accuracy"],
        "version, ms": 1e3 * steps[-1]["weights/make_s"],
    } | ({"swap, ms": 1e3 * max(swaps)} if swaps else {})
