"""Attention within each sequence of a packed batch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_q.models.packed_layout import PackedLayout


def packed_attention(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
    """Returns the causal attention within each sequence, [T, heads, head_dim].

    q is [T, heads, head_dim], k and v are [T, kv_heads, head_dim]. Padding is at the end of a sequence, so that
    no real token attends to it.
    """
    outputs = []
    for bucket in layout.buckets:
        q_pad, k_pad, v_pad = (
            x.index_select(0, bucket.rows.flatten()).unflatten(0, bucket.rows.shape).transpose(1, 2)
            for x in (q, k, v)
        )
        out = _attention(q_pad, k_pad, v_pad)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, layout.unpad)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns the causal attention, each tensor [sequences, heads, length, head_dim].

    Where torch is told to warn of what it cannot repeat bit for bit, a GPU's attention only warns, though its
    gradient could be repeated; so while that is computed, torch is told to insist.
    """
    if not (q.is_cuda and torch.get_deterministic_debug_mode() == 1):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    q, k, v = Determinism.apply("warn", q, k, v)  # pyright: ignore[reportGeneralTypeIssues]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return Determinism.apply("error", out)[0]  # pyright: ignore[reportOptionalSubscript]


class Determinism(torch.autograd.Function):
    """The identity, from whose backward pass on torch treats what it cannot repeat as `mode` says."""

    @staticmethod
    def forward(ctx: Any, mode: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mode = mode
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        torch.set_deterministic_debug_mode(ctx.mode)
        return None, *grads
