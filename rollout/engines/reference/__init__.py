"""The reference engine in torch: continuous batching over a KV cache in pages."""

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
    sampling_mask=True,
)


def build_ops(config: TorchEngine) -> "Ops":
    """Returns the operations between the GEMMs for an engine's settings: plain torch or numba."""
    from rollout.engines.reference.ops import TorchOps

    if config.device != "cpu" or not config.fused:
        return TorchOps()
    from rollout.engines.reference.ops_numba import FusedOps  # compiles kernels, if none are cached

    return FusedOps(config.dtype)
