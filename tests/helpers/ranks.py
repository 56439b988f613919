"""Ranks of a learner, forked from one process that has imported everything: it reads what to do from stdin."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import wait
from pathlib import Path

import msgspec
import torch
import torch._dynamo  # the first optimizer of each rank would import it

import areal_q.quant.kernels.cpu_numba  # noqa: F401  likewise the first version
from areal_q.config import load
from areal_q.tasks import build_tokenizer
from learner import checkpoint
from learner.backends.messages import Piece
from learner.backends.precision import PrecisionSettings, set_precision
from learner.backends.single_device import TorchPolicy
from learner.build import build_model
from learner.checkpoint.async_writer import CheckpointWriter
from learner.multi_process import MultiProcessUpdater, exit_process, follow, join
from learner.publishing.version_builder import VersionBuilder, VersionSettings


def take_steps(rank: int, size: int, jobs: list[tuple[str, int]], log: str) -> None:
    """Is one of `size` ranks of each job, a directory and the port at which its ranks meet."""
    with open(log, "w") as said:
        os.dup2(said.fileno(), 2)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(size)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    for directory, port in jobs:
        os.environ["MASTER_PORT"] = str(port)
        take_steps_of(Path(directory))
    exit_process()


def take_steps_of(directory: Path) -> None:
    run = load(directory / "config.toml")
    ranks = join(run.learner)
    if ranks.rank:
        follow(run, ranks)
        return
    model = build_model(run.model, build_tokenizer(run.model, run.task), run.seed)
    set_precision(model, PrecisionSettings.of(run))
    whole = TorchPolicy(model, run.learner, 0.7)
    if list(directory.glob("checkpoints/step-*")):
        checkpoint.restore(directory / "checkpoints", whole)
    updater, found = MultiProcessUpdater(whole, run, ranks), []
    steps = msgspec.msgpack.decode((directory / "samples").read_bytes(), type=list[list[Piece]])
    for pieces in steps:
        if run.learner.reference_kl and run.learner.reference_kl.reset_every:
            updater.reset_reference()
        found.append(updater.update([piece.sample() for piece in pieces]))
    state = checkpoint.State(
        step=9, position="0-1", cursor=1, outstanding=[], digests={},
        updates=whole.updates, skipped=whole.skipped, model=model.config.to_hf(),
    )  # fmt: skip
    writer = CheckpointWriter(directory / "checkpoints", 5)
    writer.save(state, updater)
    writer.finish()
    writer.close()
    made = VersionBuilder(VersionSettings.of(run)).build(model, 1)
    updater.close()
    (directory / "found.json").write_text(json.dumps([found, made.manifest.digest]))


def fork_on_demand() -> None:
    """Forks the ranks that each line asks for, and writes their exit codes once all have ended."""
    fork = multiprocessing.get_context("fork")
    for line in sys.stdin:
        size, jobs, logs = json.loads(line)
        ranks = [
            fork.Process(target=take_steps, args=(i, size, jobs, logs[i])) for i in range(size)
        ]
        for rank in ranks:
            rank.start()
        # One that fails leaves the others waiting.
        while any(rank.exitcode is None for rank in ranks) and not any(r.exitcode for r in ranks):
            wait([rank.sentinel for rank in ranks if rank.exitcode is None])
        for rank in ranks:
            rank.kill()
            rank.join()
        print(json.dumps([rank.exitcode for rank in ranks]), flush=True)


class RankServer:
    """The process that forks ranks."""

    def __init__(self) -> None:
        # A script's own path has no tests/helpers.
        more = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | more | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def take_steps(self, jobs: dict[Path, int], logs: list[Path]) -> list[int]:
        """Lets a rank for each of `logs` take the steps of all jobs; returns the exit codes."""
        assert self._process.stdin and self._process.stdout
        asked = len(logs), [(str(job), port) for job, port in jobs.items()], list(map(str, logs))
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


if __name__ == "__main__":
    torch.set_num_threads(1)
    fork_on_demand()
