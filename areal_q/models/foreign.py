"""What `config.json` says of a model of any family that transformers computes. Imports neither torch nor
transformers."""

import re
from typing import Any

from areal_q.errors import CheckpointError

COMPUTED_BY = "computed_by"
"""Key that marks such a `config.json` in checkpoints and manifests; exported files do not have it."""
TRANSFORMERS = "transformers"
TRANSPOSED = ("gpt2", "openai-gpt")
"""Families whose files have the linears of the layers as [in, out]"""
NO_LIMIT = 1 << 17
"""Positions of a model that names no bound, as with ALiBi"""
_BY_LENGTH = ("dynamic", "longrope")
"""Ways to stretch RoPE that depend on how long a text is"""
_NAMES = {
    "vocab_size": ("vocab_size",),
    "width": ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
}
"""Names of sizes in the families, which all have them"""
_SAID = re.compile(
    r"(torch_)?dtype|architectures|use_cache|transformers_version|.*_token_id|_name.*"
)
"""Keys that change nothing in what a model computes"""
_MLP = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")


def sizes_of(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a DecoderConfig, but for `foreign`. Raises CheckpointError for RoPE that depends on
    how long a text is, and for a size that is missing: a model that is more than a causal language model has
    its sizes in a table below."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    for table in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if (kind := table.get("rope_type", table.get("type"))) in _BY_LENGTH:
            raise CheckpointError(
                f"rope type {kind!r}: a token's log-prob would change as its text grows"
            )
    sizes: dict[str, Any] = {field: _first(hf, names) for field, names in _NAMES.items()}
    if missing := [field for field, size in sizes.items() if size is None]:
        raise CheckpointError(
            f"{hf.get('model_type')} is no language model alone: it does not say {_NAMES[missing[0]][0]}"
        )
    width, heads = sizes["width"], sizes["heads"]
    return {
        "family": hf["model_type"],
        **sizes,
        "kv_heads": _first(hf, ("num_key_value_heads", "num_kv_heads")) or heads,
        "head_dim": _first(hf, ("head_dim",)) or max(1, width // heads),
        "mlp": _first(hf, _MLP) or 4 * width,
        "max_positions": _first(hf, _POSITIONS) or NO_LIMIT,
        "tied": bool(hf.get("tie_word_embeddings", True)),
        "bos_id": hf.get("bos_token_id"),
        "eos_ids": ids_of(hf.get("eos_token_id")),
        "pad_id": hf.get("pad_token_id"),
    }


def ids_of(eos: int | list[int] | None) -> tuple[int, ...]:
    """Returns the ids that `eos_token_id` names: one, several or none."""
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)


def computing(hf: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the part of a `config.json` that tells what a model computes."""
    return {key: value for key, value in (hf or {}).items() if not _SAID.fullmatch(key)}


def _first(hf: dict[str, Any], names: tuple[str, ...]) -> int | None:
    """Returns the first of these numbers that there is; of one for each layer, the largest."""
    for name in names:
        found = hf.get(name)
        found = max(found, default=None) if isinstance(found, list) else found
        if isinstance(found, int) and found > 0:
            return found
    return None
