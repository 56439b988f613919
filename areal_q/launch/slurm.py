"""Slurm: one job for the learner, an array of jobs for the workers, which may be preempted one by one.

    sbatch learner.sh ─▶ srun: role learner on each of its hosts, Redis on the first
    sbatch workers.sh ─▶ role worker, once for each task of the array

| what happens | what follows |
|---|---|
| SIGUSR1 to the script: its time ends in WARN_S | checkpoint, exit code 143, `scontrol requeue`: it goes on |
| SIGTERM: preempted, or its host is drained | the same, but Slurm itself queues it again (`--requeue`) |
| its host is lost | Slurm queues it again; it goes on from the newest checkpoint |
| a crash | the supervisor in the job starts it again |
| finished, a wrong setting, `scancel` | it ends |
"""

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from areal_q.errors import ConfigError
from areal_q.launch.cluster import Cluster

WARN_S = 300
"""Seconds before the end of a job's time at which it is told: for a step and a checkpoint"""
_TASK = '"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"'


def learner_script(cluster: Cluster, megabytes: int, time: str) -> str:
    run = cluster.run
    asks = [
        f"--job-name={run.name}-learner",
        f'--output="{cluster.place}/logs/learner-%j.log"',
        f"--nodes={cluster.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cluster.learner_cores}",
        f"--mem={megabytes}M",
        *([f"--gpus-per-node={cluster.gpus}"] if cluster.gpus else []),
        *_always(time),
        *cluster.learner_options,
    ]
    # In a task's shell, since SLURM_NODEID is known there alone; the script itself runs on the first host.
    task = (
        f'exec {shlex.join(cluster.role("learner"))} --host="$LEARNER_HOST" --rank="$SLURM_NODEID"'
        ' --start="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"'
    )
    host = "export LEARNER_HOST=${SLURMD_NODENAME:-$HOSTNAME}"
    command = f"# shellcheck disable=SC2016\nsrun --kill-on-bad-exit=0 bash -c {shlex.quote(task)}"
    return _script(asks, cluster.setup, host, command, '"$SLURM_JOB_ID"')


def workers_script(cluster: Cluster, megabytes: int, time: str) -> str:
    run = cluster.run
    asks = [
        f"--job-name={run.name}-workers",
        f'--output="{cluster.place}/logs/worker-%A_%a.log"',
        f"--array=0-{cluster.workers - 1}",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={cluster.worker_cores}",
        f"--mem={megabytes}M",
        *([f"--gpus={cluster.worker_gpus}"] if cluster.worker_gpus else []),
        *_always(time),
        *cluster.worker_options,
    ]
    command = f"srun {shlex.join(cluster.role('worker'))} --id={_TASK}"
    return _script(asks, cluster.setup, "", command, _TASK)


def _always(time: str) -> list[str]:
    asks = ["--requeue", "--open-mode=append", f"--signal=B:USR1@{WARN_S}"]
    return [f"--time={time}", *asks] if time else asks


def _script(asks: Sequence[str], setup: str, before: str, command: str, job: str) -> str:
    """Returns a batch script that runs `command`, passes on what it is told, and puts itself into the queue
    again if its time is over."""
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {ask}" for ask in asks),
        # What it sources may well use variables that are not set: `set -u` is for our own lines.
        *filter(None, (setup, "set -u", before)),
        "# Since Slurm 22.05 srun does not take it from the job by itself.",
        'export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"',
        "again='' role='' code=0",
        "# SIGUSR1: the time is nearly over. SIGTERM: preempted, or scancel; Slurm knows which.",
        "trap 'again=1; kill -TERM \"$role\"' USR1",
        "trap 'kill -TERM \"$role\"' TERM",
        f"{command} &",
        "role=$!",
        "# A signal ends `wait` before the role has ended; a second one has its exit code.",
        'while wait "$role"; kill -0 "$role" 2>/dev/null; do :; done',
        'wait "$role"; code=$?',
        f'if [ -n "$again" ] && [ "$code" -ne 0 ] && [ "$code" -ne 2 ]; then scontrol requeue {job}; fi',
        'exit "$code"',
        "",
    ]
    return "\n".join(lines)


def write(cluster: Cluster, time: str) -> list[Path]:
    """Writes the scripts to the launch's directory, and returns their paths."""
    learner, worker = cluster.megabytes()
    scripts = {
        "learner.sh": learner_script(cluster, learner, time),
        "workers.sh": workers_script(cluster, worker, time),
    }
    paths = [cluster.place / name for name in scripts if cluster.workers or name != "workers.sh"]
    for path in paths:
        path.write_text(scripts[path.name], "utf-8")
        path.chmod(0o755)
    return paths


def submit(paths: Sequence[Path]) -> list[str]:
    """Submits the scripts, workers to begin after the learner has, and returns the jobs' ids. Raises
    ConfigError with what Slurm says."""
    jobs: list[str] = []
    for path in paths:
        after = [f"--dependency=after:{jobs[0]}"] if jobs else []
        jobs.append(_sbatch([*after, str(path)], jobs))
    return jobs


def named(jobs: Sequence[str]) -> str:
    return ", ".join(f"{who} {job}" for who, job in zip(("learner", "workers"), jobs, strict=False))


def _sbatch(arguments: list[str], jobs: list[str]) -> str:
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", *arguments], capture_output=True, encoding="utf-8"
        )
    except FileNotFoundError as error:
        raise ConfigError(
            "launch slurm: there is no sbatch here: --print writes the scripts alone"
        ) from error
    if done.returncode:
        begun = f"; scancel {' '.join(jobs)} takes the learner's job back" if jobs else ""
        raise ConfigError(f"launch slurm: {done.stderr.strip() or 'sbatch failed'}{begun}")
    return done.stdout.strip().partition(";")[0]
