"""The number formats on a GPU: what eight_bits.py computes on a CPU, in Triton, and the same for activations.

A program holds some blocks that share a scale in registers, from the search for their largest magnitude to
the store of their codes. E4M3 is rounded by hand, in integers, as on the CPU: the results are the same bits
on every device, and under Triton's interpreter, whose own cast to FP8 loses a carry. Products and sums are
not fused, for the same reason.
"""
# pyright: reportMissingImports=false

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Numbers that a program holds where its blocks are smaller."""
PER_THREAD = 16
"""Numbers that a thread holds, where a program has no more warps than it may: few enough that none leaves the
registers, and that several programs share a multiprocessor."""
WARPS = 32
"""The most in one program."""
_ROUND = tl.constexpr(12582912.0)
"""1.5 · 2²³: adding it leaves no bits for a fraction, so it rounds half to even; the low bits are the number"""


@triton.jit
def _magnitude(x):
    """Bits of |x|: without their sign floats are ordered like integers, infinity and NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _quantize(
    w, given, codes, scales, found, rows, columns, across, width, largest,
    least_range, least_scale,
    E4M3: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SQUARE: tl.constexpr,
    GIVEN: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """One block [HEIGHT, width] where SQUARE, else HEIGHT blocks [1, width] one after the other."""
    p = tl.program_id(0)
    if SQUARE:
        block = p + tl.arange(0, 1)[:, None]
        there = block >= 0
        o, q = p // across * HEIGHT + tl.arange(0, HEIGHT)[:, None], p % across
    else:
        block = p * HEIGHT + tl.arange(0, HEIGHT)[:, None]
        o, q = block // across, block % across
        there = o < rows
    j = tl.arange(0, WIDTH)[None, :]
    i = q * width + j
    inside = (o < rows) & (j < width) & (i < columns)
    at = o.to(tl.int64) * columns + i
    x = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    top = tl.max(_magnitude(x), axis=1, keep_dims=True)
    if SQUARE:
        top = tl.max(top, axis=0, keep_dims=True)
    covered = tl.load(given + block, mask=there) if GIVEN else top.to(tl.float32, bitcast=True)
    covered = tl.maximum(covered, least_range, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.div_rn(covered, largest + tl.zeros_like(covered))
    scale = tl.maximum(scale, least_scale, propagate_nan=tl.PropagateNan.ALL)
    tl.store(scales + block, scale, mask=there)
    y = tl.div_rn(x, scale + tl.zeros_like(x))
    if E4M3:
        bits, size = y.to(tl.int32, bitcast=True), _magnitude(y)
        magnitude = tl.minimum(size, 0x43E00000)
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
        shifted = magnitude.to(tl.float32, bitcast=True) + 24576.0
        subnormal = shifted.to(tl.int32, bitcast=True) - 0x46C00000
        code = tl.where(magnitude < 0x3C800000, subnormal, normal)
        code = tl.where(size > 0x7F800000, 0x7F, code) | ((bits >> 24) & 0x80)
    else:
        clamped = tl.minimum(tl.maximum(y, -127.0), 127.0)
        code = (clamped + _ROUND).to(tl.int32, bitcast=True) & 0xFF
    tl.store(codes + at, code.to(tl.uint8), mask=inside)
    if CHECKED:
        tl.atomic_max(found, tl.max(tl.max(top, axis=1), axis=0))


@triton.jit
def _ranges(w, out, rows, columns, across, width, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """HEIGHT blocks [1, width] one after the other."""
    block = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    o, j = block // across, tl.arange(0, WIDTH)[None, :]
    i = block % across * width + j
    inside = (o < rows) & (j < width) & (i < columns)
    x = tl.load(w + o.to(tl.int64) * columns + i, mask=inside, other=0.0)
    top = tl.max(_magnitude(x), axis=1, keep_dims=True)
    tl.store(out + block, top.to(tl.float32, bitcast=True), mask=o < rows)


@triton.jit
def _nibbles(
    w, scales, borders, packed, rows, columns, across, row_bytes,
    KIND: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """HEIGHT blocks [1, WIDTH] one after the other, two codes in a byte."""
    block = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    o, q = block // across, block % across
    i = q * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (o < rows) & (i < columns)
    x = tl.load(w + o.to(tl.int64) * columns + i, mask=inside, other=0.0)
    scale = tl.load(scales + block, mask=o < rows, other=1.0)
    if KIND == "nf4":
        y = x * tl.div_rn(1.0 + tl.zeros_like(scale), scale)
        code = tl.zeros_like(y).to(tl.int32)
        for k in tl.static_range(15):
            code += (y > tl.load(borders + k)).to(tl.int32)
    elif KIND == "int4":
        y = tl.minimum(tl.maximum(tl.div_rn(x, scale + tl.zeros_like(x)), -8.0), 7.0)
        code = ((y + _ROUND).to(tl.int32, bitcast=True) + 8) & 15
    else:
        y = tl.div_rn(x, scale + tl.zeros_like(x))
        a = tl.minimum(tl.abs(y), 8.0)
        low = (a * 2.0 + _ROUND).to(tl.int32, bitcast=True) & 255
        middle = ((a + _ROUND).to(tl.int32, bitcast=True) & 255) + 2
        high = tl.minimum(((a * 0.5 + _ROUND).to(tl.int32, bitcast=True) & 255) + 4, 7)
        code = tl.where(a < 2.0, low, tl.where(a < 4.0, middle, high))
        code = code | ((y.to(tl.int32, bitcast=True) >> 28) & 8)
    even, odd = tl.split(tl.reshape(tl.where(inside, code, 0), (HEIGHT, WIDTH // 2, 2)))
    byte = (even << 4 | odd) if KIND == "nf4" else (even | odd << 4)
    b = q * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
    tl.store(
        packed + o.to(tl.int64) * row_bytes + b,
        byte.to(tl.uint8),
        mask=(o < rows) & (b < row_bytes),
    )


def quantize(
    weight: Tensor, dtype: torch.dtype, block: tuple[int, int], given: Tensor | None
) -> tuple[Tensor, Tensor, int]:
    """(codes, scales, bits of the largest magnitude), as kernels.quantize."""
    codes, scales, found = _run(weight, dtype, block, given, checked=True)
    return codes, scales, int(found)


def activations(
    x: Tensor, dtype: torch.dtype, width: int, least_range: float, least_scale: float
) -> tuple[Tensor, Tensor]:
    """(codes [T, K], scales float32 [T, ⌈K / width⌉]) of float x [T, K], as those of
    areal_q/quant/activations.py.

    A scale is max(max(largest magnitude, least_range) / the dtype's largest number, least_scale). The device
    is not waited for.
    """
    return _run(x, dtype, (1, width), floors=(least_range, least_scale))[:2]


def _run(
    x: Tensor, dtype: torch.dtype, block: tuple[int, int], given: Tensor | None = None,
    floors: tuple[float, float] = (0.0, torch.finfo(torch.float32).tiny), *, checked: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (rows, columns), (height, width) = x.shape, block
    down, across = -(-rows // height), -(-columns // width)
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(down, across, dtype=torch.float32, device=x.device)
    found = torch.zeros(int(checked), dtype=torch.int32, device=x.device)
    square, (tile, whole) = height > 1, _tile(width)
    programs = down * across if square else -(-down * across // tile)
    _quantize[(programs,)](  # pyright: ignore[reportIndexIssue]
        x, scales if given is None else given.contiguous(),
        codes.view(torch.uint8), scales, found, rows, columns, across, width,
        127.0 if dtype == torch.int8 else 448.0, *floors,
        E4M3=dtype != torch.int8, HEIGHT=height if square else tile, WIDTH=whole, SQUARE=square,
        GIVEN=given is not None, CHECKED=checked,
        **_launch(height * whole if square else tile * whole),
    )  # fmt: skip
    return codes, scales, found


def ranges(weight: Tensor, width: int) -> Tensor:
    """Returns what kernels.ranges writes, in a new tensor."""
    rows, columns = weight.shape
    across, (tile, whole) = -(-columns // width), _tile(width)
    out = torch.empty(rows, across, dtype=torch.float32, device=weight.device)
    _ranges[(-(-rows * across // tile),)](  # pyright: ignore[reportIndexIssue]
        weight, out, rows, columns, across, width,
        HEIGHT=tile, WIDTH=whole, **_launch(tile * whole),
    )  # fmt: skip
    return out


def nibbles(
    weight: Tensor, scales: Tensor, width: int, row_bytes: int, kind: str, borders: Tensor
) -> Tensor:
    """Returns what kernels.nibbles writes, in a new tensor; `width` is a power of two."""
    rows, columns = weight.shape
    across, (tile, whole) = scales.shape[1], _tile(width)
    packed = torch.empty(rows, row_bytes, dtype=torch.uint8, device=weight.device)
    _nibbles[(-(-rows * across // tile),)](  # pyright: ignore[reportIndexIssue]
        weight, scales.contiguous(), borders, packed, rows, columns, across, row_bytes,
        KIND=kind, HEIGHT=tile, WIDTH=whole, **_launch(tile * whole),
    )  # fmt: skip
    return packed


def _tile(width: int) -> tuple[int, int]:
    """(blocks of a program, numbers of a block), powers of two both."""
    whole = triton.next_power_of_2(width)
    return max(1, TILE // whole), whole


def _launch(numbers: int) -> dict[str, int | bool]:
    return {
        "num_warps": max(1, min(WARPS, numbers // (32 * PER_THREAD))),
        "enable_fp_fusion": False,
    }
