"""The FP8 KV cache: codes by torch's own cast, scales for every version, log-probs of what was drawn."""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engines import ask, serving
from helpers.fixture_types import MakeRun, MakeSamples
from helpers.policies import build_policy, initial_model, save_at
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from areal_q.config import KvScales, RolloutConfig, Run, ScriptedEngine, Smoothing, TorchEngine
from areal_q.errors import ConfigError
from areal_q.messages import Array
from areal_q.models import Decoder, PackedLayout, decoder
from areal_q.models.decoder import Attention
from areal_q.models.smoothed_state import scales_of
from areal_q.quant.kv_scales import dequantize, kv_scales_of, name_of, quantize, scale_for
from areal_q.weights.version import WeightVersion
from bench.records import make_trajectory
from buffer.sampling.replay_pool import SampledGroups
from learner import checkpoint
from learner.backends.calibration import kv_scales
from learner.data.packing import samples_of
from learner.data.staleness import VersionHistory
from learner.policy_update import SingleProcessUpdater, update_policy
from learner.publishing.version_builder import VersionBuilder
from learner.train_step import train_step
from rollout.engines import build_engine
from rollout.engines.base import Completion, Request
from rollout.engines.reference.kv_cache_fp8 import Fp8KVCache
from rollout.engines.reference.torch_engine import TorchStepper
from rollout.engines.scripted import scripted_engine

FP8 = ["rollout.engine.kv_cache=fp8", "rollout.format=bf16", "model.max_positions=64"]


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1), st.floats(1.0, 4.0), st.booleans())
def test_codes_are_torch_s_cast_in_range_and_saturate_beyond(values, margin, small):
    x = torch.tensor(values, dtype=torch.float32)
    seen = x.abs().max() / (3 if small else 1)
    scale = scale_for(seen, margin)
    codes = quantize(x, scale)
    wanted = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
    inside = x.abs() <= 448 * scale
    bound = scale * (codes.float().abs() * (2**-4 + 2**-22)).clamp(min=2**-10 * (1 + 2**-18))
    assert ((x - dequantize(codes, scale)).abs() <= bound)[inside].all()
    assert (dequantize(codes, scale)[~inside].abs() <= 448 * scale).all()


def model_of(run: Run, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    model = initial_model(run)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p)).copy_(p.bfloat16())
    return model


PROMPT = np.array([3, 1, 4, 1, 5, 9], np.int32)


def request(tokens: int = 20, samples: int = 3) -> Request:
    return ask(PROMPT, samples, 7, max_tokens=tokens)


def generate(versions: list[WeightVersion], config: TorchEngine) -> list[Completion]:
    """The first version from the start, another one every 4 tokens."""

    async def main():
        drawn = asyncio.Queue()
        async with serving(build_engine(config), versions[0]) as engine:
            task = asyncio.create_task(
                engine.generate(request(), on_token=lambda i, t, lp: drawn.put_nowait(i))
            )
            for version in versions[1:]:
                for _ in range(4 * 3):
                    await drawn.get()
                await engine.load_weights(version)
            return await task

    return asyncio.run(main())


def rounding(scales: list[Tensor] | None, found: list[Tensor]) -> Callable[..., Tensor]:
    """The decoder's attention, to keys and values as an FP8 cache of `scales` returns them; of scales for
    what it meets, which go to `found`, where there are none."""
    plain, calls = decoder.packed_attention, itertools.count()

    def attention(q: Tensor, k: Tensor, v: Tensor, *shape: Any) -> Tensor:
        if scales is None:
            found.append(torch.stack((k.abs().amax(), v.abs().amax())) * 1.5 / 448)
        row = found[-1] if scales is None else scales[next(calls) % len(scales)]
        k, v = (
            (x / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s
            for x, s in zip((k, v), row, strict=True)
        )
        return plain(q, k, v, *shape)

    return attention


@torch.no_grad()
def logprobs_of(model: Decoder, completion: Completion) -> np.ndarray:
    ids = torch.tensor(np.concatenate((PROMPT, completion.response_ids))).long()
    hidden = model(ids, PackedLayout.of([len(ids)]))[len(PROMPT) - 1 : -1]
    logp = model.logits(hidden).log_softmax(-1)
    return logp.gather(1, ids[len(PROMPT) :, None]).squeeze(1).numpy()


@torch.no_grad()
def measured(model: Decoder) -> Tensor:
    """What the engine must find over the prompt: of the largest key and value of each layer, times 1.5."""
    found: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "packed_attention", rounding(None, found))
        model(torch.tensor(PROMPT).long(), PackedLayout.of([len(PROMPT)]))
    return torch.stack(found)


@pytest.mark.parametrize("fused", [True, False])
def test_log_probs_are_of_attention_to_rounded_keys_and_values(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, fused: bool
):
    run = make_run(*FP8)
    model = model_of(run)
    config = TorchEngine(slots=8, kv_cache="fp8", fused=fused)
    drawn = generate([VersionBuilder(run).build(model, 0)], config)
    plain = [logprobs_of(model, c) for c in drawn]
    scales = list(measured(model))
    monkeypatch.setattr(decoder, "packed_attention", rounding(scales, []))
    for c, unrounded in zip(drawn, plain, strict=True):
        gap = np.abs(logprobs_of(model, c) - c.logprobs)
        # Where float32 rounding turns the code of a key, the two differ by that code.
        assert np.median(gap) < 1e-4
        assert np.sqrt((gap**2).mean()) < 0.2 * np.sqrt(((unrounded - c.logprobs) ** 2).mean())


@pytest.mark.parametrize("kv_on_update", ["keep", "recompute"])
def test_every_version_has_its_own_scales_and_slots_keep_theirs(make_run: MakeRun, kv_on_update):
    run = make_run(*FP8)
    first, second = model_of(run, 0), model_of(run, 1)
    builder = VersionBuilder(run)
    config = TorchEngine(slots=8, kv_cache="fp8", kv_on_update=kv_on_update)
    versions = [builder.build(first, 0), builder.build(second, 1)]
    stepper = TorchStepper(config)
    stepper.swap(stepper.prepare(versions[0]))
    job = _job(stepper)
    stepper.step()
    torch.testing.assert_close(_scales(stepper), measured(first), rtol=1e-5, atol=0)
    stepper.swap(stepper.prepare(versions[1]))
    stepper.step()
    held = _scales(stepper)
    if kv_on_update == "keep":
        torch.testing.assert_close(held, measured(first), rtol=1e-5, atol=0)
    else:
        assert not torch.allclose(held, measured(first), rtol=1e-3)
    stepper.drop(job)
    _job(stepper)
    stepper.step()
    if kv_on_update == "keep":
        torch.testing.assert_close(_scales(stepper), measured(second), rtol=1e-5, atol=0)


def _scales(stepper: TorchStepper) -> Tensor:
    """The scales of the first row's first page."""
    assert isinstance(stepper.cache, Fp8KVCache)
    return stepper.cache.page_scales[:, :, stepper.rows[0].pages[0]]


def _job(stepper: TorchStepper):
    from rollout.engines.reference.async_engine import Job

    loop = asyncio.new_event_loop()
    job = Job(request(), loop.create_future(), None)
    loop.close()
    stepper.waiting.append(job)
    return job


def test_the_cache_takes_a_quarter_of_the_memory(make_run: MakeRun):
    run = make_run(*FP8)
    sizes = []
    for kind in ("auto", "fp8"):
        stepper = TorchStepper(TorchEngine(slots=8, kv_cache=kind))  # type: ignore[arg-type]
        stepper.swap(stepper.prepare(VersionBuilder(run).build(model_of(run), 0)))
        _job(stepper)
        stepper.step()
        sizes.append(stepper.cache.nbytes)
    assert sizes[0] == 4 * sizes[1] > 0


def test_the_learners_scales_are_percentiles_of_what_it_sees(
    make_run: MakeRun, make_samples: MakeSamples
):
    run = make_run(*FP8)
    model, samples = model_of(run), make_samples(3)
    seen: list[list[Tensor]] = []
    layers = [m for m in model.modules() if isinstance(m, Attention)]
    for layer in layers:
        layer.observe = lambda *qkv: seen.append([x.abs().flatten() for x in qkv])
    found = kv_scales(model, samples, KvScales(percentile=90.0, margin=2.0, tokens=10**6), "cpu")
    assert not seen and all(layer.observe is None for layer in layers)
    for layer in layers:
        layer.observe = lambda *qkv: seen.append([x.abs().flatten() for x in qkv])
    from learner.data.packing import pack_samples

    batch = pack_samples(samples)
    with torch.no_grad():
        model(batch.token_ids, batch.layout)
    for i, row in enumerate(seen):
        for which, x in zip(("q_scale", "k_scale", "v_scale"), row, strict=True):
            wanted = np.quantile(x.numpy(), 0.9, method="closest_observation") * 2.0 / 448
            assert float(found[name_of(i, which)]) == pytest.approx(float(wanted), rel=0.02)


def test_the_learners_scales_are_of_what_is_published(
    make_run: MakeRun, make_group: Any, make_ticket: Any
):
    """Smoothing, which a step chooses anew, scales v_proj's rows for o_proj: as a model with those weights sees
    them, bit for bit."""
    policy = build_policy(run := make_run(*FP8))
    policy.calibrate = KvScales(tokens=10**6)
    policy.smoothing = scales_of(policy.model.config, "int8", Smoothing(every=1))
    ticket = make_ticket(prompt_ids=Array.of([4, 5, 6], "int32"), group_size=2)
    answers = [make_trajectory(i, [7 + i, 3, 9], reward=float(i)) for i in range(2)]
    batch = SampledGroups([make_group(ticket, trajectories=answers)])
    history = VersionHistory(4, {0: "a0"})
    train_step(SingleProcessUpdater(policy), batch, history, 0)
    samples = samples_of(batch, run.learner.advantage, history, 0)
    folds = policy.smoothing.folds(state := policy.model.state_dict())
    plain = kv_scales(policy.model, samples, policy.calibrate, "cpu")
    published = {n: folds[n].of(x) if n in folds else x for n, x in state.items()}
    policy.model.load_state_dict(published)
    wanted = kv_scales(policy.model, samples, policy.calibrate, "cpu")
    assert policy.kv_scales == wanted != plain


def test_published_scales_reach_the_engine_and_the_checkpoint(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path
):
    run = make_run(*FP8, "rollout.kv_scales={}")
    policy = build_policy(run)
    policy.calibrate = run.rollout.kv_scales
    builder = VersionBuilder(run)
    first = builder.build(policy.model, 0, policy.kv_scales)
    assert kv_scales_of(first.tensors, 2) is None
    samples = make_samples(12)
    update_policy(policy, samples)
    policy.calibrate_kv_scales(samples)
    made = builder.build(policy.model, 1, policy.kv_scales)
    wanted = kv_scales_of(made.tensors, 2)
    assert wanted is not None and made.manifest.digest != first.manifest.digest
    stepper = TorchStepper(TorchEngine(slots=8, kv_cache="fp8"))
    stepper.swap(stepper.prepare(first))
    stepper.swap(stepper.prepare(made))
    _job(stepper)
    stepper.step()
    assert torch.equal(_scales(stepper), wanted)
    save_at(1, tmp_path, policy)
    resumed = build_policy(run)
    checkpoint.restore(tmp_path, resumed)
    again = VersionBuilder(run).build(resumed.model, 1, resumed.kv_scales)
    assert again.manifest.digest == made.manifest.digest


def test_an_engine_without_an_fp8_cache_says_so(make_run: MakeRun):
    engine = scripted_engine(ScriptedEngine())
    asked = RolloutConfig(engine=TorchEngine(kv_cache="fp8"))
    assert engine.capabilities.lacks(asked) == "rollout.engine.kv_cache: fp8 is not among auto"
    torch_engine = build_engine(TorchEngine())
    assert torch_engine.capabilities.lacks(asked) is None
    with pytest.raises(ConfigError, match=r"kv_scales needs rollout\.engine\.kv_cache"):
        make_run("rollout.kv_scales={}")
