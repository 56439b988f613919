"""Families whose files have tensors laid out otherwise than ours, and their tensors by our names.

Ours, of each expert e: `mlp.experts.e.gate_proj.weight` [M, D], `up_proj.weight` [M, D] and `down_proj.weight`
[D, M]. Files of gpt-oss have all E experts of a layer in one tensor, and those of Qwen3.5's mixtures may, which
transformers writes as ours:

                gpt-oss, each with a bias                         Qwen3.5
    mlp.experts.gate_up_proj  [E, D, 2 M]  gate and up in turns   [E, 2 M, D]  gate, then up
    mlp.experts.down_proj     [E, M, D]                           [E, D, M]

gpt-oss' files as OpenAI published them are in MXFP4, transposed, with 32 numbers of a row in 16 bytes and a
scale:

    mlp.experts.gate_up_proj_blocks  [E, 2 M, D/32, 16]     gate_up_proj_scales  [E, 2 M, D/32]
    mlp.experts.down_proj_blocks     [E, D, M/32, 16]       down_proj_scales     [E, D, M/32]

They are read as the numbers that they stand for, which bfloat16 holds. Its router is `mlp.router` there, and
`mlp.gate` with us.

Qwen3-Next's files join what a layer that keeps a state computes from a token, by heads of keys: for each of
these its rows of q and k, and those of v and z of the heads of values that it serves; then b and a likewise:

    linear_attn.in_proj_qkvz  [channels + values, D]        linear_attn.in_proj_ba  [2 H, D]
"""

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

from areal_q.models.config import DecoderConfig
from areal_q.models.layer_kinds import DeltaRule

if TYPE_CHECKING:
    from torch import Tensor

_EXPERTS, _ROUTER, _GATE = ".mlp.experts.", ".mlp.router.", ".mlp.gate."
_BOTH, _BLOCKS, _SCALES, _BIAS = "gate_up_proj", "_blocks", "_scales", "_bias"
_IN, _JOINED = ".linear_attn.in_proj_", (("qkvz", ("qkv", "z")), ("ba", ("b", "a")))


def stored_shapes(config: DecoderConfig, found: Container[str]) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of the tensors in a model's files; in MXFP4 where those in `found` are."""
    ours, gpt_oss = config.tensors(), config.family == "gpt_oss"
    if config.family == "qwen3_next":
        return _joined_shapes(ours)
    if config.experts is None or not (gpt_oss or _may_stack(config, found)):
        return ours
    shapes = {_stored_name(n, config): size for n, size in ours.items() if _EXPERTS not in n}
    count, width, mlp = config.experts.count, config.width, config.experts.mlp
    for layer in config.sparse_layers:
        for linear, inputs, outputs in (_BOTH, width, 2 * mlp), ("down_proj", mlp, width):
            name = f"model.layers.{layer}{_EXPERTS}{linear}"
            if gpt_oss:
                shapes[name + _BIAS] = count, outputs
            if gpt_oss and name + _BLOCKS in found:
                shapes[name + _BLOCKS] = count, outputs, inputs // 32, 16
                shapes[name + _SCALES] = count, outputs, inputs // 32
            else:
                shapes[name] = (count, inputs, outputs) if gpt_oss else (count, outputs, inputs)
    return shapes


def _may_stack(config: DecoderConfig, found: Container[str]) -> bool:
    first = f"model.layers.{next(iter(config.sparse_layers), 0)}{_EXPERTS}{_BOTH}"
    return config.family == "qwen3_5_moe_text" and first in found


def is_packed(name: str) -> bool:
    """Returns True for a tensor of MXFP4's blocks or scales."""
    return name.endswith((_BLOCKS, _SCALES))


def is_whole(name: str, packed: "Tensor") -> bool:
    """Returns False if MXFP4's tensor `name` is not of bytes, or has a scale that stands for NaN."""
    import torch

    return packed.dtype == torch.uint8 and not (
        name.endswith(_SCALES) and bool((packed == 255).any())
    )


def from_stored(tensors: dict[str, "Tensor"], config: DecoderConfig) -> dict[str, "Tensor"]:
    """Returns the tensors of a model's files by our names. They are taken out of `tensors` one after the other,
    so that there are never two copies of the model."""
    if config.family == "qwen3_next" and config.delta:
        return _separated(tensors, config.delta)
    if not (config.relaid or _may_stack(config, tensors)):
        return tensors
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
        kind, gpt_oss = "weight" if linear == stack else "bias", config.family == "gpt_oss"
        if gpt_oss and kind == "weight":
            tensor = tensor.mT
        parts = {linear: tensor}
        if linear == _BOTH:
            gate, up = (tensor[:, ::2], tensor[:, 1::2]) if gpt_oss else tensor.chunk(2, 1)
            parts = {"gate_proj": gate, "up_proj": up}
        for part, each in parts.items():
            for expert, of_expert in enumerate(each):
                # A copy, since tensors that share their memory cannot be saved.
                whole = of_expert.contiguous() if gpt_oss else of_expert.clone()
                ours[f"{layer}{experts}{expert}.{part}.{kind}"] = whole
    return ours


def _numbers(blocks: "Tensor", scales: "Tensor") -> "Tensor":
    """Returns what MXFP4's blocks uint8 [E, out, in/32, 16] and scales uint8 [E, out, in/32] stand for, float32
    [E, in, out]."""
    from areal_q.quant.formats.mxfp4 import Mxfp4

    packed = {
        "weight_packed": blocks.flatten(2).flatten(0, 1),
        "weight_scale": scales.flatten(0, 1),
    }
    return Mxfp4().dequantize(packed).unflatten(0, blocks.shape[:2]).mT


def to_stored(tensors: Mapping[str, "Tensor"], config: DecoderConfig) -> dict[str, "Tensor"]:
    """Returns tensors that are by our names as a model's files have them."""
    import torch

    if config.family == "qwen3_next" and config.delta:
        return _joined(tensors, config.delta)
    if not config.relaid or config.experts is None:
        return dict(tensors)
    files = {_stored_name(n, config): x for n, x in tensors.items() if _EXPERTS not in n}
    for layer in config.sparse_layers:
        at = f"model.layers.{layer}{_EXPERTS}"
        for kind, ending in ("weight", ""), ("bias", _BIAS):
            gate, up, down = (
                torch.stack(
                    [tensors[f"{at}{e}.{x}_proj.{kind}"].t() for e in range(config.experts.count)]
                )
                for x in ("gate", "up", "down")
            )
            files[f"{at}{_BOTH}{ending}"] = torch.stack((gate, up), -1).flatten(-2)
            files[f"{at}down_proj{ending}"] = down
    return files


def _stored_name(name: str, config: DecoderConfig) -> str:
    return name.replace(_GATE, _ROUTER) if config.family == "gpt_oss" else name


def _joined_shapes(ours: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    shapes = {name: size for name, size in ours.items() if _IN not in name}
    for at in {name.partition(_IN)[0] + _IN for name in ours if _IN in name}:
        for joined, parts in _JOINED:
            sizes = [ours[f"{at}{part}.weight"] for part in parts]
            shapes[f"{at}{joined}.weight"] = sum(size[0] for size in sizes), sizes[0][1]
    return shapes


def _separated(tensors: dict[str, "Tensor"], rule: DeltaRule) -> dict[str, "Tensor"]:
    """Returns Qwen3-Next's tensors by our names."""
    import torch

    serves, keys = rule.value_heads // rule.key_heads, rule.key_dim
    ours: dict[str, Tensor] = {}
    for name in [*tensors]:
        tensor, (at, found, joined) = tensors.pop(name), name.partition(_IN)
        if not found:
            ours[name] = tensor
            continue
        by_head = tensor.unflatten(0, (rule.key_heads, -1))
        if joined == "ba.weight":
            b, a = (part.flatten(0, 1) for part in by_head.split(serves, 1))
            ours |= {f"{at}{_IN}b.weight": b, f"{at}{_IN}a.weight": a}
        else:
            values = serves * rule.value_dim
            q, k, v, z = (
                part.flatten(0, 1) for part in by_head.split((keys, keys, values, values), 1)
            )
            ours |= {f"{at}{_IN}qkv.weight": torch.cat((q, k, v)), f"{at}{_IN}z.weight": z}
    return ours


def _joined(tensors: Mapping[str, "Tensor"], rule: DeltaRule) -> dict[str, "Tensor"]:
    """Returns Qwen3-Next's tensors, which are by our names, as its files have them."""
    import torch

    def by_head(*parts: "Tensor") -> "Tensor":
        return torch.cat([x.unflatten(0, (rule.key_heads, -1)) for x in parts], 1).flatten(0, 1)

    files = {name: tensor for name, tensor in tensors.items() if _IN not in name}
    keys = rule.key_heads * rule.key_dim
    for at in {name.partition(_IN)[0] + _IN for name in tensors if _IN in name}:
        qkv, z, b, a = (tensors[f"{at}{part}.weight"] for part in ("qkv", "z", "b", "a"))
        q, k, v = qkv.split((keys, keys, len(qkv) - 2 * keys))
        files |= {f"{at}qkvz.weight": by_head(q, k, v, z), f"{at}ba.weight": by_head(b, a)}
    return files
