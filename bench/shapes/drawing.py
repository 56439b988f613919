"""Drawing a token for each of some rows, in every mixture of settings, beside a decoding step in INT8."""

from typing import Any

import torch
from torch import Tensor

from areal_q.config import Sampling, TorchEngine
from bench.common import number, say, table
from bench.shapes.contestants import engine_seconds
from bench.shapes.limits import Limits, best_seconds, copy_bytes_per_s
from bench.shapes.settings import Settings
from bench.shapes.shapes import Shape, published
from rollout.engines.reference import build_ops
from rollout.engines.reference.ops import Ops
from rollout.engines.reference.sampling import Knobs

MIXTURES = {
    "temperature 1": [Sampling()],
    "temperature 0 and 1": [Sampling(temperature=0.0), Sampling()],
    "top-p 0.95": [Sampling(top_p=0.95)],
    "top-k 50": [Sampling(top_k=50)],
    "min-p 0.05": [Sampling(min_p=0.05)],
}
MIXTURES["all of these"] = list(dict.fromkeys(s for rows in MIXTURES.values() for s in rows))


def section(shape: Shape, settings: Settings, limits: Limits) -> tuple[str, dict[str, Any]]:
    """Returns a table and its numbers: CPU seconds by number of rows and mixture. Below them stands what it
    takes to read the logits once."""
    state, vocab, found = shape.model().state_dict(), shape.config.vocab_size, dict[str, Any]()
    names = [*MIXTURES, "reading the logits"]
    header, rows = [f"{shape.name}: CPU ms to draw"], {name: [name] for name in names}
    for n in settings.sequences:
        config = TorchEngine(slots=n)
        step = engine_seconds(published(state, shape, "int8"), n, shape.tokens, config)
        step /= shape.tokens
        say(f"{shape.name}, {n} sequences, a step of int8: {step:.4f} s")
        took = _draw_seconds(build_ops(config), language_like(n, vocab))
        header += [f"{n} rows", "of a step of int8 (aim 0.1)"]
        for name, seconds in took.items():
            rows[name] += [number(1e3 * seconds), f"{seconds / step:.3f}"]
        found[str(n)] = {"step_s": step, "draw_s": took}
    return table(header, list(rows.values())), found


def _draw_seconds(ops: Ops, logits: Tensor) -> dict[str, float]:
    rows, took = len(logits), {}
    u = torch.rand(rows, dtype=torch.float64)
    for name, mixture in MIXTURES.items():
        knobs = Knobs.of([mixture[i % len(mixture)] for i in range(rows)])
        took[name] = best_seconds(lambda knobs=knobs: ops.draw(logits, knobs, u))
    return took | {"reading the logits": logits.nbytes / copy_bytes_per_s()}


def language_like(rows: int, vocab: int) -> Tensor:
    """Returns logits [rows, vocab] as a trained model's are, which those of random weights are not: a few
    tokens stand 13 to 20 nats above the mean, the rest have a standard deviation of 3."""
    logits = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    logits[:, : min(8, vocab)] = 20 - torch.arange(min(8.0, vocab))
    return logits
