"""Measures the inputs of a decoder's linear layers, from which smoothing's scales follow
(areal_q/quant/smoothing.py)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from areal_q.config import Smoothing
from areal_q.models.config import DecoderConfig
from areal_q.models.decoder import Decoder
from areal_q.models.layers.linear import Linear
from areal_q.models.packed_layout import PackedLayout
from areal_q.quant.awq import scales_for
from areal_q.quant.rescaling import Fold, inputs_of, pairs_of
from areal_q.quant.smoothing import SmoothingScales


def scales_of(config: DecoderConfig, format: str, cfg: Smoothing) -> SmoothingScales:
    """Returns scales for a model of `config` in `format`, to be chosen."""
    pairs = pairs_of if config.foreign is None else inputs_of
    return scales_for(format, cfg, config.head_dim, pairs)


def first_folds(
    model: Decoder, prompts: Iterable[Sequence[int]], cfg: Smoothing, format: str
) -> Mapping[str, Fold]:
    """Returns what the parameters of `model` are multiplied by in a learner's first version. It is measured on
    the first `prompts`, token ids, with at least `cfg.tokens` tokens in all."""
    scales = scales_of(model.config, format, cfg)
    state = model.state_dict()
    ids, layout = packed(prompts, cfg.tokens)
    scales.update(state, measured_inputs(model, ids, layout, scales.measure))
    return scales.folds(state)


def packed(
    prompts: Iterable[Sequence[int]], tokens: int, device: str = "cpu"
) -> tuple[Tensor, PackedLayout]:
    """Returns the first `prompts` with at least `tokens` tokens in all, or all of them, as one packed batch:
    token ids int64 [T] and their layout."""
    taken: list[Sequence[int]] = []
    count = 0
    for prompt in prompts:
        if count >= tokens:
            break
        taken.append(prompt)
        count += len(prompt)
    ids = torch.tensor([token for prompt in taken for token in prompt], device=device)
    return ids, PackedLayout.of([len(prompt) for prompt in taken], device)


@torch.no_grad()
def measured_inputs(
    model: Decoder, token_ids: Tensor, layout: PackedLayout, measure: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Returns what `measure` makes of the inputs, float32 [T, in], of every linear layer within the decoder's
    layers, by the name of its weight, on `token_ids` int64 [T]. The pass is in float32."""
    found: dict[str, Tensor] = {}

    def observe(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = model.by_token(args[0], layout)  # an expert's may be none
        found[name] = measure(x if len(x) else x.new_zeros(1, x.shape[-1]))

    hooks = [
        module.register_forward_pre_hook(partial(observe, f"{name}.weight"))
        for name, module in model.named_modules()
        if isinstance(module, Linear) and name != "lm_head"
    ]
    before = model.dtype, model.one_pass
    model.dtype, model.one_pass = torch.float32, True
    try:
        model(token_ids, layout)
    finally:
        model.dtype, model.one_pass = before
        for hook in hooks:
            hook.remove()
    return found
