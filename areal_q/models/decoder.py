"""The decoder that the learner trains, of one of the families in config.py, with Hugging Face's names.

It runs on packed batches: the tokens of all sequences one after the other, without padding. Only attention
knows the sequences, from a `PackedLayout`.

Notation: T tokens of all sequences, S sequences, D model width, V vocabulary.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from areal_q.models.config import DecoderConfig
from areal_q.models.layers.gated_delta import GatedDelta
from areal_q.models.layers.linear import Linear
from areal_q.models.layers.mlp import Mlp
from areal_q.models.layers.moe import Routing, SparseMlp
from areal_q.models.layers.norm import HeadNorm, OffsetNorm
from areal_q.models.layers.packed_attention import packed_attention
from areal_q.models.layers.rope import RopeOfLayers, apply_rope
from areal_q.models.logprobs import head_logprobs, masked_logprobs
from areal_q.models.low_bit.bf16_rounding import RoundedEmbedding, straight
from areal_q.models.packed_layout import PackedLayout


class Decoder(nn.Module):
    """A decoder-only transformer. Its `state_dict` has the names and shapes of a Hugging Face checkpoint,
    without `lm_head` if it is tied."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = None if config.tied else Linear(config.width, config.vocab_size, bias=False)
        self.dtype = torch.float32
        """Dtype of the matrix products and of the hidden states; the residual stream is summed in float32."""

    one_pass = True
    """True if each layer is run once in a forward pass"""

    def recompute_layers(self, on: bool) -> None:
        """Turns activation checkpointing on or off: the backward pass then runs each layer again, and only its
        input is kept."""
        for layer in self.model.layers:
            assert isinstance(layer, Layer)
            layer.recompute = on

    def prepare_sharding(self) -> list[nn.Module]:
        """Returns the modules that ranks which share the weights gather one by one, inner ones first. From now
        on each is run once in a forward pass, since all ranks must gather equally often."""
        return self.model.prepare_sharding()

    def copied_trunk(self) -> "Trunk | Decoder":
        """Returns a copy of all but the output head, which computes the hidden states [T, D] in float32."""
        return copy.deepcopy(self.model)

    def forward(
        self, token_ids: Tensor, layout: PackedLayout, routing: Routing | None = None
    ) -> Tensor:
        """Returns the hidden states [T, D] after the final norm, for token_ids int64 [T]. `routing` gives the
        sparse layers the experts to use, and records those that their routers would choose."""
        if self.dtype == torch.float32:
            return self.model(token_ids, layout, routing)
        if self.dtype == torch.bfloat16 and token_ids.device.type == "cpu":
            from areal_q.models.fused import trunk as fused  # compiles kernels, if none are cached

            if fused.suits(self.model, layout):
                return fused.hidden_states(self.model, token_ids, layout)
        with torch.autocast(token_ids.device.type, self.dtype):
            return self.model(token_ids, layout, routing).to(self.dtype)

    def by_token(self, x: Tensor, layout: PackedLayout) -> Tensor:
        """Returns what a layer was given in a pass of a batch of this `layout`, [T, D], without any padding."""
        return x

    @property
    def head(self) -> Tensor:
        """Returns the weight of the output head [V, D] as the forward pass uses it; it is the embedding's if
        they are tied."""
        if self.lm_head is not None:
            rounds, weight = self.lm_head.rounds_rest, self.lm_head.weight
        else:
            embedding = self.model.embed_tokens
            rounds, weight = isinstance(embedding, RoundedEmbedding), embedding.weight
        return straight(weight) if rounds else weight

    def logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float,
        entropy_learns: bool = False,
        among: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the log-prob of each of `targets` int64 [T] and the entropies in nats, float32 [T], from the
        hidden states [T, D] that predict them, without logits [T, V] in memory. `among` int64 [T, K] has the
        ids of each token's distribution where that is not the whole vocabulary; -1 is none."""
        if among is None:
            return head_logprobs(hidden, self.head, targets, temperature, entropy_learns)
        return masked_logprobs(hidden, self.head, targets, among, temperature, entropy_learns)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [..., V] of hidden states [..., D]. They take much memory, so pass only the
        positions that are needed."""
        return F.linear(hidden.to(self.head.dtype), self.head)


class Trunk(nn.Module):
    """Embedding, layers and final norm: everything except the output head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        weight = torch.empty(config.vocab_size, config.width)
        if not weight.is_meta:  # to draw numbers there, torch imports torch.compile
            nn.init.normal_(weight)
        self.embed_tokens = nn.Embedding.from_pretrained(weight, freeze=False)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.layers))
        self.norm = _norm(config)

    def forward(
        self, token_ids: Tensor, layout: PackedLayout, routing: Routing | None = None
    ) -> Tensor:
        rope = RopeOfLayers(self.config, layout.longest, token_ids.device).at(layout.positions)
        x, scale = self.embed_tokens(token_ids), self.config.embedding_scale
        x = x if scale is None else x * scale
        for layer, turned in zip(self.layers, rope, strict=True):
            x = layer(x, *turned, layout, routing)
        return self.norm(x)

    def prepare_sharding(self) -> list[nn.Module]:
        return list(self.layers)


class Layer(nn.Module):
    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.recompute = False
        self.outer_norms = config.outer_norms
        self.input_layernorm = _norm(config)
        self.keeps_state = config.delta is not None and index in config.delta.layers
        if config.delta and self.keeps_state:
            self.linear_attn = GatedDelta(config, config.delta)
        else:
            self.self_attn = Attention(config, config.window_of(index))
        self.post_attention_layernorm = _norm(config)
        if config.outer_norms:
            self.pre_feedforward_layernorm = _norm(config)
        self.mlp: Mlp | SparseMlp
        if config.experts and config.experts.has(index):
            self.mlp = SparseMlp(config, config.experts, config.sparse_layers.index(index))
        else:
            self.mlp = Mlp(config.width, config.mlp, config.mlp_bias, config.activation)
        if config.outer_norms:
            self.post_feedforward_layernorm = _norm(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, layout: PackedLayout, routing: Routing | None
    ) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            out: Any = checkpoint(self._run, x, cos, sin, layout, routing, use_reentrant=False)
            return out
        return self._run(x, cos, sin, layout, routing)

    def _run(
        self, x: Tensor, cos: Tensor, sin: Tensor, layout: PackedLayout, routing: Routing | None
    ) -> Tensor:
        h = self.input_layernorm(x)
        turned = (cos, sin, layout)
        added = self.linear_attn(h, layout) if self.keeps_state else self.self_attn(h, *turned)
        if self.outer_norms:
            x = x + self.post_attention_layernorm(added)
            return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        x = x + added
        h = self.post_attention_layernorm(x)
        return x + (self.mlp(h, routing) if isinstance(self.mlp, SparseMlp) else self.mlp(h))


class Attention(nn.Module):
    """Causal attention within each sequence; several query heads share a key and value head."""

    def __init__(self, config: DecoderConfig, window: int | None) -> None:
        super().__init__()
        self.head_dim, self.window, self.scale = config.head_dim, window, config.attention_scale
        self.observe: Callable[[Tensor, Tensor, Tensor], None] | None = None
        """Function that is called with q, k and v as attention uses them, to measure them; None for none"""
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.output_gates = config.output_gates
        self.sinks = nn.Parameter(torch.zeros(config.heads)) if config.sinks else None
        """Scores that take a share of each head's softmax from all tokens, float [heads]; None for none"""
        self.q_proj = Linear(config.width, config.q_features, bias=config.qkv_bias)
        self.k_proj = Linear(config.width, keys, bias=config.qkv_bias)
        self.v_proj = Linear(config.width, keys, bias=config.qkv_bias)
        self.o_proj = Linear(queries, config.width, bias=config.o_bias)
        if config.qk_norm:
            kind = OffsetNorm if config.offset_norms else HeadNorm
            self.q_norm = kind(config.head_dim, config.norm_eps)
            self.k_norm = kind(config.head_dim, config.norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: PackedLayout) -> Tensor:
        q, gate = split_gates(self.q_proj(x), self.head_dim, self.output_gates)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q = apply_rope(self.q_norm(q), cos, sin)
        k = apply_rope(self.k_norm(k), cos, sin)
        if self.observe:
            self.observe(q, k, v)
        sinks = self.sinks
        if sinks is not None and self.o_proj.rounds_rest:
            sinks = straight(sinks)
        mixed = packed_attention(q, k, v, layout, self.window, self.scale, sinks)
        mixed = mixed if gate is None else mixed * torch.sigmoid(gate)
        return self.o_proj(mixed.flatten(-2))


def split_gates(q: Tensor, head_dim: int, gated: bool) -> tuple[Tensor, Tensor | None]:
    """Returns queries, and the gates of what their heads find if there are any, [T, heads, head_dim] each, of
    q_proj's output [T, features]."""
    q = q.unflatten(-1, (-1, 2 * head_dim if gated else head_dim))
    if not gated:
        return q, None
    queries, gates = q.chunk(2, -1)
    return queries, gates


def _norm(config: DecoderConfig) -> nn.RMSNorm:
    return (OffsetNorm if config.offset_norms else nn.RMSNorm)(config.width, config.norm_eps)


def init_weights(model: Decoder, seed: int) -> None:
    """Draws the weights from Normal(0, 1/√width), and divides those of projections into the residual stream by
    √(2 · layers), as GPT-2 does. Norms multiply by 1 at the start, and biases are 0.

    A fixed standard deviation of 0.02 suits a width near 2,500; at width 128 it made the warm start three times
    slower. The result depends on `seed` alone, and not on torch's global generator.
    """
    generator = torch.Generator().manual_seed(seed)
    usual_std = model.config.width**-0.5
    residual_std = usual_std / math.sqrt(2 * model.config.layers)
    for name, p in model.state_dict().items():
        if p.dim() > 1:
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight"))
            std = residual_std if into_residual else usual_std
            p.copy_(torch.empty(p.shape).normal_(0.0, std, generator=generator))
        else:
            zero = name.endswith((".bias", ".sinks")) or model.config.offset_norms
            p.fill_(0.0 if zero and not name.endswith("linear_attn.norm.weight") else 1.0)
