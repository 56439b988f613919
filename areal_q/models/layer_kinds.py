"""Layers that a decoder may have beside attention and a plain MLP: mixtures of experts, and the gated delta
rule. What `config.json` says of them, and the shapes of their tensors."""

from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import asdict

from areal_q.decode_errors import fitted
from areal_q.errors import CheckpointError
from areal_q.models.variants import STATEFUL, state_layers_of

_T = TypeVar("_T")
Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
CHUNK = 64
"""Most tokens that the delta rule computes together; a chunk's system has the square of it in numbers."""


class Experts(Struct, frozen=True, kw_only=True):
    """The sparse layers of a mixture: a router gives each token `per_token` of `count` MLPs.

    Example: with 4 layers, step 2 and dense_layers (3,), layer 1 alone is sparse.
    """

    count: Size
    per_token: Size
    mlp: Size
    """Width of one expert."""
    normalised: bool = True
    """True if the gates of a token's experts are divided by their sum."""
    step: Size = 1
    """Distance of two sparse layers; the first of them is layer `step` - 1"""
    dense_layers: tuple[int, ...] = ()
    """Layers that are dense in spite of `step`"""
    shared: Size | None = None
    """Width of an expert that all tokens share, behind a gate of its own; None for none"""

    def has(self, layer: int) -> bool:
        return layer not in self.dense_layers and (layer + 1) % self.step == 0

    def to_hf(self, family: str) -> dict[str, Any]:
        """Returns what `config.json` says of them."""
        if family == "gpt_oss":
            return {"num_local_experts": self.count, "num_experts_per_tok": self.per_token}
        shared = {} if self.shared is None else {"shared_expert_intermediate_size": self.shared}
        return shared | {
            "num_experts": self.count,
            "num_experts_per_tok": self.per_token,
            "moe_intermediate_size": self.mlp,
            "norm_topk_prob": self.normalised,
            "decoder_sparse_step": self.step,
            "mlp_only_layers": list(self.dense_layers),
        }


class DeltaRule(Struct, frozen=True, kw_only=True):
    """The layers that keep a state in place of keys and values (areal_q/models/layers/gated_delta.py)."""

    layers: tuple[int, ...]
    key_heads: Size
    value_heads: Size
    key_dim: Size
    """Width of a head of queries, and of one of keys"""
    value_dim: Size
    kernel: Size
    """Number of tokens, its own included, that the convolution sums over"""

    @property
    def channels(self) -> int:
        """Number of queries', keys' and values' channels together"""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_numbers(self) -> int:
        """What a layer keeps of a text: its heads' states, and the inputs that the next token's sums need."""
        states = self.value_heads * self.key_dim * self.value_dim
        return states + (self.kernel - 1) * self.channels

    def tensors(self, at: str, width: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a layer's tensors by name, each of which begins with `at`."""
        heads, values = self.value_heads, self.value_heads * self.value_dim
        return {
            f"{at}dt_bias": (heads,),
            f"{at}A_log": (heads,),
            f"{at}conv1d.weight": (self.channels, 1, self.kernel),
            f"{at}norm.weight": (self.value_dim,),
            f"{at}out_proj.weight": (width, values),
            f"{at}in_proj_qkv.weight": (self.channels, width),
            f"{at}in_proj_z.weight": (values, width),
            f"{at}in_proj_b.weight": (heads, width),
            f"{at}in_proj_a.weight": (heads, width),
        }

    def to_hf(self) -> dict[str, Any]:
        """Returns what `config.json` says of their sizes."""
        return {name: getattr(self, ours) for ours, name in _DELTA.items()}


class _ExpertSizes(Struct):
    """What it must say of a mixture of experts, and may."""

    num_experts_per_tok: Size
    moe_intermediate_size: Size
    num_experts: Size | None = None
    num_local_experts: Size | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[int] | None = None
    shared_expert_intermediate_size: Size | None = None


_DELTA = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "kernel": "linear_conv_kernel_dim",
}
"""What it calls the sizes of a DeltaRule"""


class _DeltaSizes(Struct, rename=_DELTA):
    """What it may say of layers that keep a state."""

    key_heads: Size = 16
    value_heads: Size = 32
    key_dim: Size = 128
    value_dim: Size = 128
    kernel: Size = 4


_ALL_SPARSE: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": None}
_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"shared_expert_intermediate_size": 5632},
    "qwen3_next": {"shared_expert_intermediate_size": 512, "norm_topk_prob": True},
    "qwen3_5_moe_text": {"shared_expert_intermediate_size": 512},
}
"""What config.json need not say of a family's experts"""


def delta_of(family: str, hf: dict[str, Any], layers: int) -> DeltaRule | None:
    """Returns the layers that keep a state; None for a family without."""
    if family not in STATEFUL:
        return None
    return DeltaRule(layers=state_layers_of(hf, layers), **asdict(read(hf, _DeltaSizes)))


def experts_of(family: str, hf: dict[str, Any]) -> Experts | None:
    """Returns the experts that `hf` describes; None for a family without. Raises CheckpointError if a token
    asks for more experts than there are, or the numbers are otherwise not valid."""
    if family == "gpt_oss":  # all its layers have experts, as wide as it says of an MLP
        own = {"moe_intermediate_size": hf.get("intermediate_size"), "norm_topk_prob": True}
        own |= _ALL_SPARSE | {"shared_expert_intermediate_size": None}
        hf = {"num_experts_per_tok": 4} | hf | own
    elif family == "qwen3_5_moe_text":
        hf = hf | _ALL_SPARSE | {"norm_topk_prob": True}
    elif family not in ("qwen2_moe", "qwen3_moe", "qwen3_next"):
        return None
    sizes = read(_EXPERTS.get(family, {}) | hf, _ExpertSizes)
    count = sizes.num_local_experts or sizes.num_experts
    if count is None:
        raise CheckpointError("num_experts is missing")
    if sizes.num_experts_per_tok > count:
        raise CheckpointError(f"{sizes.num_experts_per_tok} of {count} experts a token")
    return Experts(
        count=count,
        per_token=sizes.num_experts_per_tok,
        mlp=sizes.moe_intermediate_size,
        normalised=sizes.norm_topk_prob,
        step=sizes.decoder_sparse_step,
        dense_layers=tuple(sizes.mlp_only_layers or ()),
        shared=None if family == "qwen3_moe" else sizes.shared_expert_intermediate_size,
    )


def read(hf: dict[str, Any], kind: type[_T]) -> _T:
    """Returns those entries of `hf` that `kind` names. Raises CheckpointError for one that does not fit."""
    return fitted(hf, kind, CheckpointError)
