"""Generation on one core: our engine beside Hugging Face `generate`, same random model, same run.

    python -m bench.generation.engines          # needs the dev dependencies (transformers)

The model has the quickstart's shape; each sequence draws exactly 32 tokens after a short prompt. The
contestants take turns and the best of REPEATS counts, in seconds of the CPU: all is on one thread, which
never waits, so on an idle machine these are seconds of the clock, and on a shared one they still are.
"plain torch" is our engine with `fused = false`. What log-probs cost is bounded from above by all the
sampling there is: softmax, draw, log-prob, and keeping it.
Prints a table, and writes it to runs/bench/engines.{md,json}.
"""

import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from areal_q.config import Sampling, TorchEngine
from areal_q.quant import FORMATS
from bench.common import commit, device, number, publish, table, use_cores, versions
from bench.shapes.contestants import PROMPT, engine_seconds, generate_seconds
from bench.shapes.shapes import SHAPES, published
from rollout.engines.reference import build_ops
from rollout.engines.reference.sampling import Knobs

SEQUENCES = (1, 16, 64, 512)
SHAPE = SHAPES["0.6M"]
REPEATS = 5


def measure(sequences: int) -> dict[str, float]:
    """Tokens per second of each contestant."""
    model = SHAPE.model(torch.float32)
    state, tokens = model.state_dict(), SHAPE.tokens
    contestants: dict[str, Callable[[], float]] = {
        "transformers": lambda: generate_seconds(model, sequences, tokens)
    }
    for format in FORMATS:
        weights = published(state, SHAPE, format)
        contestants[format] = lambda weights=weights: engine_seconds(
            weights, sequences, tokens, TorchEngine(slots=sequences)
        )
    plain = TorchEngine(slots=sequences, fused=False)
    weights = published(state, SHAPE, "int8")
    contestants["int8 plain torch"] = lambda: engine_seconds(weights, sequences, tokens, plain)
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(REPEATS):
        for name, run in contestants.items():
            best[name] = min(best[name], run())
    return {name: sequences * tokens / seconds for name, seconds in best.items()}


@torch.inference_mode()
def sampling_seconds(sequences: int) -> float:
    """What drawing one token for each row and keeping its log-prob takes in a step."""
    ops, knobs = build_ops(TorchEngine()), Knobs.of([Sampling()] * sequences)
    logits = torch.randn(sequences, SHAPE.config.vocab_size)
    keys, at = torch.arange(sequences), torch.full((sequences,), len(PROMPT))
    kept = torch.zeros(sequences, len(PROMPT) + SHAPE.tokens)
    best = float("inf")
    for _ in range(200):
        began = time.process_time()
        _, logprobs = ops.draw(logits, knobs, ops.uniform(keys, at))
        kept.scatter_(1, at.unsqueeze(1), logprobs.unsqueeze(1))
        best = min(best, time.process_time() - began)
    return best


def main() -> None:
    use_cores(1)
    torch.set_num_threads(1)
    results = {sequences: measure(sequences) for sequences in SEQUENCES}
    sampling = {n: sampling_seconds(n) * r["int8"] / n for n, r in results.items()}
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
        *[f"{name}, tokens/s" for name in results[1]],
        "int8 / transformers",
        "sampling and log-probs / int8 step",
    ]
    facts = {"device": device(), "commit": commit(), **versions("torch", "transformers")}
    lines = [", ".join(f"{k} {v}" for k, v in facts.items()), "", table(header, rows)]
    values = {"facts": facts, "tokens_per_s": results, "sampling_share": sampling}
    publish("engines", "\n".join(lines), values)


if __name__ == "__main__":
    main()
