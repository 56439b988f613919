"""Generation on one core: our engine beside Hugging Face `generate`, same random model, same run.

    python -m bench.generation.engines          # needs the dev dependencies (transformers)

The model has the quickstart's shape; each sequence draws exactly TOKENS tokens after a short prompt. The
contestants take turns and the best of REPEATS counts, in seconds of the CPU: all is on one thread, which
never waits, so on an idle machine these are seconds of the clock, and on a shared one they still are.
"plain torch" is our engine with `fused = false`. What log-probs cost is bounded from above by all the
sampling there is: softmax, draw, log-prob, and keeping it.
Prints a table, and writes it to runs/bench/engines.{md,json}.
"""

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from areal_q.config import Sampling, SmallModel, TorchEngine
from areal_q.quant import FORMATS
from areal_q.weights.version import WeightVersion
from bench.common import commit, device, number, publish, table, use_cores, versions
from bench.weights.packed import packed
from rollout.engines import build_engine
from rollout.engines.base import Request
from rollout.engines.reference.build_ops import build_ops

SEQUENCES = (1, 16, 64, 512)
TOKENS = 32
PROMPT = [1, 2, 3, 4, 5, 6, 7]
VOCAB = 64
GROUP = 8
REPEATS = 5


def random_model() -> Qwen3ForCausalLM:
    shape = SmallModel()
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.width // shape.heads,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


def published(model: Qwen3ForCausalLM, format: str) -> WeightVersion:
    return packed(model.state_dict(), format, model.config.to_dict())


def engine_seconds(weights: WeightVersion, sequences: int, fused: bool = True) -> float:
    """CPU seconds in which a warm engine draws TOKENS tokens for each of `sequences` responses."""
    group = min(GROUP, sequences)

    def ask(seed: int) -> Request:
        return Request(
            prompt_ids=np.array(PROMPT, np.int32),
            num_samples=group,
            sampling=Sampling(max_tokens=TOKENS),
            seed=seed,
            stop_ids=frozenset(),
        )

    async def main() -> float:
        engine = build_engine(TorchEngine(slots=sequences, fused=fused))
        await engine.start()
        await engine.load_weights(weights)
        seconds = 0.0
        for _ in range(2):  # the first round warms up
            began = time.process_time()
            await asyncio.gather(*[engine.generate(ask(i)) for i in range(sequences // group)])
            seconds = time.process_time() - began
        await engine.close()
        return seconds

    return asyncio.run(main())


@torch.inference_mode()
def transformers_seconds(model: Any, sequences: int) -> float:
    ids = torch.tensor([PROMPT] * sequences)
    began = time.process_time()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        pad_token_id=0,
    )
    return time.process_time() - began


def measure(sequences: int) -> dict[str, float]:
    """Tokens per second of each contestant."""
    model = random_model()
    contestants: dict[str, Callable[[], float]] = {
        "transformers": lambda: transformers_seconds(model, sequences)
    }
    for format in FORMATS:
        weights = published(model, format)
        contestants[format] = lambda weights=weights: engine_seconds(weights, sequences)
    weights = published(model, "int8")
    contestants["int8 plain torch"] = lambda: engine_seconds(weights, sequences, fused=False)
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(REPEATS):
        for name, run in contestants.items():
            best[name] = min(best[name], run())
    return {name: sequences * TOKENS / seconds for name, seconds in best.items()}


@torch.inference_mode()
def sampling_seconds(sequences: int) -> float:
    """What drawing one token for each row and keeping its log-prob takes in a step."""
    ops, sampling = build_ops(TorchEngine()), Sampling()
    logits = torch.randn(sequences, VOCAB)
    keys, at = torch.arange(sequences), torch.full((sequences,), len(PROMPT))
    kept = torch.zeros(sequences, len(PROMPT) + TOKENS)
    best = float("inf")
    for _ in range(200):
        began = time.process_time()
        _, logprobs = ops.draw(logits, sampling, ops.uniform(keys, at))
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
