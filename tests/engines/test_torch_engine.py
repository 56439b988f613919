"""The torch engine against Hugging Face's own forward and generate."""

import asyncio
import copy
import threading
from typing import Any

import numpy as np
import pytest
import torch
from helpers import engines
from helpers.engines import generate, serving
from helpers.kinds import VARIANTS, by_our_names, close_to, config_of
from helpers.policies import pack_state
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from areal_q.config import Sampling, TorchEngine
from areal_q.errors import ConfigError, RecordError, WeightVersionError
from areal_q.models import DecoderConfig
from areal_q.quant import dequantize_state, is_quantized
from areal_q.quant.activations import quantize_rows
from rollout.engines import build_engine
from rollout.engines.group_caches import cache_name
from rollout.engines.reference.inference_model import InferenceModel

VOCAB = 29
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "initializer_range": 0.25,
    "eos_token_id": None,
    "bos_token_id": None,
}


def random_model(family="qwen3", seed=0):
    """A model whose every weight bfloat16 holds exactly, so that publishing as bf16 loses nothing."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(family, SHAPE)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or "bias" in name:
                p.add_(0.3 * torch.randn_like(p))
            p.copy_(p.bfloat16())
    return model


def publish(model, version=0, format="bf16"):
    config = DecoderConfig.from_hf(model.config.to_dict())
    state = by_our_names(model.state_dict(), config)
    return pack_state(state, model.config.to_dict(), format, version)


def ask(prompt, samples=3, seed=0, stop=(), **sampling):
    return engines.ask(prompt, samples, seed, stop, **{"max_tokens": 24, **sampling})


@torch.no_grad()
def reference_logprobs(model, prompt, response, sampling):
    """Hugging Face's log-probs of `response`, with its own warpers, in their usual order."""
    ids: Any = torch.tensor([[*prompt, *response.tolist()]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1]
    if sampling.temperature != 1:
        logits = TemperatureLogitsWarper(sampling.temperature)(ids, logits)
    if sampling.top_k:
        logits = TopKLogitsWarper(sampling.top_k)(ids, logits)
    if sampling.top_p < 1:
        logits = TopPLogitsWarper(sampling.top_p)(ids, logits)
    if sampling.min_p:
        logits = MinPLogitsWarper(sampling.min_p)(ids, logits)
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("family", VARIANTS)
def test_log_probs_equal_transformers_under_every_sampling(family, fused):
    config = TorchEngine(slots=64, fused=fused)
    model = random_model(family)
    settings = [
        {},
        {"temperature": 0.7},
        {"temperature": 1.6, "top_k": 5},
        {"top_p": 0.8},
        {"temperature": 1.3, "top_k": 9, "top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.95, "min_p": 0.1},
    ]
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [3] * 40, [2, 9], [8, 8], [11]]
    mixed = [ask(p, seed=i, **s) for i, (p, s) in enumerate(zip(prompts, settings, strict=True))]
    together = generate(publish(model), *mixed, config=config)
    alone = [generate(publish(model), request, config=config)[0] for request in mixed]
    for results in (together, alone):
        for request, completions in zip(mixed, results, strict=True):
            for c in completions:
                want = reference_logprobs(
                    model, request.prompt_ids.tolist(), c.response_ids, request.sampling
                )
                off = np.sort(np.abs(c.logprobs - want))
                # Of two experts that a router finds as good, rounding chooses one.
                off = off[:-2] if DecoderConfig.from_hf(model.config.to_dict()).experts else off
                assert off.max() <= close_to(model)


def test_the_prompt_of_a_group_is_computed_once(monkeypatch):
    """The model is given the 40 tokens of the prompt once for 6 samples, and then one token a row a step."""
    seen = []
    forward = InferenceModel.forward

    def counting(self, tokens, *rest):
        seen.append(len(tokens))
        return forward(self, tokens, *rest)

    monkeypatch.setattr(InferenceModel, "forward", counting)
    model = random_model()
    ((*group,),) = generate(publish(model), ask([3] * 40, 6, max_tokens=5))
    assert seen == [40, 6, 6, 6, 6]
    for c in group:
        want = reference_logprobs(model, [3] * 40, c.response_ids, Sampling())
        np.testing.assert_allclose(c.logprobs, want, atol=close_to(model))


def test_what_prompts_begin_with_is_computed_once_a_version(monkeypatch):
    """The first page of 16 tokens is common to all prompts. It is computed once for prompts that come together
    and again after a swap, but not for prompts that come later. A prompt of another kind is computed whole."""
    seen = []
    forward = InferenceModel.forward

    def counting(self, tokens, *rest):
        seen.append(len(tokens))
        return forward(self, tokens, *rest)

    monkeypatch.setattr(InferenceModel, "forward", counting)
    old, new = random_model(seed=2), random_model(seed=3)
    begin = [*range(1, 26)]
    counts: list[list[int]] = []

    async def main():
        async with serving(build_engine(TorchEngine(slots=16)), publish(old)) as engine:
            for model, prompts in (
                (old, [[*begin, 7, 8, 9], [*begin, 5]]),
                (old, [[*begin, 3, 1]]),
                (new, [[*begin, 3, 1], [*begin, 3, 1]]),
                (new, [[6] * 20]),
            ):
                if model is new:
                    await engine.load_weights(publish(new, version=1))
                seen.clear()
                requests = [ask(prompt, 2, seed=1, max_tokens=2) for prompt in prompts]
                groups = await asyncio.gather(*map(engine.generate, requests))
                for prompt, group in zip(prompts, groups, strict=True):
                    for c in group:
                        want = reference_logprobs(model, prompt, c.response_ids, Sampling())
                        np.testing.assert_allclose(c.logprobs, want, atol=close_to(model))
                counts.append(seen.copy())

    asyncio.run(main())
    assert counts == [[28 + 10, 4], [11, 2], [27 + 11, 4], [20, 2]]


@pytest.mark.parametrize("family", VARIANTS)
def test_greedy_decoding_is_transformers_generate(family):
    model = random_model(family, seed=1)
    prompts = [[1, 2, 3], [7, 7, 7, 7, 7], [20]]
    results = generate(publish(model), *[ask(p, 1, temperature=0.0) for p in prompts])
    for prompt, (c,) in zip(prompts, results, strict=True):
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=24,
            pad_token_id=0,
        )
        assert c.response_ids.tolist() == out[0, len(prompt) :].tolist()
        assert (c.logprobs == 0).all()


def rounding_inputs(model, weights):
    """Returns `model` with the weights of a version, and int8 activations before them."""
    model.load_state_dict(dequantize_state(weights.tensors, weights.manifest.format))

    def quantize_input(module, args):
        codes, scale = quantize_rows(args[0])
        return (codes * scale,)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_quantized(name + ".weight"):
            module.register_forward_pre_hook(quantize_input)
    return model


@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_int8_equals_the_product_of_dequantized_factors(fused):
    model = random_model("qwen2")
    weights = publish(model, format="int8")
    reference = rounding_inputs(copy.deepcopy(model), weights)
    request = ask([1, 2, 3], 16)
    (completions,) = generate(weights, request, config=TorchEngine(slots=16, fused=fused))
    gaps = np.concatenate(
        [
            np.abs(
                c.logprobs
                - reference_logprobs(reference, [1, 2, 3], c.response_ids, request.sampling)
            )
            for c in completions
        ]
    )
    # A rounding difference of 1e-7 may tip an activation to the next code, seldom and by little.
    assert np.quantile(gaps, 0.95) < 1e-4 and gaps.max() < 0.1
    plain = [
        np.abs(c.logprobs - reference_logprobs(model, [1, 2, 3], c.response_ids, request.sampling))
        for c in completions
    ]
    assert np.concatenate(plain).mean() > 1e-3  # it is a quantized model that was run


@pytest.mark.parametrize("format", ["int4", "nvfp4", "mxfp4"])
@torch.no_grad()
def test_dtype_int8_rounds_activations_of_four_bit_weights(format):
    model = random_model("qwen2")
    weights, request = publish(model, format=format), ask([1, 2, 3], 16)
    rounding, exact = rounding_inputs(copy.deepcopy(model), weights), copy.deepcopy(model)
    exact.load_state_dict(dequantize_state(weights.tensors, format))
    (completions,) = generate(weights, request, config=TorchEngine(slots=16, dtype="int8"))

    def gap(reference):
        each = [
            reference_logprobs(reference, [1, 2, 3], c.response_ids, request.sampling)
            for c in completions
        ]
        return np.abs(
            np.concatenate(each) - np.concatenate([c.logprobs for c in completions])
        ).mean()

    # What is left beside the same rounding is the head's, which is bfloat16.
    assert gap(rounding) < gap(exact) / 3


def generate_with_swap(old, new, kv_on_update, at=10):
    async def main():
        engine = build_engine(TorchEngine(slots=8, kv_on_update=kv_on_update))
        await engine.start()
        await engine.load_weights(publish(old, 0))
        stepper = getattr(engine, "_stepper")  # noqa: B009
        step, prepare, prepared = stepper.step, stepper.prepare, threading.Event()
        drawn = 0
        swaps: list[asyncio.Future[float]] = []

        def on_token(index, token, logprob):
            nonlocal drawn
            drawn += index == 0
            if drawn == at and not swaps:
                swaps.append(asyncio.ensure_future(engine.load_weights(publish(new, 1))))

        def step_once_prepared():
            # Else a fast processor may draw the last token before the weights are prepared.
            if stepper.steps > at:
                prepared.wait()
            return step()

        def prepare_and_say(weights):
            model = prepare(weights)
            prepared.set()
            return model

        stepper.step, stepper.prepare = step_once_prepared, prepare_and_say

        request = ask([1, 2, 3], 2, max_tokens=90)
        done = await engine.generate(request, on_token)
        await asyncio.gather(*swaps)
        await engine.close()
        return done

    return asyncio.run(main())


caches_and_states = pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])


@caches_and_states
def test_recomputing_the_cache_gives_the_new_log_probs(family):
    old, new = random_model(family, 2), random_model(family, 3)
    for c in generate_with_swap(old, new, "recompute"):
        (first, second), n = c.spans, c.spans[0].tokens
        assert (first.version, second.version) == (0, 1) and second.tokens > 1
        before = reference_logprobs(old, [1, 2, 3], c.response_ids, Sampling())
        after = reference_logprobs(new, [1, 2, 3], c.response_ids, Sampling())
        np.testing.assert_allclose(c.logprobs[:n], before[:n], atol=close_to(old))
        np.testing.assert_allclose(c.logprobs[n:], after[n:], atol=close_to(new))


@caches_and_states
@torch.no_grad()
def test_keeping_the_cache_records_the_mixtures_log_probs(family):
    old, new = random_model(family, 2), random_model(family, 3)
    for c in generate_with_swap(old, new, "keep"):
        n = c.spans[0].tokens
        ids = torch.tensor([[1, 2, 3, *c.response_ids.tolist()]])
        # The old weights have cached all but the last token drawn with them.
        cached = 3 + n - 1
        cache = cache_name(type(old))
        past = old(ids[:, :cached], use_cache=True)[cache]
        logits = new(ids[:, cached:-1], **{cache: past}).logits[0]
        want = logits.log_softmax(-1).gather(1, ids[0, cached + 1 :, None])[:, 0]
        np.testing.assert_allclose(c.logprobs[n:], want.numpy(), atol=close_to(new))
        pure = reference_logprobs(new, [1, 2, 3], c.response_ids, Sampling())
        assert np.abs(c.logprobs[n:] - pure[n:]).max() > 0.01


@caches_and_states
@pytest.mark.parametrize("fused", [True, False])
def test_refilled_slots_leave_no_trace_in_the_log_probs(fused, family):
    model = random_model(family, 4)
    requests = [
        ask([i % VOCAB] * (1 + i % 13), 1 + i % 4, seed=i, stop=(3, 4, 5)) for i in range(40)
    ]
    results = generate(publish(model), *requests, config=TorchEngine(slots=8, fused=fused))
    for request, completions in zip(requests, results, strict=True):
        for c in completions:
            want = reference_logprobs(
                model, request.prompt_ids.tolist(), c.response_ids, request.sampling
            )
            np.testing.assert_allclose(c.logprobs, want, atol=close_to(model))


@pytest.mark.parametrize("fused", [True, False])
async def test_diverged_weights_fail_requests_and_good_ones_recover(fused):
    model = random_model()
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
        broken.model.layers[0].input_layernorm.weight.fill_(float("nan"))
    engine = build_engine(TorchEngine(slots=4, fused=fused))
    async with serving(engine, publish(broken, 0)):
        for temperature in (0.0, 1.0):
            with pytest.raises(RecordError, match="not finite"):
                await engine.generate(ask([1, 2], 4, max_tokens=60, temperature=temperature))
        await engine.load_weights(publish(model, 1))
        (c,) = await engine.generate(ask([1, 2], 1))
    want = reference_logprobs(model, [1, 2], c.response_ids, Sampling())
    np.testing.assert_allclose(c.logprobs, want, atol=close_to(model))


async def test_weights_of_another_model_or_with_a_gap_are_refused():
    engine = build_engine(TorchEngine(slots=4))
    await engine.start()
    await engine.load_weights(publish(random_model("qwen3")))
    with pytest.raises(WeightVersionError, match="another model"):
        await engine.load_weights(publish(random_model("qwen2")))
    torn = publish(random_model("qwen3"))
    tensors = {k: v for k, v in torn.tensors.items() if "layers.1.mlp.up_proj" not in k}
    with pytest.raises(WeightVersionError, match="up_proj"):
        await engine.load_weights(type(torn)(torn.manifest, torn.payload, tensors))
    await engine.close()


def test_a_prompt_token_outside_the_vocabulary_is_refused():
    with pytest.raises(RecordError, match="vocabulary"):
        generate(publish(random_model()), ask([1, VOCAB]))


def test_a_group_larger_than_the_slots_is_refused_by_name(make_run):
    asked = ["learner.group_size=8", "rollout.engine.slots=4"]
    with pytest.raises(ConfigError, match=r"rollout\.engine\.slots = 4 has no room for a group"):
        make_run(*asked)
    # A tool is asked for one response at a time.
    make_run(*asked, "rollout.environment.type=calculator", "rollout.environment.max_calls=1")
