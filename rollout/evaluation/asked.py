"""What an evaluation asks: the settings, the problems, and whether the options fit together."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from areal_q.checks.automatic import settled
from areal_q.checks.hub import directory_of
from areal_q.config import EvalSet, External, Mix, Run, VerifiersEnvironment, load
from areal_q.config.run import FormatName
from areal_q.errors import ConfigError
from areal_q.evaluation.benchmarks import BENCHMARKS
from areal_q.tasks import Problem, asked_of, build_task, columns_for, task_types


def check_format(format: str, settings: list[str]) -> None:
    """Raises ConfigError for a format that there is not, or one that the settings name."""
    if format not in get_args(FormatName):
        raise ConfigError(f"--format {format}: none of {', '.join(get_args(FormatName))}")
    if any(setting.startswith("rollout.format=") for setting in settings):
        raise ConfigError("rollout.format: the format of an evaluation is --format")


def check_agents(run: Run, model: Path, serve_at: str) -> None:
    """Raises ConfigError if the problems are for agents, and none can play them, or the other way round."""
    external = isinstance(run.rollout.environment, External)
    played = isinstance(run.rollout.environment, VerifiersEnvironment)
    if external and not serve_at and not played:
        raise ConfigError(
            f"{model}: agents play its problems (rollout.environment.type = 'external'): let them by --serve "
            "8000, or ask the model alone, in one turn, by rollout.environment.type=single"
        )
    if serve_at and not external:
        raise ConfigError(
            f"--serve {serve_at}: no agents play here, as rollout.environment.type is not 'external'"
        )


def check_samples(samples: int, temperature: float, greedy: bool) -> None:
    """Raises ConfigError unless something is asked, and samples can differ."""
    if samples and temperature == 0:
        raise ConfigError("--samples needs --temperature above 0: greedy answers are all the same")
    if not samples and not greedy:
        raise ConfigError("--no-greedy needs --samples")


def set_of(run: Run, name: str) -> EvalSet:
    """Returns the evaluation set `name`. Raises ConfigError for one that there is not."""
    if name not in run.eval.sets:
        there = ", ".join(run.eval.sets) or "none"
        raise ConfigError(
            f"--set {name}: the run has no such evaluation set; eval.sets has {there}"
        )
    return run.eval.sets[name]


def asked_problems(run: Run, whole: bool, training: bool) -> Sequence[Problem]:
    """Returns the problems to ask: all of the file if `whole`, else those to train on if `training`, else the
    held-out ones; with all their columns if `training`. Raises TaskError or ConfigError for data that cannot be
    read, and ConfigError for the training problems of a mixture, whose rows have no one task."""
    if training and isinstance(run.task, Mix):
        raise ConfigError(
            "--keep: a mixture has no one file: --task and --data name that of one task"
        )
    columns = None if training else columns_for(run)
    if whole and not isinstance(columns, Mapping):
        return asked_of(run.task, columns)
    task = build_task(run.task, columns)
    return task.train if training else task.heldout


def settings_of(
    model: Path, task: str | None, data: Path | None, overrides: list[str]
) -> tuple[Run, Path]:
    """Returns the settings and the model's directory. The settings are the run's own if MODEL is a run's
    directory, otherwise the defaults. Raises ConfigError for options that do not fit together."""
    root = _run_of(model)
    config = root / "config.toml" if root else None
    path = model / "hf" if (model / "hf").is_dir() else Path(directory_of(str(model), "MODEL"))
    if config is None and task is None:
        raise ConfigError(f"{model}: not a run's directory, so --task is needed")
    if data and task is None and not hasattr(load(config).task, "path"):
        raise ConfigError(f"--data {data}: the run's own task reads no file, so --task is needed")
    if task and task not in (known := sorted({*BENCHMARKS, *task_types()})):
        raise ConfigError(f"--task {task}: none of {', '.join(known)}")
    choice = [f"task.type={BENCHMARKS.get(task, task)}"] if task else []
    if data:
        choice.append(f"task.path={json.dumps(str(data))}")
    pretrained = ["model.type=pretrained", f"model.path={json.dumps(str(path))}"]
    # A model that no run was made with is measured in the format as it is.
    plain = [] if config else ["rollout.smoothing=off"]
    run = load(config, [*choice, *pretrained, *plain, *overrides])
    return settled(run), path


def default_out(model: Path, task: str | None, format: str, preset: str | None) -> Path | None:
    """Returns the path of a new file in the run's directory; None if MODEL is not in one."""
    root = _run_of(model)
    if root is None:
        return None
    name = "-".join(
        [time.strftime("%Y%m%d-%H%M%S"), task or "heldout", format, *([preset] if preset else [])]
    )
    return root / "evals" / f"{name}.jsonl"


def _run_of(model: Path) -> Path | None:
    """Returns the run's directory that MODEL is, or is in."""
    return next((d for d in (model, model.parent) if (d / "config.toml").is_file()), None)
