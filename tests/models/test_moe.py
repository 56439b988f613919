"""Mixtures of experts as models: against transformers, and against the definition."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.kinds import DELTA, YARN, by_our_names
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from areal_q.errors import CheckpointError, NotOurs
from areal_q.models import Decoder, DecoderConfig, PackedLayout, Routing, load_decoder, save_decoder
from areal_q.models.hf.stored_layout import to_stored
from areal_q.models.hf.weight_files import check_tensors, load_config
from areal_q.models.layers.moe import UNRECORDED, SparseMlp, gates_of
from areal_q.quant.rescaling import apply_uaq, fold_back

LENGTHS = [5, 17, 1, 40]
SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
}
SHARED = {"shared_expert_intermediate_size": 40}
KINDS = {
    "all sparse": {},
    "every second": {"decoder_sparse_step": 2},
    "one dense": {"mlp_only_layers": [1]},
    "gates not divided": {"norm_topk_prob": False},
    "one expert a token": {"num_experts_per_tok": 1},
    "gpt_oss": {"sliding_window": 7, "rope_parameters": YARN},
    "shared": SHARED | {"norm_topk_prob": True},
    "qwen2_moe": SHARED | {"norm_topk_prob": False},
    "qwen3_next": DELTA | SHARED | {"linear_key_head_dim": 16, "mlp_only_layers": [3]},
    "qwen3_5_moe_text": DELTA | SHARED,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def hf_model(kind: str = "all sparse") -> Any:
    torch.manual_seed(0)
    family = kind if "_" in kind else "qwen2_moe" if kind == "shared" else "qwen3_moe"
    config = CONFIG_MAPPING[family](**{**SHAPE, **KINDS[kind]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.2)
        if name.endswith("gate_up_proj_bias"):
            p.data.mul_(25)  # so that some are clamped at 7
        if name.endswith("A_log"):
            p.data.sub_(3)  # transformers sums a state that fades fast in float32, which shows
    return model.eval()


@pytest.fixture(params=["all sparse", "gpt_oss", "shared"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Decoder:
    hf_model(request.param).save_pretrained(tmp_path / "theirs")
    return load_decoder(tmp_path / "theirs")


def tokens() -> torch.Tensor:
    return torch.randint(0, 40, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


def logits(model: Decoder, routing: Routing | None = None) -> torch.Tensor:
    return model.logits(model(tokens(), PackedLayout.of(LENGTHS), routing))


@every_kind
def test_logits_and_gradients_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    hf = hf_model(kind)
    hf.save_pretrained(tmp_path)
    ours = load_decoder(tmp_path)
    theirs = torch.cat([hf(part[None]).logits[0] for part in tokens().split(LENGTHS)])
    mine = logits(ours)
    assert theirs.std() > 0.1
    torch.testing.assert_close(mine, theirs, atol=5e-5, rtol=0)
    weights = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(2))
    for out in (mine, theirs):
        (out * weights).sum().backward()
    grads = {name: p.grad for name, p in hf.named_parameters() if p.grad is not None}
    wanted = by_our_names(grads, ours.config)
    for name, p in ours.named_parameters():
        grad = wanted.pop(name)
        atol = 2e-4 * max(1.0, grad.abs().max().item())
        torch.testing.assert_close(p.grad, grad, atol=atol, rtol=1e-4, msg=name)
    assert not wanted


@every_kind
def test_a_checkpoint_is_read_and_written_back_identically(kind: str, tmp_path: Path) -> None:
    hf = hf_model(kind)
    hf.save_pretrained(tmp_path / "theirs")
    model = load_decoder(tmp_path / "theirs")
    save_decoder(model, tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / who / "model.safetensors") for who in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    ids = tokens()[None]
    # transformers sums the states of Qwen3-Next otherwise from load to load.
    torch.testing.assert_close(again(ids).logits, hf(ids).logits, atol=1e-5, rtol=0)
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert DecoderConfig.from_hf(written) == model.config


def test_files_of_qwen3_5_may_stack_experts_and_see_images(tmp_path: Path) -> None:
    """As its release does, where config.json has the language model's in a table of its own."""
    hf = hf_model("qwen3_5_moe_text")
    whole = {n.replace("model.", "model.language_model.", 1): p for n, p in hf.state_dict().items()}
    whole |= {"model.visual.patch.weight": torch.ones(3), "mtp.norm.weight": torch.ones(3)}
    table = {"model_type": "qwen3_5_moe", "text_config": hf.config.to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(table))
    save_file({n: p.contiguous() for n, p in whole.items()}, tmp_path / "model.safetensors")
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in whole
    model = load_decoder(tmp_path)
    theirs = torch.cat([hf(part[None]).logits[0] for part in tokens().split(LENGTHS)])
    torch.testing.assert_close(logits(model), theirs, atol=5e-5, rtol=0)
    save_decoder(model, tmp_path / "ours")


@pytest.mark.parametrize("width", [32, 64])
def test_experts_in_mxfp4_are_read_as_transformers_reads_them(width: int, tmp_path: Path) -> None:
    """A scale that stands for no number is refused by name."""
    generator = torch.Generator().manual_seed(0)
    config = GptOssConfig(**{**SHAPE, "hidden_size": width, "intermediate_size": 96 - width})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    file, wanted, packed = tmp_path / "model.safetensors", {}, {}
    for name, tensor in load_file(file).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = tensor
            continue
        shape = tensor.shape[0], tensor.shape[2], tensor.shape[1] // 32
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(115, 125, shape, dtype=torch.uint8, generator=generator)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wanted[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(packed, file)
    table = json.loads((tmp_path / "config.json").read_text())
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(table | quantized))
    check_tensors(tmp_path, load_config(tmp_path))
    model = load_decoder(tmp_path)
    found = to_stored(model.state_dict(), model.config)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=0, rtol=0, msg=name)
    assert "quantization_config" not in model.config.to_hf()
    bad = "model.layers.1.mlp.experts.down_proj_scales"
    packed[bad][0, 0, 0] = 255
    save_file(packed, file)
    with pytest.raises(CheckpointError, match=rf"{bad} holds NaN"):
        load_decoder(tmp_path)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"swiglu_limit": 5.0}, NotOurs),
        ({"swiglu_alpha": 1.0}, NotOurs),
        ({"quantization_config": {"quant_method": "fp8"}}, CheckpointError),
        ({"quantization_config": "mxfp4"}, CheckpointError),
    ],
)
def test_gpt_oss_of_other_numbers_is_not_ours(
    change: dict[str, Any], error: type[Exception]
) -> None:
    table = hf_model("gpt_oss").config.to_dict()
    assert DecoderConfig.from_hf(table).sinks
    with pytest.raises(error, match=f"gpt_oss with {next(iter(change))}.* is not implemented"):
        DecoderConfig.from_hf(table | change)


def test_routing_that_cannot_be_is_refused(tmp_path: Path) -> None:
    hf_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 7}))
    with pytest.raises(CheckpointError, match="7 of 6 experts"):
        load_decoder(tmp_path)


def without_shared(model: Decoder) -> SparseMlp:
    """Returns the first sparse layer, whose shared expert, if it has one, gives nothing from now on."""
    layer = model.model.layers[0].mlp
    assert isinstance(layer, SparseMlp)
    if layer.shape.shared:
        layer.shared_expert.down_proj.weight.data.zero_()
    return layer


@torch.no_grad()
def test_a_sparse_layer_is_the_weighted_sum_of_its_experts(model: Decoder) -> None:
    layer = without_shared(model)
    x = torch.randn(9, 32)
    p = F.linear(x, layer.gate.weight, layer.gate.bias).softmax(-1)
    for row, out in zip(range(9), layer(x), strict=True):
        top = p[row].topk(2)
        gates = top.values / top.values.sum()
        wanted = sum(
            g * layer.experts[int(e)](x[row : row + 1])[0]
            for g, e in zip(gates, top.indices, strict=True)
        )
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)


def test_experts_without_a_token_have_a_gradient_of_zero(model: Decoder) -> None:
    layer = model.model.layers[0].mlp
    assert isinstance(layer, SparseMlp)
    layer(torch.randn(1, 32)).sum().backward()
    grads = [p.grad for p in layer.experts.parameters()]
    assert sum(bool(g is not None and g.any()) for g in grads) == 2 * len(
        [*layer.experts[0].parameters()]
    )
    assert all(g is not None for g in grads)


@torch.no_grad()
def test_the_result_does_not_depend_on_what_is_packed_together(model: Decoder) -> None:
    together = logits(model)
    apart = [
        model.logits(model(part, PackedLayout.of([len(part)]))) for part in tokens().split(LENGTHS)
    ]
    torch.testing.assert_close(together, torch.cat(apart), atol=5e-5, rtol=0)


def test_activation_checkpointing_changes_no_bit(model: Decoder) -> None:
    grads = []
    for recompute in (False, True):
        model.recompute_layers(recompute)
        model.zero_grad()
        routing = Routing()
        (logits(model, routing).square().mean() + routing.probs[0].square().sum()).backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


# Replay


def recorded(routing: Routing) -> torch.Tensor:
    return torch.stack([routing.own[layer] for layer in sorted(routing.own)], 1)


def test_replaying_the_own_choice_changes_no_bit(model: Decoder) -> None:
    first = Routing()
    plain = logits(model, first)
    routes = recorded(first)
    assert routes.shape == (sum(LENGTHS), 4, 2)
    assert torch.equal(logits(model, Routing(routes)), plain)
    nothing = torch.full_like(routes, UNRECORDED)
    assert torch.equal(logits(model, Routing(nothing)), plain)


def test_replayed_experts_run_with_gates_of_the_present_router(model: Decoder) -> None:
    layer = without_shared(model)
    x, other = torch.randn(3, 32), torch.tensor([[[5, 1]], [[0, 3]], [[2, 4]]], dtype=torch.int16)
    out = layer(x, Routing(other))
    p = F.linear(x, layer.gate.weight, layer.gate.bias).softmax(-1)
    for row in range(3):
        a, b = other[row, 0].tolist()
        total = p[row, a] + p[row, b]
        wanted = (
            p[row, a] * layer.experts[a](x[row : row + 1])[0]
            + p[row, b] * layer.experts[b](x[row : row + 1])[0]
        ) / total
        torch.testing.assert_close(out[row], wanted, atol=1e-5, rtol=1e-5)
    out.sum().backward()
    assert layer.gate.weight.grad is not None and layer.gate.weight.grad.abs().max() > 0


def test_gates_over_replayed_experts_are_softmax_of_their_logits(model: Decoder) -> None:
    shape = model.config.experts
    assert shape is not None
    scores = torch.randn(11, 6)
    taken = torch.stack([torch.randperm(6)[:2] for _ in range(11)])
    gates = gates_of(scores.softmax(-1), taken, shape)
    torch.testing.assert_close(gates, scores.gather(-1, taken).softmax(-1))


# Formats


@torch.no_grad()
def test_uaq_keeps_the_function_and_is_undone(model: Decoder) -> None:
    before = {name: t.clone() for name, t in model.state_dict().items()}
    plain = logits(model)
    apply_uaq(model, 2.0)
    layer = model.model.layers[0].mlp
    assert isinstance(layer, SparseMlp)
    assert torch.equal(layer.gate.weight, before["model.layers.0.mlp.gate.weight"] / 2)
    torch.testing.assert_close(logits(model), plain, atol=5e-5, rtol=0)
    fold_back(model, 2.0)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
