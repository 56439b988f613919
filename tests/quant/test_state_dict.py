"""What is quantized and what never is, in the layouts of Qwen2, Qwen3, Llama and mixtures of experts."""

import pytest
import torch

from areal_q.errors import QuantizationError
from areal_q.quant import FORMATS, dequantize_state, is_quantized, quantize_state
from areal_q.quant.state_dict import codes_of, fused_name, parts_of, rest_in_bf16

LAYER = "model.layers.3"
LINEARS = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "mlp.experts.17.gate_proj",
    "mlp.experts.17.up_proj",
    "mlp.experts.17.down_proj",
    "mlp.shared_expert.up_proj",
    "mlp.shared_experts.down_proj",
    "block_sparse_moe.experts.7.w1",
    "block_sparse_moe.experts.7.w2",
    "block_sparse_moe.experts.7.w3",
]
OTHERS = [
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    f"{LAYER}.input_layernorm.weight",
    f"{LAYER}.self_attn.q_norm.weight",
    f"{LAYER}.self_attn.q_proj.bias",
    f"{LAYER}.mlp.gate.weight",
    f"{LAYER}.mlp.shared_expert_gate.weight",
    f"{LAYER}.block_sparse_moe.gate.weight",
    f"{LAYER}.mlp.experts.gate_up_proj",
    "vision.blocks.0.mlp.up_proj.weight",
]


@pytest.mark.parametrize("linear", LINEARS)
def test_the_linears_of_attention_mlp_and_experts_are_quantized(linear):
    assert is_quantized(f"{LAYER}.{linear}.weight")


@pytest.mark.parametrize("name", OTHERS)
def test_embeddings_norms_heads_routers_and_biases_are_not(name):
    assert not is_quantized(name)


def test_linears_are_grouped_as_engines_fuse_them():
    def group(linear):
        return fused_name(f"{LAYER}.{linear}.weight")

    assert group("self_attn.q_proj") == group("self_attn.v_proj") == f"{LAYER}.self_attn.qkv_proj"
    assert group("self_attn.o_proj") == f"{LAYER}.self_attn.o_proj"
    assert group("mlp.experts.1.gate_proj") == group("mlp.experts.1.up_proj")
    assert group("mlp.experts.1.gate_proj") != group("mlp.experts.2.up_proj")
    assert group("block_sparse_moe.experts.0.w1") == group("block_sparse_moe.experts.0.w3")
    assert group("block_sparse_moe.experts.0.w2") != group("block_sparse_moe.experts.0.w3")


@pytest.mark.parametrize("format", list(FORMATS))
def test_a_mixture_of_experts_goes_through_a_format_and_back(format):
    state = {name: torch.randn(4, 6) for name in OTHERS}
    state |= {f"{LAYER}.{linear}.weight": torch.randn(8, 32) for linear in LINEARS}
    published = quantize_state(state, format)
    restored = dequantize_state(published, format)
    assert set(restored) == set(state)
    assert all(restored[name] is published[name] for name in OTHERS)
    codes = codes_of(published, format)
    assert set(codes) == {f"{LAYER}.{linear}.weight" for linear in LINEARS}


@pytest.mark.parametrize("format", list(FORMATS))
def test_a_missing_part_is_named(format):
    published = quantize_state({f"{LAYER}.mlp.up_proj.weight": torch.randn(8, 32)}, format)
    suffix = FORMATS[format].suffixes[-1]
    del published[f"{LAYER}.mlp.up_proj.{suffix}"]
    with pytest.raises(QuantizationError, match=suffix):
        parts_of(published, f"{LAYER}.mlp.up_proj", format)


def test_a_tied_head_stays_what_it_is_under_either_name():
    embedding = torch.randn(7, 8)
    state = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
    published = quantize_state(state, "int8")
    assert all(
        tensor is embedding or torch.equal(tensor, embedding) for tensor in published.values()
    )


def test_what_is_no_part_of_a_quantized_weight_goes_in_bf16():
    state = {"model.norm.weight": torch.ones(8), f"{LAYER}.mlp.up_proj.weight": torch.randn(4, 8)}
    published = quantize_state(state, "int8")
    rounded = rest_in_bf16(published, "int8")
    assert rounded.pop("model.norm.weight").dtype == torch.bfloat16
    assert all(torch.equal(tensor, published[name]) for name, tensor in rounded.items())
    assert rounded.keys() | {"model.norm.weight"} == published.keys()
