"""Tells which objectives survive quantized rollouts: every arm from the same warm start, several seeds.

    python -m bench.stability                  # what is missing of arms × seeds, then table and figure
    python -m bench.stability --only "int3 acr,bf16 ppo"
    python -m bench.stability --plot           # table and figure again, from bench/results/stability.csv
    python -m bench.stability --study sums     # the same of a pretrained model, after `make real-model`

An arm runs in this process (bench/stability/lab.py); the result of each is a file in runs/bench/stability,
named by arm, seed and settings. One that is there is not run again, nor is one that another process has begun:
several may be started beside each other. What came out: docs/stability.md.
"""

import argparse
import asyncio
import fcntl
import gc
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from areal_q.checks.automatic import settled
from areal_q.config import Gspo, Run, load
from areal_q.system.files import replacing
from bench.common import RESULTS, ROOT, commit, device, say
from bench.stability.int3 import with_format
from bench.stability.lab import Values, train
from bench.stability.report import COLUMNS, CSV, FIGURE, Row, figure, read, summary, write

RUNS = RESULTS / "stability"
BAND = 16384**0.5
"""Widens GSPO's bounds, divided by the root of a response's length, as `response_tokens` does TBPO's"""


@dataclass(frozen=True)
class Study:
    """What all arms of a table share."""

    config: str
    """A file of configs/"""
    shared: tuple[str, ...]
    """Settings on top of it"""
    tokens: int
    """Of the longest response"""
    seeds: tuple[int, ...]
    csv: Path
    figure: Path
    uaq: float = 1.0
    """The scale that an arm has unless its name says otherwise"""

    def objective(self, name: str) -> list[str]:
        """Returns the settings of an objective, with bounds for responses of this length."""
        band = BAND / self.tokens**0.5
        bounds = {
            "tbpo": [f"learner.objective.response_tokens={self.tokens}"],
            "gspo": [
                f"learner.objective.clip_low={band * Gspo().clip_low}",
                f"learner.objective.clip_high={band * Gspo().clip_high}",
            ],
        }
        return [f"learner.objective.type={name}", *bounds.get(name, [])]


STUDIES = {
    "toy": Study(
        "quickstart.toml",
        (
            "steps=100",
            "warmstart.until_accuracy=0.45",
            "learner.groups=32",
            "learner.max_lag=1",
            "learner.minibatches=2",
            "learner.dtype=float32",
            "learner.optimizer.lr=2e-4",
            "learner.optimizer.decay_steps=0",
            "eval.every=25",
            "eval.problems=256",
        ),
        tokens=5,
        seeds=(4, 5, 6),
        csv=CSV,
        figure=FIGURE,
    ),
    "sums": Study(
        "smollm2-sums.toml",
        (
            "steps=100",
            "learner.max_lag=1",
            "learner.drop_uniform=false",
            "rollout.smoothing=off",
            "eval.every=20",
        ),
        tokens=24,
        seeds=(1, 2, 3),
        csv=CSV.with_name("stability-sums.csv"),
        figure=FIGURE.with_name("stability-sums.png"),
        uaq=1.5,
    ),
}
STUDIES["screen"] = replace(
    STUDIES["sums"],
    shared=(*STUDIES["sums"].shared, "steps=50", "eval.every=10"),
    seeds=(1,),
    csv=CSV.with_name("stability-screen.csv"),
    figure=FIGURE.with_name("stability-screen.png"),
)
STUDIES["long"] = replace(
    STUDIES["screen"],
    shared=(
        *STUDIES["screen"].shared,
        "steps=20",
        "rollout.sampling.max_tokens=128",
        f'task={{type="python", path="{ROOT / "bench/stability/eight_sums.py"}", template="chat", heldout=32}}',
    ),
    tokens=128,
    seeds=(1, 2),
    csv=CSV.with_name("stability-long.csv"),
    figure=FIGURE.with_name("stability-long.png"),
)
"""The settings of `toy` were chosen on seeds from 100 on, then fixed, and its seeds not looked at before: see
docs/stability.md. `screen` tries many arms for half as long on one seed, `long` a few with long responses."""
VARIANTS = {
    "smoothed": ["rollout.smoothing.alpha=0.5"],
    "awq": ["rollout.smoothing={}"],
    "twice": ["rollout.smoothing={}", "learner.minibatches=2"],
    "qarl": ["rollout.smoothing.alpha=0.5", "learner.precision=qarl"],
    "aqn": ["rollout.aqn={}"],
    "kv8": ["rollout.engine.kv_cache=fp8"],
    "jet": ["learner.precision=jet"],
    "lag0": ["rollout.smoothing.alpha=0.5", "learner.max_lag=0"],
    "lag4": ["rollout.smoothing.alpha=0.5", "learner.max_lag=4"],
}
"""What an arm's name may end in. AWQ's scales are those of formats whose activations are not rounded."""


@dataclass(frozen=True)
class Arm:
    objective: str
    format: str = "int3"
    variant: str = ""
    """One of VARIANTS, or none"""
    study: str = "toy"
    uaq: float = 1.0

    @property
    def name(self) -> str:
        """Example: "int3 acr uaq1.5"; the study's own scale is not named."""
        uaq = f" uaq{self.uaq:g}" if self.uaq != STUDIES[self.study].uaq else ""
        return f"{self.format} {self.objective}{uaq}" + f" {self.variant}".rstrip()

    def settings(self, seed: int) -> list[str]:
        """On top of the study's configuration; int3 is not among them (bench/stability/int3.py)."""
        study = STUDIES[self.study]
        format = [] if self.format == "int3" else [f"rollout.format={self.format}"]
        chosen = [*study.objective(self.objective), *VARIANTS.get(self.variant, [])]
        return [*study.shared, *format, *chosen, f"learner.uaq={self.uaq}", f"seed={seed}"]

    def run(self, seed: int, *overrides: str) -> Run:
        base = [*self.settings(seed), *overrides]
        run = settled(load(ROOT / "configs" / STUDIES[self.study].config, base))
        return with_format(run, self.format)


sums, screen, long = (partial(Arm, study=study, uaq=1.5) for study in ("sums", "screen", "long"))
PARTS = [
    [Arm("tis", "bf16"), *(Arm(x) for x in ("naive", "tis", "acr", "ppo", "tbpo"))],
    [Arm("mis"), Arm("gspo"), Arm("acr", uaq=1.5), Arm("naive", uaq=1.5)],
    [Arm("acr", uaq=2.0), *(Arm(x, uaq=1.5) for x in ("tis", "ppo", "tbpo"))],
    [Arm("tis", "bf16", uaq=1.5)],
    [Arm("naive", x) for x in ("int4", "int8", "fp8-channel", "bf16")],
    [Arm("mis", uaq=1.5), Arm("gspo", uaq=1.5)],
    [sums("tis", "bf16"), sums("acr", "int8", "smoothed"), sums("acr", "int8-weight")],
    [screen("tis", "bf16"), screen("acr", "int8"), screen("acr", "int8", "smoothed")],
    [screen("acr", "int4", "awq"), screen("acr", "int4"), screen("naive", "int4", "awq")],
    [screen("tbpo", "int4", "awq"), screen("ppo", "int4", "awq"), screen("tis", "int4", "awq")],
    [screen("naive", "int8", "smoothed"), screen("acr", "fp8-channel", "smoothed")],
    [screen("acr", "nvfp4"), screen("mis", "int4", "awq"), screen("icepop", "int4", "awq")],
    [screen("acr", "int8", "qarl"), screen("acr", "int4", "awq", uaq=1.0)],
    [screen("acr", "int8", "lag0"), screen("acr", "int8", "lag4"), screen("acr", "int4", "aqn")],
    [screen("acr", "int8-weight"), screen("acr", "fp8-channel"), screen("acr", "fp8-weight")],
    [sums("acr", "int8"), sums("acr", "int4", "awq")],
    [screen(x, "int4", "twice") for x in ("acr", "tis", "naive", "tbpo")],
    [screen("acr", "int4", "qarl"), screen("tbpo", "int8", "smoothed")],
    [sums("naive", "int8", "smoothed"), sums("acr", "fp8-channel", "smoothed")],
    [sums("acr", "int4", "qarl")],
    [screen("tis", "bf16", "kv8"), screen("acr", "fp8", "jet"), screen("acr", "fp8")],
    [screen(x, "int8", "smoothed") for x in ("ppo", "mis", "icepop", "tis")],
    [long("tis", "bf16"), long("acr", "int8", "smoothed"), long("acr", "int8")],
]
"""In the order of their run: all seeds of a part before the next part"""
ARMS = [arm for part in PARTS for arm in part]
WINDOW = 10
"""Steps that are one row of the results"""


def windows(name: str, seed: int, steps: Sequence[Values]) -> list[Row]:
    """Means over WINDOW steps each; of what is called max, maxima."""
    rows: list[Row] = []
    for start in range(0, len(steps), WINDOW):
        part = steps[start : start + WINDOW]
        row: Row = {"arm": name, "seed": seed, "step": start + len(part)}
        for column, key in COLUMNS.items():
            found = [v[key] for v in part if key in v]
            if found:
                whole = max(found) if key.endswith("max") else sum(found) / len(found)
                row[column] = float(f"{whole:.4g}")
        rows.append(row)
    return rows


def run_arm(arm: Arm, seed: int, *overrides: str, on: str = "cpu") -> list[Row]:
    """Trains on the device `on` and keeps the result, or reads one that is there, of whichever device. What is
    known by each evaluation is in a file beside it, ending in .part."""
    path = result(arm, seed, *overrides)
    if path.exists():
        return json.loads(path.read_text())["rows"]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")

    async def learn() -> list[Row]:
        steps, rows = list[Values](), list[Row]()
        async for values in train(arm.run(seed, *overrides, f"learner.device={on}")):
            steps.append(values)
            if "eval/accuracy" in values:
                rows = windows(arm.name, seed, steps)
                with replacing(part) as scratch:
                    found = {"commit": commit(), "device": device(on), "rows": rows}
                    scratch.write_text(json.dumps(found))
                last = " ".join(f"{k} {rows[-1][k]}" for k in ("step", "reward", "accuracy", "k3"))
                say(f"{arm.name}, seed {seed}: {last}")
        return rows

    rows = asyncio.run(learn())
    part.replace(path)
    return rows


def work(runs: Sequence[tuple[Arm, int]], *overrides: str, on: str = "cpu") -> None:
    """Those that have no result and that no process is at: the file lock dies with its process."""
    for arm, seed in runs:
        path = result(arm, seed, *overrides)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            run_arm(arm, seed, *overrides, on=on)
        gc.collect()  # an arm leaves its gigabytes in circles of references


def result(arm: Arm, seed: int, *overrides: str) -> Path:
    """Returns where the result of these settings is kept."""
    given = "\n".join([*arm.settings(seed), *overrides]).encode()
    digest = hashlib.blake2b(given, digest_size=4).hexdigest()
    return RUNS / f"{arm.name.replace(' ', '-')}-{seed}-{digest}.json"


def finished(runs: Sequence[tuple[Arm, int]], *overrides: str) -> list[Row]:
    """The rows of those that have a result."""
    done = [(arm, seed) for arm, seed in runs if result(arm, seed, *overrides).exists()]
    return [row for arm, seed in done for row in run_arm(arm, seed, *overrides)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", choices=STUDIES, default="toy")
    parser.add_argument("--seeds", help="default: the study's own")
    parser.add_argument("--only", help="names of arms, with commas between them")
    parser.add_argument("--device", default="cpu", help="where all of it is computed, such as cuda")
    parser.add_argument("--plot", action="store_true", help="train nothing")
    parser.add_argument("settings", nargs="*", help="a.b=c, for all arms; nothing is kept of them")
    args = parser.parse_args()
    torch.set_num_threads(1)
    study = STUDIES[args.study]
    arms = [arm for arm in ARMS if arm.study == args.study]
    wanted = args.only.split(",") if args.only else [arm.name for arm in arms]
    seeds = [*map(int, args.seeds.split(","))] if args.seeds else [*study.seeds]
    runs = [
        (arm, seed)
        for part in PARTS
        for seed in seeds
        for arm in part
        if arm.name in wanted and arm.study == args.study
    ]
    if not args.plot:
        work(runs, *args.settings, on=args.device)
    if args.settings or {*seeds} - {*study.seeds}:
        print(summary(finished(runs, *args.settings)))
        return
    if not args.plot:
        write(finished([(a, s) for a in arms for s in study.seeds]), study.csv)
    print(summary(read(study.csv)))
    figure(read(study.csv), study.figure)
