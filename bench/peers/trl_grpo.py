"""TRL's GRPOTrainer on the same task, from the same weights: the peer of bench/quickstart.py.

Runs in TRL's own environment and imports nothing of ours: `python trl_grpo.py SPEC.json`, or under
`torchrun --nproc-per-node 2` for data parallelism over two cores. Writes one JSON line per event to the
spec's `out`, whose clock is on only while TRL trains: not while it loads, and not while it is evaluated.
"""

# pyright: reportMissingImports=false

import json
import os
import platform
import runpy
import sys
import time
from pathlib import Path

import torch
import transformers
import trl
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock:
    """Seconds that passed while it was running, and the CPU seconds that this process took in them."""

    def __init__(self) -> None:
        self.elapsed_s, self.cpu_s = 0.0, 0.0
        self._began = 0.0, 0.0

    def start(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.elapsed_s += time.perf_counter() - self._began[0]
        self.cpu_s += time.process_time() - self._began[1]


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that counts the tokens it draws, and the seconds that drawing takes."""

    generate_s = 0.0
    tokens = 0

    def _generate_single_turn(self, *args, **kwargs):
        began = time.perf_counter()
        out = super()._generate_single_turn(*args, **kwargs)
        self.generate_s += time.perf_counter() - began
        self.tokens += sum(map(len, out[0]))
        return out


class Recorder(TrainerCallback):
    """Writes each batch's mean reward, and now and then the accuracy; ends training at the time limit."""

    def __init__(self, spec: dict, tokenizer, heldout: list[dict]) -> None:
        self.spec, self.tokenizer, self.heldout = spec, tokenizer, heldout
        self.right = runpy.run_path(spec["reward"])["reward"] if spec["reward"] else equal
        self.clock = Clock()
        self.rewards: list[float] = []
        self.trainer: TimedTrainer | None = None
        self.out = Path(spec["out"]) if int(os.environ.get("RANK", 0)) == 0 else None

    def score(self, prompts, completions, answer, **_) -> list[float]:
        """The reward function: the task's own, or as areal_q/tasks/datasets/arithmetic.py has it."""
        rewards = [*map(self.right, prompts, completions, answer)]
        self.rewards += rewards
        return rewards

    def on_train_begin(self, args, state, control, model=None, **_):
        self.evaluate(model, 0)
        self.clock.start()

    def on_step_end(self, args, state, control, model=None, **_):
        batch, part = divmod(state.global_step, self.spec["updates"])
        if part:
            return
        self.clock.stop()
        trainer, elapsed = self.trainer, [self.clock.elapsed_s]
        assert trainer is not None
        broadcast_object_list(elapsed)  # all ranks stop at the same step
        self.write(
            "step",
            batch,
            elapsed_s=elapsed[0],
            reward=sum(self.rewards) / len(self.rewards),
            tokens=trainer.tokens * args.world_size,
            generate_s=trainer.generate_s,
            cpu_s=self.clock.cpu_s * args.world_size,
        )
        self.rewards.clear()
        enough = batch >= self.spec["least_batches"]
        control.should_training_stop = enough and elapsed[0] >= self.spec["time_limit_s"]
        every = self.spec["eval_every"]
        if every and (batch % every == 0 or control.should_training_stop):
            reached = [self.evaluate(model, batch) >= self.spec["goal"]]
            broadcast_object_list(reached)
            control.should_training_stop |= reached[0]
        self.clock.start()

    def evaluate(self, model, batch: int) -> float:
        """The accuracy of greedy answers to all held-out problems, by the first rank."""
        if self.out is None or not self.spec["eval_every"]:
            return 0.0
        model = getattr(model, "module", model)
        model.eval()
        inputs = self.tokenizer(
            [p["prompt"] for p in self.heldout], padding=True, return_tensors="pt"
        )
        with torch.no_grad():
            ids = model.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=self.spec["max_tokens"],
                eos_token_id=self.tokenizer.eos_token_id,
                pad_token_id=self.tokenizer.pad_token_id,
            )
        model.train()
        texts = self.tokenizer.batch_decode(
            ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        right = [
            self.right(p["prompt"], t, p["answer"])
            for t, p in zip(texts, self.heldout, strict=True)
        ]
        accuracy = sum(right) / len(right)
        self.write("eval", batch, elapsed_s=self.clock.elapsed_s, accuracy=accuracy)
        return accuracy

    def write(self, kind: str, step: int, **values) -> None:
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")


def equal(prompt: str, response: str, answer: str) -> float:
    return float(response.strip() == answer)


def settings(spec: dict) -> GRPOConfig:
    """The quickstart's, as close as TRL's options come; what costs time and is not asked for is off."""
    responses = spec["groups"] * spec["group_size"]
    processes = int(os.environ.get("WORLD_SIZE", 1))
    return GRPOConfig(
        output_dir=str(Path(spec["out"]).parent / "trl"),
        seed=spec["seed"],
        num_generations=spec["group_size"],
        per_device_train_batch_size=responses
        // spec["updates"]
        // processes
        // spec["microbatches"],
        gradient_accumulation_steps=spec["microbatches"],
        steps_per_generation=spec["updates"] * spec["microbatches"],
        max_completion_length=spec["max_tokens"],
        temperature=spec["temperature"],
        top_k=0,
        beta=0.0,
        loss_type="dapo",
        epsilon=spec["clip_low"],
        epsilon_high=spec["clip_high"],
        learning_rate=spec["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=spec["warmup_steps"],
        adam_beta1=spec["betas"][0],
        adam_beta2=spec["betas"][1],
        weight_decay=spec["weight_decay"],
        max_grad_norm=spec["max_grad_norm"],
        optim="adamw_torch_fused",
        max_steps=10**6,
        bf16=spec["bf16"],
        gradient_checkpointing=False,
        use_cpu=True,
        ddp_backend="gloo" if processes > 1 else None,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        **spec.get("options", {}),
    )


def main(path: str) -> None:
    spec = json.loads(Path(path).read_text())
    torch.set_num_threads(spec["threads"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        spec["model"],
        dtype=torch.float32,
    )
    train, heldout = (
        [json.loads(line) for line in Path(spec[name]).read_text().splitlines()]
        for name in ("train", "heldout")
    )
    for problem in heldout[:8]:
        if tokenizer(problem["prompt"])["input_ids"] != problem["prompt_ids"]:
            sys.exit(f"the tokenizer reads {problem['prompt']!r} otherwise than ours")
    recorder = Recorder(spec, tokenizer, heldout)
    trainer = TimedTrainer(
        model=model,
        reward_funcs=recorder.score,
        args=settings(spec),
        train_dataset=Dataset.from_list([{k: p[k] for k in ("prompt", "answer")} for p in train]),
        processing_class=tokenizer,
        callbacks=[recorder],
    )
    recorder.trainer = trainer
    versions = {"trl": trl.__version__, "transformers": transformers.__version__}
    versions |= {"torch": torch.__version__, "python": platform.python_version()}
    recorder.write("start", 0, versions=versions)
    trainer.train()
    recorder.write("end", 0)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
