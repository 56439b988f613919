"""Loops in Python that LLVM compiles: for what takes torch a chain of operations over memory."""

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import config as numba_config
from numba import njit

config: Any = numba_config  # its settings are set by name, unseen by a type checker

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
        with _setting:
            others, config.CACHE_DIR = config.CACHE_DIR, _CACHE_DIR
            try:
                return njit(signature, cache=True, **options)(function)
            except RuntimeError:  # numba's "cannot cache function: no locator available"
                return njit(signature, **options)(function)
            finally:
                config.CACHE_DIR = others

    return compiled


def _cache_dir() -> str:
    """Returns a directory that is another one after any change in this folder. numba compiles a kernel again
    when its own file has changed, but not when a function that it calls has, which lies in another."""
    here, digest = Path(__file__).parent, hashlib.sha256()
    for source in sorted(here.rglob("*.py")):
        digest.update(source.read_bytes())
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    own = here / "__pycache__" if os.access(here, os.W_OK) else Path(user, "areal-q")
    return str(Path(config.CACHE_DIR or own, f"kernels-{digest.hexdigest()[:12]}"))


_CACHE_DIR = _cache_dir()
_setting = threading.RLock()
"""Held while numba's cache is set to ours. Where another thread that imports kernels set it back meanwhile,
numba took the current directory."""
