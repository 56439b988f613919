"""The shape of a decoder, read from and written to Hugging Face's `config.json`."""

import math
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import asdict

from areal_q.errors import CheckpointError, NotOurs
from areal_q.models.foreign import COMPUTED_BY, ids_of, sizes_of
from areal_q.models.layer_kinds import DeltaRule, Experts, Size, delta_of, experts_of, read
from areal_q.models.rope_scaling import WINDOW_THETA, inverse_frequencies, rope_dim_of, ropes_of
from areal_q.models.variants import (
    STATEFUL,
    biases_of,
    not_implemented,
    text_part,
    unrotated_of,
    windows_of,
)

FAMILIES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
"""The class of transformers by `model_type`."""
_TIED = ("smollm3", "gemma3_text")
"""The families whose head is the embedding where config.json does not say."""
OFFSET_NORMS = {"gemma3_text", *STATEFUL}
"""The families whose norms multiply by 1 + w, where w is the weight in their files."""
_SIZES = {
    "gpt_oss": {"rms_norm_eps": 1e-5, "head_dim": 64, "num_key_value_heads": 8},
    "qwen3_5_text": {"head_dim": 256, "num_key_value_heads": 4},
    "qwen3_next": {"head_dim": 256, "num_key_value_heads": 2},
    "qwen3_5_moe_text": {"head_dim": 256, "num_key_value_heads": 2},
}
"""Sizes of a family where config.json does not say, other than those of most"""
_NAMES = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "bos_id": "bos_token_id",
    "eos_ids": "eos_token_id",
    "pad_id": "pad_token_id",
}
"""What config.json calls the fields of a decoder that it names for every family"""
MOST_LAYERS, MOST_EXPERTS = 1000, 100_000
"""Bounds on a whole model: even an empty one of more takes long to build."""
Activation = Literal["silu", "gelu_tanh", "clamped_silu"]
Rope = Literal["model", "window"]
_Id = Annotated[int, Meta(ge=0, lt=2**31)]


class _Sizes(Struct, rename=_NAMES):
    """What `config.json` must say of a decoder, and may."""

    vocab_size: Size
    width: Size
    layers: Annotated[int, Meta(ge=1, le=MOST_LAYERS)]
    heads: Size
    mlp: Size
    max_positions: Size
    kv_heads: Size | None = None
    head_dim: Size | None = None
    norm_eps: Annotated[float, Meta(ge=0, le=1)] = 1e-6
    tied: bool | None = None
    bos_id: int | None = None
    eos_ids: _Id | list[_Id] | None = None
    pad_id: int | None = None
    query_scalar: Size = field(default=256, name="query_pre_attn_scalar")
    """The attention scale is its root's inverse, in Gemma alone."""


class DecoderConfig(Struct, frozen=True, kw_only=True):
    """Pre-norm decoder: RMSNorm, grouped-query attention with RoPE, a gated MLP.

    Qwen2 has biases on q, k and v; Qwen3 has an RMSNorm over each head of q and k instead; Qwen3-MoE has
    experts in place of some, or all, of Qwen3's MLPs. Llama, Mistral, SmolLM3 and Seed-OSS differ in defaults,
    and in what any family may have: biases, layers that see a window alone, and layers without RoPE. Gemma 3 is
    Qwen3 with a second norm behind attention and behind the MLP, norms that multiply by 1 + w, embeddings times
    √width, the tanh form of GELU in place of SiLU, its own scale of the scores, and a base of RoPE for the
    layers that see a window. gpt-oss is a mixture whose router and experts have biases, with a clamped
    activation, and a sink for each head of attention: a learnt score of no token. Qwen3.5 has Gemma's form of
    norms, gates what attention found, turns a part of each head alone, and keeps a state in place of keys and
    values in most layers; so does Qwen3-Next. Its experts, those of Qwen3.5's mixtures and Qwen2-MoE's have one
    beside them that all tokens share.
    """

    family: str
    vocab_size: Size
    width: Size
    layers: Annotated[int, Meta(ge=1, le=MOST_LAYERS)]
    heads: Size
    kv_heads: Size
    head_dim: Size
    mlp: Size
    max_positions: Size
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    """How RoPE is stretched over a longer context, as in config.json; None for plain RoPE."""
    norm_eps: Annotated[float, Meta(ge=0, le=1)] = 1e-6
    tied: bool = True
    """True if the output head shares the embedding's weights"""
    bos_id: int | None = None
    eos_ids: tuple[_Id, ...] = ()
    pad_id: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    unrotated: tuple[int, ...] = ()
    """Indices of the layers without RoPE"""
    window: Size | None = None
    """Number of tokens, its own included, that a token of a sliding layer attends to."""
    sliding: tuple[int, ...] = ()
    """Indices of the layers that see the window alone"""
    window_theta: float | None = None
    """Base of plain RoPE in the layers that see the window alone; None if they turn as all others"""
    query_scalar: Size | None = None
    """Attention's scores are divided by its root; None for head_dim"""
    experts: Experts | None = None
    delta: DeltaRule | None = None
    """The layers that keep a state in place of keys and values; None if all have attention"""
    rope_dim: Size | None = None
    """Number of a head's first channels that RoPE turns; None for all"""
    foreign: dict[str, Any] | None = None
    """config.json of a model that transformers computes, of any family; None for one that we do. The other
    fields then say what they can of it."""
    stored: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Names and shapes of the tensors in its files, where it was read from them"""

    @property
    def qk_norm(self) -> bool:
        return self.family in ("qwen3", "qwen3_moe", "gemma3_text", *STATEFUL)

    @property
    def outer_norms(self) -> bool:
        """True if what attention and the MLP add to the residual stream has a norm of its own."""
        return self.family == "gemma3_text"

    @property
    def offset_norms(self) -> bool:
        """True if a norm multiplies by 1 + w, where w is its weight as files have it."""
        return self.family in OFFSET_NORMS

    @property
    def output_gates(self) -> bool:
        """True if what each head of attention found is multiplied by σ of a gate, which q_proj gives behind the
        head's query."""
        return self.family in STATEFUL

    @property
    def q_features(self) -> int:
        """Number of channels that q_proj gives."""
        return self.heads * self.head_dim * (2 if self.output_gates else 1)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have attention, and keys and values."""
        return tuple(i for i in range(self.layers) if not (self.delta and i in self.delta.layers))

    @property
    def activation(self) -> Activation:
        if self.family == "gpt_oss":
            return "clamped_silu"
        return "gelu_tanh" if self.family == "gemma3_text" else "silu"

    @property
    def sinks(self) -> bool:
        """True if each head of attention has a learnt score that takes a share from all tokens."""
        return self.family == "gpt_oss"

    @property
    def relaid(self) -> bool:
        """True if files have tensors laid out otherwise than ours (areal_q/models/hf/stored_layout.py)."""
        return self.family in ("gpt_oss", "qwen3_next")

    @property
    def embedding_scale(self) -> float | None:
        """What a token's embedding is multiplied by; None for 1."""
        return self.width**0.5 if self.family == "gemma3_text" else None

    @property
    def attention_scale(self) -> float:
        """What the product of a query and a key is multiplied by."""
        return (self.query_scalar or self.head_dim) ** -0.5

    @property
    def mlp_norm(self) -> str:
        """Name of the norm before the MLP; that of Qwen's before it is Gemma's behind attention."""
        return "pre_feedforward_layernorm" if self.outer_norms else "post_attention_layernorm"

    def rope_of(self, layer: int) -> Rope | None:
        """Returns which RoPE `layer` has: the model's, or that of the layers that see the window alone."""
        if layer in self.unrotated:
            return None
        return "window" if self.window_theta and layer in self.sliding else "model"

    def window_of(self, layer: int) -> int | None:
        """Returns the number of tokens that one attends to in `layer`; None: all before it."""
        return self.window if layer in self.sliding else None

    @property
    def active_mlp(self) -> int:
        """Number of channels, in the MLPs of a layer, that a token meets."""
        if self.experts is None:
            return self.mlp
        return self.experts.mlp * self.experts.per_token + (self.experts.shared or 0)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have experts."""
        return tuple(i for i in range(self.layers) if self.experts and self.experts.has(i))

    def validate(self) -> "DecoderConfig":
        """Returns this config if a model can have it. Raises CheckpointError."""
        if self.heads % self.kv_heads:
            raise CheckpointError(
                f"{self.heads} heads do not share {self.kv_heads} of keys and values"
            )
        if (turned := self.rope_dim or self.head_dim) % 2:
            raise CheckpointError(f"RoPE turns pairs of numbers, and a head has {turned}")
        if self.delta and self.delta.value_heads % self.delta.key_heads:
            raise CheckpointError(
                f"{self.delta.value_heads} heads of values do not share {self.delta.key_heads} of keys"
            )
        if self.experts and self.layers * self.experts.count > MOST_EXPERTS:
            raise CheckpointError(
                f"{self.experts.count} experts in each of {self.layers} layers are over {MOST_EXPERTS} in all"
            )
        return self

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a checkpoint's tensors by Hugging Face's names, in the order of the model's
        `state_dict`; of a foreign model, of its files."""
        if self.foreign is not None:
            return dict(self.stored)
        width = self.width
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, width)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            found[f"{at}input_layernorm.weight"] = (width,)
            if self.delta and layer in self.delta.layers:
                found |= self.delta.tensors(f"{at}linear_attn.", width)
            else:
                found |= self._attention(f"{at}self_attn.")
            found[f"{at}post_attention_layernorm.weight"] = (width,)
            if self.outer_norms:
                found[f"{at}pre_feedforward_layernorm.weight"] = (width,)
            if self.experts and self.experts.has(layer):
                found[f"{at}mlp.gate.weight"] = (self.experts.count, width)
                if self.mlp_bias:
                    found[f"{at}mlp.gate.bias"] = (self.experts.count,)
                for expert in range(self.experts.count):
                    of_expert = f"{at}mlp.experts.{expert}."
                    found |= _mlp(of_expert, width, self.experts.mlp, self.mlp_bias)
                if self.experts.shared:
                    found |= _mlp(f"{at}mlp.shared_expert.", width, self.experts.shared)
                    found[f"{at}mlp.shared_expert_gate.weight"] = (1, width)
            else:
                found |= _mlp(f"{at}mlp.", width, self.mlp, self.mlp_bias)
            if self.outer_norms:
                found[f"{at}post_feedforward_layernorm.weight"] = (width,)
        found["model.norm.weight"] = (width,)
        return found if self.tied else found | {"lm_head.weight": (self.vocab_size, width)}

    def _attention(self, at: str) -> dict[str, tuple[int, ...]]:
        width, queries, keys = self.width, self.heads * self.head_dim, self.kv_heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {f"{at}sinks": (self.heads,)} if self.sinks else {}
        for name, rows in (("q_proj", self.q_features), ("k_proj", keys), ("v_proj", keys)):
            found[f"{at}{name}.weight"] = (rows, width)
            if self.qkv_bias:
                found[f"{at}{name}.bias"] = (rows,)
        found[f"{at}o_proj.weight"] = (width, queries)
        if self.o_bias:
            found[f"{at}o_proj.bias"] = (width,)
        return found | {f"{at}{x}_norm.weight": (self.head_dim,) for x in "qk" if self.qk_norm}

    @property
    def weights(self) -> int:
        """Number of all weights."""
        return sum(map(math.prod, self.tensors().values()))

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> "DecoderConfig":
        """Returns the shape that a `config.json` describes. Raises CheckpointError for an architecture or a
        variant that is not implemented, and for a size that is missing or none."""
        hf = text_part(hf)
        family = hf.get("model_type")
        if hf.get(COMPUTED_BY):
            return cls(**sizes_of(hf), foreign=hf)
        if not isinstance(family, str | None):
            raise CheckpointError(f"model_type = {family!r}: must be text")
        if family not in FAMILIES:
            raise NotOurs(f"model_type {family!r} is none of {', '.join(FAMILIES)}")
        # A mixture without dense layers need not say how wide their MLPs are.
        key = "moe_intermediate_size"
        usual = {"intermediate_size": hf[key]} if key in hf else {}
        said = read(usual | _SIZES.get(family, {}) | hf, _Sizes)
        if unknown := [name for name, asked in not_implemented(family, hf).items() if asked]:
            kind = CheckpointError if hf.get("quantization_config") else NotOurs
            raise kind(f"{family} with {unknown[0]} is not implemented")
        rope_theta, rope_scaling, window_theta = ropes_of(family, hf)
        unrotated = unrotated_of(family, hf, said.layers)
        window, sliding = windows_of(family, hf, said.layers, unrotated)
        head_dim = said.head_dim or said.width // said.heads
        completed = {
            "kv_heads": said.kv_heads or said.heads,
            "head_dim": head_dim,
            "tied": family in _TIED if said.tied is None else said.tied,
            "eos_ids": ids_of(said.eos_ids),
            "query_scalar": said.query_scalar if family == "gemma3_text" else None,
        }
        return cls(
            family=family,
            **asdict(said) | completed | biases_of(family, hf),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            rope_dim=rope_dim_of(family, hf, head_dim),
            unrotated=unrotated,
            window=window,
            sliding=sliding,
            window_theta=window_theta if sliding else None,
            experts=experts_of(family, hf),
            delta=delta_of(family, hf, said.layers),
        )

    def to_hf(self) -> dict[str, Any]:
        """Returns the content of `config.json`, as transformers reads it."""
        if self.foreign is not None:
            return self.foreign
        return {
            "architectures": [FAMILIES[self.family]],
            "model_type": self.family,
            **{name: getattr(self, ours) for ours, name in _NAMES.items()},
            "eos_token_id": self._eos_to_hf(),
            "torch_dtype": "float32",
            **self._variants_to_hf(),
            **(self.experts.to_hf(self.family) if self.experts else {}),
        }

    def _variants_to_hf(self) -> dict[str, Any]:
        """Returns what the families that have a choice say of biases, windows and layers without RoPE."""
        if self.family == "gemma3_text":
            return self._gemma_to_hf()
        if self.family == "gpt_oss":
            return self._gpt_oss_to_hf()
        if self.delta:
            return self._delta_to_hf(self.delta)
        of_family: dict[str, Any] = {"hidden_act": "silu"}
        if self.family == "qwen2_moe":
            of_family |= {"qkv_bias": self.qkv_bias}
        elif self.family not in ("qwen2", "mistral"):
            of_family |= {"attention_bias": self.qkv_bias, "mlp_bias": self.mlp_bias}
        if self.family == "seed_oss":
            of_family["attention_out_bias"] = self.o_bias
        if self.family == "smollm3":
            of_family["no_rope_layers"] = [int(i not in self.unrotated) for i in range(self.layers)]
        if self.family == "mistral" or self.window:
            of_family["sliding_window"] = self.window
        if self.family != "mistral" and self.window:
            of_family["use_sliding_window"] = True
        if self.family not in ("mistral", "qwen3_moe") and self.window:
            of_family |= {
                "layer_types": self._layer_types(),
                "max_window_layers": min(self.sliding),
            }
        return of_family

    def _layer_types(self) -> list[str]:
        kinds = {True: "sliding_attention", False: "full_attention"}
        return [kinds[i in self.sliding] for i in range(self.layers)]

    def _gemma_to_hf(self) -> dict[str, Any]:
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": self.qkv_bias,
            "sliding_window": self.window or self.max_positions,
            "layer_types": self._layer_types(),
            "rope_local_base_freq": self.window_theta or WINDOW_THETA,
            "query_pre_attn_scalar": self.query_scalar,
        }

    def _gpt_oss_to_hf(self) -> dict[str, Any]:
        return {
            "hidden_act": "silu",
            "attention_bias": self.qkv_bias,
            "sliding_window": self.window,
            "layer_types": self._layer_types(),
            "rope_scaling": self.rope_scaling or {"rope_type": "default"},
        }

    def _delta_to_hf(self, rule: DeltaRule) -> dict[str, Any]:
        rope = {"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta}
        share = (self.rope_dim or self.head_dim) / self.head_dim
        kinds = {True: "full_attention", False: "linear_attention"}
        return {
            "hidden_act": "silu",
            "attention_bias": self.qkv_bias,
            "layer_types": [kinds[i in self.attention_layers] for i in range(self.layers)],
            "rope_scaling": None,
            "rope_parameters": rope | {"partial_rotary_factor": share},
            **rule.to_hf(),
        }

    def _eos_to_hf(self) -> int | list[int] | None:
        if len(self.eos_ids) > 1:
            return list(self.eos_ids)
        # Of an empty list, transformers' generate would take the first.
        return self.eos_ids[0] if self.eos_ids else None

    def inverse_frequencies(self, rope: Rope = "model") -> list[float]:
        """Returns the angular frequencies of `rope` in radians per position, one for two channels."""
        if rope == "window" and self.window_theta:
            return inverse_frequencies(self.head_dim, self.window_theta, None)
        turned = self.rope_dim or self.head_dim
        return inverse_frequencies(turned, self.rope_theta, self.rope_scaling)


def _mlp(at: str, width: int, mlp: int, bias: bool = False) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in ("gate", (mlp, width)), ("up", (mlp, width)), ("down", (width, mlp)):
        found[f"{at}{name}_proj.weight"] = shape
        if bias:
            found[f"{at}{name}_proj.bias"] = shape[:1]
    return found
