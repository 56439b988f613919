"""Runs bench/peers/trl_grpo.py: its environment, settings as close to ours as they come, its fastest layout."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec

from areal_q.config import Run, TaskConfig
from areal_q.config.objectives import Clip
from areal_q.config.tasks import Python
from areal_q.observability.metrics_log import read_metrics
from areal_q.system.processes import die_with_parent, supervised_program
from bench import learning_curve
from bench.common import ROOT, number, peer_env, say, table
from bench.learning_curve import Curve, value_at

PROGRAM = ROOT / "bench" / "peers" / "trl_grpo.py"


class PeerFailed(Exception):
    """TRL ended, or did not end, without a result."""


class Layout(msgspec.Struct, frozen=True):
    """A way for TRL to use two cores: data parallelism (torchrun, gloo), threads, smaller micro-batches."""

    processes: int
    threads: int
    microbatches: int
    bf16: bool = False
    """TRL's own default, which is autocast; otherwise float32"""

    def __str__(self) -> str:
        return (
            f"processes {self.processes}, threads {self.threads}, micro-batches {self.microbatches}, "
            + ("bfloat16" if self.bf16 else "float32")
        )


LAYOUTS = [
    Layout(*shape, bf16)
    for shape in ((1, 2, 1), (2, 1, 1), (1, 2, 2), (1, 1, 1))
    for bf16 in (False, True)
]
START_S = 300.0
"""Seconds beyond those of training that TRL may take to start, to be evaluated and to end"""


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


def spec_of(run: Run, directory: Path, limit_s: float, goal: float) -> dict[str, Any]:
    """What the program reads: all that both have a setting for. `directory` holds model and problems."""
    learner, optimizer, objective = run.learner, run.learner.optimizer, run.learner.objective
    if not isinstance(objective, Clip):
        sys.exit("TRL's loss needs an objective with clip_low and clip_high")
    return {
        **{name: str(directory / f"{name}.jsonl") for name in ("train", "heldout")},
        "model": str(directory / "model"),
        "reward": _reward_file(run.task),
        "out": str(directory / "trl.jsonl"),
        "seed": run.seed,
        "groups": learner.groups,
        "group_size": learner.group_size,
        "updates": learner.minibatches,
        "max_tokens": run.rollout.sampling.max_tokens,
        "temperature": run.rollout.sampling.temperature,
        "clip_low": objective.clip_low,
        "clip_high": objective.clip_high,
        "lr": optimizer.rate,
        "warmup_steps": optimizer.warmup_steps,
        "betas": optimizer.betas,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": learner.max_grad_norm,
        "eval_every": run.eval.every,
        "goal": goal,
        "time_limit_s": limit_s,
        "least_batches": 1,
    }


def _reward_file(task: TaskConfig) -> str | None:
    """A file with the task's reward; None for one that wants the answer and nothing else."""
    if isinstance(task, Python):
        return str(Path(task.path).resolve())
    return str(ROOT / "bench/tasks/last_number.py") if task.grader == "final_number" else None


def best_layout(
    python: Path, spec: dict[str, Any], probe_s: float, judge: Literal["wall", "cpu"]
) -> tuple[Layout, str]:
    """The layout with the most batches a second, of the clock or of CPU, the first batch (warming up) left out;
    and a table of what was tried. Each is left time for three batches, however long one takes."""
    speeds: dict[Layout, tuple[float, float]] = {}
    rows = []
    for layout in LAYOUTS:
        try:
            asked = {"eval_every": 0, "time_limit_s": probe_s, "least_batches": 3}
            probe, _ = train(python, spec | asked, layout)
            if len(probe.ended) < 2:
                raise PeerFailed(f"no second batch within {2 * probe_s + START_S:.0f} s")
        except PeerFailed as error:
            say(f"TRL, {layout}, is left out: {error}")
            rows.append([str(layout), "failed", "failed"])
            continue
        speeds[layout] = _speed(probe.ended), _speed([value_at(probe.cpu, t) for t in probe.ended])
        say(f"TRL, {layout}: {speeds[layout][0]:.3g} batches/s, {speeds[layout][1]:.3g}/CPU s")
        rows.append([str(layout), *map(number, speeds[layout])])
    if not speeds:
        sys.exit(f"TRL trains in none of its layouts: see {Path(spec['out']).with_name('trl.log')}")
    best = max(speeds, key=lambda layout: speeds[layout][judge == "cpu"])
    return best, table(["TRL's layout", "batches/s", "batches/CPU s"], rows)


def _speed(ends: list[float]) -> float:
    return (len(ends) - 1) / max(1e-9, ends[-1] - ends[0])


def train(python: Path, spec: dict[str, Any], layout: Layout) -> tuple[Curve, dict[str, str]]:
    """TRL's curve and versions. One that takes too long is ended, and what it did by then counts. Raises
    PeerFailed if it fails, or has done nothing by then."""
    out = Path(spec["out"])
    out.unlink(missing_ok=True)
    spec_file, log_file = out.with_name("trl.json"), out.with_name("trl.log")
    spec_file.write_text(json.dumps({**spec, **msgspec.to_builtins(layout)}))
    many = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(layout.processes)]
    launcher = ["-m", *many] if layout.processes > 1 else []
    argv = [str(python), *launcher, str(PROGRAM), str(spec_file)]
    with log_file.open("w") as log:
        child = subprocess.Popen(
            supervised_program(*argv),  # torchrun's processes are in sessions of their own
            cwd=out.parent,
            env=peer_env(layout.threads),
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
    late = False
    try:
        child.wait(2 * spec["time_limit_s"] + START_S)
    except subprocess.TimeoutExpired:
        say(f"TRL, {layout}, takes too long")
        late = True
    finally:
        child.terminate()
        child.wait()
    records = read_metrics(out) if out.exists() else []
    # Two processes may abort at their exit, when all is written: that costs the layout nothing.
    if not any(r["kind"] == "step" for r in records) or (records[-1]["kind"] != "end" and not late):
        raise PeerFailed(f"see {log_file}")
    return learning_curve.trls(records), records[0]["versions"]
