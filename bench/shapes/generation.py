"""Generation of a few sequences at once, in tokens per second of CPU on one thread."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from areal_q.cli.quantize import quantize
from areal_q.config import TorchEngine
from bench.common import RESULTS, number, say, table
from bench.shapes.contestants import PROMPT, engine_seconds, generate_seconds
from bench.shapes.limits import Limits
from bench.shapes.peers import Peers, python_of
from bench.shapes.settings import Settings
from bench.shapes.shapes import Shape, published


def section(shape: Shape, settings: Settings, limits: Limits) -> tuple[str, dict[str, Any]]:
    """Returns a table and its numbers: tokens per second of CPU by number of sequences and contestant."""
    model = shape.model()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    served = _served(shape, settings, model) if settings.peers else Peers()
    rates = {}
    for n in settings.sequences:
        there = {name: found[str(n)] for name, found in served.found.items()}
        rates[n] = _rates(shape, settings, model, state, n) | there
    header, rows = (
        [f"{shape.name}: tokens/CPU s"],
        {name: [name] for name in rates[settings.sequences[0]]},
    )
    for n, found in rates.items():
        header += [f"{n} sequences", "/ generate", "/ other engine", "/ limit"]
        best = [
            max((found[x] for x in names if x in found), default=None)
            for names in (PEERS, served.found)
        ]
        for name, rate in found.items():
            ratios = [number(rate / peer if peer else None) for peer in best]
            ours = name not in PEERS and name not in served.found
            kind = _kind(name, settings)
            share = number(rate * limits.step_seconds(kind, n) / n if ours else None)
            rows[name] += [number(rate), *ratios, share]
    text = table(header, list(rows.values())) + served.closing()
    return text, {"tokens_per_cpu_s": rates, "left_out": served.left_out}


PEERS = {"generate float32": torch.float32, "generate bfloat16": torch.bfloat16}
ENGINES = {"vllm": ["float32", "bfloat16", "int8"], "sglang": ["float32", "bfloat16"]}
"""How other engines compute; int8's activations are bfloat16"""


def _served(shape: Shape, settings: Settings, model: Any) -> Peers:
    """Returns what other engines say, each in a process of its own, from the environment that has it."""
    peers = Peers()
    RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=RESULTS) as directory:
        whole, low = Path(directory) / "bfloat16", Path(directory) / "int8"
        model.save_pretrained(whole)
        quantize(whole, low, "int8", torch.bfloat16)
        for engine, dtypes in ENGINES.items():
            for dtype in dtypes:
                spec = {
                    "engine": engine,
                    "model": str(low if dtype == "int8" else whole),
                    "dtype": "float32" if dtype == "float32" else "bfloat16",
                    "prompt": PROMPT,
                    "sequences": settings.sequences,
                    "tokens": shape.tokens,
                    "repeats": settings.repeats,
                }
                path = Path(directory) / "spec.json"
                path.write_text(json.dumps(spec))
                module = "bench.peers.offline_engine"
                peers.ask(f"{engine} {dtype}", python_of(engine), module, str(path))
    return peers


def _kind(name: str, settings: Settings) -> str:
    """Returns what a contestant's weights are multiplied as; `name` is a format, and a dtype if there are
    several."""
    format, _, dtype = name.partition(" ")
    if format == "int8":
        return "int8"
    fast = (dtype or settings.dtypes[0]) == "int8" and format in ("int4", "nvfp4", "mxfp4")
    return "four bits" if fast else "bfloat16"


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
