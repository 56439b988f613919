"""What the settings and this machine refuse before anything is started, moved aside or warmed up."""

import math
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from areal_q.checks.hub import not_there
from areal_q.checks.machine import visible_gpus
from areal_q.checks.packages import check_packages
from areal_q.config import (
    External,
    Fifo,
    PretrainedModel,
    Python,
    PythonEnvironment,
    Run,
    VerifiersEnvironment,
)
from areal_q.errors import ConfigError
from areal_q.evaluation.benchmarks import drawn_as
from areal_q.evaluation.estimates import pass_ks
from areal_q.system.ports import check_free
from areal_q.system.run_dir import FIXED_CODE, with_digests
from areal_q.tasks import (
    Problem,
    Task,
    asked_of,
    build_task,
    check_characters,
    check_reward,
    columns_for,
    columns_of_one,
    told_of,
)
from areal_q.tasks.environments.own_class import load_environment
from areal_q.tasks.grading.judge import asked_of_judge
from areal_q.tasks.ordering.mixture import parts_of


def served_at(serve: str | int | None, index: int) -> tuple[str, int] | None:
    """Returns (host, port) of the endpoint of worker `index`, by the setting rollout.serve; port 0 is any, ""
    is loopback. It is None where workers serve none.

    Example: with rollout.serve = "[::1]:8000" the second worker's is ("[::1]", 8001).
    """
    if serve is None:
        return None
    host, _, port = str(serve).rpartition(":")
    return host, int(port) + index if int(port) else 0


def _directories(run: Run) -> dict[str, str | None]:
    """Returns the directories that must be there, by setting."""
    kl = run.learner.reference_kl
    return {
        "model.path": run.model.path if isinstance(run.model, PretrainedModel) else None,
        "learner.reference_kl.path": kl.path if kl else None,
        "broadcast.keys": run.broadcast.keys,
    }


def check_directories(run: Run) -> None:
    """Raises ConfigError, naming the setting, for a directory that is not there."""
    for setting, directory in _directories(run).items():
        if directory is not None and not Path(directory).is_dir():
            raise ConfigError(f"{setting}: {directory}: {not_there(directory)}")


def without_effect(run: Run) -> list[str]:
    """Returns a sentence for each setting that does nothing in a run as it is."""
    backend, said = run.learner.backend, []
    alone = run.learner.processes == 1
    if alone and run.checkpoint.sharded:
        said.append("checkpoint.sharded does nothing: the learner is one process, with no ranks")
    if alone and getattr(backend, "offload", False):
        said.append(
            "learner.backend.offload does nothing: the learner is one process, with no ranks"
        )
    fifo = isinstance(run.buffer.sampler, Fifo)
    if run.learner.oversampling > 1 and fifo and not run.learner.drop_uniform:
        said.append(
            "learner.oversampling draws groups that grow too old: without learner.drop_uniform steps use all"
        )
    if run.buffer.tokens and not run.buffer.log:
        said.append("buffer.tokens does nothing without buffer.log: no token is logged")
    scores_itself = _scores_itself(run)
    for part in map(run.of, run.sources):
        if part.reward.settings and not (part.reward.path or isinstance(part.task, Python)):
            said.append(
                "reward.settings does nothing without reward.path: no function of yours is called"
            )
        names = ("path", "judge", "format", "length", "overlong") if scores_itself else ()
        for name in (one for one in names if getattr(part.reward, one)):
            said.append(
                f"reward.{name} does nothing: the environment, or its agents, give the rewards"
            )
    return list(dict.fromkeys(said))


def _scores_itself(run: Run) -> bool:
    """Returns True if rewards come from the environment of the run, and not from its tasks."""
    environment = run.rollout.environment
    if isinstance(environment, PythonEnvironment) and run.rollout.workers:
        return load_environment(environment.path, environment.settings).scores
    return isinstance(environment, External | VerifiersEnvironment)


def preflight(run: Run) -> None:
    """Raises ConfigError or TaskError, naming the setting or the file, for what keeps workers or learner from
    starting here: its data are read."""
    check_directories(run)
    environment, workers = run.rollout.environment, run.rollout.workers
    serves = run.rollout.serve is not None or "AREAL_Q_SERVE" in os.environ
    played = isinstance(environment, VerifiersEnvironment)
    if isinstance(environment, External) and workers and not serves and not played:
        raise ConfigError(
            "rollout.serve: rollout.environment.type = 'external' needs an endpoint for its agents, "
            "such as rollout.serve=8000"
        )
    processes, gpus = run.learner.processes, len(visible_gpus())
    if processes > max(1, gpus) and run.learner.device.startswith("cuda"):
        raise ConfigError(
            f"learner.processes = {processes}: each needs a GPU of its own, and there are {gpus}"
        )
    check_packages(run, serves or played)
    for address in filter(None, (served_at(run.rollout.serve, i) for i in range(workers))):
        check_free("rollout.serve", *address)
    # Read, but not run: this process does without torch.
    with_digests(run, (*FIXED_CODE, "buffer.sampler", "rollout.environment", "trackers"))
    if isinstance(environment, PythonEnvironment) and workers:
        load_environment(environment.path, environment.settings)
    check_reward(run)
    task = build_task(run.task, columns_for(run))
    check_characters(run.model, run.warmstart, task)
    check_sets(run, task)
    check_problems(run, task)


def check_problems(run: Run, task: Task) -> None:
    """Raises ConfigError or TaskError for an evaluation set whose problems cannot be read, and for a judge's
    prompt with a field that the first problems of `task` and of the sets do not have."""
    for part, problems in first_problems(run, task):
        if judge := part.reward.judge:
            for problem in problems:
                asked_of_judge(judge, problem, "")


def first_problems(run: Run, task: Task) -> Iterator[tuple[Run, Sequence[Problem]]]:
    """Yields `run` as it is to each of its tasks and evaluation sets, with the first problems that it trains on
    and holds out, or asks there. Raises what reading a set's problems raises."""
    trained = parts_of(task.train)
    for name in run.sources:
        part = run.of(name)
        if name in trained:
            held = (problem for problem in task.heldout if problem.source == name)
            yield part, [*trained[name][:1], *islice(held, 1)]
        else:
            with told_of(f"eval.sets.{name}.task"):
                asked = asked_of(part.task, columns_of_one(part))[:1]
            yield part, asked


def check_sets(run: Run, task: Task) -> None:
    """Raises ConfigError, naming the setting, for an evaluation set whose preset cannot be drawn here, and for
    an `eval.best` that no evaluation of `task` and the sets measures."""
    slots = getattr(run.rollout.engine, "slots", math.inf)
    asked = {problem.source for problem in task.heldout[: run.eval.problems]}
    measured = {source: ["accuracy"] for source in asked}
    for name, one in run.eval.sets.items():
        samples, _ = drawn_as(one, run.rollout.sampling, f"eval.sets.{name}.preset")
        if samples > slots:
            raise ConfigError(
                f"eval.sets.{name}.preset = {one.preset!r} is of {samples} answers to a problem: "
                f"rollout.engine.slots = {slots}; eval.sets.{name}.samples takes fewer"
            )
        ks = pass_ks(samples) if samples > 1 else []
        measured[name] = ["accuracy", *(f"pass_at_{k}" for k in ks)]
    of, _, metric = run.eval.best.removeprefix("eval/").rpartition("/")
    if not of:
        return
    if of not in measured:
        few = f"eval.problems = {run.eval.problems} asks none of {of}"
        raise ConfigError(f"eval.best = {run.eval.best!r}: {few}")
    if metric not in measured[of]:
        known = ", ".join(f"eval/{of}/{name}" for name in measured[of])
        raise ConfigError(f"eval.best = {run.eval.best!r}: this run measures {known}")
