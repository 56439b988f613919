"""Attention over a KV cache in pages: one query per row (decoding), or pieces of prompts (prefill).

Each layer's cache is one tensor [2, kv_heads, pages, PAGE, head_dim], keys and then values. Token t of a row
lies in the row's page t // PAGE, at t % PAGE; the row's table names its pages. Rows that begin alike may name
the same ones (rollout/engines/reference/page_pool.py). Notation: R decoding rows, N pieces of at most P tokens,
T of them together, W pages of the longest row, L cached positions that attention reads.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from areal_q.config.engines import PAGE, pages_of
from areal_q.models.config import DecoderConfig
from areal_q.models.layers.packed_attention import sdpa
from rollout.engines.reference.page_pool import NOTHING, PagePool

Attend = Callable[[int, Tensor, Tensor | None], Tensor]
"""Function that computes the attention of one layer: (layer, qkv [T, heads + 2 · kv_heads, head_dim], sinks
[heads] or None) → [T, heads · head_dim]. The heads of q come first, then those of k, then those of v. Sinks are
scores that take a share of each head's softmax from all tokens."""


class KVCache:
    item = torch.float32
    """What a number is held in"""

    def __init__(self, config: DecoderConfig, device: str, most_bytes: int = 0) -> None:
        self.config, self.device = config, device
        # Zeros rather than empty memory, since a masked position has weight 0, and 0 · NaN would be NaN.
        heads = [config.kv_heads * (i in config.attention_layers) for i in range(config.layers)]
        self.layers = [
            torch.zeros(2, n, 1, PAGE, config.head_dim, device=device, dtype=self.item)
            for n in heads
        ]
        experts = config.experts
        self.routes = torch.zeros(
            *(1, PAGE, len(config.sparse_layers), experts.per_token if experts else 0),
            dtype=torch.uint8 if not experts or experts.count <= 256 else torch.int16,
            device=device,
        )
        """Experts to which each of S sparse layers sent each token, uint8 or int16 [pages, PAGE, S, K]"""
        self.pool = PagePool(max(1, most_bytes // max(1, self.nbytes)) if most_bytes else 0)
        self._spoilt: set[int] = set()
        """Pages that may hold numbers that are not finite"""

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def new_version(self, scales: Tensor | None) -> None:
        """Tells the cache that keys and values come from other weights from now on. `scales` are those that the
        learner published with them, float32 [layers, 2], or None."""
        self.pool.forget()

    def take(self, count: int) -> list[int]:
        """Returns `count` pages with one owner. The layers grow one by one, so that there is never a copy of
        more than one of them."""
        pages = self.pool.take(count)
        if self.pool.size > len(self.routes):
            for i in range(len(self.layers)):
                self.layers[i] = grown(self.layers[i], {2: self.pool.size})
            self.routes = grown(self.routes, {0: self.pool.size})
        if spoilt := self._spoilt.intersection(pages):
            at = torch.tensor(sorted(spoilt), device=self.device)
            for layer in self.layers:
                layer[:, :, at] = 0
            self._spoilt -= spoilt
        return pages

    def spoil(self, pages: Iterable[int]) -> None:
        """Has `pages`, whose numbers need not be finite, cleared before `take` returns them: a NaN would reach
        the page's next row, since a weight of 0 times NaN is NaN. Until new weights come they can be found by
        their keys as before, with what these weights make of their tokens."""
        self._spoilt.update(pages)

    def spoil_all(self) -> None:
        """Spoils all pages, and lets none be found, since one of them holds numbers that are not finite."""
        self.spoil(range(NOTHING + 1, self.pool.size))
        self.pool.forget()

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copies whole pages."""
        to, frm = (torch.tensor(x).to(self.device, non_blocking=True) for x in (targets, sources))
        for layer in self.layers:
            layer.index_copy_(2, to, layer.index_select(2, frm))
        self.routes[to] = self.routes[frm]

    def split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Returns (q, k, v) of qkv [T, heads + 2 · kv_heads, dim]."""
        c = self.config
        return qkv.split((c.heads, c.kv_heads, c.kv_heads), 1)

    def put(self, layer: int, k: Tensor, v: Tensor, at: Tensor, whole: bool = False) -> None:
        """Caches k and v [T, kv_heads, dim] of tokens at flat places (page, position) `at` int64 [T]; `whole`
        says that they lie in pages of which nothing else is left."""
        for cached, new in zip(self.layers[layer], (k, v), strict=True):
            cached.flatten(1, 2).index_copy_(1, at, new.transpose(0, 1))

    def read(self, layer: int, pages: Tensor, length: int) -> Tensor:
        """Returns the keys and values of the first `length` positions of `pages` int64 [R, W], [2, kv_heads, R,
        length, dim]."""
        found = self.layers[layer].index_select(2, pages.flatten())
        return found.view(2, found.shape[1], len(pages), -1, found.shape[-1])[:, :, :, :length]

    def put_routes(self, at: Tensor, taken: Tensor) -> None:
        """Keeps the experts `taken` [T, S, K] of the tokens at flat places `at` int64 [T]."""
        self.routes.flatten(0, 1).index_copy_(0, at, taken.to(self.routes.dtype))

    def read_routes(self, pages: list[int], length: int) -> np.ndarray | None:
        """Returns the experts of the first tokens of `pages`, uint8 or uint16 [length, S, K]; None if no layer
        is sparse."""
        if not self.config.experts:
            return None
        at = torch.tensor(pages, dtype=torch.int64, device=self.device)
        found = self.routes[at].flatten(0, 1)[:length].cpu().numpy()
        return found.astype(np.uint8 if found.itemsize == 1 else np.uint16)


def places(tables: Tensor, positions: Tensor) -> Tensor:
    """Returns the flat places (page, position) int64 [R] of the tokens at `positions` int64 [R] of rows whose
    pages are `tables` int64 [R, W]."""
    pages = tables.gather(1, (positions // PAGE).unsqueeze(1)).squeeze(1)
    return pages * PAGE + positions % PAGE


class DecodeAttention:
    """Attention of one token in each of R rows to the positions of its row, up to and including `positions`
    int64 [R], or to those of them that a layer's window shows; `length` is L, `tables` int64 [R, ≥ W]."""

    def __init__(self, cache: KVCache, tables: Tensor, positions: Tensor, length: int) -> None:
        self.cache, self.length, self.positions = cache, length, positions
        self.pages, self.at = tables[:, : pages_of(length)], places(tables, positions)
        self.masks: dict[int | None, Tensor] = {}
        """What is added to scores [kv_heads · R, 1, L], by window."""
        self.scale = cache.config.attention_scale

    def __call__(self, layer: int, qkv: Tensor, sinks: Tensor | None) -> Tensor:
        c, rows = self.cache.config, len(qkv)
        q, k, v = self.cache.split(qkv)
        self.cache.put(layer, k, v, self.at)
        keys, values = self.cache.read(layer, self.pages, self.length).flatten(1, 2)
        # The query heads that share a key head are the rows of one small matrix product.
        q = q.view(rows, c.kv_heads, -1, c.head_dim).transpose(0, 1).flatten(0, 1)
        mask = self._mask(c.window_of(layer))
        scores = torch.baddbmm(mask, q, keys.transpose(1, 2), alpha=self.scale)
        weights = scores.softmax(-1)
        if sinks is not None:
            sums = scores.logsumexp(-1, keepdim=True).unflatten(0, (c.kv_heads, rows))
            weights *= torch.sigmoid(sums - sinks.view(c.kv_heads, 1, -1, 1)).flatten(0, 1)
        out = torch.bmm(weights, values)
        return out.view(c.kv_heads, rows, -1).transpose(0, 1).reshape(rows, -1)

    def _mask(self, window: int | None) -> Tensor:
        if window not in self.masks:
            at = torch.arange(self.length, device=self.positions.device)
            last = self.positions.repeat(self.cache.config.kv_heads).view(-1, 1, 1)
            hidden = at > last
            if window is not None:
                hidden |= at <= last - window
            zeros = torch.zeros(hidden.shape, device=hidden.device)
            self.masks[window] = zeros.masked_fill_(hidden, -torch.inf)
        return self.masks[window]


class States(NamedTuple):
    """What layers that keep a state have of texts, float32, of S texts; of one, without the first dimension."""

    inputs: Tensor
    """The last inputs of their convolutions, [S, L, K - 1, channels]"""
    memory: Tensor
    """[S, L, heads, key_dim, value_dim]"""

    @classmethod
    def empty(cls, config: DecoderConfig, device: str, *texts: int) -> "States":
        """Returns those of so many texts; of a model without such layers they have no numbers."""
        shapes: tuple[tuple[int, ...], ...] = (0,), (0,)
        if rule := config.delta:
            layers, heads = len(rule.layers), (rule.value_heads, rule.key_dim, rule.value_dim)
            shapes = (layers, rule.kernel - 1, rule.channels), (layers, *heads)
        return cls(*(torch.zeros(*texts, *shape, device=device) for shape in shapes))

    def at(self, place: int | slice) -> "States":
        """Returns a view of some."""
        return States(self.inputs[place], self.memory[place])


class PromptPiece(NamedTuple):
    """Tokens of a prompt that follow one another, to be computed in one forward pass."""

    ids: np.ndarray
    """int [n], n ≥ 1"""
    start: int
    """Their first position, at which a page begins"""
    pages: list[int]
    """The pages of the prompt, up to the piece's end at least. What lies before `start` is computed, or is by
    other pieces of the same pass."""
    states: States | None = None
    """What is kept of the prompt up to `start`, and then up to the piece's end; None without such layers"""


class PrefillAttention:
    """Causal attention of the tokens of N pieces, one behind the other, to all before them in their prompts."""

    def __init__(self, cache: KVCache, pieces: Sequence[PromptPiece]) -> None:
        self.cache, self.pieces = cache, pieces
        counts = np.array([len(piece.ids) for piece in pieces])
        starts = np.array([piece.start for piece in pieces])
        ends = starts + counts
        self.length = int(ends.max())
        tables = np.full((len(pieces), pages_of(self.length)), NOTHING, np.int64)
        for table, piece, end in zip(tables, pieces, ends, strict=True):
            table[: pages_of(end)] = piece.pages[: pages_of(end)]
        each = np.arange(counts.max())
        inside = each < counts[:, None]
        # Padding repeats a piece's last token, so that it sees what that sees.
        padded = np.minimum(each, counts[:, None] - 1)
        owner, at = np.repeat(np.arange(len(pieces)), counts), (starts[:, None] + padded)[inside]

        def moved(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(cache.device, non_blocking=True)

        self.tokens = moved(np.concatenate([piece.ids for piece in pieces]).astype(np.int64))
        """int64 [T]"""
        self.positions = moved(at)
        """int64 [T]"""
        self.at = moved(tables[owner, at // PAGE] * PAGE + at % PAGE)
        """Flat places (page, position) of the tokens, int64 [T]"""
        self.pages, self.counts = moved(tables), moved(counts)
        self.pad = moved((counts.cumsum() - counts)[:, None] + padded)
        """The token that each query is, int64 [N, P]"""
        self.unpad = moved(np.flatnonzero(inside))
        self.seen = moved(starts[:, None] + padded).unsqueeze(-1)
        """The last position that each query sees, int64 [N, P, 1]"""
        self.masks: dict[int | None, Tensor] = {}
        """What the queries see, bool [N, 1, P, L], by window."""

    def __call__(self, layer: int, qkv: Tensor, sinks: Tensor | None) -> Tensor:
        q, k, v = self.cache.split(qkv)
        self.cache.put(layer, k, v, self.at, whole=True)
        keys, values = self.cache.read(layer, self.pages, self.length).transpose(1, 2)
        mask = self._mask(self.cache.config.window_of(layer))
        q = q[self.pad].transpose(1, 2)
        out = sdpa(q, keys, values, mask, self.cache.config.attention_scale, sinks)
        return out.transpose(1, 2).flatten(0, 1).flatten(1).index_select(0, self.unpad)

    def _mask(self, window: int | None) -> Tensor:
        if window not in self.masks:
            at = torch.arange(self.length, device=self.seen.device)
            seen = at <= self.seen
            if window is not None:
                seen &= at > self.seen - window
            self.masks[window] = seen.unsqueeze(1)
        return self.masks[window]


def combined_attention(decode: Attend, prefill: PrefillAttention, rows: int) -> Attend:
    """Returns the attention of a forward pass over the tokens of `rows` decoding rows and, after them, those of
    prompts."""

    def attend(layer: int, qkv: Tensor, sinks: Tensor | None) -> Tensor:
        return torch.cat((decode(layer, qkv[:rows], sinks), prefill(layer, qkv[rows:], sinks)))

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
