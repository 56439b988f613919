"""The tensors that a learner publishes of its model: those of its own low-bit forward pass, if it has one."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from areal_q.models.low_bit.lora import adapted, is_adapter
from areal_q.models.low_bit.quantized_forward import QuantLinear, linears
from areal_q.quant.registry import FORMATS
from areal_q.quant.rescaling import Fold
from areal_q.quant.state_dict import SMOOTHING, RangePolicy, quantize_state


def published_state(
    model: nn.Module,
    format: str,
    policy: RangePolicy | None = None,
    state: Mapping[str, Tensor] | None = None,
    folds: Mapping[str, Fold] | None = None,
) -> dict[str, Tensor]:
    """Returns the tensors to publish for `model`, in the order of its state dict. They are those of its forward
    pass if that is quantized; the base and the adapters in bfloat16 if it has adapters; else those that
    `quantize_state` returns. `state` is the model's state dict with what is to be published differently, and
    `folds` what it is multiplied by."""
    state = model.state_dict() if state is None else state
    if adapted(model):
        return {
            name.replace("/", "."): tensor.detach().to(
                torch.bfloat16 if is_adapter(name) else tensor.dtype
            )
            for name, tensor in state.items()
        }
    quantized = {n: m for n, m in linears(model).items() if isinstance(m, QuantLinear)}
    if not quantized:
        return quantize_state(state, format, policy, folds)
    published: dict[str, Tensor] = {}
    for name, tensor in state.items():
        linear = quantized.get(name.removesuffix(".weight"))
        if linear is None:
            fold = (folds or {}).get(name)
            published[name] = fold.of(tensor) if fold else tensor.detach()
        else:
            prefix = name.removesuffix("weight")
            published |= {
                prefix + suffix: linear.parts[suffix] for suffix in FORMATS[format].suffixes
            }
            if linear.fold and linear.fold.at_input and linear.fold.columns is not None:
                published[prefix + SMOOTHING] = linear.fold.columns
    return published
