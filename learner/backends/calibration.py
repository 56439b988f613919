"""What the learner measures in a forward pass of its own: the scales of an FP8 KV cache."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from areal_q.config.run import KvScales
from areal_q.models import Decoder
from areal_q.models.decoder import Attention
from areal_q.quant.kv_scales import NAMES, name_of, scale_for
from areal_q.quant.rescaling import Fold
from learner.data.packing import Sample, pack_samples


@torch.no_grad()
def kv_scales(
    model: Decoder,
    samples: Sequence[Sample],
    cfg: KvScales,
    device: str,
    folds: Mapping[str, Fold] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Returns the scales to publish with the present weights, float32 [1] each, by name. They follow from a
    percentile of the magnitudes of q, k and v in every layer, over the first `samples` with at least
    `cfg.tokens` tokens in all. Smoothing's `folds` of what is published make other values of the same hidden
    states, which o_proj makes up for; queries and keys they leave as they are."""
    found: dict[str, Tensor] = {}

    def observe(layer: int, value: str, q: Tensor, k: Tensor, v: Tensor) -> None:
        if value in folds and (rows := folds[value].rows) is not None:
            v = v.flatten(1) * rows
        for which, x in zip(NAMES, (q, k, v), strict=True):
            magnitudes = x.abs().float().flatten()
            rank = max(1, round(len(magnitudes) * cfg.percentile / 100))
            seen = magnitudes.kthvalue(rank).values
            found[name_of(layer, which)] = scale_for(seen, cfg.margin).reshape(1)

    layers = {name: m for name, m in model.named_modules() if isinstance(m, Attention)}
    for index, (name, layer) in enumerate(layers.items()):
        layer.observe = partial(observe, index, f"{name}.v_proj.weight")
    try:
        batch = pack_samples(first_of(samples, cfg.tokens), device)
        model(batch.token_ids, batch.layout)
    finally:
        for layer in layers.values():
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
