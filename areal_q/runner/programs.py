"""The processes that a run on this machine asks for, and the GPUs that each of them sees."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from areal_q.checks.machine import visible_gpus
from areal_q.checks.packages import learner_python, worker_python
from areal_q.checks.settings import served_at
from areal_q.config import Run
from areal_q.config.trackers import labelled
from areal_q.runner.child_processes import Program
from areal_q.system.processes import module_command
from areal_q.system.torchrun import by_torchrun

TRACKER = "tracker-"
WITHOUT_LIMIT_S = 10**6
"""Seconds that torchrun leaves its ranks: a second Ctrl-C ends them, as it does one process"""


@dataclass(frozen=True)
class Plan:
    """The processes to start. `redis` is None if REDIS_URL names a server that runs already."""

    redis: Program | None
    redis_url: str
    learner: Program
    workers: list[Program]
    trackers: list[Program] = field(default_factory=list)


def plan(run: Run, run_dir: Path, sockets: Path, resume: bool) -> Plan:
    """Returns the processes that `run` asks for; `sockets` is a directory with a short path."""
    # The children inherit REDIS_URL, since every user of the machine can read the arguments of a process.
    redis, url, where = None, os.environ.get("REDIS_URL", ""), []
    if not url:
        socket = sockets / "redis"
        url = f"unix://{socket}"
        where = ["--redis", url]
        argv = ["--dir", str(run_dir / "redis"), "--socket", str(socket)]
        redis = Program("redis", module_command("buffer.redis_store.local_server", *argv))
    announce = run.broadcast.announce or f"ipc://{sockets / 'announce'}"
    fetch = run.broadcast.fetch or f"ipc://{sockets / 'fetch'}"
    learner = [*where, "--run-dir", str(run_dir), "--announce", announce, "--fetch", fetch]
    learner += ["--resume"] if resume else []
    worker = module_command("rollout", *where, "--run", run.name, python=worker_python(run))
    # Workers wait without a limit, since the learner of this launch resumes a finished run.
    worker += ["--config", str(run_dir / "config.toml"), "--finished-wait", "inf"]
    names, gpus = [f"rollout-{i}" for i in range(run.rollout.workers)], visible_gpus()
    return Plan(
        redis,
        url,
        Program("learner", _learner(run, learner), run.learner.threads, env=_loopback(run)),
        [
            Program(
                name,
                [*worker, "--id", name, *_serve(run, i)],
                run.rollout.threads,
                env=of_worker(run, i, gpus),
            )
            for i, name in enumerate(names)
        ],
        [
            Program(
                f"{TRACKER}{label}",
                module_command("areal_q", "track", str(run_dir), "--to", label, "--follow"),
                beside=True,
            )
            for label in labelled(run.trackers)
        ],
    )


def _learner(run: Run, arguments: list[str]) -> list[str]:
    python, ranks = learner_python(run), run.learner.processes
    if ranks == 1:
        return module_command("learner", *arguments, python=python)
    here = "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"
    started = by_torchrun(*here, shutdown_s=WITHOUT_LIMIT_S)
    return module_command(*started, *arguments, python=python)


def _loopback(run: Run) -> dict[str, str]:
    """Returns the environment in which the processes of the learner talk over the loopback interface."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if run.learner.processes > 1 else ()
    return {name: os.environ.get(name, "lo") for name in names}


def _serve(run: Run, index: int) -> list[str]:
    address = served_at(run.rollout.serve, index)
    if address is None:
        return []
    host, port = address
    return ["--serve", f"{host}:{port}" if host else str(port)]


def of_worker(run: Run, index: int, gpus: Sequence[str]) -> dict[str, str]:
    """Returns the environment in which worker number `index` sees the GPUs that are its own: behind those of
    the learner, and in turns where there are too few. It is empty on a machine of one GPU or none, and for an
    engine whose device the settings name."""
    engine, device = run.rollout.engine, run.learner.device
    each = getattr(engine, "tensor_parallel", 1)
    if len(gpus) < max(2, each) or getattr(engine, "device", "cuda") != "cuda":
        return {}
    kind, _, named = device.partition(":")
    first = int(named) if named.isdigit() else 0
    learners = range(first, first + run.learner.processes) if kind == "cuda" else ()
    left = [gpu for number, gpu in enumerate(gpus) if number not in learners]
    left = left if len(left) >= each else list(gpus)
    start = index * each % (len(left) // each * each)
    return {"CUDA_VISIBLE_DEVICES": ",".join(left[start : start + each])}
