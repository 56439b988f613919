"""Attention within each sequence of a packed batch."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from areal_q.models.packed_layout import PackedLayout

MASK = 1 << 21
"""Most numbers of a mask, 8 MB in float32, which a layer keeps for its backward pass."""


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PackedLayout,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns the causal attention within each sequence, [T, heads, head_dim], of each token to the `window`
    last ones, its own included; None: to all before it. Products of queries and keys are multiplied by `scale`,
    None: by head_dim^(-1/2). `sinks` [heads] are scores that take a share of each head's softmax from all
    tokens; not where ranks divide the tokens.

    q is [T, heads, head_dim], k and v are [T, kv_heads, head_dim]; where ranks divide the tokens, T are this
    rank's, and they compute some heads of all tokens each. Padding is at the end of a sequence, so that no real
    token attends to it.
    """
    if layout.share is not None:
        assert sinks is None
        own = _of_buckets(*layout.share.gather_tokens(q, k, v), layout, window, scale, None)
        return layout.share.gather_heads(own)
    return _of_buckets(q, k, v, layout, window, scale, sinks)


def _of_buckets(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PackedLayout,
    window: int | None,
    scale: float | None,
    sinks: Tensor | None,
) -> Tensor:
    outputs = []
    for bucket in layout.buckets:
        q_pad, k_pad, v_pad = (
            x.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)
            for x, rows in ((q, bucket.queries), (k, bucket.rows), (v, bucket.rows))
        )
        out = _blockwise(q_pad, k_pad, v_pad, window, scale, sinks)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    # A rank that computes no query takes part in the exchange of gradients all the same.
    return torch.cat(outputs).index_select(0, layout.unpad) if outputs else q


def _blockwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    scale: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Returns the attention of the last positions, whose queries [sequences, heads, queries, head_dim] are
    given, to those that `visible` says. What needs a mask is computed block by block of queries, each with the
    keys that it can see: masks, as numbers that are added to the products, then have a block's rows in place
    of the sequence's, and one serves all blocks. Their size depends on shapes alone, so that a step that is
    computed again has the same blocks."""
    queries, keys = q.shape[2], k.shape[2]
    maskless = queries == keys and (window is None or window >= keys)
    block = max(1, MASK // keys)
    if maskless or queries <= block:
        return _attention(q, k, v, visible(queries, keys, window, q.device), scale, sinks)
    reach = keys if window is None else min(keys, block + window - 1)
    mask = visible(block, reach, window, q.device)
    assert mask is not None
    mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    outputs, offset = [], keys - queries
    for start in range(0, queries, block):
        end = min(start + block, queries)
        first = 0 if window is None else max(0, offset + start + 1 - window)
        seen = slice(first, offset + end)
        # The mask's last row is a position that sees as far back as the keys reach, or the window.
        rows = mask[block - (end - start) :, reach - (offset + end - first) :]
        part = q[:, :, start:end], k[:, :, seen], v[:, :, seen]
        outputs.append(_attention(*part, rows, scale, sinks))
    return torch.cat(outputs, 2)


def visible(
    queries: int, keys: int, window: int | None, device: torch.device | str
) -> Tensor | None:
    """Returns which of `keys` positions the last `queries` of them attend to, bool [queries, keys]; None if
    these are all positions, and each attends to all before it."""
    if queries == keys and (window is None or window >= keys):
        return None
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return seen if window is None else seen.triu(keys - queries + 1 - window)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Returns the attention, each tensor [sequences, heads, length, head_dim]: causal without a mask, else to
    what `mask`, bool or added to the products, [queries, keys] says.

    Where torch is told to warn of what it cannot repeat bit for bit, a GPU's attention only warns, though its
    gradient could be repeated; so while that is computed, torch is told to insist. With a mask only the plain
    way can be repeated.
    """
    if not (q.is_cuda and torch.get_deterministic_debug_mode() == 1):
        return sdpa(q, k, v, mask, scale, sinks)
    if mask is not None:
        with sdpa_kernel(SDPBackend.MATH):
            return sdpa(q, k, v, mask, scale, sinks)
    q, k, v = Determinism.apply("warn", q, k, v)  # pyright: ignore[reportGeneralTypeIssues]
    out = sdpa(q, k, v, None, scale, sinks)
    return Determinism.apply("error", out)[0]  # pyright: ignore[reportOptionalSubscript]


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Returns torch's attention, as `_attention` has it; what `mask` has before its last two dimensions is as
    in torch.

    A sink is the score of one more key, before all others, whose value is 0. That key is 0 but for a channel of
    its own, in which the queries have the sinks: so every kernel of torch's has it, gradient included."""
    causal, before = mask is None, int(mask is None)
    if sinks is not None:
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        scores = (sinks / scale).to(q.dtype).view(-1, 1, 1).expand(*q.shape[:-1], 1)
        q = F.pad(torch.cat((q, scores), -1), (0, 0, before, 0))  # causally, it is a token
        k, v = F.pad(k, (0, 1, 1, 0)), F.pad(v, (0, 1, 1, 0))
        k[..., 0, -1] = 1
        if mask is not None:
            mask = F.pad(mask, (1, 0), value=mask.dtype == torch.bool)
    out = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=True
    )
    return out if sinks is None else out[..., before:, :-1]


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
