"""UAQ preserves the function of Hugging Face's own models, and can be undone."""

import copy

import pytest
import torch
from helpers.kinds import VARIANTS
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SeedOssForCausalLM,
)

from areal_q.quant import FORMATS
from areal_q.quant.rescaling import apply_uaq, fold_back

SHAPE = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
FED = tuple(f"{x}_proj.weight" for x in ("q", "k", "v", "gate", "up"))
MODELS = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "llama": (LlamaForCausalLM, LlamaConfig),
    "seed_oss": (SeedOssForCausalLM, VARIANTS["seed_oss, all biases"]),
}


@pytest.fixture(params=list(MODELS))
def model(request):
    torch.manual_seed(0)
    kind, config = MODELS[request.param]
    model = kind(config(**SHAPE)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or "bias" in name:
                p.add_(0.3 * torch.randn_like(p))
    return model


@torch.no_grad()
def test_uaq_preserves_the_logits(model):
    ids = torch.randint(0, 31, (3, 17))
    before = model(ids).logits
    apply_uaq(model, 1.5)
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_folding_back_restores_the_original_weights(model):
    original = copy.deepcopy(model.state_dict())
    for s, rtol in ((1.5, 3e-7), (2.0, 0.0)):
        apply_uaq(model, s)
        assert not torch.equal(
            model.state_dict()["model.layers.0.mlp.up_proj.weight"],
            original["model.layers.0.mlp.up_proj.weight"],
        )
        fold_back(model, s)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, original[name], rtol=rtol, atol=0)
        model.load_state_dict(original)


def test_uaq_touches_only_linears_and_the_norms_that_feed_them(model):
    before = copy.deepcopy(model.state_dict())
    apply_uaq(model, 2.0)
    for name, tensor in model.state_dict().items():
        ratio = tensor / before[name]
        if "input_layernorm" in name or "post_attention_layernorm" in name:
            want = 2.0
        elif name.endswith(FED):
            want = 0.5
        else:
            want = 1.0
        assert torch.equal(torch.nan_to_num(ratio, nan=want), torch.full_like(ratio, want)), name


def test_uaq_divides_the_absolute_quantization_error_by_s(model):
    name = "model.layers.1.mlp.gate_proj.weight"

    def error():
        weight = model.state_dict()[name]
        int8 = FORMATS["int8"]
        return (int8.dequantize(int8.quantize(weight, name)) - weight).norm()

    before = error()
    apply_uaq(model, 1.5)
    torch.testing.assert_close(error() * 1.5, before, rtol=1e-3, atol=0)


def test_uaq_works_on_a_state_dict_too(model):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    apply_uaq(state, 1.5)
    apply_uaq(model, 1.5)
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor)


def test_a_scale_below_one_divides_too_and_is_undone_bit_for_bit(model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    apply_uaq(model, 0.5)
    name = next(name for name in before if name.endswith("q_proj.weight"))
    assert torch.equal(model.state_dict()[name], 2 * before[name])
    fold_back(model, 0.5)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_uaq_refuses_a_scale_or_a_state_that_makes_no_sense():
    with pytest.raises(ValueError, match="positive"):
        apply_uaq({}, 0.0)
    with pytest.raises(ValueError, match="no decoder layers"):
        apply_uaq({"lm_head.weight": torch.ones(2, 2)}, 1.5)


EXPERTS = {
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "qwen2_moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4}),
}


@torch.no_grad()
@pytest.mark.parametrize("family", list(EXPERTS))
def test_uaq_preserves_the_logits_of_a_mixture_of_experts(family):
    torch.manual_seed(0)
    kind, config, experts = EXPERTS[family]
    model = kind(config(**SHAPE, **experts)).eval()
    ids = torch.randint(0, 31, (3, 17))
    before, original = model(ids).logits, copy.deepcopy(model.state_dict())
    apply_uaq(model, 1.5)
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-4)
    changed = {n for n, t in model.state_dict().items() if not torch.equal(t, original[n])}
    assert any(name.endswith("mlp.gate.weight") for name in changed)
    assert not any("down_proj" in name or "o_proj" in name for name in changed)
    fold_back(model, 1.5)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, original[name], rtol=3e-7, atol=0)


@pytest.mark.parametrize(
    "names",
    [
        ("gate", "experts.0.gate_proj", "experts.0.up_proj", "shared_experts.up_proj"),
        ("gate", "experts.0.w1", "experts.0.w3"),
    ],
)
def test_every_reader_of_a_norm_is_divided_in_checkpoint_layout(names):
    layer, block = "model.layers.0", "block_sparse_moe" if "experts.0.w1" in names else "mlp"
    state = {f"{layer}.post_attention_layernorm.weight": torch.ones(4)}
    state |= {f"{layer}.{block}.{name}.weight": torch.ones(4, 4) for name in names}
    down = f"{layer}.{block}.experts.0.{'w2' if block != 'mlp' else 'down_proj'}.weight"
    state[down] = torch.ones(4, 4)
    apply_uaq(state, 2.0)
    assert torch.equal(state.pop(down), torch.ones(4, 4))
    assert torch.equal(state.pop(f"{layer}.post_attention_layernorm.weight"), torch.full((4,), 2.0))
    assert all(torch.equal(tensor, torch.full((4, 4), 0.5)) for tensor in state.values())


def test_uaq_refuses_a_layer_with_a_parameter_of_an_unknown_kind():
    state = {
        "model.layers.0.post_attention_layernorm.weight": torch.ones(4),
        "model.layers.0.mlp.up_proj.weight": torch.ones(4, 4),
        "model.layers.0.mlp.side_proj.weight": torch.ones(4, 4),
    }
    with pytest.raises(ValueError, match="side_proj"):
        apply_uaq(state, 1.5)
    assert torch.equal(state["model.layers.0.mlp.up_proj.weight"], torch.ones(4, 4))
