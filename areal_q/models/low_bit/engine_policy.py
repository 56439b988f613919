"""π_Q, the policy that an engine runs: our own forward pass on published tensors, without master weights.

Two correct engines add the same numbers in other orders. Where a format rounds activations, what rounds up in
one rounds down in the other, and a deep model amplifies it. `perturbed` shows by how much: log-probs of two
passes whose linears' inputs differ by float32's own rounding differ by the format's *noise* on this model,
which no kernel and no alignment removes. Weight-only formats have none to speak of.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from areal_q.errors import QuantizationError
from areal_q.models.config import DecoderConfig
from areal_q.models.decoder import Decoder
from areal_q.models.hf.checkpoint import meta_decoder
from areal_q.models.low_bit.lora import A, AdaptedLinear, B, adapted, adapter_of
from areal_q.models.low_bit.quantized_forward import QuantLinear, linears
from areal_q.quant import is_quantized
from areal_q.quant.kv_scales import NAMES
from areal_q.quant.rescaling import Fold
from areal_q.quant.state_dict import SMOOTHING, parts_of

ROUNDING = 1e-7
"""Relative standard deviation of what `perturbed` does to an input: about one spacing of float32"""


def engine_policy(
    config: DecoderConfig,
    published: Mapping[str, Tensor],
    format: str,
    device: str = "cpu",
) -> Decoder:
    """Returns π_Q, the policy that an engine runs: the tensors `published` in `format`, all else in float32.

    It has no master weights and cannot be trained. Building it draws no random numbers.
    """
    model = empty_engine_policy(config, format)
    load_published(model, published, device)
    return model


def empty_engine_policy(config: DecoderConfig, format: str) -> Decoder:
    """Returns π_Q without tensors, for `load_published`."""
    model = meta_decoder(config).requires_grad_(False)
    with torch.device("meta"):
        for name, linear in [*model.named_modules()]:
            if not isinstance(linear, nn.Linear) or not is_quantized(f"{name}.weight"):
                continue
            new = QuantLinear(linear.in_features, linear.out_features, linear.bias is not None)
            new.format = format
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new.requires_grad_(False))
    return model


def load_published(
    model: Decoder, published: Mapping[str, Tensor], device: str = "cpu", lora_scale: float = 0.0
) -> None:
    """Makes `model`, which is `empty_engine_policy` or has other tensors, the policy that engines run with the
    tensors `published`. Raises QuantizationError, which names the tensor, for one that the model has no place
    for: it would be another policy without it."""
    names = [name for name in model.state_dict() if not is_quantized(name)]
    taken = {*names}
    for name, linear in linears(model).items():
        assert isinstance(linear, QuantLinear)
        parts = parts_of(published, name, linear.format)
        s = published.get(f"{name}.{SMOOTHING}")
        linear.fold = None if s is None else Fold(columns=s.to(device), at_input=True)
        linear.take({k: t.to(device) for k, t in parts.items()})
        taken |= {f"{name}.{part}" for part in (*parts, SMOOTHING, A, B)}
        if adapter := adapter_of(published, name):
            pair = adapter[0].to(device), adapter[1].to(device)
            linear.product = AdaptedLinear(linear.product, [pair], [len(pair[1])], lora_scale)
    # Scales of a KV cache are the engine's own affair.
    odd = [n for n in published if n not in taken and n.rpartition(".")[2] not in NAMES]
    if odd:
        raise QuantizationError(f"{odd[0]} is published, and the model has no such tensor")
    rest = {name: published[name].to(device).float() for name in names}
    model.load_state_dict(rest, strict=False, assign=True)
    model.requires_grad_(False)
    for module in model.modules():  # those of transformers' own layers
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


@contextmanager
def perturbed(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Multiplies inputs of the linears that a format applies to by 1 + ROUNDING · z, with standard normal z,
    while the context lasts. The numbers depend on `seed` alone."""
    generator = torch.Generator().manual_seed(seed)  # the CPU's: every device is given the same

    def nudge(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = inputs
        z = torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
        return (x * (1 + ROUNDING * z), *rest)

    found = [*linears(model).values(), *adapted(model).values()]
    hooks = [linear.register_forward_pre_hook(nudge) for linear in found]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
