"""The texts on which formats are compared, and the pace of decoding, both by the reference engine."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from areal_q.config import Sampling, TorchEngine
from areal_q.errors import ConfigError, TaskError
from areal_q.models import Decoder
from areal_q.quant import quantize_state
from areal_q.tasks import Tokenizer
from areal_q.tasks.datasets.row_files import read_objects
from areal_q.weights.version import WeightVersion, pack_version
from rollout.engines import build_engine
from rollout.engines.base import Engine, Request
from rollout.evaluation.format_error import AnsweredText

PROMPTS = (
    "What is 59 + 37? Answer with just the number.",
    "Tell me about the city of Paris.",
    "A farmer has 12 cows and buys 7 more. How many cows does he have?",
    "Write a short poem about rain.",
    "Explain to a child why the sky is blue.",
    "Write a Python function that returns the largest number of a list.",
    "Translate to French: Good morning, how are you?",
    "Name three animals that live in the sea, and say what they eat.",
)
SLOTS = 8
TOKENS = 16
"""Tokens that each of SLOTS responses draws when the pace is measured"""


def read_conversations(path: Path, tokenizer: Tokenizer, most: int) -> list[AnsweredText]:
    """Returns the prompts of a JSONL file, with their answers where they have one: lines with `prompt`, a text
    or messages, or with `messages`, whose last one may be the assistant's. Raises TaskError, which names the
    line."""
    found = []
    for where, line in read_objects(str(path))[:most]:
        asked: Any = line.get("prompt", line.get("messages"))
        answer: Any = None
        messages = isinstance(asked, list) and all(isinstance(one, dict) for one in asked)
        if asked and messages and asked[-1].get("role") == "assistant":
            asked, answer = asked[:-1], asked[-1].get("content")
        if not asked or not (messages or isinstance(asked, str)):
            raise TaskError(f"{where}: neither a prompt nor messages")
        try:
            ids = tokenizer.encode_prompt(asked)
        except TaskError as error:
            raise TaskError(f"{where}: {error}") from error
        reply = [*tokenizer.encode(answer), tokenizer.eos_id] if answer else []
        found.append(AnsweredText([*ids, *reply], len(ids)))
    if not found:
        raise TaskError(f"{path}: no line")
    return found


def answered(
    model: Decoder, texts: Sequence[AnsweredText], stops: frozenset[int], tokens: int
) -> list[AnsweredText]:
    """Returns the texts; those without an answer get the model's own, at most `tokens` long, drawn at
    temperature 1 as rollouts draw. Raises ConfigError if a prompt leaves no room for it."""
    room = model.config.max_positions - tokens
    if not all(len(t.ids) > t.prompt or t.prompt <= room for t in texts):
        raise ConfigError(f"--tokens {tokens}: a prompt has more than {room} tokens")

    async def draw() -> list[AnsweredText]:
        engine = await _started(_version(model, quantize_state(model.state_dict(), "bf16"), "bf16"))
        try:
            return await asyncio.gather(*(one(engine, seed, t) for seed, t in enumerate(texts)))
        finally:
            await engine.close()

    async def one(engine: Engine, seed: int, text: AnsweredText) -> AnsweredText:
        if len(text.ids) > text.prompt:
            return text
        request = _request(text.ids, 1, tokens, seed, stops)
        done = await engine.generate(request)
        return AnsweredText([*text.ids, *done[0].response_ids.tolist()], text.prompt)

    return asyncio.run(draw())


def decoding_pace(model: Decoder, published: Mapping[str, Tensor], format: str) -> float:
    """Returns how many tokens/s the reference engine draws for SLOTS responses of TOKENS tokens each."""

    async def draw() -> float:
        engine = await _started(_version(model, published, format))
        try:
            await engine.generate(_request([1], SLOTS, 2, 0))  # kernels are compiled, pages touched
            begun = time.perf_counter()
            await engine.generate(_request([1], SLOTS, TOKENS, 0))
            return SLOTS * TOKENS / (time.perf_counter() - begun)
        finally:
            await engine.close()

    return asyncio.run(draw())


async def _started(weights: WeightVersion) -> Engine:
    engine = build_engine(TorchEngine(slots=SLOTS))
    await engine.start()
    await engine.load_weights(weights)
    return engine


def _request(
    prompt: Sequence[int], samples: int, tokens: int, seed: int, stops: frozenset[int] = frozenset()
) -> Request:
    return Request(
        prompt_ids=np.array(prompt, np.int32),
        num_samples=samples,
        sampling=Sampling(temperature=1.0, max_tokens=tokens),
        seed=seed,
        stop_ids=stops,
    )


def _version(model: Decoder, published: Mapping[str, Tensor], format: str) -> WeightVersion:
    return pack_version(
        published,
        run="formats",
        epoch="",
        version=0,
        format=format,
        uaq_scale=1.0,
        model=model.config.to_hf(),
        published_s=0.0,
    )
