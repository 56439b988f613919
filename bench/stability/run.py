"""Tells which objectives survive quantized rollouts: every arm from the same warm start, several seeds.

    python -m bench.stability                  # what is missing of arms × seeds, then table and figure
    python -m bench.stability --only "int3 acr,bf16 ppo"
    python -m bench.stability --plot           # table and figure again, from bench/results/stability.csv

An arm runs in this process (bench/stability/lab.py); the result of each is a file in runs/bench/stability,
named by arm, seed and settings. One that is there is not run again, nor is one that another process has begun:
several may be started beside each other. What came out: docs/stability.md.
"""

import argparse
import asyncio
import fcntl
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from areal_q.config import Gspo, Run, load
from areal_q.system.files import replacing
from bench.common import RESULTS, ROOT, commit, device, say
from bench.stability.int3 import with_format
from bench.stability.lab import Values, train
from bench.stability.report import COLUMNS, Row, figure, read, summary, write

RUNS = RESULTS / "stability"
SETTING = [
    "steps=100",
    "warmstart.until_accuracy=0.45",
    "learner.groups=32",
    "learner.max_lag=1",
    "learner.minibatches=2",
    "learner.optimizer.lr=2e-4",
    "learner.optimizer.decay_steps=0",
    "eval.every=25",
    "eval.problems=256",
]
"""What all arms share, on top of configs/quickstart.toml. Chosen on seeds from 100 on, then fixed."""
TOKENS = 5
"""Of the longest response"""
BAND = (16384 / TOKENS) ** 0.5
"""Widens GSPO's bounds as `response_tokens` does TBPO's"""
OBJECTIVES: dict[str, list[str]] = {
    "naive": [],
    "tis": [],
    "acr": [],
    "ppo": [],
    "tbpo": [f"learner.objective.response_tokens={TOKENS}"],
    "mis": [],
    "gspo": [
        f"learner.objective.clip_low={BAND * Gspo().clip_low}",
        f"learner.objective.clip_high={BAND * Gspo().clip_high}",
    ],
}


@dataclass(frozen=True)
class Arm:
    objective: str
    format: str = "int3"
    uaq: float = 1.0

    @property
    def name(self) -> str:
        """Example: "int3 acr uaq1.5"; scale 1 is not named."""
        return f"{self.format} {self.objective}" + (f" uaq{self.uaq:g}" if self.uaq != 1 else "")

    def settings(self, seed: int) -> list[str]:
        """On top of configs/quickstart.toml; the format is not among them (bench/stability/int3.py)."""
        chosen = [f"learner.objective.type={self.objective}", *OBJECTIVES[self.objective]]
        return [*SETTING, *chosen, f"learner.uaq={self.uaq}", f"seed={seed}"]

    def run(self, seed: int, *overrides: str) -> Run:
        base = [*self.settings(seed), *overrides]
        return with_format(load(ROOT / "configs" / "quickstart.toml", base), self.format)


PARTS = [
    [Arm("tis", "bf16"), *(Arm(x) for x in ("naive", "tis", "acr", "ppo", "tbpo"))],
    [Arm("mis"), Arm("gspo"), Arm("acr", uaq=1.5), Arm("naive", uaq=1.5)],
    [Arm("acr", uaq=2.0), *(Arm(x, uaq=1.5) for x in ("tis", "ppo", "tbpo"))],
    [Arm("tis", "bf16", 1.5), *(Arm("naive", x) for x in ("int4", "int8", "fp8-channel", "bf16"))],
    [Arm("mis", uaq=1.5), Arm("gspo", uaq=1.5)],
]
"""In the order of their run: all seeds of a part before the next part"""
ARMS = [arm for part in PARTS for arm in part]
SEEDS = (4, 5, 6)
"""Not looked at before the setting was fixed: docs/stability.md"""
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


def run_arm(arm: Arm, seed: int, *overrides: str) -> list[Row]:
    """Trains and keeps the result, or reads one that is there."""
    path = result(arm, seed, *overrides)
    if path.exists():
        return json.loads(path.read_text())["rows"]

    async def steps() -> list[Values]:
        return [values async for values in train(arm.run(seed, *overrides))]

    rows = windows(arm.name, seed, asyncio.run(steps()))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as scratch:
        scratch.write_text(json.dumps({"commit": commit(), "device": device(), "rows": rows}))
    last = rows[-1]
    say(f"{arm.name}, seed {seed}: reward {last['reward']}, accuracy {last['accuracy']}")
    return rows


def work(runs: Sequence[tuple[Arm, int]], *overrides: str) -> None:
    """Those that have no result and that no process is at: the file lock dies with its process."""
    for arm, seed in runs:
        path = result(arm, seed, *overrides)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            run_arm(arm, seed, *overrides)


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
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--only", help="names of arms, with commas between them")
    parser.add_argument("--plot", action="store_true", help="train nothing")
    parser.add_argument("settings", nargs="*", help="a.b=c, for all arms; nothing is kept of them")
    args = parser.parse_args()
    torch.set_num_threads(1)
    wanted = args.only.split(",") if args.only else [arm.name for arm in ARMS]
    seeds = [*map(int, args.seeds.split(","))]
    runs = [(a, seed) for part in PARTS for seed in seeds for a in part if a.name in wanted]
    if not args.plot:
        work(runs, *args.settings)
    if args.settings or {*seeds} - {*SEEDS}:
        print(summary(finished(runs, *args.settings)))
        return
    if not args.plot:
        write(finished([(a, s) for a in ARMS for s in SEEDS]))
    print(summary(read()))
    figure(read())
