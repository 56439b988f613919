"""Reads what a directory says of a model that transformers computes. Imports transformers when it is asked to,
and no torch by itself."""

import json
import logging
from pathlib import Path
from typing import Any

import msgspec

from areal_q.errors import CheckpointError, ConfigError, installing, said_by
from areal_q.models.config import DecoderConfig
from areal_q.models.foreign import COMPUTED_BY, TRANSFORMERS, TRANSPOSED
from areal_q.models.hf.weight_files import check_head, opened, weight_files
from areal_q.quant.linears import is_quantized
from areal_q.tasks.encoding.hf_tokenizer import check_whole

_RANDOM = ("drop", "jitter")
"""Parts of the names of settings that make a forward pass random, which log-probs must not be"""


def transformers() -> Any:
    """Returns the module, which then tells nothing but errors. Raises ConfigError if it is not installed."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ConfigError(f"model.type = 'hf' needs transformers: {installing('hf')}") from error
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return transformers


def load_foreign_config(path: str | Path) -> DecoderConfig:
    """Returns what is known of the model in directory `path`, of any family, with the names and shapes in its
    files, those of linears as [out, in]. Raises CheckpointError, which names the file, if transformers does not
    know the family, or it is not one of causal language models."""
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    check_whole(directory)
    library, file = transformers(), directory / "config.json"
    try:
        found = library.AutoConfig.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises anything
        raise CheckpointError(f"{file}: {said_by(error)}") from error
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    if found.model_type not in KNOWN:
        raise CheckpointError(f"{file}: {found.model_type} is no causal language model")
    table = json.loads(found.to_json_string(use_diff=False))
    if table.get("quantization_config"):
        raise CheckpointError(f"{file}: weights that are quantized already are not implemented")
    for name in ("_name_or_path", "transformers_version"):  # of this machine, not of the model
        table.pop(name, None)
    try:
        config = DecoderConfig.from_hf(table | {COMPUTED_BY: TRANSFORMERS})
    except (ValueError, TypeError, ArithmeticError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    shapes: dict[str, tuple[int, ...]] = {}
    for weights in weight_files(directory):
        with opened(weights, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                shape = tuple(tensors.get_slice(name).get_shape())
                turned = config.family in TRANSPOSED and is_quantized(name)
                shapes[name] = shape[::-1] if turned else shape
    return msgspec.structs.replace(config, stored=tuple(shapes.items()))


def check_foreign_class(config: DecoderConfig, path: str | Path) -> None:
    """Raises CheckpointError, as `load_foreign` does, for a model that `check_cache` refuses, and where a head
    that is tied has values of its own."""
    check_cache(config)
    keys = _class_of(config)._tied_weights_keys or {}
    for head, embedding in keys.items() if config.tied else ():
        check_head(path, config, head, embedding)


def check_cache(config: DecoderConfig) -> None:
    """Raises CheckpointError for a model that keeps a state in place of keys and values, or beside them: the
    engine could not repeat it for a group, nor the learner pad behind it."""
    stateful = _class_of(config)._is_stateful
    if not stateful:  # which several classes do not say of themselves
        try:
            layers = transformers().DynamicCache(config=silent(config)).layers
        except Exception as error:  # transformers raises anything
            raise CheckpointError(f"{config.family}: {said_by(error)}") from error
        stateful = any(
            hasattr(layer, "update_conv_state") or not hasattr(layer, "batch_repeat_interleave")
            for layer in layers
        )
    if stateful:
        raise CheckpointError(f"{config.family} keeps a state in place of keys and values")


def check_recompute(config: DecoderConfig) -> None:
    """Raises ConfigError if transformers cannot compute layers of the model again in a backward pass."""
    if not _class_of(config).supports_gradient_checkpointing:
        raise ConfigError(f"learner.recompute: transformers' {config.family} cannot")


def silent(config: DecoderConfig) -> Any:
    """Returns transformers' configuration, without what would make a forward pass random."""
    table = {k: v for k, v in config.to_hf().items() if k != COMPUTED_BY}
    chance = [
        k for k, v in table.items() if isinstance(v, float) and any(part in k for part in _RANDOM)
    ]
    kind = transformers().CONFIG_MAPPING[table["model_type"]]
    return kind.from_dict(table | dict.fromkeys(chance, 0.0))


def _class_of(config: DecoderConfig) -> Any:
    """Returns transformers' class of the model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    return getattr(transformers(), KNOWN[config.family])
