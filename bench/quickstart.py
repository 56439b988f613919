"""A whole run against its peer: `python -m bench.quickstart`, or with `--config bench/tasks/worked_sums.toml`.

The same machine and cores, the same model from the same warm-started weights, the same problems, reward,
group size and optimizer settings for `areal-q run` and for TRL's GRPOTrainer, in turns, seed by seed, until
both have learned the task; with `--speeds` also generation alone, our engine against Hugging Face `generate`.
Prints tables and writes them to runs/bench/NAME.{md,json} after every seed.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import torch
import typer

from areal_q.config import Run, load
from areal_q.evaluation.benchmarks import Preset
from areal_q.models import save_decoder
from areal_q.observability.metrics_log import Tail, read_metrics
from areal_q.system.run_dir import METRICS_FILE
from areal_q.tasks import Problem, build_task, build_tokenizer
from bench import learning_curve, trl_peer
from bench.common import (
    RESULTS,
    ROOT,
    commit,
    cpu_seconds,
    device,
    number,
    publish,
    say,
    table,
    use_cores,
    versions,
)
from bench.generation import beside_generate
from bench.learning_curve import DEFINITION, Curve, Point, time_to
from learner.build_policy import build_model
from learner.checkpoint import files as checkpoints
from learner.replay.export import export as export_model
from learner.supervised.warm_start import warm_start
from rollout.evaluation.asked import Asked
from rollout.evaluation.generate import answered

AIM = 3.0
"""Of generation at 64 sequences"""


class Pair(msgspec.Struct, frozen=True):
    """Both curves of one seed."""

    seed: int
    ours: Curve
    trl: Curve
    load: float
    """The machine's load average after them"""


def main(
    ours: Annotated[list[str] | None, typer.Argument(help="further settings of our run")] = None,
    config: Annotated[Path, typer.Option(help="settings of the run")] = ROOT
    / "configs/quickstart.toml",
    goal: Annotated[float, typer.Option(help="held-out accuracy at which both end")] = 0.9,
    seeds: Annotated[str, typer.Option(help="one after the other")] = "0,1,2",
    limit_s: Annotated[float, typer.Option(help="seconds of training at most, each system")] = 300,
    probe_s: Annotated[float, typer.Option(help="seconds to try each of TRL's layouts")] = 15,
    judge: Annotated[
        Literal["wall", "cpu"],
        typer.Option(help="the clock by which TRL's layout is chosen; cpu on a busy machine"),
    ] = "wall",
    speeds: Annotated[bool, typer.Option(help="generation alone as well")] = False,
    trl_python: Annotated[
        Path | None, typer.Option(envvar="TRL_PYTHON", help="a Python with trl; default .venv-trl")
    ] = None,
) -> None:
    use_cores(2)
    python = trl_python or trl_peer.environment()
    name = load(config).name
    work = RESULTS / name
    shutil.rmtree(work, ignore_errors=True)
    pairs: list[Pair] = []
    layout, tried, rows = None, "", []
    for seed in map(int, seeds.split(",")):
        directory = work / f"seed-{seed}"
        directory.mkdir(parents=True)
        settings = [f"seed={seed}", "name=ours", f"root={json.dumps(str(directory))}"]
        settings += ["steps=1000000", *(ours or [])]
        run = load(config, settings)
        settings += unevaluated(run.eval.every)
        export(run, directory)
        if layout is None:
            compile_kernels(config, [*settings, "name=first", "steps=2"])
        spec = trl_peer.spec_of(run, directory, limit_s, goal)
        if layout is None:
            rows = generation_lines(run, python, directory) if speeds else []
            layout, tried = trl_peer.best_layout(python, spec, probe_s, judge)
        say(f"TRL, {layout}, seed {seed}")
        try:
            trl, peer_versions = trl_peer.train(python, spec, layout)
        except trl_peer.PeerFailed as error:
            say(f"seed {seed} is left out: {error}")
            continue
        # When ours reaches the goal is known only afterwards. Half as long again as TRL's time tells enough.
        longest = 1.5 * (time_to(trl.accuracy, goal) or limit_s)
        say(f"our system, seed {seed}, for {longest:.0f} s")
        curve = run_ours(run, [str(config), *settings], min(longest, limit_s))
        pairs.append(Pair(seed, curve, trl, os.getloadavg()[1]))
        sections = [
            f"{device()}; commit {commit()}; {' '.join([config.name, *(ours or [])])}, goal {goal}.",
            ratios(pairs, goal),
            sides(pairs, goal),
            *([table(["metric", "ours", "peer", "ratio", "aim"], rows)] if rows else []),
            f"{DEFINITION}\n\nTRL: {layout}; SDPA, no compilation, no logging.",
            tried,
            f"Ours: {_listed(versions('torch'))}. Peers: {_listed(peer_versions)}.",
        ]
        values = {"pairs": msgspec.to_builtins(pairs), "generation": rows}
        publish(name, "\n\n".join(sections), values)


def export(run: Run, directory: Path) -> None:
    """The warm-started weights and the problems, for TRL. Our own run takes the same weights from the cache."""
    torch.set_num_threads(run.learner.threads)
    torch.manual_seed(run.seed)
    task, tokenizer = build_task(run.task), build_tokenizer(run.model, run.task)
    model = build_model(run.model, tokenizer, run.seed)
    say(f"warm start, seed {run.seed}")
    warm_start(model, run, task, tokenizer, lambda step, loss: None, threading.Event())
    save_decoder(model, directory / "model", tokenizer)
    heldout = task.heldout[: run.eval.problems]
    for name, problems in (("train", task.train), ("heldout", heldout)):
        rows = (
            # TRL gets a conversation as the text that the chat template made of it.
            {"prompt": tokenizer.decode(ids), "answer": p.answer, "prompt_ids": ids}
            for p in (problems[i] for i in range(len(problems)))
            for ids in [tokenizer.encode_prompt(p.asked)]
        )
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def unevaluated(every: int) -> list[str]:
    """The settings of a run that is evaluated afterwards: a checkpoint where it would have been evaluated."""
    return [
        "eval.every=1000000000", "eval.problems=1", f"checkpoint.every={every}",
        "checkpoint.keep=1000000",
    ]  # fmt: skip


def compile_kernels(config: Path, settings: list[str]) -> None:
    """A short run, so that no clock includes what happens once on a machine. TRL has its probes for that."""
    say("our kernels are compiled")
    argv = [sys.executable, "-m", "areal_q", "run", str(config), *settings]
    subprocess.run(argv, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def run_ours(run: Run, arguments: list[str], limit_s: float) -> Curve:
    """`areal-q run`, ended by a Ctrl-C at the time limit; then its checkpoints are evaluated."""
    directory = Path(run.root) / run.name
    metrics = directory / METRICS_FILE
    with Path(run.root, "ours.log").open("w") as log:
        argv = [sys.executable, "-m", "areal_q", "run", *arguments]
        child = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log)
        try:
            cpu = _wait(child, metrics, limit_s)
        finally:
            child.send_signal(signal.SIGINT)
            if child.wait(timeout=90):
                sys.exit(f"areal-q run failed, see {log.name}")
    batch = run.learner.groups * run.learner.group_size
    return learning_curve.ours(read_metrics(metrics), accuracies(run, directory), batch, cpu)


def accuracies(run: Run, directory: Path) -> dict[int, float]:
    """The held-out accuracy of each checkpoint in the rollouts' number format, by step."""
    problems = build_task(run.task).heldout[: run.eval.problems]
    found = {}
    for checkpoint in checkpoints.steps(directory / "checkpoints"):
        say(f"evaluating {checkpoint.name}")
        step, model = int(checkpoint.name.removeprefix("step-")), directory / checkpoint.name
        export_model(directory, model, step)
        found[step] = asyncio.run(_right(run, model, problems)) / len(problems)
        shutil.rmtree(model)
    return found


async def _right(run: Run, model: Path, problems: Sequence[Problem]) -> int:
    tokenizer = build_tokenizer(run.model, run.task)
    asked = Asked(
        run, model, problems, greedy=True, preset=Preset(source="greedy"), serve=("", None)
    )
    answers = answered(asked, tokenizer, say)
    return sum([row.greedy is not None and row.greedy.correct async for row in answers])


def _wait(child: subprocess.Popen[bytes], metrics: Path, limit_s: float) -> list[Point]:
    """Waits until `limit_s` after the end of the warm start, or for the run's end. Returns the CPU seconds
    after the warm start by the time of each record."""
    tail, began, before, cpu = Tail(metrics), 0.0, 0.0, [(0.0, 0.0)]
    while child.poll() is None:
        records = tail.read()[0]
        taken = cpu_seconds(child.pid) if records else 0.0  # its search through /proc takes CPU too
        for record in records:
            if record["kind"] == "warmstart":
                began, before = record["elapsed_s"], taken
                continue
            seconds = record["elapsed_s"] - began
            cpu.append((seconds, taken - before))
            if seconds >= limit_s:
                return cpu
        time.sleep(0.2)
    return cpu


def ratios(pairs: list[Pair], goal: float) -> str:
    """How much longer TRL takes to the goal, seed by seed."""
    rows = []
    for pair in pairs:
        wall = [time_to(c.accuracy, goal) for c in (pair.ours, pair.trl)]
        cpu = [cpu_to(c, goal) for c in (pair.ours, pair.trl)]
        cells = [*wall, _ratio(wall), *cpu, _ratio(cpu), pair.load]
        rows.append([str(pair.seed), *map(number, cells)])
    header = ["seed", "s to the goal, ours", "TRL", "ratio", "CPU s to it, ours", "TRL", "ratio"]
    return table([*header, "load"], rows)


def cpu_to(curve: Curve, goal: float) -> float | None:
    """CPU seconds until the goal was first reached; None if it never was."""
    seconds = time_to(curve.accuracy, goal)
    if seconds is None:
        return None
    wall, cpu = zip(*curve.cpu, strict=True)
    return float(np.interp(seconds, wall, cpu))


def _ratio(values: list[float | None]) -> float | None:
    ours, peer = values
    return peer / ours if ours and peer else None


def sides(pairs: list[Pair], goal: float) -> str:
    """What each system did in its time, seed by seed."""
    rows = []
    for pair in pairs:
        for side, curve in (("ours", pair.ours), ("TRL", pair.trl)):
            cells = [
                curve.accuracy[0][1],
                curve.accuracy[-1][1],
                len(curve.ended),
                curve.tokens / curve.ended[-1],
                curve.tokens / curve.cpu[-1][1],
                curve.drawing,
                curve.training,
            ]
            rows.append([str(pair.seed), side, *map(number, cells)])
    header = ["seed", "side", "accuracy before", "after", "batches", "tokens/s"]
    return table([*header, "tokens/CPU s", "drawing, share of time", "training"], rows)


def generation_lines(run: Run, python: Path, directory: Path) -> list[list[str]]:
    rows = []
    for work in beside_generate.workloads(run):
        say(f"generation, {work.name}")
        model = directory / "model"
        ours = beside_generate.ours(run, model, work)
        peer = beside_generate.hugging_face(python, run, model, work, directory / "generate.json")
        name = f"tokens/s, {beside_generate.SEQUENCES} sequences, 1 thread, {work.name} (generate)"
        ratio = ours / peer
        verdict = f"{AIM:g}" + (f", short by {AIM - ratio:.2f}" if ratio < AIM else "")
        rows.append([name, number(ours), number(peer), number(ratio), verdict])
    return rows


def _listed(names: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in names.items())


if __name__ == "__main__":
    typer.run(main)
