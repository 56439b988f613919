"""The slotted KV cache in E4M3 (areal_q/quant/kv_scales.py): a quarter of the memory of float32.

Scales are recalibrated for every version. If the learner publishes them, they apply from the swap on. Otherwise
the first prompts that are computed after the swap set them, layer by layer and padding included, from the
largest key and value times the margin. A slot keeps the scales that its prompt was cached with, also when newer
weights continue its response, so that no key or value is ever rounded twice or changes its meaning.

Attention reads the dequantized numbers, in prompts as in decoding, so that a response's log-probs do not depend
on when its keys were computed.
"""

import torch
from torch import Tensor

from areal_q.config import TorchEngine
from areal_q.models.config import DecoderConfig
from areal_q.quant.kv_scales import dequantize, quantize, scale_for
from rollout.engines.reference.kv_cache import KVCache, grown


class Fp8KVCache(KVCache):
    """A KVCache whose `data` holds E4M3 codes as bytes."""

    def __init__(self, config: DecoderConfig, device: str, margin: float) -> None:
        super().__init__(config, device)
        self.margin = margin
        self.data = self.data.to(torch.uint8)
        self.slot_scales = torch.ones(config.layers, 2, 0, device=device)
        """Scales of the keys, then of the values, in each slot, float32 [layers, 2, slots]"""
        self.scales = torch.ones(config.layers, 2, device=device)
        """Scales with which the next prompts are cached, float32 [layers, 2]"""
        self.unmeasured: set[int] = set()
        """Layers that have no scales for the present version yet, since none were published and no prompt was
        computed"""

    def new_version(self, scales: Tensor | None) -> None:
        self.unmeasured = set(range(self.config.layers)) if scales is None else set()
        if scales is not None:
            self.scales = scales.clone()

    def reserve(self, slots: int, length: int) -> None:
        super().reserve(slots, length)
        self.slot_scales = grown(self.slot_scales, {2: slots}, fill=1.0)

    def put_tokens(self, layer: int, k: Tensor, v: Tensor, at: Tensor) -> None:
        scales = self.slot_scales[layer, :, : len(k), None, None]
        super().put_tokens(layer, _codes(k, scales[0]), _codes(v, scales[1]), at)

    def put_prompts(
        self, layer: int, k: Tensor, v: Tensor, slots: slice, source: Tensor
    ) -> tuple[Tensor, Tensor]:
        if layer in self.unmeasured:
            self.scales[layer] = scale_for(
                torch.stack((k.abs().amax(), v.abs().amax())), self.margin
            )
            self.unmeasured.remove(layer)
        scales = self.scales[layer]
        self.slot_scales[layer, :, slots] = scales[:, None]
        codes = _codes(k, scales[0]), _codes(v, scales[1])
        super().put_prompts(layer, *codes, slots, source)
        return _numbers(codes[0], scales[0]), _numbers(codes[1], scales[1])

    def read(self, layer: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        scales = self.slot_scales[layer, :, :rows].repeat_interleave(self.data.shape[3], 1)
        keys, values = super().read(layer, rows, length)
        return _numbers(keys, scales[0, :, None, None]), _numbers(values, scales[1, :, None, None])

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        super().move(sources, targets, length)
        self.slot_scales[:, :, targets] = self.slot_scales[:, :, sources]

    def clear(self, slots: Tensor) -> None:
        self.data[:, :, slots] = 0
        self.slot_scales[:, :, slots] = 1.0


def _codes(x: Tensor, scale: Tensor) -> Tensor:
    """Returns the E4M3 codes of x as bytes, since not every operation of torch takes E4M3."""
    return quantize(x, scale).view(torch.uint8)


def _numbers(codes: Tensor, scale: Tensor) -> Tensor:
    return dequantize(codes.view(torch.float8_e4m3fn), scale)


def build_cache(shape: DecoderConfig, config: TorchEngine) -> KVCache:
    if config.kv_cache == "fp8":
        return Fp8KVCache(shape, config.device, config.kv_margin)
    return KVCache(shape, config.device)
