"""Reads and writes checkpoints in Hugging Face's layout: config.json and *.safetensors, one file or sharded."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from areal_q.errors import CheckpointError
from areal_q.models.config import DecoderConfig
from areal_q.models.decoder import Decoder
from areal_q.system.files import replacing, save_tensors
from areal_q.tasks.base import Tokenizer

_WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"


def load_config(path: str | Path) -> DecoderConfig:
    """Returns the shape of the model in directory `path`. Raises CheckpointError, which names the file, if it
    cannot be read."""
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    file = directory / "config.json"
    if not file.is_file() and (directory / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{directory}: an adapter alone is no model: merge it into its base (peft: merge_and_unload)"
        )
    table = _read_object(file)
    try:
        return DecoderConfig.from_hf(table).validate()
    except (ValueError, TypeError, ArithmeticError) as error:
        raise CheckpointError(f"{file}: {error}") from error


def declared_dtype(path: str | Path) -> str | None:
    """Returns the dtype that config.json in directory `path` names for the weights, such as "bfloat16"; None if
    it names none, or does not exist any more."""
    file = Path(path) / "config.json"
    table = _read_object(file) if file.is_file() else {}
    return table.get("dtype") or table.get("torch_dtype")


def meta_decoder(config: DecoderConfig) -> Decoder:
    """Returns a model of this shape that has no values, on the device "meta"."""
    with torch.device("meta"):
        return Decoder(config)


def check_tensors(path: str | Path, config: DecoderConfig) -> None:
    """Compares the headers of the files of weights in directory `path` with a model of `config`; no tensor is
    read. Raises CheckpointError, which names the file, if one cannot be read or a tensor is missing, unexpected
    or of a wrong shape."""
    found: dict[str, tuple[Path, list[int]]] = {}
    for file in _weight_files(Path(path)):
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if not _is_derived(name, config):
                    found[name] = file, tensors.get_slice(name).get_shape()
    if len(found) < config.layers:  # a model of so many layers would take long to lay out
        raise CheckpointError(
            f"{path}: config.json says {config.layers} layers, and there are {len(found)} tensors"
        )
    wanted = {name: [*p.shape] for name, p in meta_decoder(config).state_dict().items()}
    for name, (file, shape) in found.items():
        if name not in wanted:
            raise CheckpointError(f"{file}: unexpected tensor {name}")
        if shape != wanted[name]:
            raise CheckpointError(f"{file}: {name} is {shape}, config.json says {wanted[name]}")
    missing = [name for name in wanted if name not in found]
    if missing:
        raise CheckpointError(f"{path}: tensor {missing[0]} is missing ({len(missing)} in all)")


def load_decoder(path: str | Path) -> Decoder:
    """Returns the model in directory `path` on the CPU, in float32 whatever its stored dtype.

    Raises CheckpointError, which names the file, if it cannot be read or a tensor is missing, unexpected, of a
    wrong shape or not finite.
    """
    config = load_config(path)
    check_tensors(path, config)
    found: dict[str, torch.Tensor] = {}
    for file in _weight_files(Path(path)):
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118
                found[name] = tensors.get_tensor(name).float()
                if not _finite(found[name]):
                    raise CheckpointError(f"{file}: {name} holds NaN or an infinity")
    derived = {name: found.pop(name) for name in [*found] if _is_derived(name, config)}
    head = derived.get("lm_head.weight")
    if head is not None and not torch.equal(head, found["model.embed_tokens.weight"]):
        raise CheckpointError(
            f"{path}: lm_head.weight is not the embedding, though config.json says tie_word_embeddings"
        )
    model = meta_decoder(config)
    model.load_state_dict(found, assign=True)
    return model.requires_grad_(True)


def _is_derived(name: str, config: DecoderConfig) -> bool:
    """Returns True for a tensor that follows from others: transformers 4 wrote a tied head as well, and older
    versions the frequencies that config.json determines."""
    return (name == "lm_head.weight" and config.tied) or name.endswith("rotary_emb.inv_freq")


def save_decoder(
    model: Decoder,
    path: str | Path,
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype = torch.float32,
    source: str | Path | None = None,
) -> None:
    """Writes directory `path` for `transformers.AutoModelForCausalLM`, and replaces one that exists.

    Tensors are rounded to `dtype`, which config.json names. `source` is the directory that the model was loaded
    from, whose generation_config.json is copied, since it names tokens that end a reply. Raises
    CheckpointError, and leaves `path` unchanged, if a value does not fit into `dtype`.

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
            _check_fits(state, path)
        save_tensors(state, part / _WEIGHTS, metadata={"format": "pt"})
        table = model.config.to_hf() | {"torch_dtype": str(dtype).removeprefix("torch.")}
        (part / "config.json").write_text(json.dumps(table, indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save(str(part))
        if source is not None and (beside := Path(source) / GENERATION).is_file():
            shutil.copyfile(beside, part / GENERATION)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if not index.exists() or (directory / _WEIGHTS).exists():  # transformers' order
        return [directory / _WEIGHTS]
    shards = _read_object(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
        raise CheckpointError(f"{index}: weight_map is not a table of file names")
    names = sorted(set(shards.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index}: {outside[0]!r} is not in this directory")
    return [directory / name for name in names]


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Opens a file of tensors. Raises CheckpointError if it, or later a tensor of it, cannot be read."""
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file{_other_weights(file.parent)}")
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        if not os.access(file, os.R_OK):  # safetensors would report it as missing
            raise CheckpointError(
                f"{file}: user {os.getuid()} may not read it by its mode; transformers writes files "
                "for their owner alone: chmod -R a+rX the directory"
            ) from error
        raise CheckpointError(f"{file}: {error}") from error


def _other_weights(directory: Path) -> str:
    """Returns what to do about a directory that has weights in files of another kind; else ""."""
    others = any(directory.glob("*.bin")) or any(directory.glob("*.pth"))
    said = "; only safetensors are read: load the model with transformers, and save_pretrained"
    return said if others else ""


def _check_fits(state: dict[str, torch.Tensor], path: str | Path) -> None:
    for name, tensor in state.items():
        if not _finite(tensor):
            raise CheckpointError(f"{path}: {name} does not fit into {tensor.dtype}")


def _finite(tensor: torch.Tensor) -> bool:
    # aminmax allocates nothing, whereas isfinite would need a further tensor as large as the embedding.
    return tensor.numel() == 0 or all(end.isfinite() for end in tensor.aminmax())


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return value
