"""Generation of a few sequences at once, in tokens per second of CPU on one thread."""

from collections.abc import Callable
from typing import Any

import torch

from areal_q.config import TorchEngine
from bench.common import number, say, table
from bench.shapes.contestants import engine_seconds, generate_seconds
from bench.shapes.limits import Limits
from bench.shapes.settings import Settings
from bench.shapes.shapes import Shape, published


def section(shape: Shape, settings: Settings, limits: Limits) -> tuple[str, dict[str, Any]]:
    """Returns a table and its numbers: tokens per second of CPU by number of sequences and contestant."""
    model = shape.model()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rates = {n: _rates(shape, settings, model, state, n) for n in settings.sequences}
    best = {
        n: max((v for k, v in found.items() if k in PEERS), default=0.0)
        for n, found in rates.items()
    }
    rows = [
        [
            name,
            *[
                cell
                for n in settings.sequences
                for cell in (
                    number(rates[n][name]),
                    f"{rates[n][name] / best[n]:.2f}" if best[n] else "–",
                    _share(limits, name, n, rates[n][name]),
                )
            ],
        ]
        for name in rates[settings.sequences[0]]
    ]
    header = [f"{shape.name}: tokens/CPU s"] + [
        text for n in settings.sequences for text in (f"{n} sequences", "/ peer", "/ limit")
    ]
    return table(header, rows), {"tokens_per_cpu_s": rates}


PEERS = {"generate float32": torch.float32, "generate bfloat16": torch.bfloat16}


def _share(limits: Limits, name: str, sequences: int, rate: float) -> str:
    if name in PEERS:
        return "–"
    seconds = limits.step_seconds("int8" if name.startswith("int8") else "bfloat16", sequences)
    return f"{rate * seconds / sequences:.2f}"


def _rates(
    shape: Shape, settings: Settings, model: Any, state: Any, sequences: int
) -> dict[str, float]:
    contestants: dict[str, Callable[[], float]] = {
        name: lambda dtype=dtype: generate_seconds(model.to(dtype), sequences, shape.tokens)
        for name, dtype in PEERS.items()
        if settings.peers
    }
    for format in settings.formats:
        for dtype in settings.dtypes:
            name = format if len(settings.dtypes) == 1 else f"{format} {dtype}"
            contestants[name] = lambda format=format, dtype=dtype: engine_seconds(
                published(state, shape, format),
                sequences,
                shape.tokens,
                TorchEngine(slots=sequences, dtype=dtype),
            )
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(settings.repeats):
        for name, run in contestants.items():
            best[name] = min(best[name], run())
            say(f"{shape.name}, {sequences} sequences, {name}: {best[name]:.3f} s")
    return {name: sequences * shape.tokens / seconds for name, seconds in best.items()}
