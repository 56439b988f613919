"""Number formats: one definition for the engine, the learner and the wire."""

from areal_q.quant.registry import FORMATS
from areal_q.quant.state_dict import dequantize_state, is_quantized, quantize_state

__all__ = ["FORMATS", "dequantize_state", "is_quantized", "quantize_state"]
