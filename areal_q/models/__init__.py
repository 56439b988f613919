"""Decoder-only transformers, and their Hugging Face checkpoints.

`areal-q check` reads a model's files without torch, so that what needs torch is imported when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from areal_q.models.config import DecoderConfig, Experts
from areal_q.models.hf.weight_files import declared_dtype, load_config

if TYPE_CHECKING:
    from areal_q.models.decoder import Decoder, init_weights
    from areal_q.models.hf.checkpoint import (
        load_decoder,
        load_frozen,
        load_model,
        new_decoder,
        save_decoder,
    )
    from areal_q.models.layers.moe import Routing
    from areal_q.models.layers.rope import apply_rope, rope_tables
    from areal_q.models.packed_layout import PackedLayout

__all__ = [
    "Decoder",
    "DecoderConfig",
    "Experts",
    "PackedLayout",
    "Routing",
    "apply_rope",
    "declared_dtype",
    "init_weights",
    "load_config",
    "load_decoder",
    "load_frozen",
    "load_model",
    "new_decoder",
    "rope_tables",
    "save_decoder",
]
_WITH_TORCH = {
    **dict.fromkeys(("Decoder", "init_weights"), "decoder"),
    **dict.fromkeys(
        ("load_decoder", "load_frozen", "load_model", "new_decoder", "save_decoder"),
        "hf.checkpoint",
    ),
    **dict.fromkeys(("apply_rope", "rope_tables"), "layers.rope"),
    "Routing": "layers.moe",
    "PackedLayout": "packed_layout",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
