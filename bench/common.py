"""What every bench needs: the machine, the commit, a table, and a place for the result."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "runs" / "bench"
"""Not committed: bench/README.md quotes from it."""


def use_cores(count: int) -> list[int]:
    """Confines this process and its children to `count` of the cores that it may use, or to all of fewer."""
    cores = sorted(os.sched_getaffinity(0))[:count]
    os.sched_setaffinity(0, cores)
    return cores


def device(kind: str = "cpu") -> str:
    """The GPU, or the CPU and how many of its cores this process may use: "AMD EPYC (family 26), 2 cores"."""
    if kind.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(kind)
    facts = {}
    for line in Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        facts[key.strip()] = value.strip()
    name = facts.get("model name", platform.machine())
    family = f" (family {facts['cpu family']})" if "cpu family" in facts else ""
    cores = len(os.sched_getaffinity(0))
    return f"{name}{family}, {cores} core{'s' if cores > 1 else ''}"


def commit() -> str:
    """The commit that is measured, marked where the tree has changes on top. Example: "2f85bbf+changes"."""

    def git(*args: str) -> str:
        out = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True)
        return out.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions(*distributions: str) -> dict[str, str]:
    """Python's and the installed distributions' versions."""
    return {"python": platform.python_version()} | {name: version(name) for name in distributions}


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and all its descendants so far, those that have ended included."""
    stats: dict[int, tuple[int, int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        stats[int(path.parent.name)] = (int(fields[1]), sum(map(int, fields[11:15])))

    def ticks(root: int) -> int:
        own = stats[root][1] if root in stats else 0
        return own + sum(ticks(child) for child, (parent, _) in stats.items() if parent == root)

    return ticks(pid) / os.sysconf("SC_CLK_TCK")


def say(text: str) -> None:
    """Progress, apart from the result."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def peer_env(threads: int) -> dict[str, str]:
    """For a program of another project: so many threads, no GPU, no network."""
    count = {f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "MKL", "OPENBLAS")}
    return os.environ | count | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def number(value: float | None) -> str:
    """Three significant digits, thousands in full; a dash for what was not measured."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, padded so that it also reads well in a terminal."""
    lines = [list(header), *map(list, rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(header))]
    text = [" | ".join(cell.ljust(w) for cell, w in zip(x, widths, strict=True)) for x in lines]
    text.insert(1, " | ".join("-" * w for w in widths))
    return "\n".join(f"| {line} |" for line in text)


def publish(name: str, text: str, values: dict[str, Any]) -> Path:
    """Prints `text` and writes it, and `values`, to runs/bench/NAME.md and NAME.json."""
    print(text)
    return keep(name, text, values)


def keep(name: str, text: str, values: dict[str, Any]) -> Path:
    """Writes the same and prints nothing."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.md"
    path.write_text(text + "\n")
    path.with_suffix(".json").write_text(json.dumps(values, indent=1) + "\n")
    return path
