"""The map from Hugging Face's tensors to Megatron's, and to the parts of them that ranks have.

    q, k, v       ▶ linear_qkv     one group of query heads after the other, each with its key and value head
    gate, up      ▶ linear_fc1     on every rank its part of gate, then its part of up
    embedding, head                rows by rank; the vocabulary padded to a multiple of the ranks
    o, down       ▶ linear_proj, linear_fc2     columns by rank
    norms                          whole on every rank

All of these only rearrange numbers, so that the moments of an optimizer are mapped in the same way.
Notation: r is a rank of n tensor-parallel ones.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_q.models import DecoderConfig

TensorList = list[Tensor]


@dataclass(frozen=True)
class TensorEntry:
    """A parameter of Megatron's model, and the Hugging Face tensors of which it consists."""

    stage: int
    """The stage of the pipeline that has it."""
    name: str
    """Its name in the module of that stage."""
    sources: tuple[str, ...]
    """Names of the Hugging Face tensors."""
    part: Callable[[TensorList, int, int], Tensor]
    """The function (whole sources, r, n) → the part of rank r."""
    whole: Callable[[TensorList], TensorList]
    """The function (parts of ranks 0 … n-1) → the whole sources."""
    copy: bool = False
    """True if another stage has the same tensor, as for the head of tied embeddings."""
    owner: int | None = None
    """The one expert-parallel rank that has this tensor, as a whole; None if all have it, or a part of it."""


def entries(config: DecoderConfig, stages: int, owners: int = 1) -> Iterator[TensorEntry]:
    """Yields the entries of all stages, in the model's order. Layers are divided equally among the `stages`,
    and experts among the `owners`."""
    last, each = stages - 1, config.layers // stages
    embedding = ("model.embed_tokens.weight",)
    yield TensorEntry(0, "embedding.word_embeddings.weight", embedding, *_rows(config.vocab_size))
    for layer in range(config.layers):
        stage, index, hf = layer // each, layer % each, f"model.layers.{layer}"
        yield from _attention(config, stage, index, hf)
        if layer in config.sparse_layers:
            yield from _experts(config, stage, index, hf, owners)
        else:
            yield from _mlp(stage, f"decoder.layers.{index}.mlp", f"{hf}.mlp", None)
    yield TensorEntry(last, "decoder.final_layernorm.weight", ("model.norm.weight",), *WHOLE)
    if not config.tied:
        yield TensorEntry(
            last, "output_layer.weight", ("lm_head.weight",), *_rows(config.vocab_size)
        )
    elif stages > 1:
        rows = _rows(config.vocab_size)
        yield TensorEntry(last, "output_layer.weight", embedding, *rows, copy=True)


def _mlp(stage: int, ours: str, hf: str, owner: int | None) -> Iterator[TensorEntry]:
    names = f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"
    yield TensorEntry(stage, f"{ours}.linear_fc1.weight", names, *_GATE_UP, owner=owner)
    names = (f"{hf}.down_proj.weight",)
    yield TensorEntry(stage, f"{ours}.linear_fc2.weight", names, *COLUMNS, owner=owner)


def _experts(
    config: DecoderConfig, stage: int, index: int, hf: str, owners: int
) -> Iterator[TensorEntry]:
    assert config.experts
    ours, each = f"decoder.layers.{index}.mlp", config.experts.count // owners
    yield TensorEntry(stage, f"{ours}.router.weight", (f"{hf}.mlp.gate.weight",), *WHOLE)
    for e in range(config.experts.count):
        local = f"{ours}.experts.local_experts.{e % each}"
        yield from _mlp(stage, local, f"{hf}.mlp.experts.{e}", e // each)
    if config.experts.shared:
        gate = (f"{hf}.mlp.shared_expert_gate.weight",)
        yield from _mlp(stage, f"{ours}.shared_experts", f"{hf}.mlp.shared_expert", None)
        yield TensorEntry(stage, f"{ours}.shared_experts.gate_weight", gate, *WHOLE)


def _attention(config: DecoderConfig, stage: int, index: int, hf: str) -> Iterator[TensorEntry]:
    ours = f"decoder.layers.{index}"

    def entry(name: str, sources: tuple[str, ...], rule: tuple) -> TensorEntry:
        return TensorEntry(stage, f"{ours}.{name}", tuple(f"{hf}.{s}" for s in sources), *rule)

    yield entry("input_layernorm.weight", ("input_layernorm.weight",), WHOLE)
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        sources = tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv")
        yield entry(f"self_attention.linear_qkv.{kind}", sources, _qkv(config))
    if config.qk_norm:
        for x in "qk":
            yield entry(
                f"self_attention.{x}_layernorm.weight", (f"self_attn.{x}_norm.weight",), WHOLE
            )
    yield entry("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), COLUMNS)
    yield entry("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), WHOLE)


ROWS = (lambda whole, r, n: whole[0].chunk(n)[r], lambda parts: [torch.cat(parts)])
WHOLE = (lambda whole, r, n: whole[0], lambda parts: parts[:1])
COLUMNS = (lambda whole, r, n: whole[0].chunk(n, 1)[r], lambda parts: [torch.cat(parts, 1)])
_GATE_UP = (
    lambda whole, r, n: torch.cat([w.chunk(n)[r] for w in whole]),
    lambda parts: [torch.cat(halves) for halves in zip(*(p.chunk(2) for p in parts), strict=True)],
)


def padded(vocab_size: int, n: int) -> int:
    """Returns the rows of the embedding, padded to a multiple of n ranks. Example: 23 over 2 is 24."""
    return -(-vocab_size // n) * n


def _rows(vocab_size: int) -> tuple:
    def part(whole: TensorList, r: int, n: int) -> Tensor:
        more = padded(vocab_size, n) - vocab_size
        return torch.nn.functional.pad(whole[0], (0, 0, 0, more)).chunk(n)[r]

    return part, lambda parts: [torch.cat(parts)[:vocab_size]]


def _qkv(config: DecoderConfig) -> tuple:
    each, keys = config.heads // config.kv_heads * config.head_dim, config.head_dim

    def part(whole: TensorList, r: int, n: int) -> Tensor:
        groups = [w.unflatten(0, (config.kv_heads, -1)) for w in whole]
        return torch.cat(groups, 1).flatten(0, 1).chunk(n)[r]

    def back(parts: TensorList) -> TensorList:
        groups = torch.cat(parts).unflatten(0, (config.kv_heads, -1))
        return [w.flatten(0, 1) for w in groups.split([each, keys, keys], 1)]

    return part, back
