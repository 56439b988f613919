"""What the learner measures in a forward pass of its own: the scales of an FP8 KV cache."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from areal_q.config.run import KvScales
from areal_q.models import Decoder
from areal_q.models.decoder import Attention
from areal_q.quant.kv_scales import NAMES, name_of, scale_for
from learner.data.packing import Sample, pack_samples


@torch.no_grad()
def kv_scales(
    model: Decoder, samples: Sequence[Sample], cfg: KvScales, device: str
) -> dict[str, Tensor]:
    """Returns the scales to publish with the present weights, float32 [1] each, by name. They follow from a
    percentile of the magnitudes of q, k and v in every layer, over the first `samples` with at least
    `cfg.tokens` tokens in all."""
    found: dict[str, Tensor] = {}

    def observe(layer: int, *states: Tensor) -> None:
        for which, x in zip(NAMES, states, strict=True):
            magnitudes = x.abs().float().flatten()
            rank = max(1, round(len(magnitudes) * cfg.percentile / 100))
            seen = magnitudes.kthvalue(rank).values
            found[name_of(layer, which)] = scale_for(seen, cfg.margin).reshape(1)

    layers = [m for m in model.modules() if isinstance(m, Attention)]
    for index, layer in enumerate(layers):
        layer.observe = partial(observe, index)
    try:
        batch = pack_samples(first_of(samples, cfg.tokens), device)
        model(batch.token_ids, batch.layout)
    finally:
        for layer in layers:
            layer.observe = None
    return found


def first_of(samples: Sequence[Sample], tokens: int) -> Sequence[Sample]:
    """Returns the first samples with at least `tokens` tokens in all, or all samples if they have fewer."""
    total = 0
    for count, sample in enumerate(samples, 1):
        total += sample.own_tokens
        if total >= tokens:
            return samples[:count]
    return samples
