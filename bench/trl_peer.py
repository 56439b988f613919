"""Runs bench/peers/trl_grpo.py: its environment, settings as close to ours as they come, its fastest layout."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from areal_q.config import Run
from areal_q.config.objectives import Clip
from areal_q.observability.metrics_log import read_metrics
from bench import learning_curve
from bench.common import ROOT, peer_env, say
from bench.learning_curve import Curve

PROGRAM = ROOT / "bench" / "peers" / "trl_grpo.py"


class Layout(msgspec.Struct, frozen=True):
    """A way for TRL to use two cores: data parallelism (torchrun, gloo), threads, smaller micro-batches."""

    processes: int
    threads: int
    microbatches: int

    def __str__(self) -> str:
        return (
            f"processes {self.processes}, threads {self.threads}, micro-batches {self.microbatches}"
        )


LAYOUTS = [Layout(1, 2, 1), Layout(2, 1, 1), Layout(1, 2, 2), Layout(2, 1, 2), Layout(1, 1, 1)]


def environment() -> Path:
    """The Python of .venv-trl, made when it is missing; with the CPU build of torch where the index has it."""
    python = ROOT / ".venv-trl" / "bin" / "python"
    if not python.exists():
        say("making .venv-trl")
        subprocess.run([sys.executable, "-m", "venv", str(ROOT / ".venv-trl")], check=True)
    if subprocess.run([str(python), "-c", "import trl"], capture_output=True).returncode:
        pip = [str(python), "-m", "pip", "install", "-q"]
        if subprocess.run([*pip, "torch==2.13.0+cpu"], capture_output=True).returncode:
            subprocess.run([*pip, "torch==2.13.0"], check=True)
        subprocess.run([*pip, "trl"], check=True)
    return python


def spec_of(run: Run, directory: Path, limit_s: float) -> dict[str, Any]:
    """What the program reads: all that both have a setting for. `directory` holds model and problems."""
    learner, optimizer, objective = run.learner, run.learner.optimizer, run.learner.objective
    if not isinstance(objective, Clip):
        sys.exit("TRL's loss needs an objective with clip_low and clip_high")
    return {
        **{name: str(directory / f"{name}.jsonl") for name in ("train", "heldout")},
        "model": str(directory / "model"),
        "out": str(directory / "trl.jsonl"),
        "seed": run.seed,
        "groups": learner.groups,
        "group_size": learner.group_size,
        "updates": learner.minibatches,
        "max_tokens": run.rollout.sampling.max_tokens,
        "temperature": run.rollout.sampling.temperature,
        "clip_low": objective.clip_low,
        "clip_high": objective.clip_high,
        "lr": optimizer.lr,
        "warmup_steps": optimizer.warmup_steps,
        "betas": optimizer.betas,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": learner.max_grad_norm,
        "eval_every": 5,
        "time_limit_s": limit_s,
    }


def best_layout(python: Path, spec: dict[str, Any], probe_s: float) -> Layout:
    """The layout with the most batches a second, the first few batches (warming up) left out."""
    speeds = {}
    for layout in LAYOUTS:
        probe, _ = train(python, {**spec, "eval_every": 0, "time_limit_s": probe_s}, layout)
        seconds = [t for t, _ in probe.reward]
        skip = max(0, min(4, len(seconds) - 2))
        speeds[layout] = (len(seconds) - 1 - skip) / max(1e-9, seconds[-1] - seconds[skip])
        say(f"TRL, {layout}: {speeds[layout]:.2f} batches/s")
    return max(LAYOUTS, key=speeds.__getitem__)


def train(python: Path, spec: dict[str, Any], layout: Layout) -> tuple[Curve, dict[str, str]]:
    """TRL's curve and versions."""
    out = Path(spec["out"])
    out.unlink(missing_ok=True)
    spec_file, log_file = out.with_name("trl.json"), out.with_name("trl.log")
    spec_file.write_text(json.dumps({**spec, **msgspec.to_builtins(layout)}))
    many = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(layout.processes)]
    launcher = ["-m", *many] if layout.processes > 1 else []
    argv = [str(python), *launcher, str(PROGRAM), str(spec_file)]
    with log_file.open("w") as log:
        done = subprocess.run(
            argv, cwd=out.parent, env=peer_env(layout.threads), stdout=log, stderr=log
        )
    if done.returncode:
        sys.exit(f"TRL failed, see {log_file}")
    records = read_metrics(out)
    return learning_curve.trls(records), records[-1]["versions"]
