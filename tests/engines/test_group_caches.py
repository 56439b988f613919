"""The engine of models that transformers computes, beside transformers and beside the torch engine."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest
import torch
from helpers.kinds import FAMILIES, VOCAB, every_format, foreign_config, foreign_model, upright
from helpers.policies import pack_state
from transformers import LlamaConfig

from areal_q.config import HfEngine, Sampling, TorchEngine
from areal_q.config.run import ROUNDS_ACTIVATIONS
from areal_q.errors import WeightVersionError
from areal_q.messages.tokens import common
from areal_q.models import DecoderConfig
from areal_q.models.foreign import COMPUTED_BY, TRANSFORMERS
from areal_q.models.low_bit.engine_policy import engine_policy
from areal_q.quant import dequantize_state
from areal_q.weights.version import WeightVersion
from rollout.engines import build_engine
from rollout.engines.base import Completion, Request
from rollout.engines.group_caches import GroupStepper
from rollout.engines.reference.async_engine import Job

PROMPT = [3, 1, 20, 7, 9, 2]


def ask(samples: int = 3, max_tokens: int = 12, stop: tuple[int, ...] = ()) -> Request:
    return Request(
        prompt_ids=np.array(PROMPT, np.int32),
        num_samples=samples,
        sampling=Sampling(max_tokens=max_tokens),
        seed=5,
        stop_ids=frozenset(stop),
    )


def published(net: Any, format: str, version: int = 0) -> WeightVersion:
    once = dict(net.named_parameters())
    state = {
        name: t for name, t in net.state_dict().items() if name in once or "correction" in name
    }
    return pack_state(upright(net.config.model_type, state), table_of(net), format, version)


def table_of(net: Any) -> dict[str, Any]:
    return json.loads(net.config.to_json_string(use_diff=False))


def drawn(
    engine_config: TorchEngine, weights: WeightVersion, *requests: Request
) -> list[Completion]:
    async def run() -> list[list[Completion]]:
        engine = build_engine(engine_config)
        await engine.start()
        await engine.load_weights(weights)
        try:
            return await asyncio.gather(*map(engine.generate, requests))
        finally:
            await engine.close()

    return [completion for group in asyncio.run(run()) for completion in group]


@torch.no_grad()
def expected(net: Any, response: np.ndarray) -> np.ndarray:
    """Log-probs of a response, by a forward pass over all of it."""
    ids = torch.tensor([*PROMPT, *response.tolist()])
    logp = net(input_ids=ids[None]).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    return logp.gather(1, ids[len(PROMPT) :, None])[:, 0].numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_drawn_has_transformers_log_probs(family: str) -> None:
    """The weights are those that bf16 leaves of them; rows end one after the other."""
    net = foreign_model(foreign_config(family))
    weights = published(net, "bf16")
    found = drawn(HfEngine(slots=4), weights, ask(stop=tuple(range(9))), ask(1, 20))
    state = upright(family, dequantize_state(weights.tensors, "bf16"))
    net.load_state_dict({n: t.float() for n, t in state.items()}, strict=False)
    assert len(found) == 4 and len({len(c.response_ids) for c in found}) > 1
    for completion in found:
        want = expected(net, completion.response_ids)
        np.testing.assert_allclose(completion.logprobs, want, atol=1e-4)


@every_format
def test_both_engines_draw_the_same_of_a_model_that_is_ours(name: str) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, max_position_embeddings=64,
    )  # fmt: skip
    weights = published(foreign_model(config), name)
    kinds = HfEngine(slots=8), TorchEngine(slots=8, fused=False, dtype="float32")
    theirs, ours = (drawn(kind, weights, ask(8)) for kind in kinds)
    # Where activations are rounded, two orders of the same sums round some to either side, and may draw others.
    rounds, drawn_alike = name in ROUNDS_ACTIVATIONS, 0
    for one, other in zip(theirs, ours, strict=True):
        same = common(one.response_ids.tolist(), other.response_ids.tolist())
        assert rounds or same == len(one.response_ids) == len(other.response_ids)
        far = 0.1 if rounds else 1e-4
        np.testing.assert_allclose(one.logprobs[:same], other.logprobs[:same], atol=far)
        drawn_alike += same
    assert drawn_alike


@pytest.mark.parametrize("name", ["int8", "nvfp4", "int4", "nf4", "fp8"])
@pytest.mark.parametrize("family", ["phi", "gpt_neox", "bloom", "gemma3_text", "gpt2"])
def test_other_families_run_on_their_published_numbers(family: str, name: str) -> None:
    """Against the policy that the fidelity meter scores with, over whole rows instead of with a cache."""
    net = foreign_model(foreign_config(family))
    weights = published(net, name)
    (found, *_) = drawn(HfEngine(slots=4), weights, ask())
    config = DecoderConfig.from_hf(table_of(net) | {COMPUTED_BY: TRANSFORMERS})
    policy: Any = engine_policy(config, weights.tensors, name)
    want = expected(policy.net, found.response_ids)
    far = 0.1 if name in ROUNDS_ACTIVATIONS else 1e-3  # as above
    np.testing.assert_allclose(found.logprobs, want, atol=far)
    plain = expected(net, found.response_ids)
    assert (
        np.abs(found.logprobs - plain).max() > 1e-3
    )  # it is not the weights before they were rounded


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_a_swap_keeps_or_recomputes_the_cache(kv: Any) -> None:
    old, new = (foreign_model(foreign_config("gemma3_text"), seed) for seed in (1, 2))
    stepper = GroupStepper(HfEngine(slots=4, kv_on_update=kv))
    stepper.swap(stepper.prepare(published(old, "bf16", 0)))
    job = Job(ask(1), asyncio.get_running_loop().create_future())
    stepper.waiting.append(job)
    for _ in range(4):
        stepper.step()
    stepper.swap(stepper.prepare(published(new, "bf16", 1)))
    while not job.future.done():
        stepper.step()
    (done,) = job.future.result()
    assert [(span.version, span.tokens) for span in done.spans] == [(0, 4), (1, 8)]
    state = dequantize_state(published(new, "bf16").tensors, "bf16")
    new.load_state_dict({n: t.float() for n, t in state.items()}, strict=False)
    same = np.abs(expected(new, done.response_ids) - done.logprobs)[4:]
    assert (same.max() < 1e-3) == (kv == "recompute")


@pytest.mark.parametrize(
    "wrong", [{"hidden_size": "32"}, {"hidden_activation": "none"}, {"head_dim": 0.5}]
)
def test_a_version_of_no_model_is_refused(wrong: dict[str, Any]) -> None:
    net = foreign_model(foreign_config("gemma3_text"))
    version = pack_state(net.state_dict(), table_of(net) | wrong)
    with pytest.raises(WeightVersionError, match="version 0: "):
        GroupStepper(HfEngine()).prepare(version)
