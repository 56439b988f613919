"""The tensors of a checkpoint that are quantized, and the widths that a number format does not take. Imports no
torch, since `areal-q check` asks."""

import re

from areal_q.errors import QuantizationError

_QUANTIZED = re.compile(
    r"(?:^|\.)layers\.\d+\.(?:"
    r"self_attn\.[qkvo]_proj|linear_attn\.(?:in_proj_qkv|in_proj_z|out_proj)|"
    r"mlp\.(?:experts\.\d+\.|shared_experts?\.)?(?:gate|up|down)_proj|"
    r"block_sparse_moe\.experts\.\d+\.w[123]|"
    # From here on: families that transformers computes. A router is none.
    r"self_attn\.(?:qkv_proj|out_proj|dense|[qk]v?_[ab]_proj|kv_a_proj_with_mqa)|"
    r"mlp\.(?:gate_up_proj|fc[12]|c_fc|c_proj)|fc[12]"
    r")\.weight$"
    r"|(?:^|\.)(?:layers|h|blocks)\.\d+\.(?:"
    r"(?:attention|self_attention)\.(?:query_key_value|dense)|"
    r"attn\.(?:attention\.)?(?:[qkv]_proj|out_proj|Wqkv|c_attn|c_proj)|"
    r"mlp\.(?:dense_h_to_4h|dense_4h_to_h|fc_in|fc_out|c_fc|c_proj)|ffn\.(?:up|down)_proj"
    r")\.weight$"
)
MOST_INPUTS = (2**31 - 1) // 127**2
"""The largest in_features whose products of int8 codes every engine may add up in an int32: 133,144."""


def is_quantized(name: str) -> bool:
    """Returns True if parameter `name` of a Hugging Face checkpoint takes the rollout's format."""
    return _QUANTIZED.search(name) is not None


def check_inputs(format: str, inputs: int, name: str) -> None:
    """Raises QuantizationError, which names the tensor, if `format` does not hold a weight with so many
    inputs."""
    if format in ("int8", "int8-weight") and inputs > MOST_INPUTS:
        raise QuantizationError(
            f"{name}: sums over {inputs:,} inputs do not fit an int32, over {MOST_INPUTS:,} they do"
        )
    if format in ("nvfp4", "mxfp4") and inputs % 2:
        raise QuantizationError(f"{name}: two codes share a byte, so {inputs} inputs do not fit")
