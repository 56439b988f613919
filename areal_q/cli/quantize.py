"""`areal-q quantize SRC DST --format int8` writes a checkpoint whose linear layers are quantized as in
rollouts."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import torch
import typer

from areal_q.config import Chat
from areal_q.errors import AReaLQError, CheckpointError, ConfigError, QuantizationError
from areal_q.models import load_config, load_decoder
from areal_q.models.hf.checkpoint import name_ends
from areal_q.models.hf.quantized import QUANTIZATION_CONFIGS, RELAID, write_checkpoint
from areal_q.models.hf.vllm_shapes import vllm_refuses
from areal_q.quant import FORMATS, quantize_state
from areal_q.system.files import replacing
from areal_q.tasks import load_tokenizer

BESIDE_WEIGHTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "additional_chat_templates",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""Files and directories that are copied unchanged if SRC has them"""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def main(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="a model in Hugging Face layout")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="a directory that is made")],
    format: Annotated[str, typer.Option(help="number format of the linears, such as int8")],
    dtype: Annotated[str, typer.Option(help="of all else: bfloat16 or float32")] = "bfloat16",
) -> None:
    """Write SRC as a quantized checkpoint that vLLM loads, with the tensors that rollouts would get."""
    known = [name for name in FORMATS if name in QUANTIZATION_CONFIGS]
    if format not in known:
        raise ConfigError(f"--format {format}: none of {', '.join(known)}")
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: none of {', '.join(DTYPES)}")
    shape = load_config(source)
    if shape.relaid:
        raise ConfigError(f"{source}: {shape.family}: {RELAID}")
    problem = vllm_refuses(shape, format)
    if problem and format != "fp8":  # whose blocks transformers takes at any width
        raise ConfigError(f"--format {format}: {problem}")
    before, after = quantize(source, target, format, DTYPES[dtype])
    if problem:
        typer.echo(f"warning: {problem}", err=True)
    typer.echo(f"{target}: {format}, {after:,} bytes of weights; in {dtype} {before:,}")


def quantize(source: Path, target: Path, format: str, dtype: torch.dtype) -> tuple[int, int]:
    """Writes `target`, a new directory, and returns the size of the weights in bytes before and after.

    `dtype` is that of the unquantized tensors (norms, embeddings, head, biases). The quantized tensors are
    those that a learner with these weights publishes, bit for bit. generation_config.json names all tokens that
    end a reply, as in a run's export. Raises CheckpointError if `target` exists, `source` is not a model, or a
    tensor does not fit the format.
    """
    if target.exists():
        raise CheckpointError(f"{target}: exists already")
    model = load_decoder(source)
    state = model.state_dict()
    try:
        published = quantize_state(state, format)
    except QuantizationError as error:
        raise CheckpointError(f"{source}: {error}") from error
    tensors = {
        name: tensor.to(dtype) if name in state and tensor.dtype == torch.float32 else tensor
        for name, tensor in published.items()
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as part:
        part.mkdir()
        write_checkpoint(tensors, format, model.config.to_hf(), part)
        for name in BESIDE_WEIGHTS:
            if (beside := source / name).is_dir():
                shutil.copytree(beside, part / name)
            elif beside.is_file():
                shutil.copyfile(beside, part / name)
        name_ends(part, _ends_of(source))
    before = sum(tensor.numel() for tensor in state.values()) * dtype.itemsize
    return before, sum(tensor.nbytes for tensor in tensors.values())


def _ends_of(source: Path) -> Iterable[int]:
    """Returns the ids that end a reply by the files in `source` and its chat template; warns, and returns none,
    if no tokenizer can be read."""
    why: AReaLQError | None = None
    for chat in (Chat(), None):  # one without a template, or with none to use, has ends too
        try:
            return load_tokenizer(source, chat).stops
        except AReaLQError as error:
            why = error
    typer.echo(f"warning: what ends a reply is not named: {why}", err=True)
    return ()
