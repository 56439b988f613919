"""Writes quantized checkpoints in Hugging Face's layout, which vLLM, SGLang and transformers can load, and
reads them back as the numbers that they stand for.

Published tensors have the names and layouts of a public checkpoint format already. A checkpoint adds the table
`quantization_config`, from which a loader knows the format. Except for fp8 blocks and nf4 it is that of
compressed-tensors (its `QuantizationConfig`, version 0.20), with one group of all linear layers except head and
routers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from areal_q.errors import CheckpointError, QuantizationError
from areal_q.models.config import DecoderConfig
from areal_q.models.hf.weight_files import config_table, opened, shape_in, weight_files
from areal_q.quant.linears import is_quantized
from areal_q.system.files import save_tensors

if TYPE_CHECKING:
    from torch import Tensor

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
RELAID = "its files have matrices joined that a quantized checkpoint has one by one"
LEFT_OUT = {
    "compressed-tensors": "ignore",
    "fp8": "ignored_layers",
    "bitsandbytes": "llm_int8_skip_modules",
}
"""Key under which each `quant_method` lists the linear layers that are not quantized"""


def write_checkpoint(
    tensors: Mapping[str, "Tensor"], format: str, model: _Table, directory: str | Path
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
    if shape.relaid:
        raise CheckpointError(f"{shape.family}: {RELAID}")
    config = shape.to_hf()
    rest = tensors["model.embed_tokens.weight"].dtype
    config["torch_dtype"] = str(rest).removeprefix("torch.")
    if (quantization := QUANTIZATION_CONFIGS[format]) is not None:
        left_out = LEFT_OUT[quantization["quant_method"]]
        # In fp8 vLLM would not match a short name, such as `gate`, to any layer.
        others = [
            name.removesuffix(".weight")
            for name, size in shape.tensors().items()
            if len(size) == 2 and ".layers." in name and not is_quantized(name)
        ]
        config["quantization_config"] = {**quantization, left_out: ["lm_head", *others]}
    target = Path(directory)
    (target / "config.json").write_bytes(msgspec.json.format(json.dumps(config).encode(), indent=2))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_tensors(contiguous, target / "model.safetensors", metadata={"format": "pt"})


def read_format(path: str | Path) -> str | None:
    """Returns the format of the linears in directory `path`; None unless `config.json` says what
    `write_checkpoint` writes for one. Raises CheckpointError if it is no JSON object."""
    file = Path(path) / "config.json"
    table = config_table(file).get("quantization_config") if file.is_file() else None
    if not isinstance(table, dict):
        return None
    own = {key: value for key, value in table.items() if key not in LEFT_OUT.values()}
    return next((format for format, known in QUANTIZATION_CONFIGS.items() if known == own), None)


def load_quantized_config(path: str | Path) -> DecoderConfig:
    """Returns the shape of the model in directory `path`, whose linears are quantized. Raises CheckpointError,
    which names the file, as `load_config` does."""
    file = Path(path) / "config.json"
    return shape_in(
        {k: v for k, v in config_table(file).items() if k != "quantization_config"}, file
    )


def check_quantized(path: str | Path, config: DecoderConfig, format: str) -> None:
    """Compares the headers of the files of weights in directory `path` with a model of `config` in `format`; no
    tensor is read. Raises CheckpointError if one cannot be read or a tensor is missing, unexpected, of a wrong
    shape or of another dtype than the format's."""
    import torch

    from areal_q.quant.state_dict import check_shapes, parts_of

    dtypes = {
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "I64": torch.int64,
        "I32": torch.int32,
        "I8": torch.int8,
        "U8": torch.uint8,
    }
    found: dict[str, Tensor] = {}
    for file in weight_files(Path(path)):
        with opened(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                piece = tensors.get_slice(name)
                if (dtype := dtypes.get(piece.get_dtype())) is None:
                    raise CheckpointError(f"{file}: {name} is {piece.get_dtype()}")
                found[name] = torch.empty(piece.get_shape(), dtype=dtype, device="meta")
    shapes = config.tensors()
    try:
        check_shapes(found, shapes, format)
        for name in filter(is_quantized, shapes):
            prefix = name.removesuffix("weight")
            for suffix in parts_of(found, prefix.removesuffix("."), format):
                del found[prefix + suffix]
    except QuantizationError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if odd := sorted(found.keys() - shapes.keys()):
        raise CheckpointError(f"{path}: unexpected tensor {odd[0]}")


def dequantized(path: str | Path, format: str) -> "dict[str, Tensor]":
    """Returns the tensors in directory `path`, float32, in place of the codes the numbers that they stand for.
    Raises CheckpointError for parts of a linear that stand for none."""
    from areal_q.quant import dequantize_state

    found: dict[str, Tensor] = {}
    for file in weight_files(Path(path)):
        with opened(file, "pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    try:
        state = dequantize_state(found, format)
    except (RuntimeError, LookupError, ValueError, TypeError) as error:  # a shape beside the codes
        raise CheckpointError(f"{path}: no {format}: {error}") from error
    return {name: tensor.float().contiguous() for name, tensor in state.items()}
