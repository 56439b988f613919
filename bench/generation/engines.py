"""Generation on one core: our engine beside Hugging Face `generate`, same random model, same run.

    python -m bench.generation.engines          # needs the dev dependencies (transformers)
    python -m bench.generation.engines --model models/SmolLM2-135M-Instruct --formats int8,int8-weight

The model has the quickstart's shape, or is the one given; each sequence draws exactly 32 tokens after a short
prompt. The contestants take turns and the best of REPEATS counts, in seconds of the CPU: all is on one thread,
which never waits, so on an idle machine these are seconds of the clock, and on a shared one they still are.
"plain torch" is our engine with `fused = false`. What log-probs cost is bounded from above by all the
sampling there is: softmax, draw, log-prob, and keeping it.
Prints a table, and writes it to runs/bench/engines.{md,json}, which holds the rate of each turn.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AutoModelForCausalLM

from areal_q.config import Sampling, TorchEngine
from areal_q.config.engines import Dtype
from areal_q.quant import FORMATS
from bench.common import commit, device, number, publish, table, use_cores, versions
from bench.shapes.contestants import PROMPT, engine_seconds, generate_seconds
from bench.shapes.shapes import SHAPES, Shape, published
from rollout.engines.reference import build_ops
from rollout.engines.reference.sampling import Knobs

SEQUENCES = "1,16,64,512"
REPEATS = 5
Rates = dict[str, list[float]]


def model_of(path: str | None) -> tuple[Shape, Any]:
    """Returns the model in directory `path`, or one of the quickstart's shape, in float32, and its shape."""
    if path is None:
        return SHAPES["0.6M"], SHAPES["0.6M"].model(torch.float32)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return Shape(path, model.config, 32), model


def measure(
    shape: Shape, model: Any, formats: Sequence[str], sequences: int, dtype: Dtype
) -> Rates:
    """Tokens per second of each contestant, by turns."""
    state, tokens = model.state_dict(), shape.tokens
    contestants: dict[str, Callable[[], float]] = {
        "transformers": lambda: generate_seconds(model, sequences, tokens)
    }
    own = TorchEngine(slots=sequences, dtype=dtype)
    for format in formats:
        weights = published(state, shape, format)
        contestants[format] = lambda weights=weights: engine_seconds(
            weights, sequences, tokens, own
        )
    plain = TorchEngine(slots=sequences, fused=False)
    weights = published(state, shape, "int8")
    contestants["int8 plain torch"] = lambda: engine_seconds(weights, sequences, tokens, plain)
    rates: Rates = {name: [] for name in contestants}
    for _ in range(REPEATS):
        for name, run in contestants.items():
            rates[name].append(sequences * tokens / run())
    return rates


@torch.inference_mode()
def sampling_seconds(shape: Shape, sequences: int) -> float:
    """What drawing one token for each row and keeping its log-prob takes in a step."""
    ops, knobs = build_ops(TorchEngine()), Knobs.of([Sampling()] * sequences)
    logits = torch.randn(sequences, shape.config.vocab_size)
    keys, at = torch.arange(sequences), torch.full((sequences,), len(PROMPT))
    kept = torch.zeros(sequences, len(PROMPT) + shape.tokens)
    best = float("inf")
    for _ in range(200):
        began = time.process_time()
        _, logprobs = ops.draw(logits, knobs, ops.uniform(keys, at))
        kept.scatter_(1, at.unsqueeze(1), logprobs.unsqueeze(1))
        best = min(best, time.process_time() - began)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", help="a directory; default: random weights of the quickstart's shape"
    )
    parser.add_argument("--formats", default=",".join(FORMATS), help="int8 among them")
    parser.add_argument("--sequences", default=SEQUENCES)
    parser.add_argument("--dtype", default="auto", help="rollout.engine.dtype")
    args = parser.parse_args()
    use_cores(1)
    torch.set_num_threads(1)
    shape, model = model_of(args.model)
    turns = {
        n: measure(shape, model, args.formats.split(","), n, args.dtype)
        for n in map(int, args.sequences.split(","))
    }
    results = {n: {name: max(rates) for name, rates in r.items()} for n, r in turns.items()}
    sampling = {n: sampling_seconds(shape, n) * r["int8"] / n for n, r in results.items()}
    rows = [
        [
            str(n),
            *[number(r[name]) for name in r],
            f"{r['int8'] / r['transformers']:.1f}×",
            f"{sampling[n]:.1%}",
        ]
        for n, r in results.items()
    ]
    header = [
        "sequences",
        *[f"{name}, tokens/s" for name in next(iter(results.values()))],
        "int8 / transformers",
        "sampling and log-probs / int8 step",
    ]
    facts = {
        "model": shape.name,
        "device": device(),
        "commit": commit(),
        **versions("torch", "transformers"),
    }
    lines = [", ".join(f"{k} {v}" for k, v in facts.items()), "", table(header, rows)]
    values = {"facts": facts, "tokens_per_s": turns, "sampling_share": sampling}
    publish("engines", "\n".join(lines), values)


if __name__ == "__main__":
    main()
