"""Decoder-only transformers, and their Hugging Face checkpoints."""

from areal_q.models.config import DecoderConfig, Experts
from areal_q.models.decoder import Decoder, init_weights
from areal_q.models.hf.checkpoint import declared_dtype, load_config, load_decoder, save_decoder
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
    "rope_tables",
    "save_decoder",
]
