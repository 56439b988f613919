"""Chooses the operations between the GEMMs for an engine's settings: plain torch or numba."""

import logging

from areal_q.config import TorchEngine
from rollout.engines.reference.ops import Ops, TorchOps

logger = logging.getLogger(__name__)


def build_ops(config: TorchEngine) -> Ops:
    """Returns the operations for `config`. Without numba they are plain torch, and a warning is logged."""
    if config.device != "cpu" or not config.fused:
        return TorchOps()
    try:
        from rollout.engines.reference.ops_numba import FusedOps
    except ImportError as error:  # a platform for which numba has no wheel
        logger.warning("decoding in plain torch, which is slower: %s", error)
        return TorchOps()
    return FusedOps(config.dtype)
