"""One long prompt and one drawn token, in seconds of CPU on one thread, beside the products' own time."""

import asyncio
import time
from typing import Any

import numpy as np

from areal_q.config import Sampling, TorchEngine
from areal_q.config.engines import Dtype
from areal_q.weights.version import WeightVersion
from bench.common import number, say, table
from bench.shapes.limits import Limits
from bench.shapes.settings import Settings
from bench.shapes.shapes import Shape, published
from rollout.engines import build_engine
from rollout.engines.base import Request

LENGTH = 2048


def section(shape: Shape, settings: Settings, limits: Limits) -> tuple[str, dict[str, Any]]:
    """Returns a table and its numbers, empty for a shape that has no room for the prompt."""
    length = min(LENGTH, shape.config.max_position_embeddings - 1)
    state = shape.model().state_dict()
    least = limits.linears_seconds("bfloat16", length)
    found: dict[str, float] = {}
    for format in settings.formats:
        for dtype in settings.dtypes:
            name = format if len(settings.dtypes) == 1 else f"{format} {dtype}"
            weights = published(state, shape, format)
            found[name] = seconds(weights, length, settings.repeats, dtype)
            say(f"{shape.name}, prompt of {length}, {name}: {found[name]:.3f} s")
    rows = [
        [name, number(length / took), number(took), f"{least / took:.2f}"]
        for name, took in found.items()
    ]
    header = [
        f"{shape.name}: prompt of {length}",
        "tokens/CPU s",
        "CPU s",
        "bfloat16 product rate (aim 0.6)",
    ]
    return table(header, rows), {"seconds": found, "products_s": least}


def seconds(weights: WeightVersion, length: int, repeats: int, dtype: Dtype) -> float:
    request = Request(
        prompt_ids=np.arange(length, dtype=np.int32) % 50,
        num_samples=1,
        sampling=Sampling(max_tokens=1),
        seed=0,
        stop_ids=frozenset(),
    )

    async def main() -> float:
        engine = build_engine(TorchEngine(slots=1, dtype=dtype))
        await engine.start()
        await engine.load_weights(weights)
        best = float("inf")
        for _ in range(repeats + 1):
            began = time.process_time()
            await engine.generate(request)
            best = min(best, time.process_time() - began)
        await engine.close()
        return best

    return asyncio.run(main())
