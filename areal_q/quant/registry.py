"""Every number format by the name that settings and manifests use."""

from areal_q.quant.format import Format
from areal_q.quant.formats.bf16 import Bf16
from areal_q.quant.formats.fp8_block import Fp8
from areal_q.quant.formats.fp8_channel import Fp8Channel, Fp8Weight
from areal_q.quant.formats.int4 import Int4, Int4G32
from areal_q.quant.formats.int4_fp8 import Int4Fp8
from areal_q.quant.formats.int8 import Int8, Int8Weight
from areal_q.quant.formats.mxfp4 import Mxfp4
from areal_q.quant.formats.nf4 import Nf4
from areal_q.quant.formats.nvfp4 import Nvfp4

_ALL = (
    Bf16(), Int8(), Int8Weight(), Fp8(), Fp8Channel(), Fp8Weight(), Int4(), Int4G32(), Int4Fp8(), Nvfp4(),
    Mxfp4(), Nf4(),
)  # fmt: skip

FORMATS: dict[str, Format] = {format.name: format for format in _ALL}
