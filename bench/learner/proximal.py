"""What A-3PO's interpolated log π_prox differs from the exact one, token by token, in a run's own steps.

    areal-q run configs/quickstart.toml steps=60 learner.max_lag=4 learner.minibatches=4 name=lags
    python -m bench.learner.proximal runs/lags

The run's logged steps are replayed with exact log π_prox, in float32 and bfloat16. At every update but a step's
first, where both are exact, `learner.proximal = "loglinear"` is computed from the same scores: its error, and
the tokens that the objective clips with either. Prints a table, and writes it to runs/bench/proximal.{md,json}.
"""

import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from areal_q.algorithms import LossInputs, PolicyLoss, loss_fn
from areal_q.algorithms.ratios import interpolated_proximal
from areal_q.config import ObjectiveConfig
from bench.common import commit, device, publish, say, table
from buffer.logs.token_log import MARKS
from learner.data.packing import PackedBatch
from learner.measure.token_recorder import TokenRecorder, marks
from learner.replay.replay_steps import Replay

CLIPPED = MARKS["clipped_up"] | MARKS["clipped_down"] | MARKS["clipped_dual"]
COLUMNS = ("error", "mismatch", "clipped", "clipped, interpolated")


class ProximalErrors(TokenRecorder):
    """Collects, by version lag, COLUMNS of every token that counts."""

    def __init__(self, objective: ObjectiveConfig) -> None:
        super().__init__()
        self._objective = objective
        self.by_lag: dict[int, list[np.ndarray]] = defaultdict(list)

    def add(
        self, batch: PackedBatch, before: LossInputs, visit: LossInputs, out: PolicyLoss
    ) -> None:
        super().add(batch, before, visit, out)
        own, exact = visit.logprobs.detach(), visit.proximal_logprobs
        if torch.equal(own, exact):
            return
        near = interpolated_proximal(own, visit.behavior_logprobs, visit.version_lag)
        other = replace(visit, logprobs=own, proximal_logprobs=near)
        interpolated = loss_fn(other, self._objective).policy_loss
        columns = [
            (near - exact).abs(),
            (exact - visit.behavior_logprobs).abs(),
            marks(out) & CLIPPED != 0,
            marks(interpolated) & CLIPPED != 0,
        ]
        rows = torch.stack([column.float() for column in columns], 1)
        for lag in visit.version_lag[visit.mask.bool()].unique().tolist():
            chosen = visit.mask.bool() & (visit.version_lag == lag)
            self.by_lag[int(lag)].append(rows[chosen].numpy())


def measure(directory: Path, dtype: str) -> dict[int, dict[str, float]]:
    """Returns by version lag the number of tokens, means of COLUMNS and the error's 99th percentile."""
    replay = Replay(directory, [f"learner.dtype={dtype}"])
    replay.recorder = errors = ProximalErrors(replay.run.learner.objective)
    for _step in replay.steps():
        pass
    found = {}
    for lag, parts in sorted(errors.by_lag.items()):
        rows = np.concatenate(parts)
        found[lag] = {"tokens": float(len(rows)), "p99": float(np.quantile(rows[:, 0], 0.99))}
        found[lag] |= dict(zip(COLUMNS, rows.mean(0).tolist(), strict=True))
    return found


def main(directory: Path) -> None:
    results = {dtype: measure(directory, dtype) for dtype in ("float32", "bfloat16")}
    rows = [
        [
            *(dtype, str(lag), f"{m['tokens']:,.0f}"),
            *(f"{m[key]:.4f}" for key in ("error", "p99", "mismatch")),
            *(f"{m[key]:.2%}" for key in COLUMNS[2:]),
        ]
        for dtype, by_lag in results.items()
        for lag, m in by_lag.items()
    ]
    header = ["dtype", "lag", "tokens", "error, mean", "error, p99", "mismatch, mean", *COLUMNS[2:]]
    about = f"log π_prox, interpolated for exact, nats · {directory.name} · {device()} · commit {commit()}"
    publish("proximal", f"{about}\n\n{table(header, rows)}", results)
    say("mismatch: |log π_prox - log π_behav|")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
