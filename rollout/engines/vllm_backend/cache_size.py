"""Chooses the size of vLLM's KV cache on a CPU, and the longest sequence that fits into it.

vLLM refuses to start if its cache cannot hold one sequence of full length, in a message that names vLLM's own
settings. Both numbers are therefore chosen here, from `kv_cache_bytes`, `max_positions` and the model's shape.
"""

import logging
from typing import NamedTuple

from areal_q.config import VllmEngine
from areal_q.errors import ConfigError
from areal_q.models import DecoderConfig

logger = logging.getLogger(__name__)

LEAST_BYTES, MOST_BYTES = 256 << 20, 1 << 30
"""Bounds on the cache if `kv_cache_bytes` is not set; between them it holds one sequence of full length."""
_BLOCK = 128
"""Positions in a block of vLLM's cache on a CPU; a sequence takes whole blocks."""
RESERVED_BLOCKS = 1
"""Blocks that vLLM keeps for itself"""
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


class Cache(NamedTuple):
    bytes: int
    """Size in each process of `tensor_parallel`"""
    positions: int
    """Most tokens of prompt and response together"""


def cache_for(config: VllmEngine, model: DecoderConfig, dtype: str) -> Cache:
    """Returns the cache for activations of `dtype`. Raises ConfigError if `max_positions` do not fit into
    `kv_cache_bytes`.

    Qwen2.5-0.5B (24 layers, 2 key heads of 64, 32,768 positions) takes 24,576 bytes a position in float32. The
    default is therefore 771 MiB, for all positions; kv_cache_bytes = 256 MiB holds 10,752 of them.
    """
    item = 1 if config.kv_cache == "fp8" else ITEM_BYTES[dtype]
    heads = max(1, model.kv_heads // config.tensor_parallel)
    block_bytes = _BLOCK * 2 * model.layers * heads * model.head_dim * item
    asked = config.max_positions or model.max_positions
    needed = (-(-asked // _BLOCK) + RESERVED_BLOCKS) * block_bytes
    size = config.kv_cache_bytes or max(LEAST_BYTES, needed)
    if not config.kv_cache_bytes and not config.max_positions:
        size = min(size, MOST_BYTES)
    held = (size // block_bytes - RESERVED_BLOCKS) * _BLOCK
    if held <= 0 or (config.max_positions and held < asked):
        raise ConfigError(
            f"rollout.engine.kv_cache_bytes = {size} holds {max(0, held)} positions of this model: "
            f"{asked} positions (rollout.engine.max_positions, or the model's own) take {needed} bytes"
        )
    if held < asked:
        logger.warning(
            "vLLM's KV cache of %d bytes holds %d of the model's %d positions; longer requests are refused: "
            "raise rollout.engine.kv_cache_bytes, or name rollout.engine.max_positions",
            size,
            held,
            asked,
        )
    return Cache(size, min(asked, held))
