"""Reads what a directory in Hugging Face's layout says of its model: config.json, and the headers of the files
of weights. Imports no torch."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from areal_q.errors import CheckpointError, NotOurs
from areal_q.models.config import DecoderConfig
from areal_q.models.hf.stored_layout import stored_shapes
from areal_q.models.variants import text_part
from areal_q.tasks.encoding.hf_tokenizer import check_whole

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LFS = b"version https://git-lfs"
"""How a file begins that stands for another in a repository which was cloned without Git LFS"""

_PIECES, _PIECE = 64, 4096
"""How many pieces of a large tensor are compared, and the bytes of each"""


def load_config(path: str | Path) -> DecoderConfig:
    """Returns the shape of the model in directory `path`. Raises CheckpointError, which names the file, if it
    cannot be read."""
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    check_whole(directory)
    file = directory / "config.json"
    return shape_in(config_table(file), file)


def shape_in(table: dict[str, Any], file: Path) -> DecoderConfig:
    """Returns the shape that `table`, the content of `file`, describes. Raises CheckpointError, which names the
    file."""
    try:
        return DecoderConfig.from_hf(table).validate()
    except (ValueError, TypeError, ArithmeticError) as error:
        kind = NotOurs if isinstance(error, NotOurs) else CheckpointError
        raise kind(f"{file}: {error}") from error


def declared_dtype(path: str | Path) -> str | None:
    """Returns the dtype that config.json in directory `path` names for the weights, such as "bfloat16"; None if
    it names none, or does not exist any more."""
    file = Path(path) / "config.json"
    table = text_part(config_table(file)) if file.is_file() else {}
    return table.get("dtype") or table.get("torch_dtype")


def check_tensors(path: str | Path, config: DecoderConfig) -> None:
    """Compares the headers of the files of weights in directory `path` with a model of `config`; no tensor is
    read. Raises CheckpointError, which names the file, if one cannot be read or a tensor is missing, unexpected
    or of a wrong shape."""
    found: dict[str, tuple[Path, list[int]]] = {}
    for file in weight_files(Path(path)):
        with opened(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if not is_derived(name, config):
                    shape = tensors.get_slice(name).get_shape()
                    found[name_in_text(name, config)] = file, shape
    if len(found) < config.layers:  # a model of so many layers would take long to lay out
        raise CheckpointError(
            f"{path}: config.json says {config.layers} layers, and there are {len(found)} tensors"
        )
    wanted = {name: [*shape] for name, shape in stored_shapes(config, found).items()}
    for name, (file, shape) in found.items():
        if name not in wanted:
            raise CheckpointError(f"{file}: unexpected tensor {name}")
        if shape != wanted[name]:
            raise CheckpointError(f"{file}: {name} is {shape}, config.json says {wanted[name]}")
    missing = [name for name in wanted if name not in found]
    if missing:
        raise CheckpointError(f"{path}: tensor {missing[0]} is missing ({len(missing)} in all)")
    if config.tied:
        check_head(path, config, "lm_head.weight", "model.embed_tokens.weight")


def check_head(path: str | Path, config: DecoderConfig, head: str, embedding: str) -> None:
    """Compares pieces of the tensors `head` and `embedding`, which `config` says are one, where the files of
    weights in directory `path` hold both. Raises CheckpointError, in the words of those who read them whole."""
    found: list[tuple[str, bytes]] = []
    for file in weight_files(Path(path)):
        with opened(file, "numpy") as tensors:
            stored = [n for n in tensors.keys() if name_in_text(n, config) in (head, embedding)]  # noqa: SIM118
        found += [_pieces(file, name) for name in stored]
    if len(found) == 2 and found[0][0] == found[1][0] and found[0] != found[1]:
        raise untied(path, head)


def _pieces(file: Path, name: str) -> tuple[str, bytes]:
    """Returns the dtype of a tensor, and pieces of its bytes: numpy has no bfloat16."""
    with file.open("rb") as raw:
        header = raw.read(int.from_bytes(raw.read(8), "little"))
        tensor, data = json.loads(header)[name], raw.tell()
        begin, end = tensor["data_offsets"]
        pieces = []
        for at in range(begin, end, max(_PIECE, (end - begin) // _PIECES)):
            raw.seek(data + at)
            pieces.append(raw.read(min(_PIECE, end - at)))
    return tensor["dtype"], b"".join(pieces)


def untied(path: str | Path, head: str) -> CheckpointError:
    """Returns the error of a model whose files hold a head of its own, though config.json says otherwise."""
    return CheckpointError(
        f"{path}: {head} is not the embedding, though config.json says tie_word_embeddings: where the head is "
        "meant, write false there"
    )


def is_derived(name: str, config: DecoderConfig) -> bool:
    """Returns True for a tensor that follows from others, or is none of the language model's: transformers 4
    wrote a tied head as well, and older versions the frequencies that config.json determines; Qwen3.5 has parts
    that see images, and that predict several tokens."""
    if config.delta and name.startswith(("model.visual.", "mtp.")):
        return True
    return (name == "lm_head.weight" and config.tied) or name.endswith("rotary_emb.inv_freq")


def name_in_text(name: str, config: DecoderConfig) -> str:
    """Returns the name that a tensor of a model that sees images too has in its language model alone."""
    return name.replace("model.language_model.", "model.", 1) if config.delta else name


def weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if not index.exists() or (directory / WEIGHTS).exists():  # transformers' order
        return [directory / WEIGHTS]
    shards = config_table(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
        raise CheckpointError(f"{index}: weight_map is not a table of file names")
    names = sorted(set(shards.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index}: {outside[0]!r} is not in this directory")
    return [directory / name for name in names]


@contextmanager
def opened(file: Path, framework: str) -> Iterator[Any]:
    """Opens a file of tensors. Raises CheckpointError if it, or later a tensor of it, cannot be read."""
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file{_other_weights(file.parent)}")
    try:
        with safe_open(file, framework=framework) as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        if not os.access(file, os.R_OK):  # safetensors would report it as missing
            raise CheckpointError(
                f"{file}: user {os.getuid()} may not read it by its mode; transformers writes files "
                "for their owner alone: chmod -R a+rX the directory"
            ) from error
        with file.open("rb") as raw:
            pointer = raw.read(len(_LFS)) == _LFS
        why = "a pointer of Git LFS, not the weights: git lfs pull" if pointer else error
        raise CheckpointError(f"{file}: {why}") from error


def _other_weights(directory: Path) -> str:
    """Returns what to do about a directory that has weights in files of another kind; else ""."""
    others = any(directory.glob("*.bin")) or any(directory.glob("*.pth"))
    said = "; only safetensors are read: load the model with transformers, and save_pretrained"
    return said if others else ""


def config_table(file: Path) -> dict[str, Any]:
    """Returns the JSON object in `file`. Raises CheckpointError, which names the file, if there is none."""
    try:
        value = json.loads(file.read_text())
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return value
