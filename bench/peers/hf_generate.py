"""Hugging Face `generate` on batches of prompts, in TRL's environment: `python hf_generate.py SPEC.json`.

Prints {"tokens_per_s": [...], "versions": {...}}: one rate for each repeat after a first, uncounted one.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import json
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def main(path: str) -> None:
    spec = json.loads(Path(path).read_text())
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(spec["seed"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32).eval()
    config = GenerationConfig(
        do_sample=True,
        temperature=spec["temperature"],
        top_k=0,
        max_new_tokens=spec["max_tokens"],
        min_new_tokens=None if spec["stop"] else spec["max_tokens"],
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    prompts, size = spec["prompts"], spec["sequences"]
    batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]

    def tokens_of(batch: list[str]) -> int:
        inputs = tokenizer(batch, padding=True, return_tensors="pt")
        drawn = model.generate(**inputs, generation_config=config)[
            :, inputs["input_ids"].shape[1] :
        ]
        # A response ends with its end-of-text token; what follows is padding.
        return int((drawn != tokenizer.pad_token_id).sum()) if spec["stop"] else drawn.numel()

    rates = []
    with torch.inference_mode():
        for _ in range(spec["repeats"] + 1):
            began = time.perf_counter()
            tokens = sum(map(tokens_of, batches))
            rates.append(tokens / (time.perf_counter() - began))
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    print(json.dumps({"tokens_per_s": rates[1:], "versions": versions}))


if __name__ == "__main__":
    main(sys.argv[1])
