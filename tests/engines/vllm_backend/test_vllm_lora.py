"""Adapters on a quantized base in vLLM, for real, on a CPU: the learner's own model is the judge.

Needs vLLM, so it runs in an environment of its own: `make test-vllm`.
"""

import os
import signal
from copy import deepcopy
from functools import cache

import msgspec
import numpy as np
import pytest
import torch
from helpers.served_model import CONFIG, HANG_S, PROMPT, ask, one_alive, swapped_after

from areal_q.config import Lora, VllmEngine
from areal_q.errors import WeightVersionError
from areal_q.messages import Noise
from areal_q.models import Decoder, PackedLayout, init_weights
from areal_q.models.low_bit.lora import LORA_SCALE, adapt, adapted, adapters_off, is_adapter
from areal_q.models.low_bit.published_state import published_state
from areal_q.quant.aqn import with_noise
from areal_q.weights.version import pack_version
from rollout.engines.vllm_backend.vllm_engine import vllm_engine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(HANG_S),
    pytest.mark.filterwarnings("ignore"),  # of vLLM's and its dependencies' own
]
pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

LORA = Lora(rank=12, alpha=16.0)
"""vLLM makes room for 16, and the scale is no power of two"""
TOLERANCE = {"bf16": 1e-4, "int4": 0.3, "fp8-channel": 0.5, "int8": 0.3}
"""As in test_vllm.py"""
SOME = "int4/k_proj,down_proj"
"""A base with biases, of which two linears of a layer have adapters"""


@cache
def learnt(version, format="bf16"):
    """The learner's model at `version`: the base is always the same, the adapters are a function of it."""
    format, _, targets = format.partition("/")
    shape = msgspec.structs.replace(CONFIG, family="qwen2", qkv_bias=True)
    model = Decoder(shape if targets else CONFIG)
    init_weights(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:  # as in served_model.py
                parameter.mul_(2)
            elif name.endswith(".bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    some = {"targets": tuple(targets.split(","))} if targets else {}
    adapt(model, format, msgspec.structs.replace(LORA, **some), version)
    draw = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for linear in adapted(model).values():
            if linear.has_adapter:
                linear.lora_B.weight.normal_(std=0.2, generator=draw)
    return model.eval()


def packed(tensors, version, format):
    return pack_version(
        tensors, run="r", epoch="e", version=version, format=format.partition("/")[0], uaq_scale=1.0,
        model=learnt(version, format).config.to_hf(), published_s=0.0,
        extra={LORA_SCALE: LORA.alpha / LORA.rank},
    )  # fmt: skip


@cache
def published(version, format="bf16"):
    return packed(
        published_state(learnt(version, format), format.partition("/")[0]), version, format
    )


@torch.no_grad()
def gap(completion, model, first=0, last=None):
    """Largest difference to the log-probs of `model` over the tokens from `first` to `last`."""
    ids = completion.response_ids.tolist()
    whole = [*PROMPT, *ids][:-1]
    states = model(torch.tensor(whole), PackedLayout.of([len(whole)]))
    logp = model.logits(states)[len(PROMPT) - 1 :].log_softmax(-1)
    reference = logp.gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()
    return np.abs(completion.logprobs - reference)[first:last].max()


@pytest.fixture(scope="module")
def live(runner):
    def build(**settings):
        return vllm_engine(VllmEngine(slots=64, kv_on_update="recompute", **settings))

    with one_alive(runner, build, published) as start:
        yield start


@pytest.mark.parametrize("format", [SOME, "fp8-channel", "int8", "bf16"])
async def test_an_update_changes_the_adapters_from_its_token_on(live, format):
    engine = await live(format)
    done = await swapped_after(engine, published(1, format), 30, ask(max_tokens=300))
    assert [(s.version, s.digest) for s in done.spans] == [
        (v, published(v, format).manifest.digest) for v in (0, 1)
    ]
    at, (old, new) = done.spans[0].tokens, (learnt(v, format) for v in (0, 1))
    bound = TOLERANCE[format.partition("/")[0]]
    assert gap(done, old, last=at) < bound
    assert gap(done, new, first=at) < bound
    assert gap(done, old, first=at) > 1
    assert gap(done, new, last=at) > 1
    with adapters_off(new):
        assert gap(done, new, first=at) > 1


async def test_a_killed_engine_comes_back_with_the_newest_adapters(live):
    engine = await live()
    await engine.load_weights(published(1))
    deaths, pid, drawn = engine.deaths, engine.backend.pid, []

    def on_token(index, token, logprob):
        drawn.append(token)
        if len(drawn) == 20:
            os.kill(pid, signal.SIGKILL)

    (done,) = await engine.generate(ask(max_tokens=350), on_token)
    assert engine.deaths > deaths and engine.backend.pid != pid
    assert drawn == done.response_ids.tolist() and len(drawn) == 350
    assert [(s.version, s.tokens) for s in done.spans] == [(1, 350)]
    assert gap(done, learnt(1)) < TOLERANCE["bf16"]


async def test_noise_in_the_norms_acts_and_goes_with_the_next_version(live):
    noisy = with_noise(published(1).tensors, Noise(sigma=0.3, seed=1), 1.0)
    model = deepcopy(learnt(1))
    model.load_state_dict(
        {k: v for k, v in noisy.items() if k.endswith("norm.weight")}, strict=False
    )
    engine = await live()
    await engine.load_weights(packed(noisy, 2, "bf16"))
    (done,) = await engine.generate(ask())
    assert gap(done, model) < TOLERANCE["bf16"]
    assert gap(done, learnt(1)) > 0.05
    await engine.load_weights(published(3))
    (done,) = await engine.generate(ask())
    assert gap(done, learnt(3)) < TOLERANCE["bf16"]


async def test_a_version_on_another_base_is_refused(live):
    tensors = dict(published(1).tensors)
    plain = {name: t for name, t in tensors.items() if not is_adapter(name)}
    moved = tensors | {"model.embed_tokens.weight": -tensors["model.embed_tokens.weight"]}
    engine = await live()
    with pytest.raises(WeightVersionError, match=r"lacks .*lora_A"):
        await engine.load_weights(packed(plain, 1, "bf16"))
    with pytest.raises(WeightVersionError, match=r"frozen, but model\.embed_tokens\.weight"):
        await engine.load_weights(packed(moved, 1, "bf16"))
    (done,) = await engine.generate(ask())
    assert done.spans[0].version == 0
    assert gap(done, learnt(0)) < TOLERANCE["bf16"]
