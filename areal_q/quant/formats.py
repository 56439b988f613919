"""Every number format by the name that settings and manifests use."""

from areal_q.quant.base import Format
from areal_q.quant.bf16 import Bf16
from areal_q.quant.fp8 import Fp8
from areal_q.quant.fp8_channel import Fp8Channel
from areal_q.quant.int4 import Int4
from areal_q.quant.int8 import Int8

FORMATS: dict[str, Format] = {f.name: f for f in (Bf16(), Int8(), Fp8(), Fp8Channel(), Int4())}
