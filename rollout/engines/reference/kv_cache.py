"""Attention over a slotted KV cache: one query per row (decoding), or whole prompts (prefill).

The cache is one tensor [layers, 2, slots, kv_heads, max_len, head_dim]. Row r of the batch owns slot r, so
that the slots in use are the first ones and attention reads them in place. Notation: R decoding rows, N prompts
padded to P tokens, L cached positions that attention reads.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areal_q.models.config import DecoderConfig
from areal_q.models.layers.packed_attention import visible

Attend = Callable[[int, Tensor], Tensor]
"""Function that computes the attention of one layer: (layer, qkv [T, heads + 2 · kv_heads, head_dim]) →
[T, heads · head_dim]. The heads of q come first, then those of k, then those of v."""

_LENGTH_STEP = 64
_FEWEST_SHARED = 16
"""Fewer tokens with which prompts begin alike are computed for each anew, as that takes less than looking after
them."""


class KVCache:
    def __init__(self, config: DecoderConfig, device: str) -> None:
        self.config = config
        # Zeros rather than empty memory, since a masked position has weight 0, and 0 · NaN would be NaN.
        shape = (config.layers, 2, 0, config.kv_heads, 0, config.head_dim)
        self.data = torch.zeros(shape, device=device)

    def reserve(self, slots: int, length: int) -> None:
        """Grows the cache to at least `slots` slots of `length` positions and keeps what it holds."""
        length = min(-(-length // _LENGTH_STEP) * _LENGTH_STEP, self.config.max_positions)
        self.data = grown(self.data, {2: slots, 4: length})

    def split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Returns (q, k, v) of qkv [·, heads + 2 · kv_heads, …]."""
        c = self.config
        return qkv.split((c.heads, c.kv_heads, c.kv_heads), 1)

    def new_version(self, scales: Tensor | None) -> None:
        """Tells the cache that keys and values come from other weights from now on. `scales` are those that the
        learner published with them, float32 [layers, 2], or None."""

    def put_tokens(self, layer: int, k: Tensor, v: Tensor, at: Tensor) -> None:
        """Caches k and v [R, kv_heads, dim] of one token in each row. `at` int64 [R · kv_heads] are flat
        indices into (slot, head, position)."""
        for cached, new in zip(self.data[layer], (k, v), strict=True):
            cached.view(-1, cached.shape[-1]).index_copy_(0, at, new.reshape(-1, new.shape[-1]))

    def put_prompts(
        self, layer: int, k: Tensor, v: Tensor, slots: slice, source: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Caches k and v [N, kv_heads, P, dim] of N prompts: prompt source[j] goes to the j-th of `slots`.
        Returns k and v with the rounding that the cache gives them, for attention."""
        for cached, new in zip(self.data[layer], (k, v), strict=True):
            cached[slots, :, : new.shape[2]] = new[source]
        return k, v

    def read(self, layer: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the first slots, each [rows · kv_heads, length, dim]."""
        kv_heads, capacity, dim = self.data.shape[3:]
        keys, values = (
            x.view(-1, capacity, dim)[: rows * kv_heads, :length] for x in self.data[layer]
        )
        return keys, values

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copies the first `length` positions of slots `sources` int64 to slots `targets` int64."""
        used = self.data[..., :length, :]
        used[:, :, targets] = used[:, :, sources]

    def clear(self, slots: Tensor) -> None:
        self.data[:, :, slots] = 0.0


class DecodeAttention:
    """Attention of one token in each of R rows to the positions of its own slot, up to and including
    `positions` int64 [R], or to those of them that a layer's window shows; `length` is L."""

    def __init__(self, cache: KVCache, positions: Tensor, length: int) -> None:
        self.cache, self.length, self.rows = cache, length, positions.shape[0]
        kv_heads, capacity = cache.data.shape[3], cache.data.shape[4]
        per_head = positions.repeat_interleave(kv_heads)
        heads = torch.arange(per_head.shape[0], device=positions.device)
        self.write_at = heads * capacity + per_head
        self.per_head = per_head.view(-1, 1, 1)
        self.masks: dict[int | None, Tensor] = {}
        """What is added to scores [R · kv_heads, 1, L], by window."""
        self.scale = cache.config.head_dim**-0.5

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        q, k, v = self.cache.split(qkv)
        self.cache.put_tokens(layer, k, v, self.write_at)
        keys, values = self.cache.read(layer, self.rows, self.length)
        mask = self._mask(self.cache.config.window_of(layer))
        # The query heads that share a key head are the rows of one small matrix product.
        scores = torch.baddbmm(
            mask, q.reshape(len(keys), -1, q.shape[-1]), keys.transpose(1, 2), alpha=self.scale
        )
        return torch.bmm(scores.softmax(-1), values).view(self.rows, -1)

    def _mask(self, window: int | None) -> Tensor:
        if window not in self.masks:
            at = torch.arange(self.length, device=self.per_head.device)
            hidden = at > self.per_head
            if window is not None:
                hidden |= at <= self.per_head - window
            zeros = torch.zeros(hidden.shape, device=hidden.device)
            self.masks[window] = zeros.masked_fill_(hidden, -torch.inf)
        return self.masks[window]


class PromptPrefix:
    """The tokens with which the latest prompts begin alike, such as a system prompt, with their keys and values
    under the present weights."""

    def __init__(self) -> None:
        self.ids = np.zeros(0, np.int32)
        self.layers: list[tuple[Tensor, Tensor]] = []
        """Keys and values [1, kv_heads, n, head_dim] of the n tokens `ids` in each layer; none if they are not
        computed yet"""

    def shared(self, prompts: Sequence[np.ndarray]) -> int:
        """Returns how many first tokens all of `prompts`, each int32 [P], have in common with each other and
        with those before them, and cuts `ids` and `layers` to these. They are fewer than the shortest prompt's,
        and 0 if they are too few to matter."""
        whole = [ids[:-1] for ids in prompts]
        shared = _common([*whole, self.ids])
        if shared < _FEWEST_SHARED:  # other prompts than before
            self.layers = []
            several = _common(whole) if len(whole) > 1 else 0
            shared = several if several >= _FEWEST_SHARED else 0
            self.ids = prompts[0][: shared or None]
        elif shared < len(self.ids):
            self.ids = self.ids[:shared]
            self.layers = [(k[:, :, :shared], v[:, :, :shared]) for k, v in self.layers]
        return shared

    def observe(self, layer: int, qkv: Tensor, cache: KVCache) -> Tensor:
        """Computes the causal attention of the tokens `ids`, and keeps their keys and values."""
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in cache.split(qkv))
        self.layers.append((k, v))
        mask = visible(len(qkv), len(qkv), cache.config.window_of(layer), qkv.device)
        causal = mask is None
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1).flatten(1)


def _common(beginnings: Sequence[np.ndarray]) -> int:
    """Returns how many first tokens are the same in all of `beginnings`."""
    most = min(map(len, beginnings))
    differ = [np.flatnonzero(a[:most] != b[:most]) for a, b in pairwise(beginnings)]
    return min([most, *(int(d[0]) for d in differ if len(d))])


class PrefillAttention:
    """Causal attention within N right-padded prompts; prompt `source[j]` is cached in slot `first + j`. With
    `prefix` all prompts begin with its tokens, and only the tokens behind them are computed.

    Padding needs no mask, since it comes after every real token. What it writes into the cache lies beyond the
    row's length until decoding overwrites it.
    """

    def __init__(
        self,
        cache: KVCache,
        first: int,
        source: Tensor,
        prompts: int,
        prefix: PromptPrefix | None = None,
    ) -> None:
        self.cache, self.source, self.prompts = cache, source, prompts
        self.slots = slice(first, first + source.shape[0])
        self.prefix = prefix
        self.masks: dict[int | None, Tensor | None] = {}
        """What the prompts' tokens attend to, by window."""

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        by_prompt = qkv.view(self.prompts, -1, *qkv.shape[1:]).transpose(1, 2)
        q, k, v = self.cache.split(by_prompt)
        length = q.shape[2]
        if self.prefix:
            before = (x.expand(self.prompts, -1, -1, -1) for x in self.prefix.layers[layer])
            k, v = (torch.cat(pair, 2) for pair in zip(before, (k, v), strict=True))
        k, v = self.cache.put_prompts(layer, k, v, self.slots, self.source)
        window = self.cache.config.window_of(layer)
        if window not in self.masks:
            self.masks[window] = visible(length, k.shape[2], window, k.device)
        mask = self.masks[window]
        causal = mask is None
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2).reshape(self.prompts * length, -1)


def combined_attention(decode: Attend, prefill: PrefillAttention, rows: int) -> Attend:
    """Returns the attention of a forward pass over the tokens of `rows` decoding rows and, after them, those of
    prompts."""

    def attend(layer: int, qkv: Tensor) -> Tensor:
        return torch.cat((decode(layer, qkv[:rows]), prefill(layer, qkv[rows:])))

    return attend


def grown(old: Tensor, sizes: dict[int, int], fill: float = 0) -> Tensor:
    """Returns `old`, or a copy, filled up with `fill`, that is at least `sizes[dim]` long in each dimension
    `dim` of `sizes`."""
    shape = [max(n, sizes.get(dim, 0)) for dim, n in enumerate(old.shape)]
    if shape == list(old.shape):
        return old
    new = old.new_full(shape, fill) if fill else old.new_zeros(shape)
    new[tuple(slice(n) for n in old.shape)] = old
    return new
