"""What the learner measures in forward passes of its own: the scales of an FP8 KV cache, and the inputs of
linear layers."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from areal_q.config.run import KvScales
from areal_q.models import Decoder, PackedLayout
from areal_q.models.decoder import Attention
from areal_q.models.layers.linear import Linear
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


@torch.no_grad()
def largest_inputs(model: Decoder, token_ids: Tensor, layout: PackedLayout) -> dict[str, Tensor]:
    """Returns the largest magnitude of each input channel of every linear layer within the decoder's layers,
    float32 [in], by the name of its weight, on `token_ids` int64 [T]. The pass is in float32."""
    found: dict[str, Tensor] = {}

    def observe(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        found[name] = (
            args[0].abs().amax(0) if len(args[0]) else args[0].new_zeros(args[0].shape[-1])
        )

    hooks = [
        module.register_forward_pre_hook(partial(observe, f"{name}.weight"))
        for name, module in model.named_modules()
        if isinstance(module, Linear) and module is not model.lm_head
    ]
    try:
        model.model(token_ids, layout)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def first_of(samples: Sequence[Sample], tokens: int) -> Sequence[Sample]:
    """Returns the first samples with at least `tokens` tokens in all, or all samples if they have fewer."""
    total = 0
    for count, sample in enumerate(samples, 1):
        total += sample.num_tokens
        if total >= tokens:
            return samples[:count]
    return samples
