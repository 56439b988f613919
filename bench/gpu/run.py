"""On a GPU: the same bits as on a CPU, kernels beside the copy, FP8 beside bfloat16, learner, generation, runs.

    bench/gpu.sh                                # all of it but vLLM's generation, in ten minutes at most
    bench/gpu.sh --sections vllm                # that, in another ten
    python -m bench.gpu --device cpu --small        # a rehearsal anywhere, of no interest as figures

Each section is a process of its own with a time limit: what crashes or hangs there becomes a line in the
result, not the end of it. Prints tables, and writes them to runs/bench/gpu.{md,json}.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict

import torch

from bench.common import ROOT, commit, device, number, publish, say, table, versions
from bench.gpu import Row
from bench.gpu.sections import SECTIONS

LIMITS_S = {
    "bits": 60, "kernels": 40, "gemm": 40, "learner": 120, "generation": 160, "runs": 160, "vllm": 570,
}  # fmt: skip
"""580 s in all but `vllm`, which is asked for by name. An H100 took 20, 6, 7, 70 and 111 for the first five."""


def run(section: str, kind: str, small: bool) -> list[Row] | str:
    """The section's rows, or why there are none."""
    argv = [sys.executable, "-m", "bench.gpu", "--section", section, "--device", kind]
    limit = LIMITS_S[section]
    try:
        out = subprocess.run(
            argv + ["--small"] * small, cwd=ROOT, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return f"not done within {limit} s"
    rows = [Row(**json.loads(x[4:])) for x in out.stdout.splitlines() if x.startswith("row ")]
    if out.returncode:
        last = (out.stderr.strip().splitlines() or [f"status {out.returncode}"])[-1]
        rows.append(Row("failed", {}, last[:200]))
    return rows


def shown(section: str, rows: list[Row] | str) -> str:
    title = " ".join((SECTIONS[section].__doc__ or "").split())
    if isinstance(rows, str):
        return f"{title}\n\n{rows}"
    columns = list(dict.fromkeys(name for row in rows for name in row.values))
    cells = [[row.name, *(number(row.values.get(c)) for c in columns), row.note] for row in rows]
    return f"{title}\n\n" + table([section, *columns, "note"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="shapes for a CPU")
    parser.add_argument("--sections", default=",".join(s for s in SECTIONS if s != "vllm"))
    parser.add_argument("--section", choices=list(SECTIONS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu --small rehearses")
    if args.section:
        for row in SECTIONS[args.section](torch.device(args.device), args.small):
            print("row " + json.dumps(asdict(row)), flush=True)
        return
    names = args.sections.split(",")
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"--sections: {', '.join(sorted(unknown))} is none of {', '.join(SECTIONS)}")
    found = {}
    for name in names:
        began = time.monotonic()
        found[name] = run(name, args.device, args.small)
        say(f"{name}: {time.monotonic() - began:.0f} s")
    head = f"{device(args.device)} · commit {commit()} · {versions('torch')}"
    text = "\n\n".join([head, *(shown(name, rows) for name, rows in found.items())])
    values = {
        name: rows if isinstance(rows, str) else [asdict(row) for row in rows]
        for name, rows in found.items()
    }
    publish("gpu", text, values)
