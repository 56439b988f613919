"""The quickstart against its peers, in one run: `python -m bench.quickstart`.

The same machine and cores, the same model from the same warm-started weights, the same problems, reward,
group size and optimizer settings for `areal-q run` and for TRL's GRPOTrainer; then generation alone, our
engine against Hugging Face `generate`. Prints tables and writes them to runs/bench/quickstart.{md,json}.
"""

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Annotated

import msgspec
import torch
import typer

from areal_q.config import Run, load
from areal_q.models import save_decoder
from areal_q.observability.metrics_log import Tail, read_metrics
from areal_q.system.run_dir import METRICS_FILE
from areal_q.tasks import build_task, build_tokenizer
from bench import learning_curve, trl_peer
from bench.common import (
    RESULTS,
    ROOT,
    commit,
    device,
    number,
    publish,
    say,
    table,
    use_cores,
    versions,
)
from bench.generation import beside_generate
from bench.learning_curve import (
    ACCURACY_GOAL,
    DEFINITION,
    REWARD_GOAL,
    Curve,
    gain_per_minute,
    time_to,
)
from learner.build import build_model
from learner.data.sft_warmup import warm_start

WORK = RESULTS / "quickstart"
AIM = 3.0
"""Both ratios that count: accuracy gained per minute, and generation at 64 sequences"""


def main(
    config: Annotated[Path, typer.Option(help="settings of the run")] = ROOT
    / "configs/quickstart.toml",
    limit_s: Annotated[float, typer.Option(help="seconds of training for each system")] = 180.0,
    probe_s: Annotated[float, typer.Option(help="seconds to try each of TRL's layouts")] = 10.0,
    seed: Annotated[int, typer.Option()] = 0,
    trl_python: Annotated[
        Path | None, typer.Option(envvar="TRL_PYTHON", help="a Python with trl; default .venv-trl")
    ] = None,
) -> None:
    use_cores(2)
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    settings = [f"seed={seed}", "name=ours", f"root={json.dumps(str(WORK))}", "steps=1000000"]
    run = load(config, settings)
    python = trl_python or trl_peer.environment()
    export(run)
    speeds = generation_lines(run, python)
    say(f"our system, {limit_s:.0f} s")
    ours = run_ours(run, [str(config), *settings], limit_s)
    spec = trl_peer.spec_of(run, WORK, limit_s)
    layout = trl_peer.best_layout(python, spec, probe_s)
    say(f"TRL, {layout}, {limit_s:.0f} s")
    trl, peer_versions = trl_peer.train(python, spec, layout)
    sections = [
        f"{device()}; commit {commit()}; seed {seed}; {limit_s:.0f} s of training for each system.",
        table(["metric", "ours", "peer", "ratio", "aim"], [*training_lines(ours, trl), *speeds]),
        over_time(ours, trl, limit_s),
        DEFINITION,
        f"TRL: {layout}, the fastest of {len(trl_peer.LAYOUTS)}; float32, SDPA, no compilation, no logging.",
        f"Ours: {_listed(versions('torch'))}. Peers: {_listed(peer_versions)}.",
    ]
    curves = {"ours": msgspec.to_builtins(ours), "trl": msgspec.to_builtins(trl)}
    publish("quickstart", "\n\n".join(sections), {"curves": curves, "generation": speeds})


def export(run: Run) -> None:
    """The warm-started weights and the problems, for TRL. Our own run takes the same weights from the cache."""
    torch.set_num_threads(run.learner.threads)
    torch.manual_seed(run.seed)
    task, tokenizer = build_task(run.task), build_tokenizer(run.model, run.task)
    model = build_model(run.model, tokenizer, run.seed)
    say("warm start")
    warm_start(model, run, task, tokenizer, lambda step, loss: None, threading.Event())
    save_decoder(model, WORK / "model", tokenizer)
    heldout = task.heldout[: run.eval.problems]
    for name, problems in (("train", task.train), ("heldout", heldout)):
        rows = (
            {
                "prompt": p.prompt,
                "answer": p.answer,
                "prompt_ids": tokenizer.encode_prompt(p.prompt),
            }
            for p in (problems[i] for i in range(len(problems)))
        )
        (WORK / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_ours(run: Run, arguments: list[str], limit_s: float) -> Curve:
    """`areal-q run`, ended by a Ctrl-C at the time limit."""
    metrics = Path(run.root) / run.name / METRICS_FILE
    with (WORK / "ours.log").open("w") as log:
        argv = [sys.executable, "-m", "areal_q", "run", *arguments]
        child = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log)
        try:
            _wait(child, metrics, limit_s)
        finally:
            child.send_signal(signal.SIGINT)
            if child.wait(timeout=90):
                sys.exit(f"areal-q run failed, see {log.name}")
    return learning_curve.ours(read_metrics(metrics), run.learner.groups * run.learner.group_size)


def _wait(child: subprocess.Popen[bytes], metrics: Path, limit_s: float) -> None:
    """Until a record is written `limit_s` after the end of the warm start, or the run ends by itself."""
    tail, began = Tail(metrics), 0.0
    while child.poll() is None:
        for record in tail.read()[0]:
            if record["kind"] == "warmstart":
                began = record["elapsed_s"]
            elif record["elapsed_s"] - began >= limit_s:
                return
        time.sleep(0.2)


def training_lines(ours: Curve, trl: Curve) -> list[list[str]]:
    """Rows of (metric, ours, TRL, ratio, aim)."""
    both = (ours, trl)
    accuracy = [gain_per_minute(c.accuracy, ACCURACY_GOAL) for c in both]
    reward = [gain_per_minute(c.smooth_reward, REWARD_GOAL) for c in both]
    seconds = [time_to(c.accuracy, ACCURACY_GOAL) for c in both]
    return [
        line("held-out accuracy gained per minute (TRL)", *accuracy, aim=AIM),
        line("training reward gained per minute (TRL)", *reward, aim=AIM),
        line(f"seconds to held-out accuracy {ACCURACY_GOAL} (TRL)", *seconds, inverse=True),
        line("held-out accuracy at the start (TRL)", *(c.accuracy[0][1] for c in both)),
        line("held-out accuracy at the end (TRL)", *(c.accuracy[-1][1] for c in both)),
        line("batches per minute (TRL)", *(c.batches * 60 / c.seconds for c in both)),
        line("tokens/s from end to end (TRL)", *(c.tokens / c.seconds for c in both)),
        line("tokens/s while generating (TRL: both cores)", *(c.rates["generate"] for c in both)),
        line("tokens/s while training (TRL: both cores)", *(c.rates["train"] for c in both)),
        line("learner idle share", ours.rates["learner_idle"]),
        line("worker idle share", ours.rates["worker_idle"]),
    ]


def generation_lines(run: Run, python: Path) -> list[list[str]]:
    rows = []
    for work in beside_generate.workloads(run):
        say(f"generation, {work.name}")
        ours = beside_generate.ours(run, WORK / "model", work)
        peer = beside_generate.hugging_face(
            python, run, WORK / "model", work, WORK / "generate.json"
        )
        name = f"tokens/s, {beside_generate.SEQUENCES} sequences, 1 thread, {work.name} (generate)"
        rows.append(line(name, ours, peer, aim=AIM))
    return rows


def line(
    name: str,
    ours: float | None,
    peer: float | None = None,
    *,
    aim: float | None = None,
    inverse: bool = False,
) -> list[str]:
    """One row; says by how much a ratio falls short of its aim. `inverse`: less is better."""
    ratio = None
    if ours and peer:
        ratio = peer / ours if inverse else ours / peer
    verdict = "" if aim is None else f"{aim:g}"
    if aim is not None and ratio is not None and ratio < aim:
        verdict += f", short by {aim - ratio:.2f}"
    return [name, number(ours), number(peer), number(ratio), verdict]


def over_time(ours: Curve, trl: Curve, limit_s: float) -> str:
    """Held-out accuracy and training reward of both, every 15 seconds."""
    columns = [ours.accuracy, trl.accuracy, ours.smooth_reward, trl.smooth_reward]
    rows = [
        [str(second), *(number(learning_curve.value_at(points, second)) for points in columns)]
        for second in range(0, int(limit_s) + 1, 15)
    ]
    return table(["seconds", "accuracy, ours", "TRL", "reward, ours", "TRL"], rows)


def _listed(names: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in names.items())


if __name__ == "__main__":
    typer.run(main)
