"""LoRA on a quantized base: what trains, what travels, what engine and learner make of it, what PEFT reads."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from helpers.engines import ask, generate
from helpers.fixture_types import MakeRun, MakeSamples
from helpers.kinds import write_foreign
from helpers.policies import initial_model, raw_bytes, save_at
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_q.config import Run, TorchEngine
from areal_q.config.engines import ADDED
from areal_q.errors import ConfigError
from areal_q.models import Decoder, PackedLayout, load_decoder
from areal_q.models.hf.adapters import save_adapted
from areal_q.models.low_bit.engine_policy import perturbed
from areal_q.models.low_bit.lora import adapted, adapters_off
from areal_q.models.low_bit.published_state import published_state
from areal_q.quant import FORMATS, dequantize_state, quantize_state
from areal_q.quant.rescaling import apply_uaq
from areal_q.tasks import build_tokenizer
from areal_q.weights import delta
from learner import checkpoint
from learner.backends.precision import set_precision
from learner.backends.single_device import TorchPolicy, token_logprobs
from learner.data.packing import Sample, pack_samples
from learner.policy_update import prepare_minibatches, update_policy
from learner.publishing.version_builder import VersionBuilder
from rollout.engines.reference.async_engine import Job
from rollout.engines.reference.torch_engine import TorchStepper

BASES = list(FORMATS)
ROUNDING = ("int8", "fp8", "fp8-channel", "int4-fp8")
"""Formats that round activations too, so that a sum in another order may tip one over"""
LORA = ["learner.lora.rank=4", "learner.lora.alpha=8.0", "learner.optimizer.lr=0.02"]


def build(run: Run) -> TorchPolicy:
    torch.manual_seed(run.seed)
    model = initial_model(run)
    if run.learner.uaq > 1:
        apply_uaq(model, run.learner.uaq)
    set_precision(model, run)
    return TorchPolicy(model, run.learner, 1.0)


def learnt(run: Run, samples: list[Sample]) -> TorchPolicy:
    policy = build(run)
    update_policy(policy, samples)
    update_policy(policy, samples)
    return policy


@torch.no_grad()
def logits(model: Decoder, ids: list[int]) -> torch.Tensor:
    return model.logits(model(torch.tensor(ids), PackedLayout.of([len(ids)])))


IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.mark.parametrize("format", BASES)
def test_only_the_adapters_train(make_run: MakeRun, make_samples: MakeSamples, format: str):
    run = make_run(*LORA, f"rollout.format={format}")
    policy = build(run)
    before = {k: v.clone() for k, v in policy.model.state_dict().items()}
    update_policy(policy, make_samples(12))
    moved = {
        k
        for k, v in policy.model.state_dict().items()
        if not torch.equal(raw_bytes(v), raw_bytes(before[k]))
    }
    factors = {n for n, p in policy.model.named_parameters() if p.requires_grad}
    # From B = 0 the gradient of A is 0 in the very first update; the second moves it.
    assert moved == factors and len(factors) == 2 * 7 * 2
    assert sum(p.numel() for p in policy.optimizer.param_groups[0]["params"]) == sum(
        before[n].numel() for n in factors
    )


@pytest.mark.parametrize("format", BASES)
def test_before_training_the_policy_is_the_dequantized_base(make_run: MakeRun, format: str):
    run = make_run(*LORA, f"rollout.format={format}", "learner.uaq=1.0")
    plain = initial_model(run)
    published = quantize_state(plain.state_dict(), format)
    policy = build(run)
    assert all(
        torch.equal(raw_bytes(published[k]), raw_bytes(v))
        for k, v in published_state(policy.model, format).items()
        if "lora" not in k
    )
    plain.load_state_dict(dequantize_state(published, format))
    ours, theirs = logits(policy.model, IDS), logits(plain, IDS)
    tolerance = 0.1 if format in ROUNDING else 1e-5
    assert (ours - theirs).norm() < tolerance * theirs.norm()


@pytest.mark.parametrize("format", ["bf16", "int8"])
def test_rounding_of_what_a_frozen_base_reads_is_noise_too(make_run: MakeRun, format: str):
    """The doctor and the fidelity meter take what it changes for the noise of a faithful engine."""
    model = build(make_run(*LORA, f"rollout.format={format}")).model
    plain = logits(model, IDS)
    with perturbed(model):
        assert not torch.equal(logits(model, IDS), plain)
    assert torch.equal(logits(model, IDS), plain)


def test_gradient_of_adapters_is_that_of_the_merged_weight(make_run: MakeRun):
    """∂A = s Bᵀ ∂W and ∂B = s ∂W Aᵀ, with ∂W = ∂yᵀ x by autograd through one plain linear."""
    run = make_run(*LORA, "rollout.format=nvfp4")
    linear = next(iter(adapted(build(run).model).values()))
    with torch.no_grad():
        linear.lora_B.weight.normal_(generator=torch.Generator().manual_seed(1))
    a, b = linear.factors()
    x, upstream = torch.randn(7, 32), torch.randn(7, 32)
    leaf, weight = x.clone().requires_grad_(), linear.merged().requires_grad_()
    plain_x = x.clone().requires_grad_()
    y, wanted = linear(leaf), torch.nn.functional.linear(plain_x, weight)
    torch.testing.assert_close(y, wanted, atol=1e-4, rtol=1e-4)
    (y * upstream).sum().backward()
    (wanted * upstream).sum().backward()
    assert weight.grad is not None
    for got, exact in (
        (linear.lora_A.weight.grad, 2.0 * b.t() @ weight.grad),
        (linear.lora_B.weight.grad, 2.0 * weight.grad @ a.t()),
        (leaf.grad, plain_x.grad),
    ):
        torch.testing.assert_close(got, exact, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("format", "targets"),
    [*((base, None) for base in BASES), ("nf4", '["k_proj","down_proj"]')],
)
def test_the_engine_gives_the_learners_log_probs(
    make_run: MakeRun, make_samples: MakeSamples, format: str, targets: str | None
):
    some = [f"learner.lora.targets={targets}"] if targets else []
    run = make_run(*LORA, f"rollout.format={format}", *some)
    policy = learnt(run, make_samples(12))
    stepper = TorchStepper(TorchEngine(slots=8))
    stepper.swap(stepper.prepare(VersionBuilder(run).build(policy.model, 1)))
    recorded: list[tuple[int, float]] = []
    request = ask(IDS, max_tokens=12)
    import asyncio

    loop = asyncio.new_event_loop()
    future = loop.create_future()
    stepper.waiting.append(Job(request, future, lambda _, t, lp: recorded.append((t, lp))))
    for _ in range(12):
        stepper.step()
    loop.close()
    ids = IDS + [t for t, _ in recorded]
    logp = logits(policy.model, ids[:-1]).log_softmax(-1)[len(IDS) - 1 :]
    ours = [float(logp[i, t]) for i, (t, _) in enumerate(recorded)]
    tolerance = 1e-2 if format in ROUNDING else 1e-4
    assert ours == pytest.approx([lp for _, lp in recorded], abs=tolerance)


def test_a_delta_holds_the_adapters_alone(make_run: MakeRun, make_samples: MakeSamples):
    run = make_run(*LORA, "rollout.format=nvfp4")
    policy, builder = build(run), VersionBuilder(run)
    update_policy(policy, make_samples(12))
    first = builder.build(policy.model, 1)
    update_policy(policy, make_samples(12))
    second = builder.build(policy.model, 2)
    body = delta.diff(first, second)
    assert body is not None
    changed = {k for k, (n, _) in delta.changed(second.manifest, body).items() if n}
    assert changed and all(".lora_" in k for k in changed)
    adapters = sum(s.nbytes for s in second.manifest.tensors if ".lora_" in s.name)
    assert len(body) < 1.2 * adapters < second.manifest.nbytes


def test_the_reference_is_the_base_without_a_second_copy(
    make_run: MakeRun, make_samples: MakeSamples
):
    run = make_run(*LORA, "rollout.format=nf4", "learner.reference_kl.coef=0.1")
    samples = make_samples(12)
    policy = build(run)
    assert policy.reference is None
    batch = pack_samples(samples)
    with torch.no_grad():
        start, _ = token_logprobs(policy.model, batch, 1.0)
    update_policy(policy, samples)
    (prepared, inputs), *_ = prepare_minibatches(policy, samples)[0]
    assert inputs.reference_logprobs is not None
    with torch.no_grad(), adapters_off(policy.model):
        again, _ = token_logprobs(policy.model, batch, 1.0)
        of_part, _ = token_logprobs(policy.model, prepared, 1.0)
    assert torch.equal(again, start)
    assert torch.equal(inputs.reference_logprobs, of_part)
    assert not torch.equal(inputs.proximal_logprobs, inputs.reference_logprobs)


def test_a_restored_checkpoint_goes_on_bit_for_bit(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path
):
    run = make_run(*LORA, "rollout.format=nvfp4")
    policy = learnt(run, make_samples(12))
    save_at(2, tmp_path, policy)
    resumed = build(make_run(*LORA, "rollout.format=nvfp4", "seed=5"))
    checkpoint.restore(tmp_path, resumed)
    assert update_policy(policy, make_samples(12, seed=1)) == update_policy(
        resumed, make_samples(12, seed=1)
    )
    a, b = (VersionBuilder(run).build(t.model, 3).manifest.digest for t in (policy, resumed))
    assert a == b


def test_the_merged_export_is_the_policy(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path
):
    run = make_run(*LORA, "rollout.format=nvfp4", "learner.uaq=1.5")
    policy = learnt(run, make_samples(12))
    assert run.learner.lora
    save_adapted(
        policy.model, tmp_path, run.learner.lora, 1.5, build_tokenizer(run.model, run.task)
    )
    wanted = logits(policy.model, IDS)
    torch.testing.assert_close(
        logits(load_decoder(tmp_path / "hf"), IDS), wanted, atol=1e-4, rtol=1e-4
    )
    with adapters_off(policy.model):
        base = logits(policy.model, IDS)
    torch.testing.assert_close(
        logits(load_decoder(tmp_path / "base"), IDS), base, atol=1e-4, rtol=1e-4
    )
    assert not torch.allclose(base, wanted, atol=1e-2)


@pytest.mark.peers
@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's own
@pytest.mark.filterwarnings(
    "ignore:.*rank_pattern keys:RuntimeWarning"
)  # of experts, which it joins
@pytest.mark.filterwarnings("ignore:.*alpha_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("model", ["model.experts=0", "model.experts=4"])
def test_peft_loads_the_adapter_onto_the_base(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path, model: str
):
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-peers")
    run = make_run(model, *LORA, "rollout.format=nf4", "learner.uaq=1.5")
    policy = learnt(run, make_samples(12))
    assert run.learner.lora
    save_adapted(
        policy.model, tmp_path, run.learner.lora, 1.5, build_tokenizer(run.model, run.task)
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():
        theirs = loaded(torch.tensor([IDS])).logits[0]
        merged = loaded.merge_and_unload()(torch.tensor([IDS])).logits[0]
    wanted = logits(policy.model, IDS)
    torch.testing.assert_close(theirs, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(merged, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.peers
@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore")  # of what it leaves out, too
@pytest.mark.parametrize("variant", ["qwen2_moe", "qwen3_5_moe_text", "gpt_oss"])
def test_peft_takes_a_part_of_other_mixtures(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path, variant: str
):
    """As the log says where it is written; once this fails, PEFT takes all, and the warning can go."""
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-peers")
    write_foreign(tmp_path / "model", variant)
    model = f"model={{type='pretrained', path='{tmp_path / 'model'}'}}"
    run = make_run(model, *LORA, "rollout.format=nf4", "learner.uaq=1.0")
    policy = learnt(run, make_samples(12))
    assert run.learner.lora
    save_adapted(
        policy.model, tmp_path, run.learner.lora, 1.0, build_tokenizer(run.model, run.task)
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    wanted = logits(policy.model, IDS)
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(torch.tensor([IDS]))
    assert not torch.allclose(theirs.logits[0], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["learner.precision=qarl"], "learner.precision must be 'full'"),
        (
            ["learner.lora={targets=[]}"],
            r"learner\.lora\.targets = \[\]: must be a list of at least 1",
        ),
        (["rollout.engine.type=sglang"], f"with SGLang, a server of its own: {ADDED}"),
        (["rollout.engine={type='sglang', dtype='float32'}"], ADDED),
        (
            [
                "rollout.engine={type='sglang', dtype='float32', url='http://h'}",
                "rollout.format=bf16",
            ],
            ADDED,
        ),
        (["rollout.engine.type=vllm", "rollout.format=nf4"], "mxfp4, int4-fp8, not 'nf4'"),
        (["rollout.engine.type=vllm", "learner.lora.rank=513"], "rank = 513: vLLM takes 512"),
        (["learner.reference_kl.path=x"], "no path"),
    ],
)
def test_settings_that_do_not_go_with_adapters_are_refused(
    make_run: MakeRun, settings, reason: str
):
    with pytest.raises(ConfigError, match=reason):
        make_run(*LORA, *settings)


@pytest.mark.parametrize(
    "variant",
    [
        "qwen2",
        "llama, llama3",
        "mistral, windows",
        "smollm3, windows, biases",
        "seed_oss, all biases",
        "gemma3_text",
        "qwen3_5_text",
        "qwen2_moe",
        "qwen3_5_moe_text",
        "gpt_oss",
    ],
)
def test_families_learn_what_engine_and_transformers_run(
    make_run: MakeRun,
    make_samples: MakeSamples,
    tmp_path: Path,
    variant: str,
    caplog: pytest.LogCaptureFixture,
):
    """Two steps; then the log-probs of what the engine draws, and the logits of the merged export; and that of
    some mixtures' adapters PEFT takes a part alone."""
    write_foreign(tmp_path / "model", variant)
    model = f"model={{type='pretrained', path='{tmp_path / 'model'}'}}"
    run = make_run(model, *LORA, "rollout.format=nf4", "learner.uaq=1.0")
    policy = learnt(run, make_samples(12))
    assert all(x.lora_B.weight.any() for x in adapted(policy.model).values() if x.has_adapter)
    weights = VersionBuilder(run).build(policy.model, 1)
    plain = TorchEngine(slots=64, fused=False)
    ((drawn,),) = generate(weights, ask(IDS, max_tokens=12), config=plain)
    ids = [*IDS, *drawn.response_ids.tolist()]
    logp = logits(policy.model, ids[:-1]).log_softmax(-1)[len(IDS) - 1 :]
    ours = logp.gather(1, torch.tensor(ids[len(IDS) :])[:, None]).squeeze(1)
    torch.testing.assert_close(ours, torch.from_numpy(drawn.logprobs), atol=1e-5, rtol=0)
    assert run.learner.lora
    save_adapted(
        policy.model, tmp_path, run.learner.lora, 1.0, build_tokenizer(run.model, run.task)
    )
    in_part = variant in ("qwen2_moe", "qwen3_5_moe_text", "gpt_oss")
    assert ("PEFT takes a part of it only" in caplog.text) == in_part
    base = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert base["base_model_name_or_path"] == str(tmp_path / "base")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        merged = exported(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(merged, logits(policy.model, ids), atol=1e-4, rtol=1e-4)


def test_a_full_disk_costs_no_adapter(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It was written last, after two models of many times its size."""
    run = make_run(*LORA)
    policy = learnt(run, make_samples(4))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("areal_q.models.hf.adapters.save_decoder", full)
    assert run.learner.lora
    with pytest.raises(OSError, match="No space"):
        save_adapted(policy.model, tmp_path, run.learner.lora, 1.0, None)
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
