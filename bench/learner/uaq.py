"""What UAQ's scale s does to one optimizer step: codes that move, and update against quantization error.

    python -m bench.learner.uaq

For s = 1, 1.5, 2 and each optimizer: the warm-started small model, rescaled, learns from the same groups,
drawn once. Measured on the linears that UAQ rescales (q, k, v, gate, up), which alone are trained here, as
means over the steps: |ΔW|/|W| and |Q(W) - W|/|W| in Frobenius norms, their quotient, and the share of
published codes that a step changed. Learning rates are set so that at s = 1 all optimizers move the
weights equally far in the first step. The exponent p says that the quotient is s^p times that at s = 1.
"""

import argparse
import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from areal_q.config import Run, load, override
from areal_q.messages import Group
from areal_q.models import Decoder
from areal_q.quant import FORMATS
from areal_q.tasks import build_reward, build_task, build_tokenizer
from bench.common import ROOT, commit, device, publish, table, use_cores
from bench.stability.lab import Drawer, Tickets, warm_model
from buffer.sampling.replay_pool import SampledGroups
from learner.backends.single_device import TorchPolicy
from learner.data.admission import Admission
from learner.data.staleness import VersionHistory
from learner.policy_update import SingleProcessUpdater
from learner.publishing.version_builder import VersionBuilder
from learner.train_step import train_step
from rollout.engines import build_engine

SCALES = (1.0, 1.5, 2.0)
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p),
    "AdamW": lambda p: torch.optim.AdamW(p, betas=(0.9, 0.95), weight_decay=0.0),
    "Muon": lambda p: torch.optim.Muon(p, weight_decay=0.0),
}
NO_CLIP = 1e9
RESCALED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def setting(steps: int, *overrides: str) -> Run:
    base = [f"steps={steps}", "learner.minibatches=1", "learner.max_lag=0", "learner.uaq=1"]
    base += ["learner.optimizer.warmup_steps=0", "learner.optimizer.decay_steps=0"]
    return load(ROOT / "configs" / "quickstart.toml", [*base, *overrides])


async def draw(run: Run) -> tuple[list[list[Group]], str]:
    """Groups for each step, all from the weights after the warm start, and those weights' digest."""
    task, tokenizer = build_task(run.task), build_tokenizer(run.model, run.task)
    tickets: Any = Tickets()  # what Admission needs of a buffer
    admission = Admission(run, task, tokenizer, tickets, 0, set())
    admission.issue(range(run.steps * run.learner.groups), 0)
    version = VersionBuilder(run).build(warm_model(run, task, tokenizer), 0)
    engine = build_engine(run.rollout.engine)
    await engine.start()
    await engine.load_weights(version)
    drawer = Drawer(engine, tokenizer, build_reward(run), run.rollout.format)
    groups = await asyncio.gather(*map(drawer.draw, tickets.waiting))
    await engine.close()
    size = run.learner.groups
    return [groups[i : i + size] for i in range(0, len(groups), size)], version.manifest.digest


def rescaled(model: Decoder) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.split(".")[-2] in RESCALED]


def measure(
    run: Run, optimizer: str, lr: float, batches: Sequence[list[Group]], digest: str
) -> dict[str, float]:
    """Means over the steps. Run with `learner.uaq` as the scale and `learner.max_grad_norm` as the clip."""
    run = override(run, f"learner.optimizer.lr={lr!r}")
    model = warm_model(run, build_task(run.task), build_tokenizer(run.model, run.task))
    policy = TorchPolicy(model, run.learner, run.rollout.sampling.temperature)
    weights = rescaled(model)
    policy.optimizer = OPTIMIZERS[optimizer](weights)
    history = VersionHistory(1 + len(batches), {0: digest})
    seen: list[dict[str, float]] = []
    for batch in batches:
        before, codes = [w.detach().clone() for w in weights], quantized(weights, run)[0]
        norm = train_step(SingleProcessUpdater(policy), SampledGroups(batch), history, 0)[
            "train/grad_norm"
        ]
        after, rounded = quantized(weights, run)
        pairs = list(zip(before, weights, strict=True))
        moved = sum(int((a != b).sum()) for a, b in zip(codes, after, strict=True))
        update = frobenius([w.detach() - b for b, w in pairs])
        error = frobenius([q - w.detach() for q, w in zip(rounded, weights, strict=True)])
        whole = frobenius(before)
        seen.append(
            {
                "update": update / whole,
                "error": error / whole,
                "ratio": update / error,
                "moved": moved / sum(w.numel() for w in weights),
                "grad_norm": norm,
            }
        )
    return {key: sum(s[key] for s in seen) / len(seen) for key in seen[0]} | {
        "first_update": seen[0]["update"]
    }


def quantized(weights: Sequence[nn.Parameter], run: Run) -> tuple[list[Tensor], list[Tensor]]:
    """Codes, and the real numbers that they stand for."""
    format = FORMATS[run.rollout.format]
    parts = [format.quantize(w, "weight") for w in weights]
    return [p["weight"] for p in parts], [format.dequantize(p) for p in parts]


def frobenius(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(t.square().sum()) for t in tensors))


def rows(run: Run, reach: float) -> list[dict[str, float | str]]:
    """One for each clip, optimizer and scale. Every optimizer's first step at s = 1 is `reach` · |W| long."""
    batches, digest = asyncio.run(draw(run))
    found: list[dict[str, float | str]] = []
    for clip in (NO_CLIP, run.learner.max_grad_norm):
        for optimizer in OPTIMIZERS:
            lr, first = 1e-4, 0.0
            for s in SCALES:
                scaled = override(run, f"learner.uaq={s}", f"learner.max_grad_norm={clip}")
                if s == 1:
                    trial = measure(scaled, optimizer, lr, batches[:1], digest)
                    lr *= reach / trial["first_update"]
                values = measure(scaled, optimizer, lr, batches, digest)
                first = first or values["ratio"]
                p = math.log(values["ratio"] / first) / math.log(s) if s > 1 else math.nan
                found.append(
                    {"optimizer": optimizer, "clip": clip, "s": s, "lr": lr, "p": p, **values}
                )
    return found


def line(row: dict[str, float | str]) -> list[str]:
    clipped = "–" if row["clip"] == NO_CLIP else f"{row['clip']}"
    return [
        str(row["optimizer"]),
        clipped,
        f"{row['s']}",
        f"{row['lr']:.2g}",
        f"{row['grad_norm']:.3g}",
        f"{row['update']:.2e}",
        f"{row['error']:.2e}",
        f"{row['ratio']:.3g}",
        "–" if row["s"] == 1 else f"{row['p']:.2f}",
        f"{100 * float(row['moved']):.3f}",
    ]


HEADER = (
    "optimizer",
    "clip",
    "s",
    "lr",
    "gradient norm",
    "update",
    "error",
    "update / error",
    "p",
    "codes moved, %",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--reach", type=float, default=1e-3, help="of the first step at s = 1")
    parser.add_argument("settings", nargs="*", help="a.b=c")
    args = parser.parse_args()
    use_cores(1)
    torch.set_num_threads(1)
    run = setting(args.steps, *args.settings)
    found = rows(run, args.reach)
    text = f"{run.rollout.format}, {args.steps} steps; {device()}, commit {commit()}\n\n"
    text += table(HEADER, [line(row) for row in found])
    publish(f"uaq-{run.rollout.format}", text, {"rows": found})


if __name__ == "__main__":
    main()
