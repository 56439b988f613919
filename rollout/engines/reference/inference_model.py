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
from areal_q.models.config import Activation, DecoderConfig, DeltaRule, Experts
from areal_q.models.decoder import split_gates
from areal_q.models.layers.moe import gates_of, mixed
from areal_q.models.layers.rope import RopeOfLayers
from areal_q.models.low_bit.lora import LORA_SCALE, AdaptedLinear, adapter_of
from areal_q.quant import FORMATS
from areal_q.quant.kv_scales import kv_scales_of
from areal_q.quant.state_dict import parts_of
from areal_q.weights.version import WeightVersion
from rollout.engines.reference.delta_layer import DeltaLayer, DeltaPass
from rollout.engines.reference.kv_cache import Attend
from rollout.engines.reference.ops import Ops


@dataclass(frozen=True)
class Attention:
    qkv: Linear
    qkv_bias: Tensor | None
    head_norm: Tensor | None
    """Factors of the RMSNorms over the heads of q and k, float32 [heads + kv_heads, head_dim]"""
    sinks: Tensor | None
    """Scores that take a share of each head's softmax from all tokens, float32 [heads]"""


@dataclass(frozen=True)
class Layer:
    input_norm: Tensor
    """Factors of the RMSNorm before attention, float32 [D]: its weight, or 1 more in Gemma"""
    mixer: Attention | DeltaLayer
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

        def factors(name: str) -> Tensor:
            return self._factors(tensors, f"{layer}.{name}")

        def attention() -> Attention:
            c, head_norm = self.config, None
            if c.qk_norm:
                of_q, of_k = factors("self_attn.q_norm"), factors("self_attn.k_norm")
                head_norm = torch.cat((of_q.expand(c.heads, -1), of_k.expand(c.kv_heads, -1)))
            qkv = [f"self_attn.{x}_proj" for x in "qkv"]
            sinks = tensors[f"{layer}.self_attn.sinks"].float() if c.sinks else None
            return Attention(linear(*qkv), bias(*qkv), head_norm, sinks)

        def delta(rule: DeltaRule) -> DeltaLayer:
            names = ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias", "conv1d.weight")
            a, b, log_a, dt, kernel = (
                tensors[f"{layer}.linear_attn.{name}"].float() for name in names
            )
            return DeltaLayer(
                number=rule.layers.index(index),
                rule=rule,
                qkv=linear("linear_attn.in_proj_qkv"),
                z=linear("linear_attn.in_proj_z"),
                a=a,
                b=b,
                log_a=log_a,
                bias=dt,
                kernel=kernel,
                norm=tensors[f"{layer}.linear_attn.norm.weight"].float(),
                eps=self.config.norm_eps,
            )

        experts, rule, outer = self.config.experts, self.config.delta, None
        if self.config.outer_norms:
            outer = factors("post_attention_layernorm"), factors("post_feedforward_layernorm")
        mixer = delta(rule) if rule and index in rule.layers else attention()
        o = "linear_attn.out_proj" if isinstance(mixer, DeltaLayer) else "self_attn.o_proj"
        return Layer(
            input_norm=factors("input_layernorm"),
            mixer=mixer,
            o=linear(o),
            o_bias=bias(o),
            mlp_norm=factors(self.config.mlp_norm),
            mlp=sparse(experts) if experts and experts.has(index) else mlp("mlp"),
            outer_norms=outer,
        )

    def _out_features(self, name: str) -> int:
        c = self.config
        mlp = c.experts.mlp if c.experts and ".experts." in name else c.mlp
        by_name = {"q_proj": c.q_features, "gate_proj": mlp, "up_proj": mlp}
        by_name |= dict.fromkeys(("k_proj", "v_proj"), c.kv_heads * c.head_dim)
        return by_name.get(name.rpartition(".")[2], c.width)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        routes: list[Tensor] | None = None,
        texts: DeltaPass | None = None,
    ) -> Tensor:
        """Returns the last hidden states, float32 [T, D], of `tokens` int64 [T] at `positions` int64 [T]. Every
        sparse layer appends to `routes` the K experts that it sent the tokens to, int64 [T, K]. Layers that
        keep a state need `texts`, whose states they move on."""
        x = self.embedding.embed(tokens)
        x = x if self.config.embedding_scale is None else x * self.config.embedding_scale
        for index, (layer, turned) in enumerate(
            zip(self.layers, self.rope.at(positions), strict=True)
        ):
            h = self._norm(x, layer.input_norm)
            if isinstance(layer.mixer, DeltaLayer):
                assert texts
                found = layer.mixer(h, texts)
            else:
                found = self._attended(index, layer.mixer, h, turned, attend)
            x = self._rest(layer, x, found, routes)
        return x

    def _attended(
        self,
        index: int,
        layer: Attention,
        x: Tensor,
        turned: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        c, gate, qkv = self.config, None, layer.qkv(x, layer.qkv_bias)
        if c.output_gates:
            q, rest = qkv.tensor_split((c.q_features,), -1)
            q, gate = split_gates(q, c.head_dim, gated=True)
            qkv = torch.cat((q.flatten(-2), rest), -1)
        rotated = c.heads + c.kv_heads
        qkv = qkv.view(-1, rotated + c.kv_heads, c.head_dim)
        self.ops.rotate(qkv, rotated, layer.head_norm, c.norm_eps, *turned)
        found = attend(index, qkv, layer.sinks)
        return found if gate is None else found * gate.flatten(-2).sigmoid()

    def _rest(self, layer: Layer, x: Tensor, found: Tensor, routes: list[Tensor] | None) -> Tensor:
        """Returns the residual stream behind `layer`, from that before it and what its mixer found for o."""
        if layer.outer_norms:
            of_attention, of_mlp = layer.outer_norms
            assert isinstance(layer.mlp, Mlp)
            x = x + self._norm(layer.o(found, layer.o_bias), of_attention)
            return x + self._norm(layer.mlp(self._norm(x, layer.mlp_norm)), of_mlp)
        x = layer.o(found, _sum(x, layer.o_bias))
        h = self._norm(x, layer.mlp_norm)
        return layer.mlp(h, x, routes) if isinstance(layer.mlp, SparseMlp) else layer.mlp(h, x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits, float32 [R, V], of hidden states [R, D]."""
        return self.head(self._norm(hidden, self.norm))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.ops.rms_norm(x, weight, self.config.norm_eps)
