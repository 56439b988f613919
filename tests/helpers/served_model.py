"""What the tests of vLLM and of SGLang share: a small model in versions that differ much, transformers as the
judge of log-probs, and engines of which one is alive at a time."""

import asyncio
import contextlib
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers import engines
from helpers.engines import serving
from transformers import Qwen3Config, Qwen3ForCausalLM

from areal_q.linear.registry import linear_of
from areal_q.models import Decoder, DecoderConfig, init_weights
from areal_q.quant import FORMATS, dequantize_state, is_quantized, quantize_state
from areal_q.quant.state_dict import parts_of
from areal_q.weights.version import pack_version

HANG_S = 600
"""Only what hangs takes so long: a start takes 15 s, and on a busy machine two minutes. The death of an engine
ends every wait at once"""
CONFIG = DecoderConfig(
    family="qwen3",
    vocab_size=48,
    width=128,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    mlp=256,
    max_positions=512,
)
PROMPT = [int(i) for i in np.random.default_rng(0).integers(0, 48, 150)]
"""Longer than a block of an engine's cache, so that its prefix is kept"""


@cache
def published(version, format="bf16"):
    """Version `version`: weights that are a function of its number."""
    model = Decoder(CONFIG)
    init_weights(model, version)
    # Away from uniform, so that other weights mean quite other log-probs.
    state = {name: 2 * t if t.dim() == 2 else t for name, t in model.state_dict().items()}
    return packed(quantize_state(state, format), version, format)


def packed(tensors, version, format="bf16"):
    return pack_version(
        tensors, run="r", epoch="e", version=version, format=format, uaq_scale=1.0,
        model=CONFIG.to_hf(), published_s=0.0,
    )  # fmt: skip


@cache
def transformers_model(version, format):
    """The version as its format runs it, in transformers."""
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG.to_hf())).eval()
    tensors = published(version, format).tensors
    state = {name: t.float() for name, t in dequantize_state(tensors, format).items()}
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    for name, linear in model.named_modules():
        if isinstance(linear, torch.nn.Linear) and is_quantized(f"{name}.weight"):
            run = linear_of(FORMATS[format], [parts_of(tensors, name, format)])
            linear.forward = partial(as_the_engine_runs_it, run)
    return model


def as_the_engine_runs_it(run, input):
    """With quantized activations where the format has them."""
    return run(input.reshape(-1, input.shape[-1])).reshape(*input.shape[:-1], -1)


def distribution(
    version, format, prompt, ids, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, mass="left"
):
    """float32 [T, V]: log-probs in the distributions that `ids` after `prompt` are drawn from, -inf outside of
    them. top-p counts the mass that top-k and min-p have "left", or that of "all" tokens."""
    with torch.no_grad():
        tokens = torch.tensor([[*prompt, *ids]])
        logits = transformers_model(version, format)(tokens).logits[0, len(prompt) - 1 : -1]
    logits = logits / temperature
    probs, order = logits.softmax(-1).sort(descending=True)
    beyond = probs < min_p * probs[:, :1]
    beyond[:, top_k or len(probs[0]) :] = True
    if mass == "left":
        probs = probs.masked_fill(beyond, 0)
        probs /= probs.sum(-1, keepdim=True)
    beyond |= probs.cumsum(-1) - probs > top_p
    logits[torch.zeros_like(beyond).scatter(1, order, beyond)] = -torch.inf
    return logits.log_softmax(-1).numpy()


def expected(version, format, prompt, ids, **sampling):
    """float32 [T]: log-probs of `ids` after `prompt`, from the distribution that is drawn from."""
    return distribution(version, format, prompt, ids, **sampling)[range(len(ids)), ids]


def gap(completion, version, format="bf16", first=0, last=None, **sampling):
    """Largest difference to transformers' log-probs over the tokens from `first` to `last`."""
    reference = expected(version, format, PROMPT, completion.response_ids.tolist(), **sampling)
    return np.abs(completion.logprobs - reference)[first:last].max()


def ask(prompt=PROMPT, seed=0, samples=1, max_tokens=40, **sampling):
    return engines.ask(prompt, samples, seed, max_tokens=max_tokens, **sampling)


@contextlib.contextmanager
def one_alive(runner, build, published=published):
    """`await live(format, setting=…)` is `build(setting=…)`, which has `published(0, format)`.

    The test is skipped if the engine does not compute the format on this processor.
    It is that of the last call where format and settings are the same; only one is alive.
    """
    asked: Any = None
    engine: Any = None
    open_one = contextlib.AsyncExitStack()

    async def live(format="bf16", **settings):
        nonlocal asked, engine
        weights = published(0, format)
        if asked == (format, settings):
            await engine.load_weights(weights)
        else:
            await open_one.aclose()
            asked = None
            made = build(**settings)
            if format.partition("/")[0] not in made.capabilities.formats:
                pytest.skip(f"{made.name} does not compute {format} on this processor")
            engine = await open_one.enter_async_context(serving(made, weights))
            asked = (format, settings)
        return engine

    yield live
    runner.run(open_one.aclose())


async def swapped_after(engine, weights, tokens, request):
    """The completion of `request` with `weights` loaded once `tokens` tokens were out. The backend has them
    near by then, so that the pause comes before the last token on a slow machine too."""
    backend, stage, asked = engine.backend, engine.backend.stage, []
    enough = asyncio.Event()

    def on_token(index, token, logprob):
        nonlocal tokens
        tokens -= 1
        if tokens == 0:
            enough.set()

    async def stage_and_ask(weights):
        await stage(weights)
        asked.append(asyncio.ensure_future(engine.generate(request, on_token)))
        heard = asyncio.ensure_future(enough.wait())
        await asyncio.wait([heard, asked[0]], return_when=asyncio.FIRST_COMPLETED)
        assert heard.done(), f"the request ended before so many tokens: {asked[0]}"

    backend.stage = stage_and_ask
    try:
        assert await engine.load_weights(weights) >= 0
    finally:
        backend.stage = stage
    (completion,) = await asked[0]
    return completion
