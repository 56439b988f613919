"""Loops in Python that LLVM compiles: for what takes torch a chain of operations over memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

TINY = np.float32(np.finfo(np.float32).tiny)
MAGNITUDE = np.int32(0x7FFFFFFF)
"""The bits of a float32 without its sign."""
ROUND = np.float32(1.5 * 2**23)
"""A float32 that leaves no bits for a fraction: added and subtracted again, it rounds half to even; of the sum,
the low bits are the whole number."""
ROUND_E4M3 = np.float32(1.5 * 2**14)
"""Rounds to multiples of 2⁻⁹, which are E4M3's subnormal numbers, as ROUND does to whole numbers."""

# LLVM may fuse multiply and add, and reorder sums. NaN and infinity keep their meaning.
FMA, SUMS = {"contract"}, {"contract", "reassoc"}


def kernel(signature: Any = None, **options: Any) -> Callable[[Any], Any]:
    """Returns `njit`, cached on disk where some directory can be written to; compiled here and now if there
    is a signature."""
    options = {"nogil": True, "error_model": "numpy", **options}

    def compiled(function: Any) -> Any:
        try:
            return njit(signature, cache=True, **options)(function)
        except RuntimeError:  # numba's "cannot cache function: no locator available"
            return njit(signature, **options)(function)

    return compiled
