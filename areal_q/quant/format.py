"""What a number format is: how a weight is stored and what it stands for. areal_q/linear multiplies by it.

Shapes: a weight is [out, in]; `parts` are the tensors published for it, by the suffix that
follows the parameter's prefix. So `model.layers.0.mlp.up_proj` in int8 is {"weight": codes,
"weight_scale": scales}, published as `….up_proj.weight` and `….up_proj.weight_scale`. Suffixes and
layouts are those of public checkpoints (DeepSeek's FP8, compressed-tensors, bitsandbytes), so that an
engine takes the tensors unchanged.

A format divides a weight into blocks that share a scale, and derives the scale from the largest
magnitude of the block: its *range*. Ranges are a step of their own, because they may come from
elsewhere: from the version before (sticky_scales.py) or from the linears that an engine fuses (state_dict.py).

To add a format: docs/extending.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from areal_q.errors import QuantizationError
from areal_q.kernels.quantize import dispatch
from areal_q.kernels.quantize.dispatch import LARGEST, TOO_LARGE
from areal_q.quant.activations import E4M3_MAX, SMALLEST_SCALE, to_e4m3
from areal_q.quant.linears import check_inputs
from areal_q.quant.rescaling import Fold

Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Ranges:
    """The largest magnitudes that the scales of a weight must cover."""

    blocks: Tensor
    """float32, of each block, in the shape of the format's block scales."""
    whole: Tensor
    """float32 scalar: of the tensor, or of all tensors that an engine fuses with it."""


class Format(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Keys of the parts; the codes come first."""
        ...

    @property
    def code_bits(self) -> int: ...

    @property
    def shared_scale(self) -> bool:
        """True if linears that an engine fuses must agree on `Ranges.whole`."""
        ...

    def ranges(self, weight: Tensor) -> Ranges | None:
        """Measured ranges of a float `weight` [out, in]; None for a format without scales."""
        ...

    def quantize(
        self, weight: Tensor, name: str, ranges: Ranges | None = None, fold: Fold | None = None
    ) -> Parts:
        """Parts of a float `weight` [out, in] times `fold`, scaled for `ranges` (None: as measured); what lies
        beyond them is clamped. Raises QuantizationError naming the tensor; one that is not finite may pass
        if `ranges` are given, for which its own were measured and checked (`check_ranges`)."""
        ...

    def dequantize(self, parts: Parts) -> Tensor:
        """Returns the real numbers that `parts` stand for, float32 [out, in]."""
        ...


def checked_float32(weight: Tensor, name: str, fold: Fold | None = None) -> Tensor:
    """Returns `weight` times `fold` as float32 [out, in].

    Raises QuantizationError for another rank, NaN, an infinity or a magnitude above LARGEST.
    """
    w = as_float32(weight, name, fold)
    low, high = torch.stack(w.aminmax()).tolist() if w.numel() else (0.0, 0.0)
    if not (low >= -LARGEST and high <= LARGEST):
        raise QuantizationError(f"{name}: {TOO_LARGE}")
    return w


def as_float32(weight: Tensor, name: str, fold: Fold | None = None) -> Tensor:
    """Returns `weight` times `fold` as float32 [out, in]. Raises QuantizationError for another rank or
    dtype."""
    if weight.dim() != 2 or not weight.is_floating_point():
        raise QuantizationError(
            f"{name}: {weight.dtype} {list(weight.shape)} is not a float [out, in]"
        )
    w = weight.detach().to(torch.float32)
    return fold.of(w) if fold else w


def checked_ranges(measure: Callable[[Tensor], Ranges], w: Tensor, name: str) -> Ranges:
    """Ranges of `w`. Raises QuantizationError for NaN, an infinity or a magnitude above LARGEST."""
    ranges = measure(w)
    check_ranges(ranges, name)
    return ranges


def check_ranges(ranges: Ranges, name: str) -> None:
    """Raises QuantizationError for ranges of a weight that `checked_ranges` refuses."""
    if not ranges.whole <= LARGEST:
        raise QuantizationError(f"{name}: {TOO_LARGE}")


def blocked(x: Tensor, size: int) -> Tensor:
    """x [out, in] as [out, ⌈in / size⌉, size], the last block filled up with zeros."""
    rest = -x.shape[1] % size
    padded = torch.nn.functional.pad(x, (0, rest)) if rest else x
    return padded.reshape(x.shape[0], -1, size)


def unblocked(x: Tensor, width: int) -> Tensor:
    """Undoes `blocked`: [out, blocks, size] as [out, width]."""
    return x.flatten(1)[:, :width]


def row_ranges(weight: Tensor, size: int | None = None) -> Ranges:
    """Ranges of rows [out, 1], or of blocks of `size` along each row [out, ⌈in / size⌉]."""
    x = weight.detach().to(torch.float32)
    size = size or max(1, x.shape[1])
    blocks = dispatch.row_blocks(x, size)
    if blocks is None:
        blocks = blocked(x.abs(), size).amax(2)
    return Ranges(blocks, blocks.amax())


def scales_for(ranges: Tensor, largest: float) -> Tensor:
    """float32 scales under which a range is the code `largest`."""
    # As a tensor: dividing by a Python number may be done as a product with its reciprocal.
    divisor = torch.full((), largest, device=ranges.device)
    return (ranges / divisor).clamp_(min=SMALLEST_SCALE)


def bf16_scaled(ranges: Ranges, largest: float) -> Ranges:
    """Returns `ranges` moved to the nearest whose scales bfloat16 holds, as engines of 16 bits do."""
    scale = scales_for(ranges.blocks, largest).to(torch.bfloat16)
    return Ranges(scale.to(torch.float32) * largest, ranges.whole)


class EightBits:
    """A format of codes of eight bits, here E4M3, with a float32 scale for each row."""

    name = ""
    suffixes = ("weight", "weight_scale")
    code_bits = 8
    shared_scale = False
    dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    largest: ClassVar[float] = E4M3_MAX
    block: ClassVar[int | None] = None
    """Rows and columns of the blocks that have a scale; None for whole rows"""

    def ranges(self, weight: Tensor) -> Ranges:
        return row_ranges(weight)

    def nearest(self, scaled: Tensor) -> Tensor:
        """Returns the codes nearest to a weight that was divided by its scales."""
        return to_e4m3(scaled)

    def spread(self, scale: Tensor, shape: torch.Size) -> Tensor:
        """Returns `scale` as it multiplies a weight of that shape."""
        return scale

    def quantize(
        self, weight: Tensor, name: str, ranges: Ranges | None = None, fold: Fold | None = None
    ) -> Parts:
        w = as_float32(weight, name)
        check_inputs(self.name, w.shape[1], name)
        blocks = (self.block or 1, self.block or w.shape[1])
        found = dispatch.eight_bits(
            w, name, self.dtype, blocks, ranges and ranges.blocks, factors=fold and fold.factors(w)
        )
        if found is None:
            w = checked_float32(w, name, fold)
            scale = scales_for((ranges or self.ranges(w)).blocks, self.largest)
            found = self.nearest(w / self.spread(scale, w.shape)), scale
        return dict(zip(self.suffixes, found, strict=True))

    def dequantize(self, parts: Parts) -> Tensor:
        codes, scale = (parts[suffix] for suffix in self.suffixes)
        return codes.to(torch.float32).mul_(self.spread(scale, codes.shape))
