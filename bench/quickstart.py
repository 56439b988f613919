"""A whole run against its peer: `python -m bench.quickstart`, or with `--config bench/tasks/worked_sums.toml`.

The same machine and cores, the same model from the same warm-started weights, the same problems, reward,
group size and optimizer settings for `areal-q run` and for TRL's GRPOTrainer, in turns, seed by seed, until
both have learned the task; with `--speeds` also generation alone, our engine against Hugging Face `generate`.
Writes tables to runs/bench/NAME.{md,json} after every part, and prints them at the end.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch
import typer

from areal_q.checks.disk_use import disk_use
from areal_q.config import Run, load
from areal_q.evaluation.benchmarks import Preset
from areal_q.models import save_decoder
from areal_q.observability.metrics_log import Tail, read_metrics
from areal_q.system.processes import die_with_parent
from areal_q.system.run_dir import METRICS_FILE
from areal_q.tasks import Problem, build_task, build_tokenizer
from bench import learning_curve, trl_peer
from bench.common import (
    RESULTS,
    ROOT,
    commit,
    cpu_seconds,
    device,
    keep,
    number,
    say,
    table,
    use_cores,
    versions,
)
from bench.generation import beside_generate
from bench.learning_curve import DEFINITION, Curve, Point, has_weights, time_to
from learner.build_policy import build_model
from learner.checkpoint import files as checkpoints
from learner.replay.export import export as export_model
from learner.supervised.warm_start import warm_start
from rollout.evaluation.generate import answered
from rollout.evaluation.questions import EvalQuestions

AIM = 3.0
"""Of generation at 64 sequences"""
END_S, SILENT_S = 300.0, 600.0
"""Seconds that our run may take to end, with a checkpoint and the model to write, and between two records"""


class Pair(msgspec.Struct, frozen=True):
    """Both curves of one seed."""

    seed: int
    trl: Curve
    load: float
    """The machine's load average after them"""
    ours: Curve | None = None
    """None until it is measured, and if it never was"""


class OursFailed(Exception):
    """Our run ended before its first step."""


@dataclass
class Results:
    """What was measured so far, which is on the disk after every part: each takes minutes, and any may fail."""

    name: str
    settings: Sequence[str]
    """Further settings of our run"""
    goal: float
    layout: trl_peer.Layout | None = None
    tried: str = ""
    """Table of TRL's layouts"""
    generation: list[list[str]] = field(default_factory=list)
    peers: dict[str, str] = field(default_factory=dict)
    """Versions of TRL and what it needs"""
    pairs: dict[int, Pair] = field(default_factory=dict)

    def add(self, pair: Pair) -> None:
        """Puts `pair` in the place of what was known of its seed."""
        self.pairs[pair.seed] = pair
        self.keep()

    def keep(self) -> None:
        pairs = list(self.pairs.values())
        generated = table(["metric", "ours", "peer", "ratio", "aim"], self.generation)
        sections = [
            f"{device()}; commit {commit()}; {' '.join([self.name, *self.settings])}, goal {self.goal}.",
            *([ratios(pairs, self.goal), sides(pairs, self.goal)] if pairs else []),
            *([generated] if self.generation else []),
            f"{DEFINITION}\n\nTRL: {self.layout}; SDPA, no compilation, no logging.",
            self.tried,
            f"Ours: {_listed(versions('torch'))}. Peers: {_listed(self.peers)}.",
        ]
        values = {"pairs": msgspec.to_builtins(pairs), "generation": self.generation}
        keep(self.name, "\n\n".join(sections), values)


def main(
    ours: Annotated[list[str] | None, typer.Argument(help="further settings of our run")] = None,
    config: Annotated[Path, typer.Option(help="settings of the run")] = ROOT
    / "configs/quickstart.toml",
    goal: Annotated[float, typer.Option(help="held-out accuracy at which both end")] = 0.9,
    seeds: Annotated[str, typer.Option(help="one after the other")] = "0,1,2",
    limit_s: Annotated[float, typer.Option(help="seconds of training at most, each system")] = 300,
    probe_s: Annotated[
        float, typer.Option(help="seconds to try each of TRL's layouts, and three batches at least")
    ] = 15,
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
    results = Results(load(config).name, ours or [], goal)
    work = RESULTS / results.name
    shutil.rmtree(work, ignore_errors=True)
    for seed in map(int, seeds.split(",")):
        directory = work / f"seed-{seed}"
        directory.mkdir(parents=True)
        settings = [f"seed={seed}", "name=ours", f"root={json.dumps(str(directory))}"]
        settings += ["steps=1000000", *results.settings]
        run = load(config, settings)
        settings += unevaluated(run.eval.every)
        export(run, directory)
        spec = trl_peer.spec_of(run, directory, limit_s, goal)
        if results.layout is None:
            compile_kernels(config, [*settings, "name=first", "steps=2"])
            results.generation = generation_lines(run, python, directory) if speeds else []
            results.layout, results.tried = trl_peer.best_layout(python, spec, probe_s, judge)
            results.keep()
        try:
            beside_trl(results, run, [str(config), *settings], python, spec)
        except trl_peer.PeerFailed as error:
            say(f"seed {seed} is left out: {error}")
        except OursFailed as error:
            say(f"of seed {seed} there is TRL's side alone: {error}")
    if not results.pairs:
        sys.exit("nothing was measured")
    print((RESULTS / f"{results.name}.md").read_text())


def beside_trl(
    results: Results, run: Run, arguments: list[str], python: Path, spec: dict[str, Any]
) -> None:
    """Measures both systems on one seed: TRL first, since its time says how long ours may take."""
    assert results.layout is not None
    goal, limit_s = results.goal, spec["time_limit_s"]
    say(f"TRL, {results.layout}, seed {run.seed}")
    trl, results.peers = trl_peer.train(python, spec, results.layout)
    results.add(Pair(run.seed, trl, os.getloadavg()[1]))
    # When ours reaches the goal is known only afterwards. Half as long again as TRL's time tells enough.
    longest = min(limit_s, 1.5 * (time_to(trl.accuracy, goal) or limit_s))
    say(f"our system, seed {run.seed}, for {longest:.0f} s")
    for curve in our_curves(run, arguments, longest, goal):
        results.add(Pair(run.seed, trl, os.getloadavg()[1], curve))


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
    """The settings of a run that is evaluated afterwards: a checkpoint where it would have been evaluated.

    Those that `keep` counts must fit on the disk before the run starts, those of `keep_every` need not."""
    return [
        "eval.every=1000000000", "eval.problems=1", "checkpoint.keep=1",
        f"checkpoint.every={every}", f"checkpoint.keep_every={every}",
    ]  # fmt: skip


def compile_kernels(config: Path, settings: list[str]) -> None:
    """A short run, so that no clock includes what happens once on a machine. TRL has its probes for that."""
    say("our kernels are compiled")
    argv = [sys.executable, "-m", "areal_q", "run", str(config), *settings]
    subprocess.run(argv, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def our_curves(run: Run, arguments: list[str], limit_s: float, goal: float) -> Iterator[Curve]:
    """Trains, then evaluates one checkpoint after the other until one reaches `goal`; yields the curve as known
    before that, and after each. Raises OursFailed if there is no curve."""
    cpu = run_ours(run, arguments, limit_s)
    directory = Path(run.root) / run.name
    metrics = directory / METRICS_FILE
    records = read_metrics(metrics) if metrics.exists() else []
    if not any(record["kind"] == "step" for record in records):
        raise OursFailed(f"areal-q run made no step, see {directory.with_suffix('.log')}")
    batch, found = run.learner.groups * run.learner.group_size, {}
    yield learning_curve.ours(records, found, batch, cpu)
    for checkpoint in checkpoints.steps(directory / "checkpoints"):
        say(f"evaluating {checkpoint.name}")
        found[int(checkpoint.name.removeprefix("step-"))] = accuracy(run, directory, checkpoint)
        yield learning_curve.ours(records, found, batch, cpu)
        shutil.rmtree(checkpoint)  # with its moments it is six times as large as the model
        if max(found.values()) >= goal:
            return


def run_ours(run: Run, arguments: list[str], limit_s: float) -> list[Point]:
    """`areal-q run`, ended by a Ctrl-C at the time limit. Returns its CPU seconds, as `_wait` does."""
    directory = Path(run.root) / run.name
    with directory.with_suffix(".log").open("w") as log:
        argv = [sys.executable, "-m", "areal_q", "run", *arguments]
        with_us = die_with_parent(signal.SIGTERM)
        child = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log, preexec_fn=with_us)
        try:
            return _wait(child, run, directory / METRICS_FILE, limit_s)
        finally:
            child.send_signal(signal.SIGINT)
            try:
                code = child.wait(END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                code = child.wait()
            if code:  # what it had done by then counts
                say(f"areal-q run ended with {code}, see {log.name}")


def accuracy(run: Run, directory: Path, checkpoint: Path) -> float:
    """The held-out accuracy of a checkpoint in the rollouts' number format."""
    problems = build_task(run.task).heldout[: run.eval.problems]
    model = directory / checkpoint.name
    export_model(directory, model, int(checkpoint.name.removeprefix("step-")))
    try:
        return asyncio.run(_right(run, model, problems)) / len(problems)
    finally:
        shutil.rmtree(model)


async def _right(run: Run, model: Path, problems: Sequence[Problem]) -> int:
    tokenizer = build_tokenizer(run.model, run.task)
    asked = EvalQuestions(
        run, model, problems, greedy=True, preset=Preset(source="greedy"), serve=("", None)
    )
    answers = answered(asked, dict(enumerate(problems)), tokenizer, say)
    return sum([row.greedy is not None and row.greedy.correct async for row in answers])


def _wait(child: subprocess.Popen[bytes], run: Run, metrics: Path, limit_s: float) -> list[Point]:
    """Waits until `limit_s` after the learner has its first weights, for the run's end, until it has said
    nothing for SILENT_S, or until its disk holds only two more checkpoints. Returns the CPU seconds since those
    weights by the time of each record."""
    began: float | None = None
    tail, before, cpu = Tail(metrics), 0.0, [(0.0, 0.0)]
    heard, room = time.monotonic(), 2 * disk_use(run).one
    while child.poll() is None:
        records = tail.read()[0]
        taken = cpu_seconds(child.pid) if records else 0.0  # its search through /proc takes CPU too
        for record in records:
            heard = time.monotonic()
            if has_weights(record):
                began, before = record["elapsed_s"], taken
                continue
            if began is None:
                continue
            seconds = record["elapsed_s"] - began
            cpu.append((seconds, taken - before))
            if seconds >= limit_s:
                return cpu
        if time.monotonic() - heard > SILENT_S:
            say(f"areal-q run has said nothing for {SILENT_S:.0f} s")
            return cpu
        if shutil.disk_usage(run.root).free < room:
            say(f"{run.root}: no room for more checkpoints")
            return cpu
        time.sleep(0.2)
    return cpu


def ratios(pairs: list[Pair], goal: float) -> str:
    """How much longer TRL takes to the goal, seed by seed."""
    rows = []
    for pair in pairs:
        both = (pair.ours, pair.trl)
        wall = [c and time_to(c.accuracy, goal) for c in both]
        cpu = [c and cpu_to(c, goal) for c in both]
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
            if curve is None:
                continue
            accuracies = [value for _, value in curve.accuracy] or [None]
            cells = [
                accuracies[0],
                accuracies[-1],
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
