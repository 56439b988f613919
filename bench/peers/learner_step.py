"""A learner's step as TRL's GRPOTrainer takes it, and as a plain loop on transformers does: peers of
bench/learner/step.py.

Runs in TRL's own environment and imports nothing of ours: `python learner_step.py SPEC.json trl|transformers`.
Prints one JSON line: CPU seconds and gradient norm of each step, and this process's memory.
"""

# pyright: reportMissingImports=false

import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

KIB = 1024


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB


def load(spec: dict[str, Any]) -> Any:
    return AutoModelForCausalLM.from_pretrained(spec["model"], dtype=getattr(torch, spec["dtype"]))


def advantages(rewards: list[float]) -> torch.Tensor:
    r = torch.tensor(rewards)
    return (r - r.mean()) / (r.std() + 1e-4)


def padded(group: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """ids and attention mask [G, P + T] of a group, padded on the right; P."""
    prompt, longest = group["prompt_ids"], max(map(len, group["responses"]))
    rows = [prompt + r + [0] * (longest - len(r)) for r in group["responses"]]
    mask = [[1] * (len(prompt) + len(r)) + [0] * (longest - len(r)) for r in group["responses"]]
    return torch.tensor(rows), torch.tensor(mask), len(prompt)


def plain(spec: dict[str, Any]) -> dict[str, Any]:
    """What one writes first: whole logits, log_softmax, a group at a time."""
    model = load(spec)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec["lr"], weight_decay=0.0, fused=True)
    tokens = sum(len(r) for group in spec["groups"] for r in group["responses"])
    before, seconds, norms = rss_bytes(), [], []
    for _ in range(spec["steps"]):
        began = time.process_time()
        for group in spec["groups"]:
            ids, mask, start = padded(group)
            logits = model(ids, attention_mask=mask, use_cache=False).logits[:, start - 1 : -1]
            logprobs = logits.float().log_softmax(-1).gather(-1, ids[:, start:, None]).squeeze(-1)
            ratio = (logprobs - logprobs.detach()).exp()
            gain = ratio * advantages(group["rewards"])[:, None]
            (-(gain * mask[:, start:]).sum() / tokens).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.process_time() - began)
    return {"seconds": seconds, "norms": norms, "before": before, "peak": peak_bytes()}


class Meter(TrainerCallback):
    """CPU seconds from the end of one optimizer step to that of the next; the first starts with training."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.since = 0.0
        self.before = 0

    def on_train_begin(self, args, state, control, **_):
        self.before, self.since = rss_bytes(), time.process_time()

    def on_step_end(self, args, state, control, **_):
        now = time.process_time()
        self.seconds.append(now - self.since)
        self.since = now


def trl(spec: dict[str, Any]) -> dict[str, Any]:
    """GRPOTrainer, told what its rollouts are, so that nothing is generated."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

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
            output_dir=str(Path(spec["model"]).parent / "trl"),
            num_generations=size,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=len(groups),
            max_completion_length=max(len(r) for g in groups for r in g["responses"]),
            beta=0.0,
            loss_type="dapo",
            learning_rate=spec["lr"],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            max_steps=spec["steps"],
            bf16=spec["dtype"] == "bfloat16",
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
    return found | {"before": meter.before, "peak": peak_bytes()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps({"trl": trl, "transformers": plain}[sys.argv[2]](given)))
