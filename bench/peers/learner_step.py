"""A learner's step as TRL's GRPOTrainer takes it, and as a plain loop on transformers does: peers of
bench/learner/step.py.

`python -m bench.peers.learner_step SPEC.json`, whose "side" is trl or transformers and whose "dtype" is
float32, bfloat16 (all weights) or autocast (bfloat16 products alone). Only our meter of memory and our
setting of the allocator are imported.
Prints one JSON line: CPU seconds and gradient norm of each step, and this process's memory.
"""

# pyright: reportMissingImports=false

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from areal_q.system.processes import keep_freed_memory
from bench.learner.memory import resident_bytes


def load(spec: dict[str, Any]) -> Any:
    dtype = torch.bfloat16 if spec["dtype"] == "bfloat16" else torch.float32
    return AutoModelForCausalLM.from_pretrained(spec["model"], dtype=dtype)


def rows_of(groups: list[dict[str, Any]]) -> list[tuple[list[int], list[int], float]]:
    """Returns prompt, response and advantage of every response."""
    rows = []
    for group in groups:
        r = torch.tensor(group["rewards"])
        advantages = (r - r.mean()) / (r.std() + 1e-4)
        for response, advantage in zip(group["responses"], advantages.tolist(), strict=True):
            rows.append((group["prompt_ids"], response, advantage))
    return rows


def padded(rows: list[tuple[list[int], list[int], float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids and attention mask, [rows, P + T], padded on the right."""
    longest = max(len(response) for _, response, _ in rows)
    rests = [longest - len(response) for _, response, _ in rows]
    ids = [p + r + [0] * rest for (p, r, _), rest in zip(rows, rests, strict=True)]
    mask = [
        [1] * (len(p) + len(r)) + [0] * rest for (p, r, _), rest in zip(rows, rests, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(mask)


def plain(spec: dict[str, Any]) -> dict[str, Any]:
    """What one writes first: whole logits of the responses, log_softmax, a micro-batch at a time."""
    start = resident_bytes()
    model = load(spec)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec["lr"], weight_decay=0.0, fused=True)
    rows, size = rows_of(spec["groups"]), spec["microbatch"]
    tokens = sum(len(response) for _, response, _ in rows)
    cast = torch.autocast("cpu", torch.bfloat16, enabled=spec["dtype"] == "autocast")
    seconds, norms = [], []
    for _ in range(spec["steps"]):
        began = time.process_time()
        for at in range(0, len(rows), size):
            part = rows[at : at + size]
            ids, mask = padded(part)
            prompt = len(part[0][0])
            keep = ids.shape[1] - prompt + 1
            with cast:
                logits = model(
                    ids, attention_mask=mask, use_cache=False, logits_to_keep=keep
                ).logits[:, :-1]
            logprobs = logits.float().log_softmax(-1).gather(-1, ids[:, prompt:, None]).squeeze(-1)
            ratio = (logprobs - logprobs.detach()).exp()
            gain = ratio * torch.tensor([advantage for *_, advantage in part])[:, None]
            (-(gain * mask[:, prompt:]).sum() / tokens).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.process_time() - began)
    return {"seconds": seconds, "norms": norms, "start": start, "peak": resident_bytes(peak=True)}


class Meter(TrainerCallback):
    """CPU seconds from the end of one optimizer step to that of the next; the first starts with training."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.since = 0.0

    def on_train_begin(self, args, state, control, **_):
        self.since = time.process_time()

    def on_step_end(self, args, state, control, **_):
        now = time.process_time()
        self.seconds.append(now - self.since)
        self.since = now


def trl(spec: dict[str, Any]) -> dict[str, Any]:
    """GRPOTrainer, told what its rollouts are, so that nothing is generated."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    start = resident_bytes()
    groups, size = spec["groups"], len(spec["groups"][0]["responses"])

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        turn = [iter(group["responses"]) for group in groups]
        return {
            "prompt_ids": [groups[int(p)]["prompt_ids"] for p in prompts],
            "completion_ids": [next(turn[int(p)]) for p in prompts],
            "logprobs": [[0.0] for _ in prompts],  # of vLLM's correction, which is off
        }

    def reward(prompts: list[str], **_: Any) -> list[float]:
        turn: list[Iterator[float]] = [iter(group["rewards"]) for group in groups]
        return [next(turn[int(p)]) for p in prompts]

    meter = Meter()
    trainer = GRPOTrainer(
        model=load(spec),
        reward_funcs=reward,
        rollout_func=rollouts,
        args=GRPOConfig(
            output_dir=str(Path(spec["model"]) / "trl"),
            num_generations=size,
            per_device_train_batch_size=spec["microbatch"],
            gradient_accumulation_steps=len(groups) * size // spec["microbatch"],
            max_completion_length=max(len(r) for g in groups for r in g["responses"]),
            beta=0.0,
            loss_type="dapo",
            learning_rate=spec["lr"],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            max_steps=spec["steps"],
            bf16=spec["dtype"] != "float32",
            gradient_checkpointing=False,
            use_cpu=True,
            report_to="none",
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": str(i)} for i in range(len(groups))]),
        processing_class=AutoTokenizer.from_pretrained(spec["model"], padding_side="left"),
        callbacks=[meter],
    )
    trainer.train()
    norms = [r["grad_norm"] for r in trainer.state.log_history if "grad_norm" in r]
    found = {"seconds": meter.seconds, "norms": norms}
    return found | {"start": start, "peak": resident_bytes(peak=True)}


if __name__ == "__main__":
    keep_freed_memory()  # as our learner does
    torch.set_num_threads(1)
    given = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps({"trl": trl, "transformers": plain}[given["side"]](given)))
