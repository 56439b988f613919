"""What smoothing costs a version, and how large its deltas are, in real steps of a pretrained model.

    python -m bench.weights.smoothing          # after `make real-model`; 9 GB

The laboratory (bench/stability/lab.py) trains its arm "int8 acr smoothed" for STEPS steps. From step FIRST on,
where the learning rate no longer rises, every version is made twice more of the same weights, with smoothing's
scales and without, TURNS times in turns, and so is its delta, which is applied and compared. CPU seconds of one
thread, the least of a version's turns; medians over the versions, with the least and the largest. Measuring is
what choosing the scales takes, by the steps from one time to the next. Bytes are beside those of all weights
in bf16. Versions after a step that changed nothing, since all of its rewards were equal, are left out.
Prints a table, and writes it to runs/bench/smoothing.{md,json}.
"""

import asyncio
import os
import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from areal_q.config import Run, Smoothing
from areal_q.models.smoothed_state import first_folds
from areal_q.tasks import build_task, build_tokenizer, problem_at
from areal_q.weights import delta
from areal_q.weights.version import WeightVersion
from bench.common import commit, device, publish, say, table
from bench.stability.lab import train
from bench.stability.run import sums
from learner.backends.single_device import TorchPolicy
from learner.publishing.version_builder import VersionBuilder

STEPS, FIRST, TURNS = 36, 16, 3
SMOOTHED, PLAIN = "int8, smoothed", "int8"
Figures = dict[str, list[float]]
T = TypeVar("T")


def timed(took: list[float], call: Callable[[], T]) -> T:
    """Returns what `call` does, and adds its CPU seconds to `took`."""
    began = time.process_time()
    result = call()
    took.append(time.process_time() - began)
    return result


class Watcher:
    """Makes each version in both ways, beside the laboratory."""

    def __init__(self, run: Run, smoothing: Smoothing) -> None:
        self._run, self._smoothing = run, smoothing
        task, self._tokenizer = build_task(run.task), build_tokenizer(run.model, run.task)
        self._prompts = [problem_at(task, n, run.seed).asked for n in range(len(task.train))]
        self._builders: dict[str, VersionBuilder] = {}
        self._bases: dict[str, WeightVersion] = {}
        self.dense = 0
        """Bytes of all weights in bf16"""
        self.measuring: list[float] = []
        """CPU seconds in which the inputs are measured and scales are chosen"""
        self.figures: dict[str, Figures] = {
            way: {"made": [], "delta": [], "bytes": []} for way in (PLAIN, SMOOTHED)
        }

    def __call__(self, policy: TorchPolicy, version: int) -> None:
        if version < FIRST:
            return
        if not self._builders:
            self.dense = 2 * sum(p.numel() for p in policy.model.parameters())
            self._builders = {
                PLAIN: VersionBuilder(self._run),
                SMOOTHED: VersionBuilder(self._run, smoothing=policy.smoothing),
            }
        prompts = map(self._tokenizer.encode_prompt, self._prompts)
        timed(
            self.measuring,
            lambda: first_folds(policy.model, prompts, self._smoothing, self._run.rollout.format),
        )
        made, coded = {way: list[float]() for way in self._builders}, dict[str, list[float]]()
        new, sizes = dict[str, WeightVersion](), dict[str, int]()
        for _turn in range(TURNS):
            for way, builder in self._builders.items():
                new[way] = timed(made[way], lambda b=builder: b.build(policy.model, version))
                if base := self._bases.get(way):
                    body = timed(
                        coded.setdefault(way, []), lambda o=base, n=new[way]: delta.diff(o, n)
                    )
                    assert body is not None
                    sizes[way] = len(body)
                    result = delta.apply(base, body, torch.empty_like(base.payload))
                    assert torch.equal(result.payload, new[way].payload)
        old, self._bases = self._bases, new
        if not old or torch.equal(old[PLAIN].payload, new[PLAIN].payload):
            return
        for way in coded:
            self.figures[way]["made"].append(min(made[way]))
            self.figures[way]["delta"].append(min(coded[way]))
            self.figures[way]["bytes"].append(sizes[way])
        say(f"version {version}: " + ", ".join(f"{w} {self.row(w)}" for w in coded))

    def row(self, way: str) -> list[str]:
        """Milliseconds and bytes of the versions so far."""
        figures = self.figures[way]
        share = median(self.measuring) / self._smoothing.every if way == SMOOTHED else 0.0
        times = [m + d + share for m, d in zip(figures["made"], figures["delta"], strict=True)]
        sizes = figures["bytes"]
        middle, *ends = (self.dense / f(sizes) for f in (median, max, min))
        return [
            *(spread(1e3, figures[key]) for key in ("made", "delta")),
            f"{1e3 * share:.1f}",
            spread(1e3, times),
            spread(1e-3, sizes),
            f"{middle:.0f} ({ends[0]:.0f} to {ends[1]:.0f})",
        ]


def spread(scale: float, values: list[float]) -> str:
    """Example: "93 (90 to 101)"."""
    middle, *ends = (scale * f(values) for f in (median, min, max))
    return f"{middle:.0f} ({ends[0]:.0f} to {ends[1]:.0f})"


async def watched(run: Run, watcher: Watcher) -> None:
    async for _values in train(run, watch=watcher):
        pass


def main() -> None:
    torch.set_num_threads(1)
    run = sums("acr", "int8", "smoothed").run(1, f"steps={STEPS}", f"eval.every={STEPS}")
    assert run.rollout.smooths
    watcher = Watcher(run, run.rollout.smooths)
    asyncio.run(watched(run, watcher))
    header = ["way", "made, ms", "delta, ms", "measuring, ms", "in all, ms", "delta, kB", "times"]
    lines = [
        f"{STEPS} versions of SmolLM2-135M-Instruct · {device()} · commit {commit()}",
        table(header, [[way, *watcher.row(way)] for way in (PLAIN, SMOOTHED)]),
    ]
    publish("smoothing", "\n\n".join(lines), watcher.figures | {"measuring": watcher.measuring})


if __name__ == "__main__":
    main()
