"""The rule by which vLLM refuses widths, against tables of models worked out by hand."""

import pytest
from msgspec.structs import replace

from areal_q.models.config import DecoderConfig, Experts
from areal_q.models.hf.vllm_shapes import vllm_refuses


def shape(
    width: int, heads: int, kv_heads: int, head_dim: int, mlp: int, experts: int = 0
) -> DecoderConfig:
    return DecoderConfig(
        family="qwen3_moe" if experts else "llama",
        vocab_size=100, layers=2, max_positions=64, width=width, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, mlp=mlp,
        experts=Experts(count=8, per_token=2, mlp=experts) if experts else None,
    )  # fmt: skip


SMOLLM2_135M = shape(576, 9, 3, 64, 1536)
SMOLLM2_360M = shape(960, 15, 5, 64, 2560)
QWEN2_5_0_5B = shape(896, 14, 2, 64, 4864)
QWEN3_8B = shape(4096, 32, 8, 128, 12288)
QWEN3_30B_A3B = shape(2048, 32, 4, 128, 6144, experts=768)
SHARED = replace(
    QWEN3_30B_A3B, experts=Experts(count=8, per_token=2, mlp=768, shared=192), family="qwen2_moe"
)
GROUPS = "vLLM takes {} only where every linear's input is a multiple of 128; this model's {}"
BLOCKS = (
    "vLLM takes fp8 only where every part of a fused linear is a multiple of 128; this model's {}"
)


@pytest.mark.parametrize(
    ("model", "format", "processes", "problem"),
    [
        (SMOLLM2_135M, "int4", 1, GROUPS.format("int4", "hidden_size is 576")),
        (SMOLLM2_135M, "int4-g32", 1, None),
        (
            SMOLLM2_135M,
            "int4-g32",
            4,
            GROUPS.format("int4-g32", "o_proj is 144, in each of 4 processes").replace("128", "32"),
        ),
        (SMOLLM2_360M, "int4-fp8", 1, GROUPS.format("int4-fp8", "hidden_size is 960")),
        (SMOLLM2_135M, "fp8", 1, BLOCKS.format("q_proj is 576")),
        (SMOLLM2_135M, "int8", 1, None),
        (SMOLLM2_135M, "bf16", 1, None),
        (SMOLLM2_135M, "fp8-channel", 1, None),
        (QWEN2_5_0_5B, "int4", 1, None),
        (QWEN2_5_0_5B, "fp8", 1, None),
        (QWEN2_5_0_5B, "int4", 2, GROUPS.format("int4", "o_proj is 448, in each of 2 processes")),
        (QWEN2_5_0_5B, "fp8", 2, BLOCKS.format("q_proj is 448, in each of 2 processes")),
        (QWEN3_8B, "int4", 8, None),
        (QWEN3_8B, "fp8", 8, None),
        (
            QWEN3_30B_A3B,
            "fp8",
            4,
            BLOCKS.format("moe_intermediate_size is 192, in each of 4 processes"),
        ),
        (QWEN3_30B_A3B, "int4", 2, None),
        (
            SHARED,
            "fp8",
            1,
            BLOCKS.format("shared_expert_intermediate_size is 192"),
        ),
    ],
)
def test_models_that_vllm_cannot_hold_are_told(
    model: DecoderConfig, format: str, processes: int, problem: str | None
):
    assert vllm_refuses(model, format, processes) == problem
