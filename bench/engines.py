"""Generation on one core: our engine beside Hugging Face `generate`, same random model, same run.

    python -m bench.engines          # needs the dev dependencies (transformers)

The model has the quickstart's shape; each sequence draws exactly TOKENS tokens after a short prompt. The
contestants take turns and the best of REPEATS counts, since a shared machine only ever slows one down.
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
from areal_q.quant import FORMATS, quantize_state
from areal_q.weights import WeightVersion, pack
from bench.common import commit, device, number, publish, table, use_cores, versions
from rollout.engines import build_engine
from rollout.engines.base import Request

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
    return pack(
        quantize_state(model.state_dict(), format),
        run="bench",
        epoch="0",
        version=0,
        format=format,
        uaq_scale=1.0,
        model=model.config.to_dict(),
        published_s=0.0,
    )


def engine_seconds(weights: WeightVersion, sequences: int) -> float:
    """Seconds in which a warm engine draws TOKENS tokens for each of `sequences` responses."""
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
        engine = build_engine(TorchEngine(slots=sequences))
        await engine.start()
        await engine.load_weights(weights)
        seconds = 0.0
        for _ in range(2):  # the first round warms up
            began = time.perf_counter()
            await asyncio.gather(*[engine.generate(ask(i)) for i in range(sequences // group)])
            seconds = time.perf_counter() - began
        await engine.close()
        return seconds

    return asyncio.run(main())


@torch.inference_mode()
def transformers_seconds(model: Any, sequences: int) -> float:
    ids = torch.tensor([PROMPT] * sequences)
    began = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        pad_token_id=0,
    )
    return time.perf_counter() - began


def measure(sequences: int) -> dict[str, float]:
    """Tokens per second of each contestant."""
    model = random_model()
    contestants: dict[str, Callable[[], float]] = {
        "transformers": lambda: transformers_seconds(model, sequences)
    }
    for format in FORMATS:
        weights = published(model, format)
        contestants[format] = lambda weights=weights: engine_seconds(weights, sequences)
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(REPEATS):
        for name, run in contestants.items():
            best[name] = min(best[name], run())
    return {name: sequences * TOKENS / seconds for name, seconds in best.items()}


def main() -> None:
    use_cores(1)
    torch.set_num_threads(1)
    results = {sequences: measure(sequences) for sequences in SEQUENCES}
    rows = [
        [str(n), *[number(r[name]) for name in r], f"{r['int8'] / r['transformers']:.1f}×"]
        for n, r in results.items()
    ]
    header = ["sequences", *[f"{name}, tokens/s" for name in results[1]], "int8 / transformers"]
    facts = {"device": device(), "commit": commit(), **versions("torch", "transformers")}
    lines = [", ".join(f"{k} {v}" for k, v in facts.items()), "", table(header, rows)]
    publish("engines", "\n".join(lines), {"facts": facts, "tokens_per_s": results})


if __name__ == "__main__":
    main()
