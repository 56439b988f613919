"""The forward pass of inference, computed from a published version's tensors without modules or autograd.

q, k and v are one GEMM, and so are gate and up. Quantized linear layers compute as their format says
(areal_q/linear/quantized_linear.py), everything else is float32. Notation: T tokens, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_q.errors import WeightVersionError
from areal_q.linear.quantized_linear import Linear
from areal_q.messages import Manifest
from areal_q.models.config import Activation, DecoderConfig, DeltaRule, Experts
from areal_q.models.decoder import split_gates
from areal_q.models.layers.moe import gates_of, mixed
from areal_q.models.layers.rope import RopeOfLayers
from areal_q.models.low_bit.lora import LORA_SCALE, AdaptedLinear, adapter_of
from areal_q.quant import FORMATS
from areal_q.quant.kv_scales import kv_scales_of
from areal_q.quant.state_dict import check_shapes, parts_of
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
    shared: tuple[Tensor, Mlp] | None
    """Weight of the gate, float32 [1, D], and the expert that all tokens share"""

    def __call__(self, x: Tensor, add: Tensor, routes: list[Tensor] | None) -> Tensor:
        probs = F.linear(x, self.router, self.bias).softmax(-1)
        taken = probs.topk(self.shape.per_token, dim=-1).indices
        if routes is not None:
            routes.append(taken)
        if self.shared:
            gate, expert = self.shared
            add = add + F.linear(x, gate).sigmoid() * expert(x)
        return add + mixed(x, taken, gates_of(probs, taken, self.shape), self.experts)


def _sum(add: Tensor | None, bias: Tensor | None) -> Tensor | None:
    return add if bias is None else bias if add is None else add + bias


class InferenceModel:
    """A decoder with the weights of one version. Raises WeightVersionError if `weights` lack a tensor, have one
    of another shape, or are of an unknown format or model."""

    def __init__(self, weights: WeightVersion, device: str, ops: Ops) -> None:
        manifest = weights.manifest
        if manifest.format not in FORMATS:
            raise WeightVersionError(
                f"version {manifest.version}: format {manifest.format!r} is none of {', '.join(FORMATS)}"
            )
        self.manifest = manifest
        self.ops = ops
        try:
            self.config = DecoderConfig.from_hf(manifest.model).validate()
            check_shapes(weights.tensors, self.config.tensors(), manifest.format)
            tensors = {name: tensor.to(device) for name, tensor in weights.tensors.items()}
            self.norm = _factors(self.config, tensors, "model.norm")
            head = None if self.config.tied else tensors.get("lm_head.weight")
            self.embedding, self.head = ops.tables(tensors["model.embed_tokens.weight"], head)
            shapes = self.config.tensors()
            self.layers = [
                _LayerReader(self.config, shapes, ops, manifest, tensors, i).layer()
                for i in range(self.config.layers)
            ]
            self.kv_scales = kv_scales_of(tensors, self.config.layers)
        # What a publisher says of its model may be of any type.
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise WeightVersionError(
                f"version {manifest.version} cannot be used: {error}"
            ) from error
        self.rope = RopeOfLayers(self.config, device=device)

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


def _factors(config: DecoderConfig, tensors: Mapping[str, Tensor], norm: str) -> Tensor:
    """Returns what the RMSNorm `norm` multiplies by, float32."""
    weight = tensors[f"{norm}.weight"].float()
    return 1 + weight if config.offset_norms else weight


@dataclass(frozen=True)
class _LayerReader:
    """Builds layer `index` out of a version's tensors. Names are those within the layer."""

    config: DecoderConfig
    shapes: Mapping[str, tuple[int, ...]]
    """Those of all tensors that the config names, of the whole model"""
    ops: Ops
    manifest: Manifest
    tensors: Mapping[str, Tensor]
    index: int

    def layer(self) -> Layer:
        config, index, outer = self.config, self.index, None
        experts, rule = config.experts, config.delta
        if config.outer_norms:
            names = "post_attention_layernorm", "post_feedforward_layernorm"
            outer = self._factors(names[0]), self._factors(names[1])
        mixer = self._delta(rule) if rule and index in rule.layers else self._attention()
        o = "linear_attn.out_proj" if isinstance(mixer, DeltaLayer) else "self_attn.o_proj"
        return Layer(
            input_norm=self._factors("input_layernorm"),
            mixer=mixer,
            o=self._linear(o),
            o_bias=self._bias(o),
            mlp_norm=self._factors(config.mlp_norm),
            mlp=self._sparse(experts) if experts and experts.has(index) else self._mlp("mlp"),
            outer_norms=outer,
        )

    def _attention(self) -> Attention:
        c, head_norm, sinks = self.config, None, None
        if c.qk_norm:
            of_q, of_k = self._factors("self_attn.q_norm"), self._factors("self_attn.k_norm")
            head_norm = torch.cat((of_q.expand(c.heads, -1), of_k.expand(c.kv_heads, -1)))
        qkv = [f"self_attn.{x}_proj" for x in "qkv"]
        if c.sinks:
            sinks = self._tensor("self_attn.sinks")
        return Attention(self._linear(*qkv), self._bias(*qkv), head_norm, sinks)

    def _delta(self, rule: DeltaRule) -> DeltaLayer:
        names = ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias", "conv1d.weight")
        a, b, log_a, dt, kernel = (self._tensor(f"linear_attn.{name}") for name in names)
        return DeltaLayer(
            number=rule.layers.index(self.index),
            rule=rule,
            qkv=self._linear("linear_attn.in_proj_qkv"),
            z=self._linear("linear_attn.in_proj_z"),
            a=a,
            b=b,
            log_a=log_a,
            bias=dt,
            kernel=kernel,
            norm=self._tensor("linear_attn.norm.weight"),
            eps=self.config.norm_eps,
        )

    def _mlp(self, prefix: str) -> Mlp:
        both, down = (f"{prefix}.gate_proj", f"{prefix}.up_proj"), f"{prefix}.down_proj"
        biases = self._bias(*both), self._bias(down)
        return Mlp(
            self._linear(*both), self._linear(down), self.ops, *biases, self.config.activation
        )

    def _sparse(self, experts: Experts) -> SparseMlp:
        each = [self._mlp(f"mlp.experts.{i}") for i in range(experts.count)]
        router, bias, shared = self._tensor("mlp.gate.weight"), self._bias("mlp.gate"), None
        if experts.shared:
            shared = self._tensor("mlp.shared_expert_gate.weight"), self._mlp("mlp.shared_expert")
        return SparseMlp(router, bias, each, experts, shared)

    def _linear(self, *names: str) -> Linear:
        format, at = self.manifest.format, [f"{self._at}.{name}" for name in names]
        run = self.ops.linear(FORMATS[format], [parts_of(self.tensors, n, format) for n in at])
        pairs = [adapter_of(self.tensors, name) for name in at]
        if not any(pairs):
            return run
        outs = [self.shapes[f"{name}.weight"][0] for name in at]
        return AdaptedLinear(run, pairs, outs, float(self.manifest.extra[LORA_SCALE]))

    def _bias(self, *names: str) -> Tensor | None:
        """Returns the biases that the config names; None if the first linear has none."""
        if f"{self._at}.{names[0]}.bias" not in self.shapes:
            return None
        return torch.cat([self._tensor(f"{name}.bias") for name in names])

    def _factors(self, name: str) -> Tensor:
        return _factors(self.config, self.tensors, f"{self._at}.{name}")

    def _tensor(self, name: str) -> Tensor:
        return self.tensors[f"{self._at}.{name}"].float()

    @property
    def _at(self) -> str:
        return f"model.layers.{self.index}"
