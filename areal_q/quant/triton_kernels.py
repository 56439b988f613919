"""The 8-bit formats on a GPU: kernels.quantize in Triton, one program for each block that shares a scale.

A block is loaded once, and stays in registers from the search for its largest magnitude to the store of
its codes. E4M3 is rounded by hand, in integers, as on the CPU: the results are the same bits on every
device, and under Triton's interpreter, whose own cast to FP8 loses a carry.
"""
# pyright: reportMissingImports=false

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _quantize(
    w, given, previous, codes, scales, moved, worst, fold, rows, columns, width, largest,
    E4M3: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    GIVEN: tl.constexpr, PREVIOUS: tl.constexpr,
):  # fmt: skip
    p, q = tl.program_id(0), tl.program_id(1)
    block = p * tl.num_programs(1) + q
    o = p * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    j = tl.arange(0, WIDTH)[None, :]
    i = q * width + j
    inside = (o < rows) & (j < width) & (i < columns)
    at = o.to(tl.int64) * columns + i
    x = tl.load(w + at, mask=inside, other=0.0) * fold
    top = tl.max(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1), axis=0)
    tl.store(worst + block, top)
    covered = tl.load(given + block) if GIVEN else top.to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(covered, largest), 1.1754943508222875e-38)
    tl.store(scales + block, scale)
    y = tl.div_rn(x, scale + tl.zeros_like(x))
    if E4M3:
        bits = y.to(tl.int32, bitcast=True)
        magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
        shifted = magnitude.to(tl.float32, bitcast=True) + 24576.0
        subnormal = shifted.to(tl.int32, bitcast=True) - 0x46C00000
        code = tl.where(magnitude < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)
    else:
        clamped = tl.minimum(tl.maximum(y, -127.0), 127.0)
        code = (clamped + 12582912.0).to(tl.int32, bitcast=True) & 0xFF
    code = code.to(tl.uint8)
    tl.store(codes + at, code, mask=inside)
    if PREVIOUS:
        old = tl.load(previous + at, mask=inside, other=0)
        differs = ((old != code) & inside).to(tl.int32)
        tl.store(moved + block, tl.sum(tl.sum(differs, axis=1), axis=0))


def quantize(
    weight: Tensor, fold: float, dtype: torch.dtype, block: tuple[int, int],
    given: Tensor | None, previous: Tensor | None,
) -> tuple[Tensor, Tensor, int, int]:  # fmt: skip
    """(codes, scales, codes that moved, bits of the largest magnitude), as kernels.quantize."""
    (rows, columns), (height, width) = weight.shape, block
    grid = (-(-rows // height), -(-columns // width))
    codes = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scales = weight.new_empty(grid)
    moved, worst = (torch.zeros(grid, dtype=torch.int32, device=weight.device) for _ in range(2))
    _quantize[grid](  # pyright: ignore[reportIndexIssue]
        weight, scales if given is None else given.contiguous(),
        codes.view(torch.uint8) if previous is None else previous.contiguous().view(torch.uint8),
        codes.view(torch.uint8), scales, moved, worst, fold, rows, columns, width,
        127.0 if dtype == torch.int8 else 448.0,
        E4M3=dtype != torch.int8, HEIGHT=height, WIDTH=triton.next_power_of_2(width),
        GIVEN=given is not None, PREVIOUS=previous is not None,
    )  # fmt: skip
    return codes, scales, int(moved.sum()), int(worst.max())
