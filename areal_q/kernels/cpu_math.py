"""Functions of numbers for the loops that numba compiles, in arithmetic that LLVM can vectorize."""

import numpy as np

from areal_q.kernels.jit import FMA, ROUND, SUMS, kernel

float32, int32, uint16, uint32 = np.float32, np.int32, np.uint16, np.uint32


@kernel(fastmath=FMA)
def exp(x):
    """Returns eˣ to 2 units in the last place; 0 below -87 and e⁸⁸ above 88. It is 2ⁿ · eʳ, with eʳ by Cephes'
    polynomial.

    It uses arithmetic alone, so that LLVM can vectorize it; libm's function takes one number at a time.
    """
    y = float32(88.0) if x > float32(88.0) else x
    shifted = y * float32(1.44269504) + ROUND
    n = shifted - ROUND
    r = y - n * float32(0.693359375) + n * float32(2.12194440e-4)
    p = float32(1.9875691500e-4)
    p = p * r + float32(1.3981999507e-3)
    p = p * r + float32(8.3334519073e-3)
    p = p * r + float32(4.1665795894e-2)
    p = p * r + float32(1.6666665459e-1)
    p = p * r + float32(5.0000001201e-1)
    p = p * r * r + r + float32(1.0)
    power = int32((float32(shifted).view(int32) << int32(23)) + int32(127 << 23)).view(float32)
    return float32(0.0) if x < float32(-87.0) else p * power


inlined_exp = kernel(inline="always")(exp.py_func)
"""The function `exp` as a part of the kernel that calls it, under whose fastmath flags LLVM may reorder its
sums too. Its last bits depend on them."""


@kernel(fastmath=SUMS)
def dot(a, b):
    total = float32(0.0)
    for i in range(a.shape[0]):
        total += a[i] * b[i]
    return total


@kernel(inline="always")
def of_bf16(x):
    """Returns the float32 with the bits of a bfloat16."""
    return uint32(uint32(x) << uint32(16)).view(float32)


@kernel(inline="always")
def nearest_bf16(x):
    """Returns the bits of the bfloat16 nearest to a float32."""
    bits = float32(x).view(uint32)
    half = uint32(uint32(uint32(bits >> uint32(16)) & uint32(1)) + uint32(0x7FFF))
    rounded = uint16(uint32(bits + half) >> uint32(16))
    return rounded if x == x else uint16(0x7FC0)
