"""`areal-q quantize SRC DST --format int8` writes a checkpoint whose linear layers are quantized as in
rollouts."""

import shutil
from pathlib import Path

import torch

from areal_q.errors import CheckpointError, QuantizationError
from areal_q.models import load_decoder
from areal_q.models.hf.quantized import write_checkpoint
from areal_q.quant import quantize_state
from areal_q.system.files import replacing

BESIDE_WEIGHTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""Files that are copied unchanged if SRC has them"""


def quantize(source: Path, target: Path, format: str, dtype: torch.dtype) -> tuple[int, int]:
    """Writes `target`, a new directory, and returns the size of the weights in bytes before and after.

    `dtype` is that of the unquantized tensors (norms, embeddings, head, biases). The quantized tensors are
    those that a learner with these weights publishes, bit for bit. Raises CheckpointError if `target` exists,
    `source` is not a model, or one of its tensors does not fit the format.
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
            if (source / name).is_file():
                shutil.copyfile(source / name, part / name)
    before = sum(tensor.numel() for tensor in state.values()) * dtype.itemsize
    return before, sum(tensor.nbytes for tensor in tensors.values())
