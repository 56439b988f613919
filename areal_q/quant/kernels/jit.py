"""Loops in Python that LLVM compiles: for what takes torch a chain of operations over memory."""

from collections.abc import Callable
from typing import Any

from numba import njit


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
