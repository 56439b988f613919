"""The requests of a bench, and the seconds of CPU in which an engine of ours and `generate` answer them."""

import asyncio
import time
from typing import Any

import numpy as np
import torch

from areal_q.config import Sampling, TorchEngine
from areal_q.weights.version import WeightVersion
from rollout.engines import build_engine
from rollout.engines.base import Engine, Request

PROMPT = [1, 2, 3, 4, 5, 6, 7]
GROUP = 8


async def draw(engine: Engine, sequences: int, tokens: int) -> None:
    """Draws `tokens` tokens for each of `sequences` responses, GROUP of them to a request."""
    group = min(GROUP, sequences)
    requests = [
        Request(
            prompt_ids=np.array(PROMPT, np.int32),
            num_samples=group,
            sampling=Sampling(max_tokens=tokens),
            seed=seed,
            stop_ids=frozenset(),
        )
        for seed in range(sequences // group)
    ]
    await asyncio.gather(*map(engine.generate, requests))


def engine_seconds(
    weights: WeightVersion, sequences: int, tokens: int, config: TorchEngine
) -> float:
    """Returns the CPU seconds in which a warm engine draws `tokens` tokens of each response."""

    async def main() -> float:
        engine = build_engine(config)
        await engine.start()
        await engine.load_weights(weights)
        seconds = []
        for _ in range(2):  # the first round warms up
            began = time.process_time()
            await draw(engine, sequences, tokens)
            seconds.append(time.process_time() - began)
        await engine.close()
        return min(seconds)

    return asyncio.run(main())


@torch.inference_mode()
def generate_seconds(model: Any, sequences: int, tokens: int) -> float:
    """Returns the CPU seconds in which transformers' `generate` does the same."""
    ids = torch.tensor([PROMPT] * sequences)
    began = time.process_time()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        pad_token_id=0,
    )
    return time.process_time() - began
