"""A step on one long response whose tokens 1, 2 or 4 processes share: `python -m bench.learner.long_response`.

With a number behind it, of so many tokens.
Float32, gloo, one thread each; for each process count the gradient's norm, which none of them may change, the
seconds, and how much more memory the first process had at the step's highest moment than before it. One model
has key heads for two processes, the other for one.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from areal_q.config import Run, dump_toml, load
from areal_q.tasks import build_tokenizer
from bench.common import commit, device, number, publish, table
from bench.learner.memory import resident_bytes
from bench.records import make_trajectory
from learner.backends.precision import set_precision
from learner.backends.single_device import TorchPolicy
from learner.build_policy import build_model
from learner.data.packing import Sample
from learner.multi_process import MultiProcessUpdater, exit_process, follow, join

TOKENS, PROMPT = 32_768, 8
HEADS = {"4 heads, 2 of keys": (4, 2), "2 heads, 1 of keys": (2, 1)}


def main(tokens: int = TOKENS) -> None:
    found, rows = {}, []
    for name, (heads, kv_heads) in HEADS.items():
        for ranks in (1, 2, 4):
            one = found[f"{name}, {ranks}"] = measured(
                run_of(tokens, heads, kv_heads, ranks), ranks
            )
            cells = [f"{one['bytes'] / 1e6:.0f}", f"{one['norm']:.6f}", number(one["seconds"])]
            rows.append([name, str(ranks), *cells])
    header = ["2 layers of width 64", "processes", "MB of a step", "gradient norm", "s"]
    facts = f"{device()}; commit {commit()}; a response of {tokens:,} tokens, float32"
    publish("long_response", f"{facts}\n\n{table(header, rows)}", found)


def run_of(tokens: int, heads: int, kv_heads: int, ranks: int) -> Run:
    shape = f"layers=2, width=64, mlp=192, heads={heads}, kv_heads={kv_heads}"
    return load(
        None,
        [
            f"model={{type='small', {shape}, max_positions={tokens + PROMPT}}}",
            f"learner.backend.context={ranks}", f"learner.microbatch_tokens={-(-(tokens + PROMPT) // ranks)}",
            "learner.groups=1", "learner.group_size=2", "learner.minibatches=1", "learner.dtype=float32",
            "rollout.unquantized=bf16", "learner.optimizer.lr=1e-4",
        ],
    )  # fmt: skip


def measured(run: Run, ranks: int) -> dict[str, float]:
    """Returns what the first of so many processes found."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.toml").write_text(dump_toml(run))
        torchrun = [sys.executable, "-m", "areal_q.system.torchrun", "--nproc-per-node", str(ranks)]
        subprocess.run([*torchrun, "-m", "bench.learner.long_response", place], check=True)
        return json.loads((Path(place) / "found.json").read_text())


def process(place: Path) -> None:
    """One of the processes, which torchrun has started."""
    torch.set_num_threads(1)
    run = load(place / "config.toml")
    ranks = join(run)
    if ranks.rank:
        follow(run, ranks)
        exit_process()
    model = build_model(run.model, build_tokenizer(run.model, run.task), run.seed)
    set_precision(model, run)
    updater = MultiProcessUpdater(TorchPolicy(model, run.learner, 1.0), run, ranks)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, model.config.max_positions)
    response = make_trajectory(0, ids[PROMPT:], -3.0, reward=1.0)
    sample = Sample(
        0, ids[:PROMPT].astype(np.int32), response, 1.0, np.zeros(len(ids) - PROMPT, np.int64)
    )
    before, began = resident_bytes(), time.perf_counter()
    norm = updater.update([sample])["train/grad_norm"]
    found = {
        "seconds": time.perf_counter() - began,
        "bytes": resident_bytes(peak=True) - before,
        "norm": norm,
    }
    (place / "found.json").write_text(json.dumps(found))
    updater.close()
    exit_process()


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    process(place) if place and place.is_dir() else main(*map(int, sys.argv[1:]))
