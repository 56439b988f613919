"""LoRA adapters inside vLLM's worker process: those of a new version replace the old ones between two steps."""

# pyright: reportMissingImports=false

from typing import Any

import torch
import torch.nn.functional as F
from vllm.lora.layers import base_linear
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from areal_q.models.low_bit.lora import LORA_SCALE, A, B
from areal_q.weights.version import WeightVersion
from rollout.engines.vllm_backend.lora_requests import ADAPTER

_device_of = base_linear._get_lora_device


def _device(layer: torch.nn.Module) -> torch.device:
    """Returns the device of a layer. oneDNN's INT8 product on a CPU leaves None in place of the weight, which
    has no device; vLLM asks the weight."""
    return torch.device("cpu") if getattr(layer, "weight", 0) is None else _device_of(layer)


def _add_one_adapter(
    self: PunicaWrapperCPU,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    lora_b_stacked: tuple[torch.Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **more: Any,
) -> None:
    """Adds scale · (x · Aᵀ) · Bᵀ to y in float32, slice by slice. vLLM's own function for a CPU copies A and B
    for every token, since each might have another adapter; here there is only one, at index 0."""
    start = 0
    for a, b, out in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
        low = F.linear(x.float(), a[0, 0].float())
        y[:, start : start + out] += F.linear(low, b[0, 0].float()) * scale
        start += out


base_linear._get_lora_device = _device
PunicaWrapperCPU.add_lora_linear = _add_one_adapter


def model_has_adapters(model: torch.nn.Module) -> bool:
    return getattr(model, "lora_manager", None) is not None


def load_adapters(model: Any, version: WeightVersion) -> None:
    """Replaces the tensors of vLLM's only adapter, and the norms. The rest of the base stays."""
    manager, tensors = model.lora_manager, version.tensors
    scale = float(version.manifest.extra[LORA_SCALE])
    layers = {}
    for linear in (name.removesuffix(f".{A}") for name in tensors if name.endswith(A)):
        a, b = tensors[f"{linear}.{A}"], tensors[f"{linear}.{B}"]
        # B is scaled in float32, so that it is rounded only once, to vLLM's dtype.
        layers[linear] = LoRALayerWeights(linear, len(a), 1, a, b.float() * scale, scaling=1.0)
    manager.remove_adapter(ADAPTER)
    manager.add_adapter(LoRAModel(ADAPTER, max(layer.rank for layer in layers.values()), layers))
    manager.activate_adapter(ADAPTER)
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name.endswith("norm.weight"):
                model.get_parameter(name).copy_(tensor)
