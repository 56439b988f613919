"""What an evaluation asks: the settings, the problems, and whether the options fit together."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from msgspec.structs import replace

from areal_q.checks.automatic import settled
from areal_q.checks.hub import directory_of
from areal_q.config import (
    EvalConfig,
    External,
    Mix,
    Run,
    Sampling,
    SingleTurn,
    TorchEngine,
    VerifiersEnvironment,
    load,
)
from areal_q.config.load import Override, pair_of
from areal_q.config.run import FormatName
from areal_q.errors import ConfigError
from areal_q.evaluation.benchmarks import BENCHMARKS, Preset, preset_of
from areal_q.tasks import (
    Problem,
    asked_of,
    build_task,
    check_reward,
    columns_for,
    task_types,
)


@dataclass(frozen=True)
class EvalQuestions:
    """Problems for a model, and how its answers are drawn."""

    run: Run
    model: Path
    problems: Sequence[Problem]
    greedy: bool
    """True if the most likely answer is asked for, beside the samples of `preset`"""
    preset: Preset
    serve: tuple[str, str | None]
    """The address for agents, "" for none, and the file of its token"""
    of_set: bool = False
    """True if an evaluation set of the run's is asked, whose samples are drawn as in training but for what the
    set says"""

    @property
    def sampling(self) -> Sampling:
        """How samples are drawn."""
        preset, training = self.preset, self.run.rollout.sampling
        base = training if self.of_set else Sampling(stop=training.stop)
        return replace(
            base,
            temperature=preset.temperature,
            top_p=preset.top_p,
            max_tokens=preset.max_tokens or training.max_tokens,
        )


def check_format(format: str, settings: Sequence[Override]) -> None:
    """Raises ConfigError for a format that there is not, or one that the settings name."""
    if format not in get_args(FormatName):
        raise ConfigError(f"--format {format}: none of {', '.join(get_args(FormatName))}")
    if any(pair_of(setting)[0] == "rollout.format" for setting in settings):
        raise ConfigError("rollout.format: the format of an evaluation is --format")


def check_samples(preset: Preset, greedy: bool, run: Run) -> None:
    """Raises ConfigError unless something is asked, samples can differ, and the engine can draw as many of a
    problem at once, which it does where no environment plays."""
    engine, played = run.rollout.engine, run.rollout.environment
    slots = (engine if isinstance(engine, TorchEngine) else TorchEngine()).slots
    if preset.samples > slots and isinstance(played, SingleTurn):
        raise ConfigError(f"--samples {preset.samples}: the engine draws {slots} responses at once")
    if preset.samples and preset.temperature == 0:
        raise ConfigError("--samples needs --temperature above 0: greedy answers are all the same")
    if not preset.samples and not greedy:
        raise ConfigError("--no-greedy needs --samples")


def set_of(run: Run, name: str, problems: int | None) -> tuple[Run, Preset, bool, int]:
    """Returns what is asked by the evaluation set `name`: the run as it is to the set, how its answers are
    drawn, whether its data are its own, and how many problems at most, by default as the set says. Raises
    ConfigError for a set or a preset that there is not."""
    if name not in run.eval.sets:
        there = ", ".join(run.eval.sets) or "none"
        raise ConfigError(
            f"--set {name}: the run has no such evaluation set; eval.sets has {there}"
        )
    one = run.eval.sets[name]
    preset, own = preset_of(one, f"eval.sets.{name}.preset"), bool(one.task or one.path)
    preset = replace(preset, max_tokens=None)  # as in training, whatever it is published with
    return run.of(name), preset, own, problems or one.problems or run.eval.problems


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
    model: Path, task: str | None, data: Path | None, overrides: Sequence[Override]
) -> tuple[Run, Path]:
    """Returns the settings and the model's directory. The settings are the run's own if MODEL is a run's
    directory, otherwise the defaults; another task is judged by that task. Raises ConfigError for options that
    do not fit together."""
    root = _run_of(model)
    config = root / "config.toml" if root else None
    path = model / "hf" if (model / "hf").is_dir() else Path(directory_of(str(model), "MODEL"))
    if not path.exists():
        raise ConfigError(f"{model}: no such run or model")
    if config is None and task is None:
        raise ConfigError(f"{model}: not a run's directory, so --task is needed")
    if data and task is None and not hasattr(load(config).task, "path"):
        raise ConfigError(f"--data {data}: the run's own task reads no file, so --task is needed")
    if task and task not in (known := sorted({*BENCHMARKS, *task_types()})):
        raise ConfigError(f"--task {task}: none of {', '.join(known)}")
    choice: list[Override] = [("task.type", BENCHMARKS.get(task, task))] if task else []
    if data:
        choice.append(("task.path", str(data)))
    choice.append(("model", {"type": "pretrained", "path": str(path)}))
    if config is None:  # a model that no run was made with is measured in the format as it is
        choice.append(("rollout.smoothing", "off"))
    run = load(config, [*choice, *overrides])
    named = any(pair_of(setting)[0].startswith("rollout.engine") for setting in overrides)
    if named and not isinstance(run.rollout.engine, TorchEngine):
        raise ConfigError(
            "rollout.engine: the torch engine answers here; another one answers at the URL of its worker"
        )
    other = config is not None and type(run.task) is not type(load(config).task)
    asked = ("reward.path", "reward.judge")
    if other and not any(pair_of(setting)[0].startswith(asked) for setting in overrides):
        run = replace(run, reward=run.reward.of_the_task)
    return settled(run), path


def as_evaluated(run: Run, model: Path, format: str, serve_at: str) -> Run:
    """Returns the run with the weights in `format`, and no evaluation sets, whose rewards are not needed.
    Raises TaskError or ConfigError for a reward that cannot be used, and ConfigError if the problems are for
    agents, and none can play them, or the other way round.

    Rules of a training run, such as that smoothing needs a format to smooth, are none of an evaluation."""
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
    run = replace(run, eval=EvalConfig(), rollout=replace(run.rollout, format=format))
    check_reward(run)
    return run


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
