"""python -m bench.before_after COMMIT: an earlier commit beside this tree, in one table.

Both are run as a user runs them, by the command `areal-q`, in turns, with the packages of this environment; so
any commit compares whose settings have the same names. The best turn of each counts. A command that either side
does not have is left out by a dash. Figures of a busy machine say little.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.common import ROOT, commit, device, number, publish, say, table

FLOAT32, BFLOAT16 = ["learner.dtype=float32"], ["learner.dtype=bfloat16"]
RUNS = {
    "int8": FLOAT32,
    "int8, learner in bfloat16": BFLOAT16,
    "bf16": ["rollout.format=bf16", *FLOAT32],
    "fp8": ["rollout.format=fp8", *FLOAT32],
    "int4": ["rollout.format=int4", *FLOAT32],
    "nvfp4": ["rollout.format=nvfp4", *FLOAT32],
}
"""Settings of the quickstart"""
AFTERWARDS = {
    "report": ["report"],
    "replay of 20 steps": ["replay", "--to", "20"],
    "eval": ["eval"],
}
"""Commands on a run that has ended, which is their last argument"""
SETTLED = 20
"""Steps after which speeds are measured"""


class Figure(NamedTuple):
    name: str
    value: float
    more_is_better: bool = False


class Tree:
    """A checkout whose `areal-q` is run."""

    def __init__(self, root: Path, work: Path) -> None:
        self.root, self.work = root, work
        scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
        module, _, function = scripts["areal-q"].partition(":")
        self._start = (
            f"import sys; from {module} import {function}; sys.argv[0] = 'areal-q'; {function}()"
        )

    def run(self, *args: str) -> tuple[float, float] | None:
        """Returns the seconds and CPU seconds of `areal-q ARGS`, or None if it fails."""
        command = [sys.executable, "-c", self._start, *args]
        env = os.environ | {"PYTHONPATH": str(self.root)}
        began = time.perf_counter()
        with (self.work / "output").open("w") as output:
            process = subprocess.Popen(
                command, cwd=self.root, env=env, stdout=output, stderr=subprocess.STDOUT
            )
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - began
        return None if process.returncode else (seconds, usage.ru_utime + usage.ru_stime)


def trained(tree: Tree, name: str, settings: Sequence[str], steps: int) -> Iterator[Figure]:
    """Trains the quickstart for `steps` steps; yields what it took."""
    run = tree.work / name.replace(" ", "-").replace(",", "")
    shutil.rmtree(run, ignore_errors=True)
    asked = [f"root={tree.work}", f"name={run.name}", f"steps={steps}", *settings]
    typed = time.time()
    took = tree.run("run", "configs/quickstart.toml", *asked)
    if took is None:
        return
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    done = [line for line in lines if line["kind"] == "step"]
    settled = done[SETTLED:]
    rate = (len(settled) - 1) / (settled[-1]["time_s"] - settled[0]["time_s"])
    yield Figure(f"{name}: s from typing to the first step", done[0]["time_s"] - typed)
    yield Figure(f"{name}: steps/s", rate, more_is_better=True)
    yield Figure(f"{name}: CPU s of the whole run", took[1])
    drawn = median(line["rollout/tokens_per_s"] for line in settled)
    busy = 1 - median(line["rollout/idle_share"] for line in settled)
    yield Figure(f"{name}: tokens/s of a busy worker", drawn / busy, more_is_better=True)


def afterwards(tree: Tree, name: str, command: Sequence[str], run: str) -> Iterator[Figure]:
    took = tree.run(command[0], str(tree.work / run), *command[1:])
    if took is not None:
        yield Figure(f"{name}: CPU s", took[1])


def helped(tree: Tree) -> Iterator[Figure]:
    took = tree.run("--help")
    if took is not None:
        yield Figure("--help: s", took[0])


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """Yields a directory with the files of a commit."""
    with tempfile.TemporaryDirectory(prefix="areal-q-before-") as name:
        archive = subprocess.run(
            ["git", "archive", revision], cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "x", "-C", name], input=archive.stdout, check=True)
        yield Path(name)


def measure(trees: dict[str, Tree], steps: int, turns: int) -> dict[str, dict[str, Figure]]:
    """Returns {figure: {tree: its best}}."""
    found: dict[str, dict[str, Figure]] = {}
    parts: dict[str, Callable[[Tree], Iterator[Figure]]] = {"--help": helped}
    for name, settings in RUNS.items():
        parts[name] = lambda t, name=name, settings=settings: trained(t, name, settings, steps)
    for name, command in AFTERWARDS.items():
        parts[name] = lambda t, name=name, command=command: afterwards(t, name, command, "int8")
    for turn, (part, figures), (label, tree) in product(range(turns), parts.items(), trees.items()):
        say(f"turn {turn + 1}: {part}, {label}")
        for figure in figures(tree):
            best = max if figure.more_is_better else min
            others = found.setdefault(figure.name, {})
            others[label] = best(others.get(label, figure), figure, key=lambda f: f.value)
    return found


def rows_of(found: dict[str, dict[str, Figure]], labels: Sequence[str]) -> list[list[str]]:
    rows = []
    for name, by_tree in found.items():
        before, now = (by_tree.get(label) for label in labels)
        gain = None
        if before and now:
            gain = now.value / before.value if now.more_is_better else before.value / now.value
        values = [figure and figure.value for figure in (before, now)]
        rows.append([name, *map(number, values), number(gain)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.before_after", description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    if args.steps < SETTLED + 2:
        parser.error(f"--steps: at least {SETTLED + 2}, since speeds are measured after {SETTLED}")
    asked = ["git", "rev-parse", "--short", "--verify", f"{args.commit}^{{commit}}"]
    named = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    if named.returncode:
        parser.error(f"{args.commit}: no such commit here")
    before = named.stdout.strip()
    if before == commit():
        parser.error(f"{args.commit} is this tree: there is nothing to compare")
    with checkout(before) as root, tempfile.TemporaryDirectory() as work:
        trees = {}
        for label, at in ((before, root), (commit(), ROOT)):
            (directory := Path(work) / label).mkdir()
            trees[label] = Tree(at, directory)
            say(f"{label}: the warm start, and kernels that are compiled once")
            for settings in (FLOAT32, BFLOAT16):
                list(trained(trees[label], "first", settings, SETTLED + 2))
        found = measure(trees, args.steps, args.turns)
    header = ["", *trees, "times as good"]
    text = (
        f"{device()}, load {os.getloadavg()[0]:.0f}\n\n{table(header, rows_of(found, list(trees)))}"
    )
    publish("before_after", text, {name: [*by.values()] for name, by in found.items()})


if __name__ == "__main__":
    main()
