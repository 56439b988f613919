"""`areal-q quantize SRC DST --format int8`: a checkpoint whose linears are quantized as rollouts have them."""

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
"""What is copied as it is, where SRC has it."""


def quantize(source: Path, target: Path, format: str, dtype: torch.dtype) -> tuple[int, int]:
    """Writes `target`, a new directory; returns the bytes of the weights before and after.

    `dtype` is that of all that stays unquantized (norms, embeddings, head, biases). The quantized
    tensors are those that a learner with these weights publishes, bit for bit. Raises CheckpointError
    when `target` exists, `source` is no model, or one of its tensors has no place in the format.
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
