"""Aligned forwards of models that transformers computes: the engine's numbers, and the masters' gradient."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.engines import ask, generate
from helpers.fixture_types import MakeRun, MakeSamples
from helpers.kinds import FAMILIES, VOCAB, write_foreign
from helpers.policies import build_policy, save_at
from torch import Tensor, nn
from torch.func import functional_call

from areal_q.config import HfEngine, Run
from areal_q.models import Decoder, PackedLayout
from areal_q.models.low_bit import quantized_forward
from areal_q.models.low_bit.engine_policy import engine_policy
from areal_q.quant import dequantize_state, is_quantized, quantize_state
from learner import checkpoint
from learner.policy_update import update_policy
from learner.publishing.version_builder import VersionBuilder

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


def run_of(make_run: MakeRun, path: Path, family: str, *settings: str) -> Run:
    more = "learner.uaq=1", "rollout.unquantized=bf16", "learner.precision=qarl"
    model = f"model={{type='hf', path='{path}'}}"
    return make_run(model, "rollout.engine.type=hf", *more, *settings)


def logits(model: Decoder, ids: Tensor = IDS) -> Tensor:
    return model.logits(model(ids, PackedLayout.of([len(ids)])))


def learnt(model: Decoder, ids: Tensor = IDS) -> Tensor:
    """Returns the log-probs that a learner computes, of each token after the one before it."""
    hidden = model(ids[:-1], PackedLayout.of([len(ids) - 1]))
    return model.logprobs(hidden, ids[1:], 1.0)[0]


@pytest.mark.parametrize(
    ("family", "format"),
    [*((family, "nvfp4") for family in FAMILIES), ("phi", "int8"), ("gpt_neox", "fp8")],
)
def test_a_learner_computes_bit_for_bit_what_it_publishes(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path, family: str, format: str
) -> None:
    """Before and after a step; what no format applies to is rounded to bfloat16, a router's bias too."""
    net = write_foreign(tmp_path, family)
    for name, buffer in net.named_buffers():
        if name in net.state_dict():
            buffer.uniform_(generator=torch.Generator().manual_seed(1))
    net.save_pretrained(tmp_path)
    precision = "jet" if format == "fp8" else "qarl"
    run = run_of(
        make_run, tmp_path, family, f"rollout.format={format}", f"learner.precision={precision}"
    )
    policy = build_policy(run)
    for _ in range(2):
        weights = VersionBuilder(run).build(policy.model, 1)
        engine = engine_policy(policy.model.config, weights.tensors, format)
        with torch.no_grad():
            drawn = logits(engine)
            assert torch.equal(logits(policy.model), drawn)
            drawn = drawn[:-1].log_softmax(-1).gather(1, IDS[1:, None]).squeeze(1)
            torch.testing.assert_close(learnt(policy.model), drawn, atol=1e-5, rtol=0)
        update_policy(policy, make_samples(6))


@pytest.mark.parametrize("family", ["gpt_neox", "phi", "gemma2", "opt", "mixtral"])
def test_the_gradient_is_straight_through_that_of_transformers(
    make_run: MakeRun, tmp_path: Path, family: str
) -> None:
    """Beside transformers' own linears, to whose outputs a constant is added: what the format changes."""
    net = write_foreign(tmp_path, family)
    run = run_of(make_run, tmp_path, family, "rollout.format=nvfp4", "learner.recompute=true")
    policy = build_policy(run)
    weights = VersionBuilder(run).build(policy.model, 1)
    published = dequantize_state(weights.tensors, "nvfp4")
    masters = dict(net.named_parameters())

    def moved(name: str) -> Any:
        def hook(module: Any, args: tuple[Tensor], out: Tensor) -> Tensor:
            with torch.no_grad():
                other = F.linear(args[0], published[f"{name}.weight"], module.bias)
            return out + (other - out).detach()

        return hook

    for name, module in net.named_modules():
        if isinstance(module, nn.Linear) and is_quantized(f"{name}.weight"):
            module.register_forward_hook(moved(name))
    rest = {
        name: p + (published[name].float() - p).detach()
        for name, p in masters.items()
        if not is_quantized(name)
    }
    got, want = logits(policy.model), functional_call(net, rest, (IDS[None],)).logits[0]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    upstream = torch.randn(len(IDS), VOCAB, generator=torch.Generator().manual_seed(2))
    for out in (got, want):
        (out * upstream).sum().backward()
    for name, p in policy.model.named_parameters():
        torch.testing.assert_close(p.grad, masters[name].grad, atol=1e-3, rtol=1e-3, msg=name)


def test_what_the_engine_draws_has_the_learner_s_log_probs(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path
) -> None:
    """And a restored policy goes on bit for bit."""
    write_foreign(tmp_path / "model", "gpt_neox")
    run = run_of(make_run, tmp_path / "model", "gpt_neox", "rollout.format=nvfp4")
    policy, again = build_policy(run), build_policy(run)
    update_policy(policy, make_samples(12))
    weights = VersionBuilder(run).build(policy.model, 1)
    ((drawn,),) = generate(weights, ask(IDS.tolist(), max_tokens=12), config=HfEngine(slots=4))
    ids = torch.cat((IDS, torch.from_numpy(drawn.response_ids).long()))
    with torch.no_grad():
        logp = logits(policy.model, ids).log_softmax(-1)[len(IDS) - 1 : -1]
    ours = logp.gather(1, ids[len(IDS) :, None]).squeeze(1)
    torch.testing.assert_close(ours, torch.from_numpy(drawn.logprobs), atol=1e-5, rtol=0)
    save_at(1, tmp_path / "checkpoints", policy)
    checkpoint.restore(tmp_path / "checkpoints", again)
    told = [update_policy(one, make_samples(12, seed=1)) for one in (policy, again)]
    assert told[0] == told[1]


@pytest.mark.parametrize("family", ["gpt_neox", "gptj"])
def test_no_more_than_one_layer_is_quantized_at_once(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Whether a family calls them `layers` or `h`: what ranks share is whole in memory then."""
    write_foreign(tmp_path, family)
    run, together = run_of(make_run, tmp_path, family, "rollout.format=nvfp4"), list[set[str]]()

    def spy(weights: dict[str, Tensor], *args: Any, **more: Any) -> dict[str, Tensor]:
        together.append({name.partition(".mlp")[0].partition(".att")[0] for name in weights})
        return quantize_state(weights, *args, **more)

    monkeypatch.setattr(quantized_forward, "quantize_state", spy)
    build_policy(run)
    assert [len(layers) for layers in together] == [1, 1]
