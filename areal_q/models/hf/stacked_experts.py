"""gpt-oss' files, which have all experts of a layer in one tensor, and their tensors by our names.

Ours, of each expert e: `mlp.experts.e.gate_proj.weight` [M, D], `up_proj.weight` [M, D] and `down_proj.weight`
[D, M], each with its `bias`. In the files, with E experts:

    mlp.experts.gate_up_proj  [E, D, 2 M]   columns of gate and up in turns     gate_up_proj_bias  [E, 2 M]
    mlp.experts.down_proj     [E, M, D]                                         down_proj_bias     [E, D]

The files as OpenAI published them are in MXFP4, transposed, with 32 numbers of a row in 16 bytes and a scale:

    mlp.experts.gate_up_proj_blocks  [E, 2 M, D/32, 16]     gate_up_proj_scales  [E, 2 M, D/32]
    mlp.experts.down_proj_blocks     [E, D, M/32, 16]       down_proj_scales     [E, D, M/32]

They are read as the numbers that they stand for, which bfloat16 holds. The router is `mlp.router` there, and
`mlp.gate` with us.
"""

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

from areal_q.models.config import DecoderConfig

if TYPE_CHECKING:
    from torch import Tensor

_EXPERTS, _ROUTER, _GATE = ".mlp.experts.", ".mlp.router.", ".mlp.gate."
_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"


def stored_shapes(config: DecoderConfig, found: Container[str]) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of the tensors in a model's files; in MXFP4 where those in `found` are."""
    ours = config.tensors()
    if not config.stacked_experts or not config.experts:
        return ours
    shapes = {n.replace(_GATE, _ROUTER): size for n, size in ours.items() if _EXPERTS not in n}
    count, width, mlp = config.experts.count, config.width, config.experts.mlp
    for layer in config.sparse_layers:
        for linear, inputs, outputs in ("gate_up_proj", width, 2 * mlp), ("down_proj", mlp, width):
            name = f"model.layers.{layer}{_EXPERTS}{linear}"
            shapes[name + _BIAS] = count, outputs
            if name + _BLOCKS in found:
                shapes[name + _BLOCKS] = count, outputs, inputs // 32, 16
                shapes[name + _SCALES] = count, outputs, inputs // 32
            else:
                shapes[name] = count, inputs, outputs
    return shapes


def is_packed(name: str) -> bool:
    """Returns True for a tensor of MXFP4's blocks or scales."""
    return name.endswith((_BLOCKS, _SCALES))


def is_whole(name: str, packed: "Tensor") -> bool:
    """Returns False if MXFP4's tensor `name` is not of bytes, or has a scale that stands for NaN."""
    import torch

    return packed.dtype == torch.uint8 and not (
        name.endswith(_SCALES) and bool((packed == 255).any())
    )


def unstacked(tensors: dict[str, "Tensor"]) -> dict[str, "Tensor"]:
    """Returns the tensors of gpt-oss' files by our names, each expert's by itself. They are taken out of
    `tensors` one after the other, so that there are never two copies of the model."""
    ours: dict[str, Tensor] = {}
    for name in [name for name in tensors if not name.endswith(_SCALES)]:
        tensor, stack = tensors.pop(name), name.removesuffix(_BLOCKS)
        if stack != name:
            tensor = _numbers(tensor, tensors.pop(stack + _SCALES))
        layer, experts, stack = stack.partition(_EXPERTS)
        if not experts:
            ours[name.replace(_ROUTER, _GATE)] = tensor
            continue
        linear = stack.removesuffix(_BIAS)
        kind, parts = "weight" if linear == stack else "bias", {linear: tensor}
        if linear == "gate_up_proj":
            parts = {"gate_proj": tensor[..., ::2], "up_proj": tensor[..., 1::2]}
        for part, each in parts.items():
            for expert, matrix in enumerate(each):
                ours[f"{layer}{experts}{expert}.{part}.{kind}"] = matrix.t().contiguous()
    return ours


def _numbers(blocks: "Tensor", scales: "Tensor") -> "Tensor":
    """Returns what MXFP4's blocks uint8 [E, out, in/32, 16] and scales uint8 [E, out, in/32] stand for, float32
    [E, in, out]."""
    from areal_q.quant.formats.mxfp4 import Mxfp4

    packed = {
        "weight_packed": blocks.flatten(2).flatten(0, 1),
        "weight_scale": scales.flatten(0, 1),
    }
    return Mxfp4().dequantize(packed).unflatten(0, blocks.shape[:2]).transpose(1, 2)


def stacked(tensors: Mapping[str, "Tensor"], config: DecoderConfig) -> dict[str, "Tensor"]:
    """Returns tensors that are by our names as gpt-oss' files have them."""
    import torch

    files = {n.replace(_GATE, _ROUTER): x for n, x in tensors.items() if _EXPERTS not in n}
    assert config.experts
    for layer in config.sparse_layers:
        at = f"model.layers.{layer}{_EXPERTS}"
        for kind, ending in ("weight", ""), ("bias", _BIAS):
            gate, up, down = (
                torch.stack(
                    [tensors[f"{at}{e}.{x}_proj.{kind}"].t() for e in range(config.experts.count)]
                )
                for x in ("gate", "up", "down")
            )
            files[f"{at}gate_up_proj{ending}"] = torch.stack((gate, up), -1).flatten(-2)
            files[f"{at}down_proj{ending}"] = down
    return files
