"""The recorded and the replayed history side by side, as a table for the terminal, a figure and a CSV file."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from learner.replay.replay_steps import Replayed

METRIC_COLUMNS = {
    "train/loss": "loss",
    "train/grad_norm": "gradient norm",
    "policy/entropy": "entropy",
    "policy/kl_k3": "policy KL (k3)",
    "mismatch/kl_k3": "mismatch KL (k3)",
    "policy/clip_fraction_up": "clipped up",
}
MAX_ROWS = 20


def side_by_side(steps: Sequence[Replayed], width: int) -> Table:
    """Returns a table of at most MAX_ROWS steps, evenly spaced from the first to the last, with as many of
    METRIC_COLUMNS as fit into `width` characters."""
    columns = dict(list(METRIC_COLUMNS.items())[: max(2, (width - 6) // 20)])
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("step", justify="right")
    for title in columns.values():
        table.add_column(f"{title}\nlogged", justify="right", style="dim", no_wrap=True)
        table.add_column("\nnow", justify="right", no_wrap=True)
    count = min(MAX_ROWS, len(steps))
    chosen = {round(i * (len(steps) - 1) / max(1, count - 1)) for i in range(count)}
    for one in (steps[i] for i in sorted(chosen)):
        pairs = ((one.record.metrics.get(key), one.metrics.get(key)) for key in columns)
        table.add_row(str(one.record.step), *(_number(x) for pair in pairs for x in pair))
    return table


def every_metric(one: Replayed) -> Table:
    """Returns a table of all metrics of one step."""
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for title in ("metric", "logged", "now", "difference"):
        table.add_column(title, justify="left" if title == "metric" else "right")
    for name in sorted(one.record.metrics.keys() | one.metrics.keys()):
        logged, now = one.record.metrics.get(name), one.metrics.get(name)
        gap = 0.0 if logged is None or now is None else now - logged
        table.add_row(name, _number(logged), _number(now), f"{gap:+.3g}" if gap else "")
    return table


def write_csv(steps: Sequence[Replayed], path: Path) -> None:
    """Writes one line per step with every metric as logged (column `NAME`) and as replayed (`NAME,
    replayed`)."""
    names = sorted(
        {name for one in steps for name in one.record.metrics.keys() | one.metrics.keys()}
    )
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *(f"{n}{kind}" for n in names for kind in ("", ", replayed"))])
        for one in steps:
            pairs = ((one.record.metrics.get(n), one.metrics.get(n)) for n in names)
            writer.writerow([one.record.step, *(x for pair in pairs for x in pair)])


def draw(steps: Sequence[Replayed], title: str, path: Path) -> None:
    """Draws a panel with both histories for each of METRIC_COLUMNS into the file `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(2, 3, sharex=True)
    for axis, (key, name) in zip(axes.flat, METRIC_COLUMNS.items(), strict=True):
        axis.set_title(name, fontsize=10, loc="left")
        axis.grid(color="#e6e6e6", linewidth=0.7)
        axis.tick_params(labelsize=8, color="#999999")
        axis.spines[["top", "right"]].set_visible(False)
        _line(axis, steps, [one.record.metrics.get(key) for one in steps], "#2f6fb2", "logged")
        _line(axis, steps, [one.metrics.get(key) for one in steps], "#d9822b", "replayed")
    axes.flat[0].legend(frameon=False, fontsize=8)
    for axis in axes[1]:
        axis.set_xlabel("learner step", fontsize=8)
    figure.savefig(path, dpi=130)


def _line(
    axis: Any, steps: Sequence[Replayed], values: list[float | None], color: str, label: str
) -> None:
    y = [math.nan if value is None else value for value in values]
    axis.plot([one.record.step for one in steps], y, color=color, label=label, linewidth=1.5)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
