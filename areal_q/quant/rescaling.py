"""Rescaling that preserves the function of a decoder: what one parameter gives out, others read.

For each channel j between a writer and its readers, s_j may be any positive number:

    writer's channel j ← · s_j,    readers' column j ← / s_j

The writers of a layer, and their readers: `input_layernorm` (q, k, v), `post_attention_layernorm` (gate, up,
and in a mixture of experts the router, the experts and a shared expert with its gate: quantized or not, since
a norm cannot be scaled for some of its readers), `up_proj` (down_proj of the same MLP, as the product with the
gate is linear in it), and `v_proj` with its bias (o_proj, as attention averages values channel by channel; the
heads that share a value head share its scales). Biases of readers act after the product and stay; so do the
per-head norms of q and k (Qwen3). The function stays the same in real arithmetic, and bit for bit where s is a
power of two.

Of a model that transformers computes only the linears are known. There each linear divides its own input by s,
which is published beside its weight: no writer is needed, and the function stays the same whatever the layers
are.

Smoothing (smoothing.py) chooses s by channel for all of them. UAQ, update-aware quantization (QuRL §4.3), is
one number s for the norms alone, applied once before training:

    norm weight ← norm weight · s,    W ← W · (1/s)

W is s times smaller, hence its absolute quantization error too, while its gradient is s times larger: relative
to the error an update grows by s² under SGD and by s under Adam and Muon, whose steps do not depend on the
gradient's scale. The codes stay the same where scales are real numbers, so that under Adam this is a choice of
learning rates (docs/stability.md, with measurements).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from areal_q.quant.linears import is_quantized

_FED_BY_NORM = {
    "input_layernorm": re.compile(r"self_attn\.[qkv]_proj\.weight"),
    "post_attention_layernorm": re.compile(
        r"(?:mlp|block_sparse_moe)\.(?:"
        r"(?:experts\.\d+\.|shared_experts?\.)?(?:gate|up)_proj\.weight|"
        r"experts\.\d+\.w[13]\.weight|experts\.gate_up_proj|"
        r"gate\.weight|shared_expert_gate\.weight)"
    ),
}
"""Parameters within a layer that read a norm's output, in checkpoints and in transformers' fused experts."""
_FED_BY_OTHERS = re.compile(
    r"self_attn\..*|(?:input|post_attention)_layernorm\.weight|.*\.down_proj(?:\.weight)?|.*\.w2\.weight|.*bias"
)
_FEEDS = {"v_proj": "o_proj", "up_proj": "down_proj", "w3": "w2"}
"""Linears whose outputs another one beside them reads, and that one."""


@dataclass(frozen=True)
class Pair:
    """A module that writes channels, and the weights whose columns read them."""

    writer: str
    """The module's name, such as `model.layers.0.input_layernorm`; where a linear divides its own input, a name
    that no module has, such as `model.layers.0.mlp.fc1.input`."""
    readers: tuple[str, ...]
    """The names of the weights, such as `model.layers.0.self_attn.q_proj.weight`."""

    @property
    def written(self) -> set[str]:
        """The names that the writer's weight and bias have, if it has both."""
        return {f"{self.writer}.weight", f"{self.writer}.bias"}

    @property
    def norm(self) -> bool:
        """True if the writer is a norm."""
        return self.writer.endswith("layernorm")


def pairs_of(names: Iterable[str]) -> list[Pair]:
    """Returns the pairs among the parameters `names` of a decoder, under Hugging Face names. Raises ValueError
    if there are none, or it is not known what feeds a parameter of a layer."""
    layers: dict[str, list[str]] = {}
    for name in names:
        if found := re.match(r"(.*layers\.\d+)\.(.*)", name):
            layers.setdefault(found[1], []).append(found[2])
    pairs = [pair for layer, inside in layers.items() for pair in _pairs_in(layer, inside)]
    if not pairs:
        raise ValueError("no decoder layers among the names")
    return pairs


def inputs_of(names: Iterable[str]) -> list[Pair]:
    """Returns a pair for each linear among the parameters `names` that a format applies to: it divides its own
    input."""
    return [Pair(f"{n.removesuffix('.weight')}.input", (n,)) for n in names if is_quantized(n)]


def _pairs_in(layer: str, inside: list[str]) -> list[Pair]:
    readers: dict[str, list[str]] = {norm: [] for norm in _FED_BY_NORM}
    for name in inside:
        norm = next((n for n, fed in _FED_BY_NORM.items() if fed.fullmatch(name)), None)
        if norm is not None:
            readers[norm].append(name)
        elif not _FED_BY_OTHERS.fullmatch(name):
            raise ValueError(f"what feeds {layer}.{name} is not known")
        parent, _, child = name.removesuffix(".weight").rpartition(".")
        if name.endswith(".weight") and child in _FEEDS:
            readers[f"{parent}.{child}"] = [f"{parent}.{_FEEDS[child]}.weight"]
    found = set(inside)
    return [
        Pair(f"{layer}.{writer}", tuple(f"{layer}.{name}" for name in fed))
        for writer, fed in readers.items()
        if fed and found.issuperset(fed)
    ]


@dataclass(frozen=True)
class Fold:
    """What to multiply a parameter by; None is 1."""

    rows: Tensor | None = None
    """float32 [out], also of a norm or a bias."""
    columns: Tensor | None = None
    """float32 [in]"""
    clip: Tensor | None = None
    """Share, 0 … 1, of the ranges of the product that int4's scales cover, float32 [out, ⌈in/group⌉]."""
    at_input: bool = False
    """True if the linear itself divides its input by `columns`, which are published beside its weight."""

    def of(self, parameter: Tensor) -> Tensor:
        """Returns the product, [out] or [out, in]."""
        product = parameter.detach()
        if self.columns is not None:
            product = product * self.columns
        if self.rows is not None:
            product = product * (self.rows if product.dim() == 1 else self.rows[:, None])
        return product

    def factors(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Returns those of the columns [in] and of the rows [out] of `weight`."""
        columns, rows = self.columns, self.rows
        columns = weight.new_ones(weight.shape[1]) if columns is None else columns
        return columns, weight.new_ones(weight.shape[0]) if rows is None else rows


def folds_of(
    pairs: Iterable[Pair],
    state: Mapping[str, Tensor],
    scales: Mapping[str, Tensor],
    head_dim: int,
) -> dict[str, Fold]:
    """Returns what the `pairs` of `state` are multiplied by, by the parameters' names: a writer by 1/s, its
    readers by s. `scales` has s, float32 [channels], by the writer's name; `head_dim` is the width of a head,
    for readers that share value heads."""
    rows: dict[str, Tensor] = {}
    columns: dict[str, Tensor] = {}
    alone: set[str] = set()
    for pair in pairs:
        s, written = scales[pair.writer], pair.written & state.keys()
        rows |= dict.fromkeys(written, 1 / s)
        columns |= {n: by_column(s, state[n].shape[-1], head_dim) for n in pair.readers}
        alone.update(() if written else pair.readers)
    return {n: Fold(rows.get(n), columns.get(n), at_input=n in alone) for n in rows | columns}


def channels_of(pair: Pair, state: Mapping[str, Tensor]) -> int:
    """Returns how many channels are scaled: those that the writer has, or the columns of a linear alone."""
    writer = state.get(f"{pair.writer}.weight")
    return state[pair.readers[0]].shape[1] if writer is None else writer.shape[0]


def by_column(s: Tensor, columns: int, head_dim: int) -> Tensor:
    """Returns the writer's s [channels] for each of a reader's columns: each value head's for all heads that
    share it."""
    if len(s) == columns:
        return s
    return s.view(-1, head_dim).repeat_interleave(columns // len(s), 0).flatten()


def by_channel(largest: Tensor, channels: int, head_dim: int) -> Tensor:
    """Returns the largest of a reader's numbers [columns] for each of the writer's channels, [channels]."""
    if len(largest) == channels:
        return largest
    return largest.view(channels // head_dim, -1, head_dim).amax(1).flatten()


def apply_uaq(model: nn.Module | Mapping[str, Tensor], s: float) -> None:
    """Rescales a decoder, or its state dict under Hugging Face names, in place.

    s = 1 changes nothing. Raises ValueError when s is not positive, there is nothing to rescale, or a
    parameter of a layer is of an unknown kind.
    """
    if not s > 0:
        raise ValueError(f"UAQ's scale must be positive, not {s}")
    state = model.state_dict() if isinstance(model, nn.Module) else model
    with torch.no_grad():
        for pair in pairs_of(state):
            if pair.norm:
                state[f"{pair.writer}.weight"].mul_(s)
                for name in pair.readers:
                    state[name].mul_(1 / s)


def fold_back(model: nn.Module | Mapping[str, Tensor], s: float) -> None:
    """Undoes `apply_uaq(model, s)`: an exported checkpoint is in the original parameterisation.

    Equal to the original to float rounding, and bit for bit when s is a power of two.
    """
    apply_uaq(model, 1 / s)
