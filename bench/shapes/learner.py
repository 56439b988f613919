"""One optimizer step of the learner beside a plain loop on transformers and TRL's GRPOTrainer.

One model and one batch: groups of responses with their rewards, prescribed, so that nobody generates. GRPO
advantages, token mean, clipped ratio, AdamW. That all contestants do the same shows in their gradient norms.
Each runs in a process of its own, one after the other, since a step at 0.5B takes many gigabytes.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_q.tasks import CharTokenizer
from bench.common import RESULTS, number, table
from bench.shapes.limits import Limits
from bench.shapes.peers import OURS, Peers, python_of
from bench.shapes.settings import Settings
from bench.shapes.shapes import Shape

BYTES_PER_WEIGHT = 24
"""What must be free for a contestant: weights, moments and gradients in float32, and half as much again"""


@dataclass(frozen=True)
class Batch:
    groups: int
    size: int
    prompt: int
    median: int
    spread: float
    """Of the lognormal lengths of responses"""
    bounds: tuple[int, int]
    microbatch: int
    """Responses that a peer computes at once"""
    tokens: int
    """Tokens that ours computes at once, each prompt counted with each of its responses"""
    steps: int
    """Steps in a repeat"""

    def drawn(self, vocabulary: int) -> list[dict[str, Any]]:
        """Returns prompts, responses and rewards of all groups."""
        rng = np.random.default_rng(0)
        lengths = rng.lognormal(np.log(self.median), self.spread, (self.groups, self.size))
        return [
            {
                "prompt_ids": rng.integers(3, vocabulary, self.prompt).tolist(),
                "responses": [rng.integers(3, vocabulary, n).tolist() for n in row],
                "rewards": [float(i % 3 == 0) for i in range(self.size)],
            }
            for row in np.clip(lengths.round().astype(int), *self.bounds)
        ]


BATCHES = {
    "0.6M": Batch(32, 8, 6, 4, 0.2, (3, 5), 256, 256 * 11, 10),
    "20M": Batch(3, 8, 48, 64, 0.9, (2, 256), 8, 8 * 304, 1),
    "0.5B": Batch(1, 4, 64, 448, 0.0, (448, 448), 1, 4 * 512, 1),
}
"""The quickstart's minibatch; mixed lengths; 4 × 512 tokens, which peers take one by one to save memory. Else
ours computes as many tokens at once as a peer does, which pads them."""


def section(shape: Shape, settings: Settings, limits: Limits) -> tuple[str, dict[str, Any]]:
    """Returns a table and its numbers: seconds, speed and memory of a step of each contestant."""
    batch = BATCHES[shape.name]
    groups = batch.drawn(shape.config.vocab_size)
    responses = [len(r) for group in groups for r in group["responses"]]
    tokens = batch.groups * batch.prompt + sum(responses)
    least = {k: _least_seconds(limits, k, tokens, sum(responses)) for k in ("float32", "bfloat16")}
    RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=RESULTS) as directory:
        model = shape.model()
        model.save_pretrained(directory)
        need = BYTES_PER_WEIGHT * sum(p.numel() for p in model.parameters())
        del model
        CharTokenizer().save(directory)
        peers = _asked(Path(directory), groups, batch, settings, need)
    header = [
        f"{shape.name}: a step of {sum(responses):,} response tokens", "gradient norm", "CPU s", "tokens/CPU s",
        "best peer / it", "share of its products' rate", "memory, MiB", "/ the best peer's", "version, s",
    ]  # fmt: skip
    text = table(header, _rows(peers.found, least, sum(responses))) + peers.closing()
    return text, {"steps": peers.found, "products_s": least, "left_out": peers.left_out}


def _least_seconds(limits: Limits, kind: str, tokens: int, predicted: int) -> float:
    """Returns the CPU seconds of a step's products alone: one forward, and two for the gradients."""
    return 3 * (limits.linears_seconds(kind, tokens) + limits.head_seconds(kind, predicted))


def _asked(directory: Path, groups: Any, batch: Batch, settings: Settings, need: int) -> Peers:
    peers = Peers()
    contestants = [(OURS, "ours", "bench.learner.step", ["float32", "bfloat16"])]
    if settings.peers:
        dtypes = ["float32", "bfloat16", "autocast"]
        contestants.append((OURS, "transformers", "bench.peers.learner_step", dtypes))
        contestants.append((python_of("peers"), "trl", "bench.peers.learner_step", dtypes))
    for python, side, module, dtypes in contestants:
        for dtype in dtypes:
            if free_bytes() < need:
                peers.left_out[f"{side} {dtype}"] = f"less than {need >> 20:,} MiB are free"
                continue
            spec = {
                "model": str(directory),
                "side": side,
                "dtype": dtype,
                "groups": groups,
                "microbatch": batch.microbatch,
                "tokens": batch.tokens,
                "lr": 1e-5,
                "steps": 1 + batch.steps * settings.repeats,
            }
            path = directory / "spec.json"
            path.write_text(json.dumps(spec))
            peers.ask(f"{side} {dtype}", python, module, str(path))
    return peers


def free_bytes() -> int:
    """Returns the memory that new processes can have without anything being swapped out or killed."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def _rows(
    found: dict[str, dict[str, Any]], least: dict[str, float], tokens: int
) -> list[list[str]]:
    # The first step prepares memory and kernels.
    seconds = {name: min(run["seconds"][1:]) for name, run in found.items()}
    memory = {name: run["peak"] - run["start"] for name, run in found.items()}
    best = min((n for n in found if not n.startswith("ours")), key=seconds.__getitem__, default="")
    return [
        [
            name,
            f"{run['norms'][0]:.5g}",
            number(seconds[name]),
            number(tokens / seconds[name]),
            number(seconds[best] / seconds[name] if best else None),
            f"{least['float32' if 'float32' in name else 'bfloat16'] / seconds[name]:.2f}",
            number(memory[name] / 2**20),
            number(memory[name] / memory[best] if best else None),
            number(run.get("version_s")),
        ]
        for name, run in found.items()
    ]
