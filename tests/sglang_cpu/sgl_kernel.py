"""Stands in for SGLang's compiled kernels, which have no CPU build to install: put into site-packages by
`make test-sglang`. On a processor without AMX one of them is called, the hash that seeds are drawn by; it
is here. Any other raises."""

from typing import Any

import numpy as np
import torch

__path__: list[str] = []
LIBRARY = torch.library.Library("sgl_kernel", "DEF")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU build here")

    return missing


def _rotated(x: np.ndarray, bits: int) -> np.ndarray:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def murmur_hash32(seed: torch.Tensor, position: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """uint32 [N, M]: MurmurHash3 (x86, 32 bits, seed 0) of the four words low and high half of `seed` [N],
    `position` [N], and `column` [M]."""
    seeds = seed.numpy().astype(np.uint64)
    h = np.zeros((1, 1), np.uint32)
    words = (
        (seeds & np.uint64(0xFFFFFFFF))[:, None],
        (seeds >> np.uint64(32))[:, None],
        position.numpy()[:, None],
        column.numpy()[None, :],
    )
    for word in words:
        k = _rotated(word.astype(np.uint32) * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
        h = _rotated(h ^ k, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    h = h ^ np.uint32(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> np.uint32(shift))) * np.uint32(factor)
    return torch.from_numpy(h ^ (h >> np.uint32(16)))


LIBRARY.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
LIBRARY.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
