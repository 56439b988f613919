"""LoRA on models that transformers computes: what it computes, learns, sends and exports."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines import ask, generate
from helpers.fixture_types import MakeRun, MakeSamples
from helpers.kinds import VOCAB, upright, write_foreign
from helpers.policies import build_policy, raw_bytes, save_at
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from areal_q.config import HfEngine, Run
from areal_q.models import Decoder, PackedLayout
from areal_q.models.hf.adapters import save_adapted
from areal_q.models.low_bit.lora import adapted, adapters_off
from areal_q.quant import is_quantized
from learner import checkpoint
from learner.backends.single_device import TorchPolicy
from learner.policy_update import update_policy
from learner.publishing.version_builder import VersionBuilder

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
SCALE = 2.0
LORA = ["learner.uaq=1", "learner.lora={rank=4, alpha=8.0}", "learner.optimizer.lr=0.02"]
every_family = pytest.mark.parametrize(
    "family",
    ["gpt_neox", "phi", "gemma2", "opt", "starcoder2", "gptj", "bloom", "deepseek_v3", "gpt2"],
)


def run_of(make_run: MakeRun, path: Path, family: str, *settings: str) -> Run:
    write_foreign(path, family)
    model = f"model={{type='hf', path='{path}'}}"
    return make_run(model, "rollout.engine.type=hf", "rollout.format=nf4", *LORA, *settings)


def logits(model: Decoder, ids: Tensor = IDS) -> Tensor:
    return model.logits(model(ids, PackedLayout.of([len(ids)])))


def drawn_factors(policy: TorchPolicy) -> None:
    """Gives every adapter a B that is not 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for linear in adapted(policy.model).values():
            if linear.has_adapter:
                linear.lora_B.weight.normal_(std=0.3, generator=generator)


def dequantized(policy: TorchPolicy, directory: Path) -> Any:
    """transformers' model with the base that the policy's adapters stand on."""
    net = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with adapters_off(policy.model), torch.no_grad():
        merged = {f"{n}.weight": linear.merged() for n, linear in adapted(policy.model).items()}
        for name, weight in upright(net.config.model_type, merged).items():
            net.get_parameter(name).copy_(weight)
    return net.requires_grad_(False)


@every_family
def test_adapters_of_zero_are_the_base_bit_for_bit(
    make_run: MakeRun, tmp_path: Path, family: str
) -> None:
    policy = build_policy(run_of(make_run, tmp_path, family))
    got = logits(policy.model)
    with adapters_off(policy.model):
        assert torch.equal(got, logits(policy.model))
    net = dequantized(policy, tmp_path)
    torch.testing.assert_close(got, net(IDS[None]).logits[0], atol=1e-5, rtol=1e-5)
    known = {n for n, m in net.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    with_one = {n for n, m in adapted(policy.model).items() if m.has_adapter}
    assert with_one == {n for n in known if is_quantized(f"{n}.weight")} != set()


@every_family
def test_gradients_are_those_of_w_plus_s_b_a(
    make_run: MakeRun, tmp_path: Path, family: str
) -> None:
    policy = build_policy(run_of(make_run, tmp_path, family, "learner.recompute=true"))
    drawn_factors(policy)
    net = dequantized(policy, tmp_path)
    upstream = torch.randn(len(IDS), VOCAB, generator=torch.Generator().manual_seed(2))
    got = logits(policy.model)
    (got * upstream).sum().backward()
    pairs = {
        name: [t.clone().requires_grad_() for t in linear.factors()]
        for name, linear in adapted(policy.model).items()
    }
    added = {f"{name}.weight": SCALE * b @ a for name, (a, b) in pairs.items()}
    added = upright(family, added)
    weights = {name: net.get_parameter(name) + more for name, more in added.items()}
    want = functional_call(net, weights, (IDS[None],)).logits[0]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    (want * upstream).sum().backward()
    for name, linear in adapted(policy.model).items():
        for own, other in zip((linear.lora_A, linear.lora_B), pairs[name], strict=True):
            torch.testing.assert_close(own.weight.grad, other.grad, atol=1e-3, rtol=1e-3, msg=name)


@pytest.mark.parametrize("family", ["gpt_neox", "gemma2", "deepseek_v3", "gpt2"])
def test_what_is_learnt_is_drawn_with_restored_and_exported(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path, family: str
) -> None:
    run = run_of(make_run, tmp_path / "model", family, "rollout.unquantized=bf16")
    policy, again = (
        build_policy(run),
        build_policy(run_of(make_run, tmp_path / "model", family, "seed=5")),
    )
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    for _ in range(2):  # from B = 0 the gradient of A is 0 in the first
        update_policy(policy, make_samples(12))
    moved = {
        name
        for name, tensor in policy.model.state_dict().items()
        if not torch.equal(raw_bytes(tensor), raw_bytes(before[name]))
    }
    assert moved == {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert len(moved) == 2 * len(adapted(policy.model))

    weights = VersionBuilder(run).build(policy.model, 1)
    ((drawn,),) = generate(weights, ask(IDS.tolist(), max_tokens=12), config=HfEngine(slots=4))
    ids = torch.cat((IDS, torch.from_numpy(drawn.response_ids).long()))
    with torch.no_grad():
        logp = logits(policy.model, ids).log_softmax(-1)[len(IDS) - 1 : -1]
        wanted = logits(policy.model, ids)
    ours = logp.gather(1, ids[len(IDS) :, None]).squeeze(1)
    torch.testing.assert_close(ours, torch.from_numpy(drawn.logprobs), atol=1e-5, rtol=0)

    save_at(2, tmp_path / "checkpoints", policy)
    checkpoint.restore(tmp_path / "checkpoints", again)
    assert run.learner.lora
    save_adapted(policy.model, tmp_path / "export", run.learner.lora, 1.0, None)
    told = [update_policy(one, make_samples(12, seed=1)) for one in (policy, again)]
    assert told[0] == told[1]
    digests = [VersionBuilder(run).build(one.model, 3).manifest.digest for one in (policy, again)]
    assert digests[0] == digests[1]

    merged, base = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "export" / name, dtype=torch.float32)
        for name in ("hf", "base")
    )
    factors = load_file(tmp_path / "export" / "adapter" / "adapter_model.safetensors")
    with torch.no_grad():
        for name in adapted(policy.model):
            a, b = (factors[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
            weight = f"{name}.weight"
            base.get_parameter(weight).add_(upright(family, {weight: SCALE * b @ a})[weight])
        for net in (merged, base):
            torch.testing.assert_close(net(ids[None]).logits[0], wanted, atol=1e-4, rtol=1e-4)


def test_adapters_go_on_the_linears_that_are_named(make_run: MakeRun, tmp_path: Path) -> None:
    run = run_of(make_run, tmp_path, "gpt_neox", 'learner.lora.targets=["dense"]')
    with_one = [n for n, m in adapted(build_policy(run).model).items() if m.has_adapter]
    assert with_one == [f"gpt_neox.layers.{i}.attention.dense" for i in (0, 1)]
