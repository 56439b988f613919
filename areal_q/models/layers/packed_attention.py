"""Attention within each sequence of a packed batch."""

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
        out = F.scaled_dot_product_attention(q_pad, k_pad, v_pad, is_causal=True, enable_gqa=True)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, layout.unpad)
