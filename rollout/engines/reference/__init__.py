"""The reference engine in torch: continuous batching over a KV cache in pages."""

import logging
from typing import TYPE_CHECKING, get_args

from areal_q.config import TorchEngine
from areal_q.config.run import FormatName
from rollout.engines.base import Capabilities

if TYPE_CHECKING:
    from rollout.engines.reference.ops import Ops

CAPABILITIES = Capabilities(
    formats=frozenset(get_args(FormatName)),
    kv_on_update=frozenset({"keep", "recompute"}),
    kv_cache=frozenset({"auto", "fp8"}),
    kv_scales=True,
    routes=True,
)
logger = logging.getLogger(__name__)


def build_ops(config: TorchEngine) -> "Ops":
    """Returns the operations for `config`. Without numba they are plain torch, and a warning is logged."""
    from rollout.engines.reference.ops import TorchOps

    if config.device != "cpu" or not config.fused:
        return TorchOps()
    try:
        from rollout.engines.reference.ops_numba import FusedOps
    except ImportError as error:  # a platform for which numba has no wheel
        logger.warning("decoding in plain torch, which is slower: %s", error)
        return TorchOps()
    return FusedOps(config.dtype)
