"""Bytes that a version of the weights puts on the wire, as a whole and as the difference to the one before."""

import math
from typing import NamedTuple

from areal_q.checks.memory import linear_weights, trained_weights, version_bytes
from areal_q.config import Run
from areal_q.models import DecoderConfig

DELTA_RATIOS = {
    "bf16": (122, 30, 8.0),
    "int8": (800, 220, 33.5),
    "fp8": (984, 211, 43.4),
    "fp8-channel": (650, 184, 34.3),
    "int4": (7537, 1381, 233),
    "int4-fp8": (7481, 1366, 255),
    "nvfp4": (5741, 1032, 167),
    "mxfp4": (7034, 1281, 213),
    "nf4": (119, 85, 53.8),
}
"""How many times smaller a delta was than all weights in bfloat16, at the rates of RATES: that of one Adam
step of a model of 100M parameters, and those of the quickstart (bench/README.md, Weights on the wire)"""
RATES = (1e-6, 1e-5, 1.5e-4)
_ALIKE = {"int8-weight": "int8", "fp8-weight": "fp8-channel", "int4-g32": "int4"}
_REST_FP32 = 1.76
"""Bytes of a delta for a weight that no format applies to, where these travel in float32: all of them move"""
ZEROMQ_SHARE = 0.7
"""The part of a card's rate that ZeroMQ moves (docs/sizing.md)"""


class Wire(NamedTuple):
    snapshot: float
    """Bytes of a whole version."""
    delta: float
    """Bytes of the difference that a step makes."""


def wire(run: Run, shape: DecoderConfig) -> Wire:
    """Returns about how many bytes a version takes. How much of it a step changes depends on the size of the
    weights beside that of a step: a delta may be several times smaller or larger."""
    snapshot = version_bytes(run, shape)
    if run.learner.lora:
        return Wire(snapshot, 4.0 * trained_weights(run, shape))
    delta = 2 * shape.weights / _ratio(run.rollout.format, run.learner.optimizer.rate)
    if run.rollout.unquantized != "bf16":
        delta += _REST_FP32 * (shape.weights - linear_weights(shape))
    return Wire(snapshot, min(delta, snapshot))


def _ratio(format: str, lr: float) -> float:
    """Returns the entry of DELTA_RATIOS for `lr`, on straight lines between the logarithms of both."""
    known = DELTA_RATIOS[_ALIKE.get(format, format)]
    place = 0 if lr < RATES[1] else 1
    (a, b), (x, y) = RATES[place : place + 2], known[place : place + 2]
    slope = math.log(y / x) / math.log(b / a)
    return max(1.0, x * (max(lr, 1e-9) / a) ** slope)
