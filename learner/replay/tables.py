"""The recorded and the replayed history side by side, as a table for the terminal and a CSV file."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from areal_q.observability.metric_table import METRICS, Metric
from areal_q.observability.run_summary import evenly
from areal_q.system.command import escaped

if TYPE_CHECKING:
    from learner.replay.replay_steps import Replayed

MAX_ROWS = 20


def compared(steps: Sequence["Replayed"]) -> list[Metric]:
    """Returns the named metrics that a replay computes anew and that were recorded."""
    areas = ("train/", "mismatch/", "policy/", "teacher/")
    known = [metric for metric in METRICS if metric.name and metric.key.startswith(areas)]
    return [m for m in known if any(m.key in one.record.metrics for one in steps)]


def side_by_side(steps: Sequence["Replayed"], width: int) -> Table:
    """Returns a table of at most MAX_ROWS steps, evenly spaced from the first to the last, with as many of
    the compared metrics as fit into `width` characters."""
    columns = compared(steps)[: max(2, (width - 6) // 20)]
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("step", justify="right")
    for metric in columns:
        table.add_column(f"{metric.name}\nlogged", justify="right", style="dim", no_wrap=True)
        table.add_column("\nnow", justify="right", no_wrap=True)
    for one in evenly(steps, MAX_ROWS):
        pairs = ((one.record.metrics.get(m.key), one.metrics.get(m.key)) for m in columns)
        table.add_row(str(one.record.step), *(_number(x) for pair in pairs for x in pair))
    return table


def every_metric(one: "Replayed") -> Table:
    """Returns a table of all metrics of one step."""
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for title in ("metric", "logged", "now", "difference"):
        table.add_column(title, justify="left" if title == "metric" else "right")
    for name in sorted(one.record.metrics.keys() | one.metrics.keys()):
        logged, now = one.record.metrics.get(name), one.metrics.get(name)
        gap = 0.0 if logged is None or now is None else now - logged
        table.add_row(escaped(name), _number(logged), _number(now), f"{gap:+.3g}" if gap else "")
    return table


def write_csv(steps: Sequence["Replayed"], path: Path) -> None:
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


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
