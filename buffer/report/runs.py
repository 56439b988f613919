"""The overview chunk of a report: the curves of each run, its summary, and the comparison of several runs.

meta.runs[i] describes run i. The arrays of its plots are `i/step/KEY`, `i/eval/KEY` and `i/worker/N/KEY`, each
together with `…/step` and `…/elapsed_s`; `i/lags` and `i/ages` are histograms (index.py). What runs of several
seeds have in common is in seeds.py.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from areal_q import __version__
from areal_q.config import Run, load
from areal_q.errors import LogError
from areal_q.evaluation.estimates import read_evaluations
from areal_q.observability.metric_table import METRICS, Metric
from areal_q.observability.metrics_log import Record, read_metrics
from areal_q.observability.run_summary import Summary, best_of, evenly, mean, summarize
from areal_q.system.files import by_number
from areal_q.system.run_dir import METRICS_FILE, flat
from buffer.logs.token_log import MARKS
from buffer.report.figures import column, plots_for, rows_of
from buffer.report.index import Index, segment_sums
from buffer.report.seeds import averaged, group_name, mean_and_spread, seed_groups
from buffer.report.text import Pieces
from buffer.report.tokens import Groups

MAX_STEPS = 2000
"""Most points of a curve, to which longer runs are averaged; the CSV files of `--csv` have all points."""
MAX_SAMPLED = 40
"""Number of evaluations whose samples are shown: the first, the last and some between them"""
TABLE = [metric for metric in METRICS if metric.name]
"""The metrics of the table of final figures"""


class Reported:
    """One run with its records so far; `refresh` reads the new ones."""

    def __init__(self, directory: Path) -> None:
        """Reads the run in `directory`. Raises LogError if there is none, and ConfigError for settings that
        cannot be read."""
        if not (directory / "config.toml").is_file():
            raise LogError(f"{directory}: no such run")
        self.directory = directory
        self.run: Run = load(directory / "config.toml")
        self.name = self.run.name
        self.records: list[Record] = []
        self.index = Index(directory)
        self.pieces = Pieces(self.run.model, self.run.task)
        self.groups = Groups(self.index, self.pieces)

    def refresh(self) -> None:
        path = self.directory / METRICS_FILE
        self.records = read_metrics(path) if path.exists() else []
        self.__dict__.pop("summary", None)
        self.index.refresh()

    @cached_property
    def summary(self) -> Summary:
        """The summary of the records, computed once after each refresh."""
        return summarize(self.records, self.run)

    @property
    def steps(self) -> list[Record]:
        return [r for r in self.records if r["kind"] == "step"]

    @property
    def evals(self) -> list[Record]:
        return [r for r in self.records if r["kind"] == "eval"]

    @property
    def ended(self) -> bool:
        return any(r["kind"] == "end" for r in self.records)


def read_runs(directories: Sequence[Path]) -> list[Reported]:
    """Returns the runs. Runs of equal names are named by their directories. If the directories are in
    alphabetical order, as a shell's `*` gives them, they are sorted by number, 2 before 10; any other order
    stays."""
    if list(directories) == sorted(directories):
        directories = by_number(directories)
    runs = [Reported(directory) for directory in directories]
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.directory)
        run.refresh()
    return runs


def overview(runs: Sequence[Reported]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the (meta, arrays) of the overview chunk."""
    plots = plots_for([run.records for run in runs])
    keys = {
        source: sorted({line.key for p in plots if p.source == source for line in p.lines})
        for source in ("step", "eval", "worker")
    }
    arrays: dict[str, np.ndarray] = {}
    workers = []
    for i, run in enumerate(runs):
        steps = thinned(rows_of(run.records, "step"), MAX_STEPS)
        arrays |= _columns(f"{i}/step", steps, keys["step"])
        arrays |= _columns(f"{i}/eval", rows_of(run.records, "eval"), keys["eval"])
        beats = _by_worker(run)
        workers.append(list(beats))
        for n, rows in enumerate(beats.values()):
            arrays |= _columns(f"{i}/worker/{n}", rows, keys["worker"])
        arrays[f"{i}/lags"] = segment_sums([s.lags for s in run.index.steps.values()])
        arrays[f"{i}/ages"] = segment_sums([s.ages for s in run.index.steps.values()])
    table = comparison(runs)
    groups = seed_groups([run.run for run in runs])
    for g, group in enumerate(groups):
        for source in ("step", "eval"):
            rows = [rows_of(runs[i].records, source) for i in group]
            for place, some in zip(
                ("g{}/{}", "g{}/spread/{}"), averaged(rows, keys[source]), strict=True
            ):
                place = place.format(g, source)
                arrays |= _columns(place, thinned(some, MAX_STEPS), keys[source])
    meta = {
        "made_by": f"areal-q {__version__}",
        "plots": plots,
        "marks": MARKS,
        "runs": [_words(run) | {"workers": w} for run, w in zip(runs, workers, strict=True)],
        "settings": different_settings([run.run for run in runs]),
        "table": table,
        "groups": [_group(runs, group, table) for group in groups],
    }
    return meta, arrays


def _group(
    runs: Sequence[Reported], group: Sequence[int], table: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the indices of the runs, their name, and mean and spread of the finals of `table`, by key."""
    finals = {
        line["key"]: mean_and_spread([line["values"][i]["final"] for i in group]) for line in table
    }
    return {"runs": list(group), "name": group_name([runs[i].run for i in group]), "finals": finals}


def group_lines(runs: Sequence[Reported]) -> list[str]:
    """Returns a line for each group of seeds, such as "mean of 3 runs, seeds 0, 1, 2: held-out accuracy 0.953 ±
    0.012, reward 0.904 ± 0.004"."""
    table, lines = comparison(runs), []
    for group in seed_groups([run.run for run in runs]):
        found = _group(runs, group, table)
        told = [
            f"{line['label']} {both[0]:.3f} ± {both[1]:.3f}"
            for line in table
            if line["key"] in {metric.key for metric in TABLE[:3]}
            and (both := found["finals"][line["key"]])
        ]
        lines.append(f"{found['name']}: {', '.join(told) or 'nothing in common'}")
    return lines


def comparison(runs: Sequence[Reported]) -> list[dict[str, Any]]:
    """Returns the lines of TABLE for which some run has a value. They have for each run the final value, which
    is that of the last tenth of the steps or of the last evaluation, and the best value with its step."""
    lines = []
    for metric in TABLE:
        values = [_final_and_best(run, metric) for run in runs]
        if any(v["final"] is not None for v in values):
            line = {"label": metric.name, "key": metric.key, "leading": metric.leading}
            lines.append(line | {"values": values})
    return lines


def _final_and_best(run: Reported, metric: Metric) -> dict[str, Any]:
    key = metric.key
    records = run.evals if key.startswith("eval/") else run.steps
    found = [r for r in records if r.get(key) is not None]
    last = found[-1:] if key.startswith("eval/") else found[-max(1, len(found) // 10) :]
    out: dict[str, Any] = {"final": mean(last, key), "best": None, "step": None}
    order = min if metric.best == "min" else max
    if metric.best and (best := best_of(found, key, run.run, order)):
        out |= {"best": best[key], "step": best["step"]}
    return out


def one_line(run: Reported) -> str:
    """Returns a line such as "run2: done after 420 steps in 4:24, held-out accuracy 0.953, reward 0.904"."""
    told = [f"{run.name}: {run.summary.title}"]
    for metric in TABLE[:3]:
        final = _final_and_best(run, metric)["final"]
        told += [] if final is None else [f"{metric.name} {final:.3f}"]
    return ", ".join(told)


def different_settings(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns the settings in which the runs differ, except their names and directories: [{"key": …, "values":
    …}] with a value for each run."""
    tables = [flat(msgspec.to_builtins(run)) for run in runs]
    keys = sorted({key for table in tables for key in table} - {"name", "root"})
    rows = [{"key": key, "values": [table.get(key) for table in tables]} for key in keys]
    return [row for row in rows if any(v != row["values"][0] for v in row["values"])]


def _words(run: Reported) -> dict[str, Any]:
    summary = run.summary
    last = max((r["step"] for r in run.records), default=0)
    sampled = evenly([r for r in run.evals if r.get("samples")], MAX_SAMPLED)
    return {
        "name": run.name,
        "title": summary.title if run.ended else f"at step {last} of {run.run.steps}",
        "ended": run.ended,
        "rows": summary.rows,
        "answers": summary.answers,
        "samples": [{"step": r["step"], "samples": r["samples"]} for r in sampled],
        "evaluations": [
            {"task": e.task, "format": e.format, "says": ", ".join(map(str, e.estimates))}
            for e in read_evaluations(run.directory)
        ],
        "settings": flat(msgspec.to_builtins(run.run)),
        "thinned": max(1, -(-len(run.steps) // MAX_STEPS)),
        "note": run.pieces.note,
        "logged": {"steps": len(run.index.steps), "trajectories": run.index.num_trajectories},
    }


def _by_worker(run: Reported) -> dict[str, list[Record]]:
    rows = sorted(rows_of(run.records, "worker"), key=lambda r: r["worker"])
    beats = {name: list(some) for name, some in groupby(rows, key=lambda r: r["worker"])}
    return {name: some[:: -(-len(some) // MAX_STEPS)] for name, some in beats.items()}


def _columns(place: str, rows: list[Record], keys: list[str]) -> dict[str, np.ndarray]:
    """Returns the columns that have a value in some row, and `step` and `elapsed_s`."""
    found = {f"{place}/{key}": column(rows, key) for key in ("step", "elapsed_s", *keys)}
    return {name: values for name, values in found.items() if np.isfinite(values).any()}


def thinned(steps: list[Record], most: int) -> list[Record]:
    """Returns at most `most` records, by averaging neighbours; of metrics named `…max` it takes the maximum."""
    width = -(-len(steps) // most)
    if width <= 1:
        return steps
    out = []
    for start in range(0, len(steps), width):
        part = steps[start : start + width]
        keys = {k for r in part for k, v in r.items() if "/" in k and isinstance(v, float)}
        point: Record = {"step": part[-1]["step"], "elapsed_s": part[-1]["elapsed_s"]}
        for key in keys:
            top = max(x for r in part if isinstance(x := r.get(key), float))
            point[key] = top if key.endswith("max") else mean(part, key)
        out.append(point)
    return out
