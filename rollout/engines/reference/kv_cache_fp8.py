"""The KV cache in E4M3 (areal_q/quant/kv_scales.py): a quarter of the memory of float32.

Scales are recalibrated for every version. If the learner publishes them, they apply from the swap on. Otherwise
the first prompts that are computed after the swap, as much of them as one forward pass takes, set them layer by
layer from the largest key and value times the margin. A page keeps the scales that it was begun with, so that
no key or value is ever rounded twice or changes its meaning.

Attention reads the dequantized numbers, in prompts as in decoding, so that a response's log-probs do not depend
on when its keys were computed.
"""

import torch
from torch import Tensor

from areal_q.config import TorchEngine
from areal_q.config.engines import PAGE
from areal_q.models.config import DecoderConfig
from areal_q.quant.kv_scales import dequantize, quantize, scale_for
from rollout.engines.reference.kv_cache import KVCache, grown


class Fp8KVCache(KVCache):
    """A KVCache that holds E4M3 codes as bytes."""

    item = torch.uint8

    def __init__(
        self, config: DecoderConfig, device: str, most_bytes: int = 0, margin: float = 1.0
    ) -> None:
        super().__init__(config, device, most_bytes)
        self.margin = margin
        self.page_scales = torch.ones(config.layers, 2, 1, device=device)
        """Scales of the keys, then of the values, in each page, float32 [layers, 2, pages]"""
        self.scales = torch.ones(config.layers, 2, device=device)
        """Scales with which the next pages are begun, float32 [layers, 2]"""
        self.unmeasured: set[int] = set()
        """Layers that have no scales for the present version yet, since none were published and no prompt was
        computed"""

    def new_version(self, scales: Tensor | None) -> None:
        super().new_version(scales)
        self.unmeasured = set(range(self.config.layers)) if scales is None else set()
        if scales is not None:
            self.scales = scales.clone()
        # Those of weights that overflowed would make NaN of what rows go on with until a prompt is computed.
        self.scales = self.scales.where(self.scales.isfinite(), 1.0)

    def take(self, count: int) -> list[int]:
        pages = super().take(count)
        if not pages:
            return []
        self.page_scales = grown(self.page_scales, {2: self.pool.size}, fill=1.0)
        at = torch.tensor(pages, dtype=torch.int64).to(self.device, non_blocking=True)
        self.page_scales[:, :, at] = self.scales.unsqueeze(2)
        return pages

    def copy(self, sources: list[int], targets: list[int]) -> None:
        super().copy(sources, targets)
        to, frm = (torch.tensor(x).to(self.device, non_blocking=True) for x in (targets, sources))
        self.page_scales[:, :, to] = self.page_scales[:, :, frm]

    def put(self, layer: int, k: Tensor, v: Tensor, at: Tensor, whole: bool = False) -> None:
        pages = at // PAGE
        if whole:
            if layer in self.unmeasured:
                largest = torch.stack((k.abs().amax(), v.abs().amax()))
                self.scales[layer] = scale_for(largest, self.margin)
                self.unmeasured.remove(layer)
            self.page_scales[layer][:, pages] = self.scales[layer].unsqueeze(1)
        scales = self.page_scales[layer][:, pages, None, None]
        super().put(layer, _codes(k, scales[0]), _codes(v, scales[1]), at)

    def read(self, layer: int, pages: Tensor, length: int) -> Tensor:
        scales = self.page_scales[layer][:, pages].repeat_interleave(PAGE, 2)[:, :, :length]
        codes = super().read(layer, pages, length).view(torch.float8_e4m3fn)
        return dequantize(codes, scales[:, None, ..., None])


def _codes(x: Tensor, scale: Tensor) -> Tensor:
    """Returns the E4M3 codes of x as bytes, since not every operation of torch takes E4M3."""
    return quantize(x, scale).view(torch.uint8)


def build_cache(shape: DecoderConfig, config: TorchEngine) -> KVCache:
    if config.kv_cache == "fp8":
        return Fp8KVCache(shape, config.device, config.kv_cache_bytes, config.kv_margin)
    return KVCache(shape, config.device, config.kv_cache_bytes)
