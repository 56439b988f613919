"""The forward pass of a dense decoder in bfloat16 on a CPU, made of the operations in functions.py."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad
from torch.utils.checkpoint import checkpoint

from areal_q.models.fused.functions import (
    AddNorm,
    Attend,
    Projections,
    Rotate,
    SwigluMlp,
    added_rows,
)
from areal_q.models.layers.linear import Linear
from areal_q.models.layers.norm import HeadNorm
from areal_q.models.layers.packed_attention import packed_attention
from areal_q.models.layers.rope import RopeOfLayers
from areal_q.models.packed_layout import PackedLayout

_PLAIN = {nn.Embedding, nn.RMSNorm, HeadNorm, Linear, nn.Identity}
"""The layers whose arithmetic the operations have. Those with experts, adapters, or numbers of the rollouts'
formats are of other classes."""

_LONGEST = 512
"""Tokens of the longest sequence that Attend takes, in one thread. It needs no padding and no
copies, and is faster than torch's at any length in one thread, but torch's divides one between threads."""


def suits(trunk: Any, layout: PackedLayout) -> bool:
    """Returns True if `hidden_states` can compute `trunk` for `layout`: no MLP has a bias, no sequence is
    longer than a window, and no norm is one of Gemma's, whose activation and second norms it lacks too."""
    c = trunk.config
    leaves = (m for m in trunk.modules() if not any(m.children()))
    return (
        trunk.norm.weight.device.type == "cpu"
        and not c.mlp_bias
        and (c.window is None or layout.longest <= c.window)
        and all(type(m) in _PLAIN for m in leaves)
        and all(p.dtype == torch.float32 for p in trunk.parameters())
        and not any(layer.self_attn.observe for layer in trunk.layers)
    )


def hidden_states(trunk: Any, token_ids: Tensor, layout: PackedLayout) -> Tensor:
    """Returns the hidden states after the final norm, bfloat16 [T, D], for token_ids int64 [T].

    Rows are added to a pass over short sequences that attend to nothing; their gradient is 0. The gradient of a
    tied embedding is sparse: it is added to that of the output head, which has all rows."""
    added = (0, added_rows(len(token_ids)) if layout.longest <= _LONGEST else 0)
    positions = pad(layout.positions, added)
    rope = RopeOfLayers(trunk.config, layout.longest).at(positions)
    weight, tied = trunk.embed_tokens.weight, trunk.config.tied
    x, delta = embedding(pad(token_ids, added), weight, sparse=tied), None
    for layer, turned in zip(trunk.layers, rope, strict=True):
        if layer.recompute and torch.is_grad_enabled():
            out: Any = checkpoint(_layer, layer, x, delta, *turned, layout, use_reentrant=False)
            x, delta = out
        else:
            x, delta = _layer(layer, x, delta, *turned, layout)
    return _add_norm(x, delta, trunk.norm)[1][: len(token_ids)]


def _layer(
    layer: Any, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, layout: PackedLayout
) -> tuple[Tensor, Tensor]:
    """Returns the residual stream after attention, float32 [T, D], and what the MLP adds to it, bfloat16."""
    x, y = _add_norm(x, delta, layer.input_layernorm)
    x, y = _add_norm(
        x, _attention(layer.self_attn, y, cos, sin, layout), layer.post_attention_layernorm
    )
    mlp = layer.mlp
    weights = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    added: Tensor = SwigluMlp.apply(y, *weights)  # type: ignore[assignment]
    return x, added


def _attention(attention: Any, y: Tensor, cos: Tensor, sin: Tensor, layout: PackedLayout) -> Tensor:
    qkv = _projections(y, attention.q_proj, attention.k_proj, attention.v_proj)
    qkv = qkv.unflatten(-1, (-1, attention.head_dim))
    heads = attention.q_proj.out_features // attention.head_dim
    shared = attention.k_proj.out_features // attention.head_dim
    norms, eps = None, 0.0
    if isinstance(attention.q_norm, nn.RMSNorm):
        of_q, of_k = attention.q_norm.weight, attention.k_norm.weight
        norms, eps = (
            torch.cat((of_q.expand(heads, -1), of_k.expand(shared, -1))),
            attention.q_norm.eps,
        )
    turned = Rotate.apply(qkv, norms, heads + shared, eps, cos, sin)
    return _projections(_mixed(turned, heads, layout).flatten(-2), attention.o_proj)


def _mixed(qkv: Tensor, heads: int, layout: PackedLayout) -> Tensor:
    """Returns the attention of qkv [T, heads + 2 · kv_heads, dim] within each sequence, [T, heads, dim]."""
    if layout.longest > _LONGEST:
        shared = (qkv.shape[1] - heads) // 2
        q, k, v = qkv.split((heads, shared, shared), 1)
        return packed_attention(q, k, v, layout)
    return Attend.apply(qkv, heads, layout)  # type: ignore[return-value]


def _add_norm(x: Tensor, delta: Tensor | None, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    return AddNorm.apply(x, delta, norm.weight, norm.eps)  # type: ignore[return-value]


def _projections(x: Tensor, *linears: Linear) -> Tensor:
    parameters = [linear.weight for linear in linears] + [linear.bias for linear in linears]
    return Projections.apply(x, *parameters)  # type: ignore[return-value]
