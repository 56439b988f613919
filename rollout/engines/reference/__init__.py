"""The reference engine in torch: continuous batching over a KV cache in pages."""

from typing import get_args

from areal_q.config.run import FormatName
from rollout.engines.base import Capabilities

CAPABILITIES = Capabilities(
    formats=frozenset(get_args(FormatName)),
    kv_on_update=frozenset({"keep", "recompute"}),
    kv_cache=frozenset({"auto", "fp8"}),
    kv_scales=True,
    routes=True,
)
