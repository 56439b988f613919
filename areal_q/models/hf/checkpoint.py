"""Reads and writes checkpoints in Hugging Face's layout: config.json and *.safetensors, one file or sharded."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from areal_q.config import HfModel, ModelConfig
from areal_q.errors import CheckpointError, NotOurs
from areal_q.models.config import DecoderConfig
from areal_q.models.decoder import Decoder
from areal_q.models.hf.causal_lm import (
    HfDecoder,
    empty_foreign,
    load_foreign,
    without_values,
)
from areal_q.models.hf.foreign_files import load_foreign_config
from areal_q.models.hf.quantized import (
    check_quantized,
    dequantized,
    load_quantized_config,
    read_format,
)
from areal_q.models.hf.stored_layout import from_stored, is_packed, is_whole, to_stored
from areal_q.models.hf.weight_files import (
    WEIGHTS,
    check_tensors,
    is_derived,
    load_config,
    name_in_text,
    opened,
    untied,
    weight_files,
)
from areal_q.system.files import replacing, save_tensors
from areal_q.tasks.base import Tokenizer
from areal_q.tasks.stops import named_ends

GENERATION = "generation_config.json"


def new_decoder(config: DecoderConfig) -> Decoder:
    """Returns a model of `config` whose values mean nothing: ours, or transformers' if it is foreign."""
    return Decoder(config) if config.foreign is None else empty_foreign(config)


def meta_decoder(config: DecoderConfig) -> Decoder:
    """Returns a model of this shape that has no values, on the device "meta"."""
    if config.foreign is not None:
        return without_values(empty_foreign(config))
    with torch.device("meta"):
        return Decoder(config)


def load_model(kind: ModelConfig, path: str | Path) -> Decoder:
    """Returns the model in directory `path` on the CPU in float32: transformers' own if `kind` is of type hf,
    else ours. Raises CheckpointError as `load_decoder` does."""
    if isinstance(kind, HfModel):
        return load_foreign(load_foreign_config(path), path)
    return load_decoder(path)


def load_decoder(path: str | Path) -> Decoder:
    """Returns the model in directory `path` on the CPU, in float32 whatever its stored dtype.

    Raises CheckpointError, which names the file, if it cannot be read or a tensor is missing, unexpected, of a
    wrong shape or not finite.
    """
    config = load_config(path)
    check_tensors(path, config)
    found: dict[str, torch.Tensor] = {}
    for file in weight_files(Path(path)):
        with opened(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                tensor = tensors.get_tensor(name)
                name = name_in_text(name, config)
                packed = config.relaid and is_packed(name)
                found[name] = tensor if packed else tensor.float()
                if not (is_whole(name, tensor) if packed else _finite(found[name])):
                    raise CheckpointError(f"{file}: {name} holds NaN or an infinity")
    derived = {name: found.pop(name) for name in [*found] if is_derived(name, config)}
    head = derived.get("lm_head.weight")
    if head is not None and not torch.equal(head, found["model.embed_tokens.weight"]):
        raise untied(path, "lm_head.weight")
    model = meta_decoder(config)
    model.load_state_dict(from_stored(found, config), assign=True)
    return model.requires_grad_(True)


def load_frozen(path: str | Path) -> Decoder:
    """Returns the model in directory `path`, to compute with and not to train: one of ours, also one that
    `areal-q quantize` wrote, with the numbers that its codes stand for, or of another family, which
    transformers computes. Raises CheckpointError as `load_decoder` does."""
    if format := read_format(path):
        return _load_quantized(path, format)
    try:
        return load_decoder(path)
    except NotOurs:
        return load_foreign(load_foreign_config(path), path)


def _load_quantized(path: str | Path, format: str) -> Decoder:
    config = load_quantized_config(path)
    check_quantized(path, config, format)
    state, shapes = dequantized(path, format), config.tensors()
    for name, tensor in state.items():
        if tuple(tensor.shape) != shapes[name] or not _finite(tensor):
            raise CheckpointError(f"{path}: {name} is no {format} of shape {[*shapes[name]]}")
    model = meta_decoder(config)
    model.load_state_dict(state, assign=True)
    return model


def save_decoder(
    model: Decoder,
    path: str | Path,
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype = torch.float32,
    source: str | Path | None = None,
) -> None:
    """Writes directory `path` for `transformers.AutoModelForCausalLM`, and replaces one that exists.

    Tensors are rounded to `dtype`, which config.json names. `source` is the directory that the model was loaded
    from, whose generation_config.json is copied; that file names all of the tokenizer's tokens that end a
    reply, those of its chat template too. Raises CheckpointError, and leaves `path` unchanged, if a value does
    not fit into `dtype`.

    The directory is written under a hidden name and then renamed, so that `path` never has an incomplete model.
    A crash between the two renames of a replacement leaves both models hidden until the next save. Only one
    writer at a time is allowed.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as part:
        part.mkdir()
        state = {
            name: t.detach().cpu().to(dtype).contiguous() for name, t in model.state_dict().items()
        }
        if dtype != torch.float32:
            for name, tensor in state.items():
                if not _finite(tensor):
                    raise CheckpointError(f"{path}: {name} does not fit into {dtype}")
        if isinstance(model, HfDecoder):
            model.save(part, state)
        else:
            state = to_stored(state, model.config)
            save_tensors(state, part / WEIGHTS, metadata={"format": "pt"})
            table = model.config.to_hf() | {"torch_dtype": str(dtype).removeprefix("torch.")}
            (part / "config.json").write_text(json.dumps(table, indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save(str(part))
        if source is not None and (beside := Path(source) / GENERATION).is_file():
            shutil.copyfile(beside, part / GENERATION)
        if tokenizer is not None:
            name_ends(part, tokenizer.stops)


def name_ends(directory: Path, stops: Iterable[int]) -> None:
    """Names those of `stops` in generation_config.json that no file of `directory` names: other programs, which
    read no chat template for it, draw on behind them."""
    file = directory / GENERATION
    table = json.loads(file.read_bytes()) if file.is_file() else {}
    # Where it names any, config.json's are not read.
    named = named_ends(file) or named_ends(directory / "config.json")
    if more := [id for id in stops if id not in named]:
        table["eos_token_id"] = [*named, *more]
        file.write_text(json.dumps(table, indent=2) + "\n")


def _finite(tensor: torch.Tensor) -> bool:
    # aminmax allocates nothing, whereas isfinite would need a further tensor as large as the embedding.
    return tensor.numel() == 0 or all(end.isfinite() for end in tensor.aminmax())
