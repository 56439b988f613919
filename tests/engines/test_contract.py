"""What every engine promises: the scripted and the torch engine, vLLM and SGLang where they are installed
(`make test-vllm`, `make test-sglang`)."""

import asyncio
import contextlib
from functools import cache, partial
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
import torch
from helpers.kinds import config_of
from helpers.policies import pack_state
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from areal_q.config import (
    HfEngine,
    Lora,
    Sampling,
    ScriptedEngine,
    SglangEngine,
    TorchEngine,
    VllmEngine,
)
from areal_q.config.run import EngineConfig
from areal_q.errors import EngineDied, RecordError, WeightVersionError
from areal_q.models import Decoder, DecoderConfig, Experts, PackedLayout, Routing, init_weights
from areal_q.models.low_bit.engine_policy import engine_policy
from areal_q.models.low_bit.lora import LORA_SCALE, adapt, adapted, adapters_off
from areal_q.models.low_bit.published_state import published_state
from areal_q.weights.version import pack_version
from rollout.engines import ENGINES, build_engine
from rollout.engines.base import Request

VOCAB, POSITIONS = 32, 512
MIXTURE = DecoderConfig(
    family="qwen3_moe", vocab_size=VOCAB, width=64, layers=3, heads=2, kv_heads=1, head_dim=32, mlp=96,
    max_positions=POSITIONS, experts=Experts(count=8, per_token=2, mlp=32),
)  # fmt: skip
SHARED = replace(
    MIXTURE, family="qwen2_moe", qkv_bias=True,
    experts=Experts(count=8, per_token=2, mlp=32, normalised=False, shared=48),
)  # fmt: skip
"""A mixture with an expert that all tokens share"""
DENSE = {"torch": (1,), "vllm": (1,)}
"""Layers of mixtures without experts, in engines that know such"""
CONFIGS = {
    "torch": TorchEngine(slots=64),
    "torch, a state": TorchEngine(slots=64),
    "hf": HfEngine(slots=64),
    "vllm": VllmEngine(slots=64),
    "sglang": SglangEngine(slots=64, start_timeout_s=300),
    "scripted": ScriptedEngine(tokens_per_s=1000),
}
FORMATS = {"sglang": "bf16"}
"""int8, but for engines that run no quantized one on a CPU"""
SERVED = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
"""Marks of engines that have processes of their own and take long to start"""
KINDS = [
    "torch",
    "torch, a state",
    "hf",
    "scripted",
    pytest.param("vllm", marks=[pytest.mark.vllm, *SERVED]),
    pytest.param("sglang", marks=[pytest.mark.sglang, *SERVED]),
]


@pytest.fixture(params=KINDS)
def kind(request):
    """Tag of an engine that is installed."""
    if request.param in ("vllm", "sglang"):
        pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return request.param


@pytest.fixture
def published(kind, make_published):
    """`published(v)`: a version v, all with different weights, in a format of the engine."""
    family = "qwen3_5_text" if kind == "torch, a state" else "qwen3"
    return partial(make_published, family, format=FORMATS.get(kind, "int8"))


@pytest.fixture(scope="module")
def make_published():
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.3,
    }

    def make(family, version, format, **changes):
        torch.manual_seed(version)
        config = config_of(family, shape)
        model = AutoModelForCausalLM.from_config(config)
        return pack_state(model.state_dict(), config.to_dict() | changes, format, version)

    return make


@pytest.fixture(scope="module")
def shared(runner):
    """`shared(kind)`: an engine for all tests, of those that take long to start."""
    with contextlib.ExitStack() as stack:
        yield cache(lambda kind: stack.enter_context(started(kind, runner)))


@contextlib.contextmanager
def started(kind, runner):
    engine = build_engine(CONFIGS[kind])
    runner.run(engine.start())
    yield engine
    runner.run(engine.close())


@pytest.fixture
def new_engine(kind, runner):
    """A started engine that has no weights."""
    with started(kind, runner) as engine:
        yield engine


@pytest.fixture
def engine(kind, request, runner, published, shared):
    """A started engine that has version 0."""
    own_processes = kind in ("vllm", "sglang")
    engine = shared(kind) if own_processes else request.getfixturevalue("new_engine")
    runner.run(engine.load_weights(published(0)))
    return engine


def ask(
    seed=0, samples=2, max_tokens=12, prompt=(3, 1, 2), stop=(), stops=(), temperature=1.0, **fields
):
    return Request(
        prompt_ids=np.array(prompt, np.int32),
        num_samples=samples,
        sampling=Sampling(max_tokens=max_tokens, temperature=temperature, stop=stops),
        seed=seed,
        stop_ids=frozenset(stop),
        **fields,
    )


def check(request, completions):
    assert len(completions) == request.num_samples
    for c in completions:
        tokens = len(c.response_ids)
        assert c.response_ids.dtype == np.int32 and c.logprobs.dtype == np.float32
        assert 1 <= tokens <= request.sampling.max_tokens and len(c.logprobs) == tokens
        assert sum(s.tokens for s in c.spans) == tokens and all(s.tokens > 0 for s in c.spans)
        assert np.isfinite(c.logprobs).all() and (c.logprobs <= 1e-6).all()
        stops = [i for i, token in enumerate(c.response_ids.tolist()) if token in request.stop_ids]
        if c.finish_reason == "stop":
            assert stops == [tokens - 1]
        else:
            assert stops == [] and tokens == request.sampling.max_tokens


async def test_a_response_ends_at_a_stop_token_or_its_budget(engine):
    requests = [ask(seed, 4, 1 + seed, stop=(1, 2, 3)) for seed in range(12)]
    results, reasons = await asyncio.gather(*map(engine.generate, requests)), set()
    for request, done in zip(requests, results, strict=True):
        check(request, done)
        reasons.update(c.finish_reason for c in done)
    assert engine.active == 0
    assert reasons == {"stop", "length"}


def spelled(ids):
    """A letter for each id but 0, 7, …, which have none; the text of 3 is two letters."""
    return "".join("" if i % 7 == 0 else "xy" if i == 3 else chr(97 + i % 26) for i in ids)


@pytest.mark.parametrize("by", ["ids", "text"])
async def test_a_response_ends_with_the_first_completed_stop(engine, by):
    """The stops are pieces of what is drawn without them; all else stays as it is, token for token."""
    decode = spelled if by == "text" else None
    plain = await engine.generate(ask(21, 8, 40))
    drawn = [c.response_ids.tolist() for c in plain]
    texts = [spelled(ids) for ids in drawn]
    pieces = tuple(text[len(text) // 3 :][:2] for text in texts)
    stops = pieces if by == "text" else tuple(tuple(ids[10:13]) for ids in drawn)
    request = ask(21, 8, 40, stop=(), decode=decode, stops=stops)
    for free, cut in zip(plain, await engine.generate(request), strict=True):
        ids = free.response_ids.tolist()
        end = next(
            end
            for end in range(1, 41)
            if any(
                s in spelled(ids[:end]) if isinstance(s, str) else ids[:end][-len(s) :] == [*s]
                for s in stops
            )
        )
        assert cut.finish_reason == "stop"
        assert cut.response_ids.tolist() == ids[:end]
        np.testing.assert_allclose(cut.logprobs, free.logprobs[:end], atol=1e-5)
        assert sum(s.tokens for s in cut.spans) == end
    assert engine.active == 0


async def test_a_stop_may_begin_in_what_an_earlier_request_drew(engine):
    (free,) = await engine.generate(ask(5, 1, 12))
    ids = free.response_ids.tolist()
    rest = ask(5, 1, 7, prompt=(3, 1, 2, *ids[:5]), drawn=5)
    (more,) = await engine.generate(rest)
    stop = (*ids[3:5], int(more.response_ids[0]))
    stopping = ask(5, 1, 7, prompt=(3, 1, 2, *ids[:5]), stops=(stop,), drawn=5)
    (second,) = await engine.generate(stopping)
    assert second.response_ids.tolist() == [stop[-1]] and second.finish_reason == "stop"
    if engine.name != "vllm":  # whose random numbers begin anew with each request
        (first,) = await engine.generate(ask(5, 1, 12, stops=(stop,)))
        assert first.response_ids.tolist() == ids[:6] and first.finish_reason == "stop"
    # What only stands in the prompt is no stop.
    stop_in_prompt = ask(5, 1, 12, stops=((2, ids[0]),))
    assert len((await engine.generate(stop_in_prompt))[0].response_ids) == 12


async def test_a_stop_id_that_no_token_has_is_no_harm(engine):
    if engine.name == "scripted":
        return  # it draws stop ids as it is told
    for completion in await engine.generate(ask(5, 2, 12, stop=(4096,))):
        assert len(completion.response_ids) == 12 and completion.finish_reason == "length"


async def test_who_asks_is_told_what_tokens_were_drawn_from(engine):
    """Also up to a stop; whoever draws in the same batch and does not ask is told nothing."""
    sampling = Sampling(max_tokens=40, temperature=0.9, top_k=4, top_p=0.95)
    masked = replace(ask(9, 4), sampling=sampling, masked=engine.capabilities.sampling_mask)
    told, untold = await asyncio.gather(
        engine.generate(masked), engine.generate(ask(90, 4, temperature=0.0))
    )
    assert all(c.sampling_mask is None for c in untold)
    if not engine.capabilities.sampling_mask:
        return
    stop = tuple(told[0].response_ids[20:22].tolist())
    cut = await engine.generate(replace(masked, sampling=replace(sampling, stop=(stop,))))
    for whole, done in zip(told, cut, strict=True):
        assert len(whole.sampling_mask) == 40 and len(done.sampling_mask) == len(done.response_ids)
        for token, ids in zip(whole.response_ids, whole.sampling_mask, strict=True):
            assert ids.dtype == np.int32 and token in ids and len(ids) <= 4
            assert (np.diff(ids) > 0).all()
        for one, other in zip(whole.sampling_mask, done.sampling_mask, strict=False):
            assert one.tolist() == other.tolist()
    assert {len(ids) for c in told for ids in c.sampling_mask} > {4}


async def test_strings_to_stop_at_without_a_tokenizer_are_refused(engine):
    with pytest.raises(RecordError, match="need a tokenizer"):
        await engine.generate(ask(stops=("x",)))


async def test_a_late_response_ends_with_the_tokens_it_has(engine):
    (whole,) = await engine.generate(ask(9, 1, 400))
    request = ask(9, 1, 400, timeout_s=1e-6)
    (cut,) = await engine.generate(request)
    tokens = len(cut.response_ids)
    assert cut.finish_reason == "timeout" and 1 <= tokens < 400
    assert cut.response_ids.tolist() == whole.response_ids.tolist()[:tokens]
    np.testing.assert_allclose(cut.logprobs, whole.logprobs[:tokens], atol=1e-5)
    assert sum(s.tokens for s in cut.spans) == tokens
    (patient,) = await engine.generate(ask(9, 1, 400, timeout_s=3600))
    assert patient.finish_reason == "length" and engine.active == 0


async def test_a_cancelled_request_is_continued_token_for_token(engine, published):
    """Of an engine with processes of its own, one response's tokens may all arrive before another's."""
    length = 240
    whole = await engine.generate(ask(31, 3, length))
    told, drawn = {}, [0, 0, 0]

    def on_token(index, token, logprob):
        drawn[index] += 1
        if drawn[index] == min(drawn) == 20:
            task.cancel()

    request = ask(31, 3, length)
    task = asyncio.ensure_future(engine.generate(request, on_token, told.__setitem__))
    await asyncio.wait([task])
    assert task.cancelled() and engine.active == 0
    assert sorted(told) == [0, 1, 2]
    for index, half in told.items():
        ids, want = half.response_ids.tolist(), whole[index]
        assert half.finish_reason == ("length" if len(ids) == length else None)
        assert ids and ids == want.response_ids.tolist()[: len(ids)]
        assert sum(s.tokens for s in half.spans) == len(ids)
        # vLLM's random numbers begin anew with each request.
        if engine.name == "vllm" or half.finish_reason:
            continue
        more = min(40, length - len(ids))
        rest = ask(31 + index, 1, more, prompt=(3, 1, 2, *ids), drawn=len(ids))
        (done,) = await engine.generate(rest)
        both, logprobs = [*ids, *done.response_ids.tolist()], [*half.logprobs, *done.logprobs]
        assert both == want.response_ids.tolist()[: len(both)]
        np.testing.assert_allclose(logprobs, want.logprobs[: len(both)], atol=1e-5)


async def test_responses_are_told_as_they_end(engine):
    told = {}
    done = await engine.generate(ask(3, 4, stop=(4, 5)), None, told.__setitem__)
    assert [told[i] for i in range(4)] == done


async def test_equal_seeds_give_equal_tokens_in_any_company(engine):
    alone = await engine.generate(ask(7, 3))
    crowd = [ask(100 + i, 4, prompt=(i % 5, 2, 9)) for i in range(10)]
    results = await asyncio.gather(*map(engine.generate, [*crowd, ask(7, 3)]))
    for a, b in zip(alone, results[-1], strict=True):
        assert a.response_ids.tolist() == b.response_ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    assert len({tuple(c.response_ids) for c in alone}) == 3


async def test_response_i_draws_with_seed_plus_i(engine):
    group = await engine.generate(ask(50, 4))
    single = await engine.generate(ask(52, 1))
    assert group[2].response_ids.tolist() == single[0].response_ids.tolist()


async def test_other_weights_give_other_log_probs(engine, published):
    before = await engine.generate(ask(1))
    await engine.load_weights(published(1))
    after = await engine.generate(ask(1))
    assert not np.array_equal(before[0].logprobs, after[0].logprobs)


async def test_tokens_are_stamped_with_the_version_that_drew_them(engine, published):
    """A swap asked for when the third token is out shows in the spans exactly where it took effect."""
    swaps, drawn_with = [], []

    def on_token(index, token, logprob):
        drawn_with.append(engine.version)
        if len(drawn_with) in (3, 40):
            weights = published(len(swaps) + 1)
            swaps.append(asyncio.ensure_future(engine.load_weights(weights)))

    request = ask(samples=1, max_tokens=500)
    (done,) = await engine.generate(request, on_token)
    check(request, [done])
    assert [v for s in done.spans for v in [s.version] * s.tokens] == drawn_with
    assert [s.version for s in done.spans] == [0, 1, 2]
    assert [s.digest for s in done.spans] == [published(v).manifest.digest for v in range(3)]
    assert all(pause >= 0 for pause in await asyncio.gather(*swaps))


async def test_a_response_begun_after_a_swap_holds_the_new_version(engine, published):
    for version in (1, 2):
        await engine.load_weights(published(version))
    (done,) = await engine.generate(ask(samples=1))
    assert [(s.version, s.tokens) for s in done.spans] == [(2, 12)]


async def test_requests_wait_for_the_first_weights(new_engine, published):
    assert new_engine.version == -1 and new_engine.max_positions == 0
    waiting = asyncio.ensure_future(new_engine.generate(ask()))
    too_long = asyncio.ensure_future(new_engine.generate(ask(max_tokens=POSITIONS)))
    await asyncio.sleep(0.01)
    assert not waiting.done() and new_engine.tokens_drawn == 0
    await new_engine.load_weights(published(0))
    check(ask(), await waiting)
    assert new_engine.max_positions == POSITIONS
    with pytest.raises(RecordError, match="max_positions"):
        await too_long


async def test_requests_that_can_never_be_served_are_refused_by_name(engine):
    with pytest.raises(RecordError, match="maximum context length is 512 tokens"):
        await engine.generate(ask(max_tokens=510))
    for tokens in (0, -1, -4, -300, 2**31):
        with pytest.raises(RecordError, match="max_tokens"):
            await engine.generate(ask(max_tokens=tokens))
    with pytest.raises(RecordError, match="prompt"):
        await engine.generate(ask(prompt=()))
    with pytest.raises(RecordError, match="slots"):
        await engine.generate(ask(samples=5000))
    check(ask(max_tokens=509), await engine.generate(ask(max_tokens=509)))


async def test_weights_of_an_unknown_format_are_refused(engine, published):
    bad = published(3)
    manifest = type(bad.manifest)(
        **{f: getattr(bad.manifest, f) for f in bad.manifest.__struct_fields__}
        | {"format": "int99"}
    )
    with pytest.raises(WeightVersionError, match="int99"):
        await engine.load_weights(type(bad)(manifest, bad.payload, bad.tensors))
    check(ask(), await engine.generate(ask()))
    assert engine.version == 0


@pytest.mark.parametrize("change", ["sizes", "names", "fewer rows", "heads", "no model", "no text"])
async def test_weights_of_another_model_are_refused(kind, engine, published, change):
    """They are whole and agree with their own digests: a learner of another run, or one who means harm."""
    if kind == "scripted":
        pytest.skip("it has no model")
    good = published(3)
    model, tensors = good.manifest.model, dict(good.tensors)
    up = "model.layers.0.mlp.up_proj"
    match change:
        case "sizes":
            name = "model.embed_tokens.weight"
            tensors[name] = tensors[name][:, ::2]
        case "names":
            tensors = {f"x.{name}": t for name, t in tensors.items()}
        case "fewer rows":
            tensors |= {name: t[:64] for name, t in tensors.items() if name.startswith(up)}
        case "heads":
            model = model | {"num_key_value_heads": 3}
        case "no model":
            model = {"model_type": "unheard of"}
        case "no text":
            model = model | {"hidden_size": "x", "rope_scaling": 5, "rope_parameters": []}
    other = pack_version(
        tensors, run="r", epoch="e", version=3, format=good.manifest.format, uaq_scale=1.0, model=model,
        published_s=0.0,
    )  # fmt: skip
    with pytest.raises(WeightVersionError, match="version 3"):
        await engine.load_weights(other)
    check(ask(), await engine.generate(ask()))
    assert engine.version == 0


async def test_cancelling_frees_the_slots_and_disturbs_nobody(engine):
    undisturbed = [await engine.generate(ask(seed, 1, 20)) for seed in range(32)]
    drawn = 0
    tasks = [asyncio.ensure_future(engine.generate(ask(s, 1, 20))) for s in range(64)]

    def on_token(index, token, logprob):
        nonlocal drawn
        drawn += 1
        if drawn == 5:
            for task in tasks[32:]:
                task.cancel()

    await engine.generate(ask(1000, 1, 10), on_token)
    await asyncio.wait(tasks[32:])
    assert engine.active <= 32
    results = await asyncio.gather(*tasks[:32])
    for seed in range(32):
        check(ask(seed, 1, 20), results[seed])
        assert results[seed][0].response_ids.tolist() == undisturbed[seed][0].response_ids.tolist()
    assert all(task.cancelled() for task in tasks[32:])
    assert engine.active == 0
    check(ask(samples=64), await engine.generate(ask(samples=64)))


async def test_more_requests_than_slots_are_all_served_in_turn(engine):
    before = engine.tokens_drawn
    requests = [ask(i, 1 + i % 8, 1 + i % 20, stop=(5,)) for i in range(100)]
    results = await asyncio.gather(*map(engine.generate, requests))
    for request, done in zip(requests, results, strict=True):
        check(request, done)
    drawn = sum(len(c.response_ids) for done in results for c in done)
    assert engine.tokens_drawn == before + drawn
    assert engine.busy_s > 0


async def test_callbacks_see_every_token_as_it_is_recorded(engine):
    heard: dict[int, list[tuple[int, float]]] = {0: [], 1: [], 2: []}
    done = await engine.generate(
        ask(3, 3, stop=(4, 5, 6)), lambda i, token, lp: heard[i].append((token, lp))
    )
    for index, c in enumerate(done):
        assert [token for token, _ in heard[index]] == c.response_ids.tolist()
        np.testing.assert_array_equal(
            np.array([lp for _, lp in heard[index]], np.float32), c.logprobs
        )


async def test_greedy_tokens_are_certain(engine):
    a, b = await engine.generate(ask(1, 2, temperature=0.0))
    assert a.response_ids.tolist() == b.response_ids.tolist()
    assert (a.logprobs == 0).all() and (b.logprobs == 0).all()


async def test_closing_cancels_requests_and_refuses_later_ones(new_engine, published):
    await new_engine.load_weights(published(0))
    task = asyncio.ensure_future(new_engine.generate(ask(max_tokens=100)))
    await asyncio.sleep(0)
    await new_engine.close()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(EngineDied, match="not running"):
        await new_engine.generate(ask())


@pytest.mark.parametrize("mixture", [MIXTURE, SHARED], ids=lambda shape: shape.family)
async def test_a_swapped_mixture_runs_the_published_experts(new_engine, kind, mixture):
    """Log-probs, and routes where the engine tells them, are those that the learner has of the version."""
    if kind in ("scripted", "hf"):
        pytest.skip("it has no weights, or none of such a model")
    experts = replace(mixture.experts, dense_layers=DENSE.get(kind, ()))
    config = replace(mixture, experts=experts)
    for version in range(2):
        init_weights(model := Decoder(config), version)
        state = {
            name: 2 * t if t.dim() == 2 else t + torch.linspace(-0.2, 0.2, len(t))
            for name, t in model.state_dict().items()
        }
        weights = pack_state(state, config.to_hf(), "bf16", version)
        await new_engine.load_weights(weights)
        policy = engine_policy(config, weights.tensors, "bf16")
        for done in await new_engine.generate(request := ask(version, 4, 40)):
            ids = torch.tensor([*request.prompt_ids, *done.response_ids])
            drawn = scored(policy, ids, routing := Routing())
            np.testing.assert_allclose(done.logprobs, drawn, 0, 1e-3, err_msg=f"version {version}")
            assert [span.version for span in done.spans] == [version]
            assert (done.routes is not None) == new_engine.capabilities.routes
            if done.routes is not None:
                own = torch.stack([routing.own[layer] for layer in sorted(routing.own)], 1)[:-1]
                assert done.routes.dtype == np.uint8
                assert np.array_equal(np.sort(done.routes), own.sort(-1).values)


@pytest.mark.parametrize(
    ("shape", "targets"),
    [
        (replace(MIXTURE, family="qwen3", experts=None), Lora().targets),
        (MIXTURE, Lora().targets),
        (MIXTURE, ("q_proj", "o_proj")),
        (SHARED, Lora().targets),
    ],
    ids=["dense", "experts", "attention", "shared"],
)
async def test_swapped_adapters_run_as_the_learner_s(new_engine, kind, shape, targets):
    """Log-probs are those that the learner's own model has, whose base stays."""
    if kind not in ("torch", "vllm", "sglang"):
        pytest.skip("it has no weights, or none of such a model")
    experts = shape.experts and replace(shape.experts, dense_layers=DENSE.get(kind, ()))
    config = replace(shape, experts=experts)
    init_weights(model := Decoder(config), 0)
    model.load_state_dict({n: 2 * t if t.dim() == 2 else t for n, t in model.state_dict().items()})
    adapt(model, "bf16", lora := Lora(rank=4, alpha=6.0, targets=targets), 0)
    adapters = [linear for linear in adapted(model).values() if linear.has_adapter]
    draw = torch.Generator().manual_seed(0)
    for version in range(2):
        for linear in adapters:
            torch.nn.init.normal_(linear.lora_B.weight, std=0.1, generator=draw)
        weights = pack_version(
            published_state(model, "bf16"), run="r", epoch="e", version=version, format="bf16",
            uaq_scale=1.0, model=config.to_hf(), published_s=0.0, extra={LORA_SCALE: lora.alpha / lora.rank},
        )  # fmt: skip
        await new_engine.load_weights(weights)
        for done in await new_engine.generate(request := ask(version, 4, 40)):
            ids = torch.tensor([*request.prompt_ids, *done.response_ids])
            # Products of the torch engine may be of two bfloat16 numbers, not of float32.
            tolerance = 1e-3 if kind == "torch" else 1e-4
            np.testing.assert_allclose(done.logprobs, scored(model, ids), 0, tolerance)
            with adapters_off(model):
                assert np.abs(done.logprobs - scored(model, ids).numpy()).max() > 0.01


@torch.no_grad()
def scored(policy, ids, routing=None):
    """Log-probs of the response in `ids`, after the prompt of `ask`."""
    logits = policy.logits(policy(ids, PackedLayout.of([len(ids)]), routing))
    return logits[2:-1].log_softmax(-1).gather(1, ids[3:, None])[:, 0]


async def test_versions_may_change_at_every_step(engine, published):
    versions = [published(v) for v in range(1, 9)]

    async def swap():
        for weights in versions:
            await engine.load_weights(weights)

    requests = [ask(i, 4, 100) for i in range(6)]
    swapping = asyncio.ensure_future(swap())
    results = await asyncio.gather(*map(engine.generate, requests))
    await swapping
    for request, done in zip(requests, results, strict=True):
        check(request, done)
        for c in done:
            assert all(a.version < b.version for a, b in pairwise(c.spans))


def test_every_engine_of_the_settings_can_be_built(every_engine_installed):
    for config in CONFIGS.values():
        engine = build_engine(config)
        assert engine.name == type(config).__struct_config__.tag
        assert "bf16" in engine.capabilities.formats and engine.version == -1
    assert set(ENGINES) == {kind.partition(",")[0] for kind in CONFIGS}
    assert set(ENGINES) == {c.__struct_config__.tag for c in get_args(EngineConfig)}
