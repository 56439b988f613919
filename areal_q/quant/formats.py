"""Every number format by the name that settings and manifests use."""

from areal_q.quant.base import Format
from areal_q.quant.bf16 import Bf16
from areal_q.quant.int8 import Int8

FORMATS: dict[str, Format] = {"bf16": Bf16(), "int8": Int8()}
