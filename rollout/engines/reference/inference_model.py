"""The forward pass of inference, computed from a published version's tensors without modules or autograd.

q, k and v are one GEMM, and so are gate and up. Quantized linear layers compute as their format says
(areal_q/linear/quantized_linear.py), everything else is float32. Notation: T tokens, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_q.errors import QuantizationError, WeightVersionError
from areal_q.linear.quantized_linear import Linear
from areal_q.models.config import Activation, DecoderConfig, Experts
from areal_q.models.layers.moe import gates_of, mixed
from areal_q.models.layers.rope import RopeOfLayers
from areal_q.models.low_bit.lora import LORA_SCALE, AdaptedLinear, adapter_of
from areal_q.quant import FORMATS
from areal_q.quant.kv_scales import kv_scales_of
from areal_q.quant.state_dict import parts_of
from areal_q.weights.version import WeightVersion
from rollout.engines.reference.kv_cache import Attend
from rollout.engines.reference.ops import Ops


@dataclass(frozen=True)
class Layer:
    input_norm: Tensor
    """Factors of the RMSNorm before attention, float32 [D]: its weight, or 1 more in Gemma"""
    qkv: Linear
    qkv_bias: Tensor | None
    head_norm: Tensor | None
    """Factors of the RMSNorms over the heads of q and k, float32 [heads + kv_heads, head_dim]"""
    sinks: Tensor | None
    """Scores that take a share of each head's softmax from all tokens, float32 [heads]"""
    o: Linear
    o_bias: Tensor | None
    mlp_norm: Tensor
    """Factors of the RMSNorm before the MLP, float32 [D]"""
    mlp: "Mlp | SparseMlp"
    outer_norms: tuple[Tensor, Tensor] | None = None
    """Factors of Gemma's RMSNorms behind attention and behind the MLP"""


@dataclass(frozen=True)
class Mlp:
    gate_up: Linear
    down: Linear
    ops: Ops
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: Activation = "silu"

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        y = self.ops.gated(self.gate_up(x, self.gate_up_bias), self.activation)
        return self.down(y, _sum(add, self.down_bias))


@dataclass(frozen=True)
class SparseMlp:
    """The mixture of experts of areal_q/models/layers/moe.py; the router computes in float32."""

    router: Tensor
    """Weight of the router over E experts, float32 [E, D]"""
    bias: Tensor | None
    """float32 [E]"""
    experts: list[Mlp]
    shape: Experts

    def __call__(self, x: Tensor, add: Tensor, routes: list[Tensor] | None) -> Tensor:
        probs = F.linear(x, self.router, self.bias).softmax(-1)
        taken = probs.topk(self.shape.per_token, dim=-1).indices
        if routes is not None:
            routes.append(taken)
        return add + mixed(x, taken, gates_of(probs, taken, self.shape), self.experts)


def _sum(add: Tensor | None, bias: Tensor | None) -> Tensor | None:
    return add if bias is None else bias if add is None else add + bias


class InferenceModel:
    """A decoder with the weights of one version. Raises WeightVersionError if `weights` lack a tensor or are of
    an unknown format."""

    def __init__(self, weights: WeightVersion, device: str, ops: Ops) -> None:
        manifest = weights.manifest
        if manifest.format not in FORMATS:
            raise WeightVersionError(
                f"version {manifest.version}: format {manifest.format!r} is none of {', '.join(FORMATS)}"
            )
        self.manifest = manifest
        self.config = DecoderConfig.from_hf(manifest.model)
        self.ops = ops
        self._names = self.config.tensors().keys()
        tensors = {name: tensor.to(device) for name, tensor in weights.tensors.items()}
        try:
            self.norm = self._factors(tensors, "model.norm")
            head = None if self.config.tied else tensors.get("lm_head.weight")
            self.embedding, self.head = ops.tables(tensors["model.embed_tokens.weight"], head)
            self.layers = [self._layer(tensors, i) for i in range(self.config.layers)]
        except (KeyError, QuantizationError) as error:
            raise WeightVersionError(
                f"version {manifest.version} lacks a tensor: {error}"
            ) from error
        self.kv_scales = kv_scales_of(tensors, self.config.layers)
        self.rope = RopeOfLayers(self.config, device=device)

    def _factors(self, tensors: Mapping[str, Tensor], norm: str) -> Tensor:
        """Returns what the RMSNorm `norm` multiplies by, float32."""
        weight = tensors[f"{norm}.weight"].float()
        return 1 + weight if self.config.offset_norms else weight

    def _layer(self, tensors: Mapping[str, Tensor], index: int) -> Layer:
        layer = f"model.layers.{index}"
        format = self.manifest.format

        def linear(*names: str) -> Linear:
            parts = [parts_of(tensors, f"{layer}.{name}", format) for name in names]
            run = self.ops.linear(FORMATS[format], parts)
            pairs = [adapter_of(tensors, f"{layer}.{name}") for name in names]
            if not any(pairs):
                return run
            outs = [self._out_features(name) for name in names]
            return AdaptedLinear(run, pairs, outs, float(self.manifest.extra[LORA_SCALE]))

        def mlp(prefix: str) -> Mlp:
            both, down = (f"{prefix}.gate_proj", f"{prefix}.up_proj"), f"{prefix}.down_proj"
            biases = bias(*both), bias(down)
            return Mlp(linear(*both), linear(down), self.ops, *biases, self.config.activation)

        def sparse(experts: Experts) -> SparseMlp:
            router = tensors[f"{layer}.mlp.gate.weight"].float()
            each = [mlp(f"mlp.experts.{i}") for i in range(experts.count)]
            return SparseMlp(router, bias("mlp.gate"), each, experts)

        def bias(*names: str) -> Tensor | None:
            """Returns the biases that the config names; None if the first linear has none."""
            if f"{layer}.{names[0]}.bias" not in self._names:
                return None
            return torch.cat([tensors[f"{layer}.{name}.bias"] for name in names]).float()

        experts = self.config.experts
        qkv = [f"self_attn.{x}_proj" for x in "qkv"]
        head_norm = outer = None
        if self.config.outer_norms:
            behind = ("post_attention_layernorm", "post_feedforward_layernorm")
            of_attention, of_mlp = (self._factors(tensors, f"{layer}.{x}") for x in behind)
            outer = of_attention, of_mlp
        if self.config.qk_norm:
            q_norm = self._factors(tensors, f"{layer}.self_attn.q_norm")
            k_norm = self._factors(tensors, f"{layer}.self_attn.k_norm")
            head_norm = torch.cat(
                (q_norm.expand(self.config.heads, -1), k_norm.expand(self.config.kv_heads, -1))
            )
        return Layer(
            input_norm=self._factors(tensors, f"{layer}.input_layernorm"),
            qkv=linear(*qkv),
            qkv_bias=bias(*qkv),
            head_norm=head_norm,
            sinks=tensors[f"{layer}.self_attn.sinks"].float() if self.config.sinks else None,
            o=linear("self_attn.o_proj"),
            o_bias=bias("self_attn.o_proj"),
            mlp_norm=self._factors(tensors, f"{layer}.{self.config.mlp_norm}"),
            mlp=sparse(experts) if experts and experts.has(index) else mlp("mlp"),
            outer_norms=outer,
        )

    def _out_features(self, name: str) -> int:
        c = self.config
        mlp = c.experts.mlp if c.experts and ".experts." in name else c.mlp
        by_name = {"q_proj": c.heads * c.head_dim, "gate_proj": mlp, "up_proj": mlp}
        by_name |= dict.fromkeys(("k_proj", "v_proj"), c.kv_heads * c.head_dim)
        return by_name.get(name.rpartition(".")[2], c.width)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        routes: list[Tensor] | None = None,
    ) -> Tensor:
        """Returns the last hidden states, float32 [T, D], of `tokens` int64 [T] at `positions` int64 [T]. Every
        sparse layer appends to `routes` the K experts that it sent the tokens to, int64 [T, K]."""
        c, ops = self.config, self.ops
        rotated = c.heads + c.kv_heads
        x = self.embedding.embed(tokens)
        x = x if c.embedding_scale is None else x * c.embedding_scale
        for index, (layer, turned) in enumerate(
            zip(self.layers, self.rope.at(positions), strict=True)
        ):
            qkv = layer.qkv(self._norm(x, layer.input_norm), layer.qkv_bias)
            qkv = qkv.view(-1, rotated + c.kv_heads, c.head_dim)
            ops.rotate(qkv, rotated, layer.head_norm, c.norm_eps, *turned)
            x = self._rest(layer, x, attend(index, qkv, layer.sinks), routes)
        return x

    def _rest(
        self, layer: Layer, x: Tensor, attended: Tensor, routes: list[Tensor] | None
    ) -> Tensor:
        """Returns the residual stream behind `layer`, from that before it and what attention found for o."""
        if layer.outer_norms:
            of_attention, of_mlp = layer.outer_norms
            assert isinstance(layer.mlp, Mlp)
            x = x + self._norm(layer.o(attended, layer.o_bias), of_attention)
            return x + self._norm(layer.mlp(self._norm(x, layer.mlp_norm)), of_mlp)
        x = layer.o(attended, _sum(x, layer.o_bias))
        h = self._norm(x, layer.mlp_norm)
        return layer.mlp(h, x, routes) if isinstance(layer.mlp, SparseMlp) else layer.mlp(h, x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits, float32 [R, V], of hidden states [R, D]."""
        return self.head(self._norm(hidden, self.norm))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.ops.rms_norm(x, weight, self.config.norm_eps)
