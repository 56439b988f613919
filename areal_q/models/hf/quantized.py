"""Writes quantized checkpoints in Hugging Face's layout, which vLLM, SGLang and transformers can load.

Published tensors have the names and layouts of a public checkpoint format already. A checkpoint adds the table
`quantization_config`, from which a loader knows the format. Except for fp8 blocks and nf4 it is that of
compressed-tensors (its `QuantizationConfig`, version 0.20), with one group of all linear layers except head and
routers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from areal_q.errors import CheckpointError
from areal_q.models.config import DecoderConfig
from areal_q.system.files import save_tensors

_Table = dict[str, Any]


def _numbers(kind: str, bits: int, strategy: str, **more: Any) -> _Table:
    """Returns compressed-tensors' description of weights or activations that are symmetric, without zero
    points."""
    return {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True, **more}


def _compressed(layout: str, weights: _Table, activations: _Table | None = None) -> _Table:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layout,
        "config_groups": {"group_0": group},
    }


QUANTIZATION_CONFIGS: dict[str, _Table | None] = {
    "bf16": None,
    "int8": _compressed(
        "int-quantized",
        _numbers("int", 8, "channel", dynamic=False),
        _numbers("int", 8, "token", dynamic=True),
    ),
    "int8-weight": _compressed("pack-quantized", _numbers("int", 8, "channel", dynamic=False)),
    "int4": _compressed(
        "pack-quantized", _numbers("int", 4, "group", dynamic=False, group_size=128)
    ),
    "int4-g32": _compressed(
        "pack-quantized", _numbers("int", 4, "group", dynamic=False, group_size=32)
    ),
    "int4-fp8": _compressed(
        "pack-quantized",
        _numbers("int", 4, "group", dynamic=False, group_size=128),
        _numbers("float", 8, "token", dynamic=True),
    ),
    "nvfp4": _compressed(
        "nvfp4-pack-quantized",
        _numbers("float", 4, "tensor_group", dynamic=False, group_size=16),
    ),
    "mxfp4": _compressed(
        "mxfp4-pack-quantized", _numbers("float", 4, "group", dynamic=False, group_size=32)
    ),
    "nf4": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": "bfloat16",
    },
    "fp8-channel": _compressed(
        "float-quantized",
        _numbers("float", 8, "channel", dynamic=False),
        _numbers("float", 8, "token", dynamic=True),
    ),
    "fp8-weight": _compressed("float-quantized", _numbers("float", 8, "channel", dynamic=False)),
    "fp8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
"""The `quantization_config` of each format, without the list of layers that it excludes; bf16 needs none."""
STACKED = "its files have all experts of a layer in one tensor, which no format is written as"
LEFT_OUT = {
    "compressed-tensors": "ignore",
    "fp8": "ignored_layers",
    "bitsandbytes": "llm_int8_skip_modules",
}
"""Key under which each `quant_method` lists the linear layers that are not quantized"""


def write_checkpoint(
    tensors: Mapping[str, Tensor], format: str, model: _Table, directory: str | Path
) -> None:
    """Writes published `tensors` and the `config.json` of `model` into `directory`, which must exist.

    `torch_dtype` is that of the embedding. Raises CheckpointError for a format without a public layout, and for
    an architecture that is not implemented or whose files have no matrix for each expert.
    """
    if format not in QUANTIZATION_CONFIGS:
        known = ", ".join(QUANTIZATION_CONFIGS)
        raise CheckpointError(
            f"format {format!r} has no checkpoint layout; those that have: {known}"
        )
    shape = DecoderConfig.from_hf(model)
    if shape.stacked_experts:
        raise CheckpointError(f"{shape.family}: {STACKED}")
    config = shape.to_hf()
    rest = tensors["model.embed_tokens.weight"].dtype
    config["torch_dtype"] = str(rest).removeprefix("torch.")
    if (quantization := QUANTIZATION_CONFIGS[format]) is not None:
        left_out = LEFT_OUT[quantization["quant_method"]]
        # In fp8 vLLM would not match the short name `gate` to any layer.
        routers = [f"model.layers.{i}.mlp.gate" for i in shape.sparse_layers]
        config["quantization_config"] = {**quantization, left_out: ["lm_head", *routers]}
    target = Path(directory)
    (target / "config.json").write_bytes(msgspec.json.format(json.dumps(config).encode(), indent=2))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_tensors(contiguous, target / "model.safetensors", metadata={"format": "pt"})
