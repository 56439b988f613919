"""The kinds of models and number formats that tests run over.

VARIANTS are transformers' configurations of what the decoder has: families, biases, windows, ways to stretch
RoPE. Each takes a shape of two layers or more. FAMILIES are tiny models of
families that it does not have, and of three that it has: tests of the others use their cache of windows, and
experts in one tensor.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from areal_q.models import DecoderConfig
from areal_q.models.foreign import TRANSPOSED
from areal_q.models.hf.stored_layout import from_stored
from areal_q.models.variants import STATEFUL
from areal_q.quant import FORMATS, is_quantized
from areal_q.quant.activations import expanded, on
from areal_q.quant.format import Parts, blocked, unblocked
from areal_q.quant.formats import e2m1, mxfp4, nvfp4
from areal_q.quant.formats.bf16 import Bf16
from areal_q.quant.formats.fp8_block import Fp8
from areal_q.quant.formats.fp8_channel import Fp8Channel
from areal_q.quant.formats.int4 import Int4
from areal_q.quant.formats.int4_fp8 import Int4Fp8
from areal_q.quant.formats.int8 import Int8, Int8Weight
from areal_q.quant.formats.mxfp4 import Mxfp4
from areal_q.quant.formats.nf4 import Nf4
from areal_q.quant.formats.nvfp4 import Nvfp4

E4M3 = torch.float8_e4m3fn
every_format = pytest.mark.parametrize("name", list(FORMATS))
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4}
BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
SHORT_DELTA: dict[str, Any] = DELTA | {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 2}
WIDE_DELTA: dict[str, Any] = DELTA | {"linear_key_head_dim": 32}
"""The wider a key, the seldomer is it nearly at right angles to a query, where rounding shows."""
NO_PAD: dict[str, Any] = {"pad_token_id": None}

VARIANTS: dict[str, Callable[..., PreTrainedConfig]] = {
    "qwen2": lambda **shape: Qwen2Config(**shape),
    "qwen2, yarn": lambda **shape: Qwen2Config(**shape, rope_parameters=YARN),
    "qwen2, windows from layer 1 on": lambda **shape: Qwen2Config(
        **shape, **WINDOW, max_window_layers=1
    ),
    "qwen3": lambda **shape: Qwen3Config(**shape, rms_norm_eps=1e-5),
    "qwen3, a window in layer 0, biases": lambda **shape: Qwen3Config(
        **shape,
        **WINDOW,
        attention_bias=True,
        layer_types=["sliding_attention"] + ["full_attention"] * (shape["num_hidden_layers"] - 1),
    ),
    "llama": lambda **shape: LlamaConfig(**shape),
    "llama, llama3": lambda **shape: LlamaConfig(**shape, rope_parameters=LLAMA3),
    "llama, linear, biases": lambda **shape: LlamaConfig(
        **shape, **BIASES, rope_parameters={"rope_type": "linear", "factor": 3.0}
    ),
    "llama, yarn of other numbers": lambda **shape: LlamaConfig(
        **shape,
        rope_parameters=YARN
        | {"beta_fast": 8, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False},
    ),
    "llama, yarn with a factor for attention": lambda **shape: LlamaConfig(
        **shape, rope_parameters=YARN | {"attention_factor": 1.3}
    ),
    "mistral": lambda **shape: MistralConfig(**shape, sliding_window=None),
    "mistral, windows": lambda **shape: MistralConfig(**shape, sliding_window=4),
    "smollm3": lambda **shape: SmolLM3Config(
        **shape | NO_PAD, no_rope_layers=[1, 0] * (shape["num_hidden_layers"] // 2)
    ),
    "smollm3, windows, biases": lambda **shape: SmolLM3Config(
        **shape | NO_PAD, **WINDOW, **BIASES, no_rope_layer_interval=2
    ),
    "seed_oss": lambda **shape: SeedOssConfig(**shape),
    "gemma3_text": lambda **shape: Gemma3TextConfig(
        **shape,
        sliding_window=4,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention"] * (shape["num_hidden_layers"] // 2),
    ),
    "gemma3_text, linear, biases, other bases": lambda **shape: Gemma3TextConfig(
        **shape,
        sliding_window=4,
        attention_bias=True,
        layer_types=["full_attention", "sliding_attention"] * (shape["num_hidden_layers"] // 2),
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
        },
    ),
    "gpt_oss": lambda **shape: GptOssConfig(**shape | NO_PAD, **EXPERTS, sliding_window=4),
    "gpt_oss, yarn, no biases of attention, windows in layer 1": lambda **shape: GptOssConfig(
        **shape | NO_PAD,
        **EXPERTS,
        attention_bias=False,
        sliding_window=4,
        rope_parameters=YARN,
        layer_types=["full_attention", "sliding_attention"] * (shape["num_hidden_layers"] // 2),
    ),
    "qwen3_5_text": lambda **shape: Qwen3_5TextConfig(
        **shape | NO_PAD,
        **DELTA,
        layer_types=["linear_attention", "full_attention"] * (shape["num_hidden_layers"] // 2),
    ),
    "qwen3_5_text, yarn, biases, a state in layer 1": lambda **shape: Qwen3_5TextConfig(
        **shape | NO_PAD,
        **SHORT_DELTA,
        attention_bias=True,
        layer_types=["full_attention", "linear_attention"] * (shape["num_hidden_layers"] // 2),
        rope_parameters=YARN | {"partial_rotary_factor": 0.5},
    ),
    "qwen2_moe": lambda **shape: Qwen2MoeConfig(**shape | NO_PAD, **SHARED, mlp_only_layers=[1]),
    "qwen2_moe, no biases": lambda **shape: Qwen2MoeConfig(
        **shape | NO_PAD, **SHARED, qkv_bias=False
    ),
    "qwen3_next": lambda **shape: Qwen3NextConfig(
        **shape | NO_PAD,
        **WIDE_DELTA | SHARED,
        mlp_only_layers=[1],
        layer_types=["linear_attention", "full_attention"] * (shape["num_hidden_layers"] // 2),
    ),
    "qwen3_5_moe_text": lambda **shape: Qwen3_5MoeTextConfig(
        **shape | NO_PAD,
        **WIDE_DELTA | SHARED,
        layer_types=["linear_attention", "full_attention"] * (shape["num_hidden_layers"] // 2),
    ),
    "seed_oss, all biases": lambda **shape: SeedOssConfig(
        **shape, attention_out_bias=True, mlp_bias=True
    ),
}


def config_of(variant: str, shape: dict[str, Any], **more: Any) -> PreTrainedConfig:
    """Returns transformers' configuration of a model of `shape`."""
    return VARIANTS[variant](**shape | more)


QUICKSTART = DecoderConfig(
    family="qwen3", vocab_size=19, width=128, layers=3, heads=4, kv_heads=2, head_dim=32, mlp=384,
    max_positions=256,
)  # fmt: skip
SMALL = DecoderConfig(
    family="llama", vocab_size=100, width=32, layers=1, heads=2, kv_heads=1, head_dim=16, mlp=48,
    max_positions=64,
)  # fmt: skip
SMOLLM2 = DecoderConfig(
    family="llama", vocab_size=49_152, width=576, layers=30, heads=9, kv_heads=3, head_dim=64, mlp=1536,
    max_positions=8192,
)  # fmt: skip
M20 = DecoderConfig(
    family="qwen3", vocab_size=16_384, width=384, layers=8, heads=6, kv_heads=2, head_dim=64, mlp=1152,
    max_positions=4096,
)  # fmt: skip
HALF_A_BILLION = DecoderConfig(
    family="qwen2", vocab_size=151_936, width=896, layers=24, heads=14, kv_heads=2, head_dim=64, mlp=4864,
    max_positions=4096, qkv_bias=True,
)  # fmt: skip
"""Shapes of the models whose runs and benches were measured."""

VOCAB = 40
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
_HEADS: dict[str, Any] = {**_GROUPED, "head_dim": 8}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_NARROW: dict[str, Any] = {"sliding_window": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": _SHAPE | _HEADS,
    "gemma2": _SHAPE | _HEADS | _NARROW | {"final_logit_softcapping": 2.0},
    "gemma3_text": _SHAPE | _HEADS | _NARROW,
    "gpt_neox": _SHAPE,
    "phi": _SHAPE,
    "phi3": _SHAPE | _GROUPED,
    "opt": _SHAPE | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "olmo2": _SHAPE | _GROUPED,
    "olmo3": _SHAPE | _GROUPED | _NARROW,
    "stablelm": _SHAPE | _GROUPED,
    "granite": _SHAPE | _GROUPED | {"logits_scaling": 4.0},
    "cohere2": _SHAPE | _GROUPED | _NARROW | {"logit_scale": 0.5},
    "starcoder2": _SHAPE | _GROUPED,
    "glm4": _SHAPE | _HEADS,
    "arcee": _SHAPE | _HEADS,
    "ernie4_5": _SHAPE | _HEADS,
    "exaone4": _SHAPE | _HEADS | _NARROW,
    "hunyuan_v1_dense": _SHAPE | _HEADS,
    "gpt2": _GPT2,
    "gptj": _GPT2 | {"rotary_dim": 4},
    "bloom": {k: v for k, v in _SHAPE.items() if k != "intermediate_size"} | {"n_layer": 2, "n_head": 4},
    "mixtral": _SHAPE | _GROUPED | {"num_local_experts": 4},
    "qwen2_moe": _SHAPE | _GROUPED | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "gpt_oss": _SHAPE | _HEADS | _NARROW | EXPERTS,
    "deepseek_v3": _SHAPE | {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16,
        "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    },
}  # fmt: skip
"""Arguments of transformers' configurations, by model_type"""


def upright(family: str, state: dict[str, Any]) -> dict[str, Any]:
    """Returns `state`, or what is like it, with the linears that transformers has as [in, out] turned to
    [out, in], or turned back."""
    turned = family in TRANSPOSED
    return {n: t.t().contiguous() if turned and is_quantized(n) else t for n, t in state.items()}


def by_our_names(
    state: Mapping[str, torch.Tensor], config: DecoderConfig
) -> dict[str, torch.Tensor]:
    """Returns the tensors that transformers has in memory, which joins all experts of a layer, by our names."""
    ours = from_stored(dict(state), config)
    if not any(name.endswith(".experts.gate_up_proj") for name in ours):
        return ours
    return from_stored(ours, structs.replace(config, family="qwen3_5_moe_text"))


def close_to(model: Any) -> float:
    """Returns the nats by which a log-prob of the torch engine may differ from those of transformers' `model`.
    Where products are of bfloat16x2, activations have 16 of float32's 24 binary digits, which shows ten times
    as much behind the norm of a state that is nearly nothing."""
    return 3e-3 if model.config.model_type in STATEFUL else 3e-4


def foreign_config(family: str, **more: Any) -> Any:
    if family not in FAMILIES:
        return config_of(family, _SHAPE | _HEADS, **more)
    return CONFIG_MAPPING[family](**FAMILIES[family] | more)


def foreign_model(config: Any, seed: int = 0) -> Any:
    """Returns a model whose weights are large enough for its logits to differ."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.15)
    return model


def write_foreign(directory: Path, family: str, **more: Any) -> Any:
    """Writes a tiny random model and a tokenizer of characters, and returns the model."""
    model = foreign_model(foreign_config(family, **more))
    model.save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    return model


def character_tokenizer(characters: str = "0123456789+-*/()=.,% ") -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<eos>": 1} | {c: n for n, c in enumerate(characters, 2)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


_E2M1 = torch.tensor([0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 1.0, 1.0]).repeat(2)
"""Largest distance to what rounds to a code of E2M1 without saturating."""


def error_bound(name: str, parts: Parts) -> Tensor:
    """Returns the largest |weight - dequantize(parts)| within the ranges, float32, broadcastable to [out,
    in]."""
    match FORMATS[name]:
        case Bf16() as format:
            # From the rounded number r, which may be the smaller: 2⁻⁸ |w| ≤ 2⁻⁸ |r| / (1 - 2⁻⁸).
            return format.dequantize(parts).abs() * (2**-8 / (1 - 2**-8)) + 2**-134
        case Int8() | Int8Weight():
            return parts["weight_scale"].to(torch.float32) * (0.5 + 127 * 2**-23)
        case Fp8():
            scale = expanded(parts["weight_scale_inv"], parts["weight"].shape)
            return _of_e4m3(parts["weight"], scale)
        case Fp8Channel():
            return _of_e4m3(parts["weight"], parts["weight_scale"].to(torch.float32))
        case Int4Fp8() as format:
            published, scale = (
                parts["weight_scale"].float(),
                format.effective(parts["weight_scale"]),
            )
            largest = 7 * (1 + 2**-8) * published
            bound = torch.maximum(0.5 * (1 + 2**-18) * scale, largest - 7 * scale)
            return bound.repeat_interleave(format.group, 1)[:, : int(parts["weight_shape"][1])]
        case Int4() as format:
            scale = format.effective(parts["weight_scale"]).repeat_interleave(format.group, 1)
            return scale[:, : int(parts["weight_shape"][1])] * 0.53
        case Nvfp4():
            codes = e2m1.unpack(parts["weight_packed"])
            errors = on(_E2M1, codes.device)[codes.int()]
            rounding = blocked(errors, nvfp4.BLOCK) * nvfp4.real_scale(parts).unsqueeze(-1)
            exact = unblocked(rounding, codes.shape[1]) * (1 + 2**-18)
            return exact + 6 * 2**-10 / parts["weight_global_scale"]
        case Mxfp4():
            codes = e2m1.unpack(parts["weight_packed"])
            errors = torch.where(codes & 7 == 7, 2.0, on(_E2M1, codes.device)[codes.int()])
            scale = mxfp4.real_scale(parts).unsqueeze(-1)
            return unblocked(blocked(errors, mxfp4.BLOCK) * scale, codes.shape[1])
        case Nf4():
            shape = json.loads(bytes(parts["weight.quant_state.bitsandbytes__nf4"].tolist()))[
                "shape"
            ]
            each = parts["weight.absmax"].repeat_interleave(64)[: math.prod(shape)]
            return 0.152 * each.view(shape)
    raise AssertionError(name)


def _of_e4m3(codes: Tensor, scale: Tensor) -> Tensor:
    """Largest error of E4M3 codes times scale; the float32 division and product add 2⁻²² at most."""
    magnitude = codes.to(torch.float32).abs()
    return scale * (magnitude * (2**-4 + 2**-22)).clamp_(min=2**-10 * (1 + 2**-18))
