"""The shape of the model that the settings name, before any of its weights exist or are read."""

from pathlib import Path

from areal_q.config import HfModel, ModelConfig, SmallModel
from areal_q.errors import NotOurs
from areal_q.models.config import DecoderConfig, Experts
from areal_q.models.hf.foreign_files import check_foreign_class, load_foreign_config
from areal_q.models.hf.quantized import check_quantized, load_quantized_config, read_format
from areal_q.models.hf.weight_files import check_tensors, load_config
from areal_q.tasks.base import Tokenizer


def shape_of(model: ModelConfig, tokenizer: Tokenizer) -> DecoderConfig:
    """Returns the shape of a pretrained model, from its directory, or of the small one, whose vocabulary is the
    tokenizer's. Raises CheckpointError, which names the file, if the former cannot be read."""
    if not isinstance(model, SmallModel):
        return config_at(model, model.path)
    return DecoderConfig(
        family="qwen3_moe" if model.experts else "qwen3",
        vocab_size=tokenizer.vocab_size,
        width=model.width,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.width // model.heads,
        mlp=model.mlp,
        max_positions=model.max_positions,
        eos_ids=(tokenizer.eos_id,),
        experts=Experts(count=model.experts, per_token=model.experts_per_token, mlp=model.mlp)
        if model.experts
        else None,
    )


def config_at(kind: ModelConfig, path: str | Path) -> DecoderConfig:
    """Returns the shape of the model in directory `path`, which transformers computes if `kind` is of type hf.
    Raises CheckpointError, which names the file, if it cannot be read."""
    return load_foreign_config(path) if isinstance(kind, HfModel) else load_config(path)


def frozen_shape(path: str | Path) -> DecoderConfig:
    """Returns the shape of the model in directory `path`, which `load_frozen` is to read. Raises
    CheckpointError, which names the file, if it cannot."""
    if read_format(path):
        return load_quantized_config(path)
    try:
        return load_config(path)
    except NotOurs:
        return load_foreign_config(path)


def check_frozen(path: str | Path) -> DecoderConfig:
    """Returns that shape once it is known that `load_frozen` can read the model but for the values."""
    shape = frozen_shape(path)
    if format := read_format(path):
        check_quantized(path, shape, format)
    elif shape.foreign is None:
        check_tensors(path, shape)
    else:
        check_foreign_class(shape, path)
    return shape
