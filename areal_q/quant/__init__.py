"""Number formats: one definition for the engine, the learner and the wire.

`areal-q check` reads a model's files without torch, so that what needs torch is imported when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from areal_q.quant.linears import is_quantized

if TYPE_CHECKING:
    from areal_q.quant.registry import FORMATS
    from areal_q.quant.state_dict import dequantize_state, quantize_state

__all__ = ["FORMATS", "dequantize_state", "is_quantized", "quantize_state"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "registry" if name == "FORMATS" else "state_dict"
    return getattr(import_module(f"{__name__}.{module}"), name)
