"""The plots of a report as data: what each shows, its columns, and its CSV. The page draws nothing else.
Which there are, is said by the table of metrics (areal_q/observability/metric_table.py).

Each line has one source: `step` and `eval` are the records of those kinds, and `worker` the heartbeats in a
step record, with one line for each worker.
"""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from areal_q.observability.metric_table import (
    FIGURES,
    METRICS,
    WORKER_METRICS,
    Figure,
    Source,
    describe,
)
from areal_q.observability.metrics_log import Record

DELTA = "weights/delta_bytes_of_step"
"""Key of the increase of the counter weights/delta_bytes, which begins at 0 in each process of the learner"""


@dataclass(frozen=True)
class Line:
    key: str
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Plot(Figure):
    lines: list[Line]
    about: list[str]
    """Sentences that say what the lines mean"""


def plots_for(records: Sequence[Sequence[Record]]) -> list[Plot]:
    """Returns the figures for which some run has a value, then one for every other metric that some run has."""
    found: dict[Source, set[str]] = {"step": set(), "eval": set(), "worker": set()}
    for run in records:
        for source, keys in found.items():
            for record in rows_of(run, source):
                unknown = record.keys() - keys
                keys.update(k for k in unknown if isinstance(record[k], (int, float)))
    plots = [_plot(figure, found[figure.source]) for figure in FIGURES]
    rest = found["step"] - {line.key for plot in plots for line in plot.lines}
    for key in sorted(key for key in rest if "/" in key):
        figure = Figure(key.replace("/", "."), "Every other metric", key)
        metric = describe(key)
        about = [metric.meaning] if metric else []
        plots.append(Plot(**vars(figure), lines=[Line(key)], about=about))
    return [plot for plot in plots if plot.lines]


def _plot(figure: Figure, found: set[str]) -> Plot:
    """Returns the figure with a line for each of the keys in `found` that it shows, and what these mean. Lines
    with the same meaning share a sentence."""
    table = WORKER_METRICS if figure.source == "worker" else METRICS
    lines, about = [], {}
    for metric in table:
        if metric.figure != figure.id:
            continue
        for key in sorted(filter(metric.match, found)):
            lines.append(Line(key, metric.line_of(key)))
            about.setdefault(metric.meaning, lines[-1].label)
    sentences = [f"{label}: {text}" if len(about) > 1 else text for text, label in about.items()]
    return Plot(**vars(figure), lines=lines, about=sentences)


def rows_of(records: Iterable[Record], source: Source) -> list[Record]:
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
