"""`areal-q launch slurm|sky|ray CONFIG` starts a run on a cluster (docs/launch.md)."""

import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from areal_q.checks.hub import fetched
from areal_q.checks.settings import check_directories
from areal_q.config import load
from areal_q.errors import ConfigError
from areal_q.launch import ray_job, sky, slurm
from areal_q.launch.cluster import Cluster
from areal_q.launch.place import SETTINGS, prepared
from areal_q.plan.hardware import on_gpus
from areal_q.system.command import ConfigFile, Overrides
from areal_q.system.credentials import no_password

EXITS = "Exit codes: 0 submitted, or written; 2 something to mend, which one line names."
_OPTION = "a further line for slurm, such as --partition=gpu; of sky NAME=VALUE of its resources"
_ENGINES = {
    "--time": ["slurm"],
    "--option": ["slurm", "sky"],
    "--worker-option": ["slurm"],
    "--gpu": ["sky"],
    "--bucket": ["sky"],
}
"""The schedulers that have a use for an option, where not all have one."""


_Engine = Annotated[
    Literal["slurm", "sky", "ray"],
    typer.Argument(metavar="slurm|sky|ray", help="what starts jobs there"),
]
_Show = Annotated[bool, typer.Option("--print", help="write and print the scripts; submit nothing")]
_Nodes = Annotated[int, typer.Option(min=1, help="hosts of the learner")]
_GPUS = "GPUs of the learner on each, with a process each; 0: a CPU"
_LearnerGpus = Annotated[int, typer.Option(min=0, help=_GPUS)]
_WORKERS = "workers; of sky hosts, each with as many as its GPUs are for; -1: the settings'"
_Workers = Annotated[int, typer.Option(min=-1, help=_WORKERS)]
_WorkerGpus = Annotated[int, typer.Option(min=0, help="GPUs of each worker; 0: a CPU")]
_TIME = "slurm: the time of a job, such as 24:00:00; then it goes on"
_Time = Annotated[str, typer.Option(help=_TIME)]
_Lines = Annotated[list[str] | None, typer.Option(help=_OPTION)]
_WorkerLines = Annotated[list[str] | None, typer.Option(help="slurm: one more, for workers alone")]
_Setup = Annotated[str, typer.Option(help="shell commands before each role")]
_PythonThere = Annotated[str, typer.Option(help="the interpreter there; default: this one")]
_REDIS = "URL of a Redis that runs already; default: beside the learner"
_RedisUrl = Annotated[str, typer.Option(help=_REDIS, callback=no_password)]
_Gpu = Annotated[str, typer.Option(help="sky: the kind of GPU, such as H100")]
_Bucket = Annotated[str, typer.Option(help="sky: a bucket in which the run is kept")]


def main(
    engine: _Engine,
    config: ConfigFile,
    overrides: Overrides = None,
    show: _Show = False,
    learner_nodes: _Nodes = 1,
    learner_gpus: _LearnerGpus = 0,
    workers: _Workers = -1,
    worker_gpus: _WorkerGpus = 0,
    time: _Time = "",
    option: _Lines = None,
    worker_option: _WorkerLines = None,
    setup: _Setup = "",
    python: _PythonThere = "",
    redis: _RedisUrl = "",
    gpu: _Gpu = "",
    bucket: _Bucket = "",
) -> None:
    """Start a run on a cluster by Slurm, SkyPilot or Ray: the learner on its hosts, workers on theirs.

    Settings, secrets and scripts go to root/NAME.launch, the run to root/NAME; launched again, it goes on from
    its newest checkpoint.
    """
    asked = {"--time": time, "--option": option, "--worker-option": worker_option}
    _check_options(engine, asked | {"--gpu": gpu, "--bucket": bucket}, learner_gpus + worker_gpus)
    file = config / SETTINGS if (config / SETTINGS).is_file() else config
    run = on_gpus(fetched(load(file, overrides)), learner_gpus > 0, worker_gpus > 0 or bool(gpu))
    check_directories(run)
    place = prepared(run)
    cluster = Cluster(
        run=load(place / SETTINGS),
        place=place,
        python=python or ("python" if engine == "sky" else sys.executable),
        nodes=learner_nodes,
        gpus=learner_gpus,
        workers=run.rollout.workers if workers < 0 else workers,
        worker_gpus=worker_gpus,
        setup=setup,
        redis=redis,
        learner_options=tuple(option or ()),
        worker_options=(*(option or ()), *(worker_option or ())),
    )
    if engine == "slurm":
        paths = slurm.write(cluster, time)
    else:
        paths = sky.write(cluster, gpu, bucket) if engine == "sky" else ray_job.write(cluster)
    if not show:
        return _submit(engine, paths)
    for path in paths:
        typer.echo(f"# {path}\n{path.read_text('utf-8')}")


def _check_options(engine: str, asked: Mapping[str, object], gpus: int) -> None:
    """Raises ConfigError for an option that the engine does not use, or for GPUs of no kind."""
    for name, value in asked.items():
        if value and engine not in _ENGINES[name]:
            raise ConfigError(
                f"launch {engine}: {name} is for {' and '.join(_ENGINES[name])} alone"
            )
    if engine == "sky" and gpus and not asked["--gpu"]:
        raise ConfigError("launch sky: GPUs need their kind as well, such as --gpu H100")


def _submit(engine: str, paths: list[Path]) -> None:
    """Hands the scripts to the scheduler. Raises ConfigError if SkyPilot or Ray is not here, or fails."""
    if engine == "slurm":
        jobs = slurm.submit(paths)
        typer.echo(f"submitted: {slurm.named(jobs)}; logs in {paths[0].parent}/logs")
        typer.echo(f"scancel {' '.join(reversed(jobs))} ends it; launched again it goes on")
        return
    command = ["sky", "jobs", "launch", "--yes", "--detach-run", str(paths[0])]
    command = command if engine == "sky" else ray_job.command(paths[0])
    try:
        code = subprocess.run(command).returncode
    except FileNotFoundError as error:
        raise ConfigError(
            f"launch {engine}: there is no {command[0]} here; where there is: {shlex.join(command)}"
        ) from error
    if code:
        raise ConfigError(f"launch {engine}: {shlex.join(command)} ended with {code}")
