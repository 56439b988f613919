"""A learner's step beside TRL's and a plain loop on transformers; log-probs beside their definition.

    python -m bench.learner.step                      each side in processes of its own, in turns; one thread
    python -m bench.learner.step --dtype bfloat16     all sides in bfloat16: weights at rest too, but for ours

**Step.** One model, one batch: groups of responses of mixed length with their rewards, prescribed, so that
nobody generates. GRPO advantages, token mean, clipped ratio, AdamW; float32 unless `--dtype` says otherwise.
That all sides do the same shows in their gradient norms. Time is the process's CPU time. Memory is its peak
RSS, in all and beyond what it had before the first step (model loaded, libraries imported, no optimizer state
yet).

**Log-probs.** Of T = 2,048 tokens over V = 152k, forward and backward; D as Qwen2.5-0.5B has it, or `--width`.
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from areal_q.config import load
from areal_q.messages import Array, Trajectory, VersionSpan
from areal_q.models import Decoder, DecoderConfig, init_weights, load_decoder, save_decoder
from areal_q.models.logprobs import blockwise, whole
from areal_q.tasks import CharTokenizer
from bench import trl_peer
from bench.common import RESULTS, ROOT, commit, device, number, peer_env, publish, say, table
from bench.learner.memory import peak_bytes
from learner.backends.single_device import TorchPolicy
from learner.data.packing import Sample
from learner.policy_update import update_policy

WORK = RESULTS / "learner"
PROGRAM = ROOT / "bench" / "peers" / "learner_step.py"
AIM_SPEED, AIM_MEMORY, AIM_LOGPROBS = 2.0, 0.5, 0.2
GROUPS, SIZE, PROMPT, LONGEST = 3, 8, 48, 256
MEDIAN, SPREAD = 64, 0.9
"""Of the lognormal lengths of responses"""
STEPS = 3
"""A process takes so many; the first, in which memory and kernels are prepared, is not counted"""
CONFIG = DecoderConfig(
    family="qwen3",
    vocab_size=16_384,
    width=384,
    layers=8,
    heads=6,
    kv_heads=2,
    head_dim=64,
    mlp=1152,
    max_positions=512,
)
LOGPROBS = (2048, 151_936)
"""T, V"""


def main(
    rounds: Annotated[int, typer.Option(help="processes of each side, in turns")] = 3,
    trl_python: Annotated[
        Path | None, typer.Option(envvar="TRL_PYTHON", help="a Python with trl; default .venv-trl")
    ] = None,
    width: Annotated[int, typer.Option(help="D of the log-probs")] = 896,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    torch.set_num_threads(1)
    if child:
        print(json.dumps(ours(json.loads(Path(child).read_text()))))
        return
    python = trl_python or trl_peer.environment()
    spec = prepare(dtype)
    sides = {
        "ours": [sys.executable, "-m", "bench.learner.step", "--child", str(spec)],
        "TRL": [str(python), str(PROGRAM), str(spec), "trl"],
        "transformers": [str(python), str(PROGRAM), str(spec), "transformers"],
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for number_ in range(rounds):
        for name, argv in sides.items():
            say(f"round {number_}: {name}")
            found[name].append(taken(argv))
    steps, tokens = step_table(found, json.loads(spec.read_text()))
    say("log-probs")
    parts = [
        f"{device()}; commit {commit()}; one thread, CPU time, best of {rounds * (STEPS - 1)} steps; "
        f"{sum(p.numel() for p in Decoder(CONFIG).parameters()):,} parameters, {tokens:,} response tokens.",
        steps,
        logprobs_table(width),
    ]
    publish("learner", "\n\n".join(parts), found)


def prepare(dtype: str) -> Path:
    """Writes model, tokenizer and batch; the path of their description."""
    WORK.mkdir(parents=True, exist_ok=True)
    model = Decoder(CONFIG)
    init_weights(model, 0)
    save_decoder(model, WORK / "model", CharTokenizer())
    rng = np.random.default_rng(0)
    lengths = np.minimum(LONGEST, rng.lognormal(np.log(MEDIAN), SPREAD, (GROUPS, SIZE)) + 2).astype(
        int
    )

    def ids(count: int) -> list[int]:
        return rng.integers(3, CONFIG.vocab_size, count).tolist()

    groups = [
        {
            "prompt_ids": ids(PROMPT),
            "responses": [ids(n) for n in row],
            "rewards": [float(i % 3 == 0) for i in range(SIZE)],
        }
        for row in lengths
    ]
    spec = {
        "model": str(WORK / "model"),
        "groups": groups,
        "lr": 1e-5,
        "steps": STEPS,
        "dtype": dtype,
    }
    path = WORK / "spec.json"
    path.write_text(json.dumps(spec))
    return path


def taken(argv: list[str]) -> dict[str, Any]:
    """What a side's process says of itself in its last line."""
    env = peer_env(1) | {"TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=WORK, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(argv)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def ours(spec: dict[str, Any]) -> dict[str, Any]:
    """`STEPS` of our policy's steps; a micro-batch has as many tokens as a group of the peers, padded."""
    run = load(
        None,
        [
            "learner.objective.type=ppo", "learner.minibatches=1", f"learner.optimizer.lr={spec['lr']}",
            f"learner.microbatch_tokens={SIZE * (PROMPT + LONGEST)}", "learner.optimizer.warmup_steps=0",
            "learner.optimizer.betas=[0.9,0.999]", f"learner.dtype={spec['dtype']}",
        ],
    )  # fmt: skip
    policy = TorchPolicy(load_decoder(spec["model"]), run.learner, temperature=1.0)
    samples = samples_of(spec["groups"])
    before, seconds, norms = rss_bytes(), [], []
    for _ in range(spec["steps"]):
        began = time.process_time()
        norms.append(update_policy(policy, samples)["train/grad_norm"])
        seconds.append(time.process_time() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "norms": norms, "before": before, "peak": peak}


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def samples_of(groups: list[dict[str, Any]]) -> list[Sample]:
    out = []
    for number_, group in enumerate(groups):
        rewards = torch.tensor(group["rewards"])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for i, ids in enumerate(group["responses"]):
            t = Trajectory(
                index=i,
                response_ids=Array.of(ids, "int32"),
                behavior_logprobs=Array.of(np.full(len(ids), -9.0), "float32"),
                loss_mask=Array.of(np.ones(len(ids)), "uint8"),
                spans=[VersionSpan(0, len(ids), "")],
                finish_reason="stop",
                reward=float(rewards[i]),
            )
            lag = np.zeros(len(ids), np.int64)
            out.append(
                Sample(
                    number_, np.array(group["prompt_ids"], np.int32), t, float(advantages[i]), lag
                )
            )
    return out


def step_table(found: dict[str, list[dict[str, Any]]], spec: dict[str, Any]) -> tuple[str, int]:
    tokens = sum(len(r) for group in spec["groups"] for r in group["responses"])
    best = {
        name: min(s for run in runs for s in run["seconds"][1:]) for name, runs in found.items()
    }
    step = {name: min(run["peak"] - run["before"] for run in runs) for name, runs in found.items()}
    peak = {name: min(run["peak"] for run in runs) for name, runs in found.items()}
    rows = [
        [
            name,
            f"{found[name][0]['norms'][0]:.5f}",
            number(best[name]),
            number(tokens / best[name]),
            number(best[name] / best["ours"]),
            number(step[name] / 2**20),
            number(step["ours"] / step[name]),
            number(peak[name] / 2**20),
            number(peak["ours"] / peak[name]),
        ]
        for name in found
    ]
    header = [
        "side", "gradient norm", "CPU s a step", "response tokens/s", f"ours faster (aim {AIM_SPEED:g})",
        "step's memory, MiB", f"ours / it (aim {AIM_MEMORY:g})", "peak RSS, MiB", "ours / it",
    ]  # fmt: skip
    return table(header, rows), tokens


def logprobs_table(width: int) -> str:
    """Peak memory beyond the inputs, and CPU time, of log-probs and entropies with their gradients."""
    tokens, vocabulary = LOGPROBS
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) * 0.02).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    rows, memory = [], {}
    for name, way in {"whole logits": whole, "ours, blockwise": blockwise}.items():
        hidden.grad = weight.grad = None

        def work(way=way) -> None:
            logprobs, _ = way(hidden, weight, targets, 1.0, False)
            logprobs.sum().backward()

        began = time.process_time()
        memory[name] = peak_bytes(work)
        seconds = time.process_time() - began
        assert hidden.grad is not None
        gradient = float(hidden.grad.norm())
        share = memory[name] / memory["whole logits"]
        rows.append(
            [name, number(memory[name] / 2**20), number(share), number(seconds), f"{gradient:.6g}"]
        )
    header = [
        "log-probs and entropy",
        "peak, MiB",
        f"of whole (aim {AIM_LOGPROBS:g})",
        "CPU s",
        "norm of ∂hidden",
    ]
    return f"T = {tokens:,}, V = {vocabulary:,}, D = {width}, float32:\n\n{table(header, rows)}"


if __name__ == "__main__":
    typer.run(main)
