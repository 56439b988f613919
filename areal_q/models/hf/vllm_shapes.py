"""Tells which models vLLM cannot hold in a number format: its kernels take whole groups and blocks only."""

from areal_q.models.config import DecoderConfig

WHOLE = {"int4": 128, "int4-g32": 32, "int4-fp8": 128, "fp8": 128}
"""Weights that share a scale in these formats; in fp8, rows and columns of a block"""


def vllm_refuses(shape: DecoderConfig, format: str, tensor_parallel: int = 1) -> str | None:
    """Returns one line on why vLLM does not load a model of this shape in `format`; None if it does.

    int4: each row of a process's part of a linear must be whole groups. fp8: of the linears that vLLM fuses
    (q, k and v; gate and up), all but the last must be whole blocks, and the last is as wide as another.
    """
    mlps = {"moe_intermediate_size": shape.experts.mlp} if shape.experts else {}
    if shape.experts and shape.experts.shared:
        mlps["shared_expert_intermediate_size"] = shape.experts.shared
    if len(shape.sparse_layers) < shape.layers:
        mlps["intermediate_size"] = shape.mlp
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if format not in WHOLE:
        return None
    if format != "fp8":
        what, whole, split = "linear's input", {"hidden_size": shape.width}, {"o_proj": queries}
    else:
        what, whole, split = "part of a fused linear", {}, {"q_proj": queries, "k_proj": keys}
    sizes = whole | {name: size // tensor_parallel for name, size in (split | mlps).items()}
    wrong = [f"{name} is {size}" for name, size in sizes.items() if size % WHOLE[format]]
    if not wrong:
        return None
    share = f", in each of {tensor_parallel} processes" if tensor_parallel > 1 else ""
    return (
        f"vLLM takes {format} only where every {what} is a multiple of {WHOLE[format]}; "
        f"this model's {wrong[0]}{share}"
    )
