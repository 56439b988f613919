"""The plots of a report as data: what each shows, its columns, and its CSV. The page draws nothing else.

Each line has one source: `step` and `eval` are the records of those kinds, and `worker` the heartbeats in a
step record, with one line for each worker.
"""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from areal_q.observability.metric_table import METRICS, WORKER_METRICS, describe
from areal_q.observability.metrics_log import Record

_MetricSource = Literal["step", "eval", "worker"]
DELTA = "weights/delta_bytes_of_step"
"""Key of the increase of the counter weights/delta_bytes, which begins at 0 in each process of the learner"""


class Line(msgspec.Struct, frozen=True):
    key: str
    label: str = ""


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    section: str
    title: str
    lines: list[Line]
    unit: str = ""
    scale: float = 1.0
    """Factor for the axis; CSV and columns have the metric as it was recorded."""
    source: _MetricSource = "step"
    log: bool = False
    """True for a logarithmic axis"""
    zero: bool = False
    """True if the axis includes 0"""
    about: list[str] = []
    """Sentences that say what the lines mean"""


def _plot(section: str, id: str, title: str, unit: str, *keys: str, **more: Any) -> Plot:
    lines = [Line(*key.split("|")) for key in keys]
    return Plot(id=id, section=section, title=title, unit=unit, lines=lines, **more)


_LAGS = [(k, f"lag {k}" + ("+" if k == 3 else "")) for k in range(4)]
_PLOTS = [
    _plot("Learning", "reward", "Reward", "mean of a step", "reward/mean"),
    _plot("Learning", "accuracy", "Held-out accuracy", "", "eval/accuracy", source="eval"),
    _plot("Learning", "loss", "Loss", "", "train/loss"),
    _plot("Learning", "grad_norm", "Gradient norm", "before clipping", "train/grad_norm", zero=True),
    _plot("Learning", "entropy", "Entropy", "nats per token", "policy/entropy", zero=True),
    _plot("Learning", "length", "Response length", "tokens", "response/tokens_mean", zero=True),
    _plot("Learning", "cut_off", "Responses cut off, uniform groups", "%",
        "response/cut_off_share|cut off", "reward/uniform_share|uniform groups", scale=100, zero=True,
    ),
    _plot("Learning", "reward_std", "Spread of rewards", "std of a step", "reward/std", zero=True),
    _plot("Learning", "lr", "Learning rate", "", "train/lr", zero=True),
    _plot("Mismatch", "mismatch_kl", "Mismatch KL", "nats per token", "mismatch/kl|k1", "mismatch/kl_k3|k3"),
    _plot(
        "Mismatch", "mismatch_kl_lag", "Mismatch KL by version lag", "nats per token",
        *(f"mismatch/lag_{k}/kl|{name}" for k, name in _LAGS),
    ),
    _plot(
        "Mismatch", "weight", "Mismatch weight w", "π_prox / π_behav",
        "mismatch/weight_mean|mean", "mismatch/weight_p99|p99", "mismatch/weight_max|max", log=True,
    ),
    _plot("Mismatch", "ess", "Effective sample size of w", "share", "mismatch/ess"),
    _plot("Mismatch", "routing", "Routes of experts that the learner would not take", "% of token-layers",
        "routing/disagreement", scale=100, zero=True,
    ),
    _plot("Policy", "ratio", "Policy ratio R", "π_θ / π_prox",
        "policy/ratio_mean|mean", "policy/ratio_p99|p99", "policy/ratio_max|max", log=True,
    ),
    _plot("Policy", "policy_kl", "Policy KL", "nats per token", "policy/kl|k1", "policy/kl_k3|k3"),
    _plot("Policy", "clipped", "Clipped tokens", "%",
        "policy/clip_fraction_up|above", "policy/clip_fraction_down|below", "policy/clip_fraction_dual|dual",
        scale=100, zero=True,
    ),
    _plot("Policy", "masked", "Truncated and masked tokens", "%",
        "mismatch/truncated_fraction|weight truncated", "policy/mask_fraction|masked out", scale=100, zero=True,
    ),
    _plot("Staleness", "lag", "Version lag of tokens", "versions", "lag/max|max", "lag/mean|mean", zero=True),
    _plot("Staleness", "lag_tokens", "Tokens by version lag", "tokens of a step",
        *(f"mismatch/lag_{k}/tokens|{name}" for k, name in _LAGS), zero=True,
    ),
    _plot("Throughput", "throughput", "Throughput", "1000 tokens/s",
        "rollout/tokens_per_s|rollout", "learner/tokens_per_s|learner", scale=1e-3, zero=True,
    ),
    _plot("Throughput", "idle", "Idle", "% of the time",
        "rollout/idle_share|rollout", "learner/idle_share|learner", scale=100, zero=True,
    ),
    _plot("Throughput", "step_time", "Time of a step", "s",
        "learner/step_s|step", "learner/wait_s|waiting", zero=True),
    _plot("Throughput", "buffer", "Buffer", "tickets and groups", "buffer/open_tickets|open tickets",
        "buffer/dropped_stale|dropped, too old", "buffer/dropped_uniform|dropped, uniform",
        "buffer/quarantined|quarantined", "buffer/reward_errors|rewards failed", zero=True,
    ),
    _plot("Workers", "worker_rate", "Throughput of a worker", "1000 tokens/s",
        "tokens_per_s", source="worker", scale=1e-3, zero=True),
    _plot("Workers", "worker_idle", "Idle of a worker", "% of the time",
        "idle_share", source="worker", scale=100, zero=True),
    _plot("Workers", "worker_active", "Responses in generation", "", "active", source="worker", zero=True),
    _plot("Workers", "worker_version", "Version loaded", "", "version", source="worker"),
    _plot("Weights", "weight_bytes", "Bytes of a version", "MB",
        f"{DELTA}|delta sent", "weights/bytes|whole version", scale=1e-6, log=True),
    _plot("Weights", "publish", "Learner's pause to publish", "ms", "weights/publish_s", scale=1e3, zero=True),
    _plot("Weights", "swap", "Worker's mean pause for a swap", "ms",
        "swap_s", source="worker", scale=1e3, zero=True),
    _plot("Weights", "fetches", "Whole versions fetched, refused", "since the start",
        "weights/fetches|fetched", "weights/refused|refused", zero=True),
]  # fmt: skip


def plots_for(records: Sequence[Sequence[Record]]) -> list[Plot]:
    """Returns the plots for which some run has a value, then one for every other metric that some run has."""
    found: dict[_MetricSource, set[str]] = {"step": set(), "eval": set(), "worker": set()}
    for run in records:
        for source, keys in found.items():
            for record in rows_of(run, source):
                unknown = record.keys() - keys
                keys.update(k for k in unknown if isinstance(record[k], (int, float)))
    plots = [
        msgspec.structs.replace(p, lines=[x for x in p.lines if x.key in found[p.source]])
        for p in _PLOTS
    ]
    shown = {line.key for plot in _PLOTS for line in plot.lines}
    rest = sorted(k for k in found["step"] - shown if "/" in k)
    others = [_plot("Every other metric", key.replace("/", "."), key, "", key) for key in rest]
    return [_with_meaning(p) for p in [*plots, *others] if p.lines]


def _with_meaning(plot: Plot) -> Plot:
    """Returns `plot` with the meaning of its lines from the table of metrics. Lines with the same meaning share
    a sentence."""
    table = WORKER_METRICS if plot.source == "worker" else METRICS
    about: dict[str, str] = {}
    for line in plot.lines:
        if metric := describe(line.key, table):
            about.setdefault(metric.meaning, line.label)
    sentences = [
        f"{label}: {text}" if label and len(about) > 1 else text for text, label in about.items()
    ]
    return msgspec.structs.replace(plot, about=sentences)


def rows_of(records: Iterable[Record], source: _MetricSource) -> list[Record]:
    """Returns the records of a source, in order. Those of workers are their heartbeats with the step's
    times."""
    if source == "eval":
        return [r for r in records if r["kind"] == "eval"]
    steps = [r for r in records if r["kind"] == "step"]
    if source == "worker":
        return [
            {**w, "step": r["step"], "elapsed_s": r["elapsed_s"]}
            for r in steps
            for w in r.get("workers", [])
        ]
    return _with_derived(steps)


def _with_derived(steps: Sequence[Record]) -> list[Record]:
    """Returns the step records, with DELTA added where the counter is recorded."""
    before, out = 0.0, []
    for record in steps:
        total = record.get("weights/delta_bytes")
        if total is not None:
            grown = total - before if total >= before else total
            before, record = total, {**record, DELTA: grown}
        out.append(record)
    return out


def column(rows: Sequence[Record], key: str) -> np.ndarray:
    """Returns float64 [len(rows)], NaN where a value is missing or was not finite."""
    return np.array([r.get(key) for r in rows], np.float64)  # numpy turns None into NaN


def write_figures_csv(
    names: Sequence[str], records: Sequence[Sequence[Record]], directory: Path
) -> int:
    """Writes a file `ID.csv` for each plot, with run, worker (if there are any), step, elapsed_s and the plot's
    metrics as recorded. A missing or infinite value is an empty cell. Returns the number of files."""
    directory.mkdir(parents=True, exist_ok=True)
    plots = plots_for(records)
    for plot in plots:
        keys = [line.key for line in plot.lines]
        head = ["run", *(["worker"] if plot.source == "worker" else []), "step", "elapsed_s"]
        with (directory / f"{plot.id}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(head + keys)
            for name, run in zip(names, records, strict=True):
                for row in rows_of(run, plot.source):
                    place = [name if h == "run" else row[h] for h in head]
                    writer.writerow(place + [row.get(key) for key in keys])
    return len(plots)
