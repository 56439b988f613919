"""What a run measured, for plans of others on the same hardware."""

import re
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec

from areal_q.checks.pass_memory import Lengths
from areal_q.config import Run, load
from areal_q.errors import ConfigError, LogError
from areal_q.models import DecoderConfig
from areal_q.observability.metrics_log import read_metrics
from areal_q.plan.hardware import Hardware
from areal_q.plan.speed import Correction, HardwareSplit, speed
from areal_q.plan.step_load import Load, share_cores
from areal_q.plan.wire import wire
from areal_q.system.files import by_number
from areal_q.system.run_dir import METRICS_FILE

_SETTLED = 2
"""Steps at the start that are left out: kernels are compiled, and nothing is drawn ahead yet."""
_READ = {
    "response/tokens_mean",
    "buffer/groups",
    "learner/step_s",
    "learner/wait_s",
    "weights/delta_bytes",
    "workers",
}
"""What is read of a step"""


def measured(
    directory: Path, shape: DecoderConfig, prompt: float, on: Hardware
) -> tuple[Load, Correction]:
    """Returns what the steps of the run in `directory`, of a model of this shape, say of the load of a step and
    of the formulas. Raises LogError if it has too few steps, ConfigError if they are not those of rollouts."""
    run = load(directory / "config.toml")
    steps = [r for r in read_metrics(directory / METRICS_FILE) if r["kind"] == "step"]
    if len(steps) <= _SETTLED + 1:
        raise LogError(
            f"{directory}: {len(steps)} steps are too few to measure by: at least {_SETTLED + 2}"
        )
    if missing := sorted({key for key in _READ for r in steps if r.get(key) is None}):
        raise ConfigError(
            f"--from {directory}: its steps have no {', '.join(missing)}: a run with workers is needed"
        )
    before, *rest = steps[_SETTLED:]
    response = median(float(r["response/tokens_mean"]) for r in rest)
    load_ = Load(Lengths(prompt, response), _useful(run, [before, *rest]))
    learner = msgspec.structs.replace(run.learner, processes=_ranks(directory, run))
    run = msgspec.structs.replace(run, learner=learner)
    split = HardwareSplit(learner.processes, max(1, run.rollout.workers))
    busy_s = median(r["learner/step_s"] - r["learner/wait_s"] for r in rest)
    drawing = [w for r in rest for w in r["workers"] if w["idle_share"] < 1 and w["tokens_per_s"]]
    rate = median(w["tokens_per_s"] / (1 - w["idle_share"]) for w in drawing) if drawing else 0.0
    deltas = (rest[-1]["weights/delta_bytes"] - before["weights/delta_bytes"]) / len(rest)
    expected = speed(run, shape, load_, on, split)
    slower, faster = busy_s / expected.learner_s, rate / expected.worker_tokens_s or 1.0
    if share_cores(run, on, split.workers):  # What each would take alone is not known.
        slower = mean(r["learner/step_s"] for r in rest) / expected.step_s
        faster = 1 / slower
    return load_, Correction(
        learner=slower,
        workers=faster,
        delta=deltas / wire(run, shape).delta if deltas else 1.0,
    )


def _useful(run: Run, steps: list[dict[str, Any]]) -> float:
    """Returns the part of the groups read that steps were made of; those that only wait do not count. Steps at
    which their count falls are left out: it may where another learner goes on."""
    read = [after - before for before, after in pairwise(r["buffer/groups"] for r in steps)]
    grown = [count for count in read if count >= 0]
    used = len(grown) * run.learner.groups
    return min(1.0, used / sum(grown)) if any(grown) else 1.0


def _ranks(directory: Path, run: Run) -> int:
    """Returns how many processes the learner of `run` had, by its step log; without one, by its settings.
    Raises LogError for a log that cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts = by_number((directory / "steps").glob("part-*.parquet"))
    if not parts:
        return run.learner.processes
    try:
        machine = pq.ParquetFile(parts[-1]).read(["machine"])["machine"][-1].as_py()
    except (pa.ArrowException, OSError, LookupError) as error:
        raise LogError(f"--from {directory}: {parts[-1]} cannot be read: {error}") from error
    several = re.search(r", (\d+) ranks", machine)
    return int(several[1]) if several else 1
