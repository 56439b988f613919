"""Runs that differ in their seed alone: their mean, and how far they spread.

Group g is meta.groups[g]. Its arrays are `gG/step/KEY` and `gG/eval/KEY` for the means, `gG/spread/step/KEY`
and the like for the sample standard deviations (n - 1), at the steps that all of its runs have.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from areal_q.config import Run, settings_hash
from areal_q.observability.metrics_log import Record
from areal_q.observability.run_summary import plural
from buffer.report.figures import column


def seed_groups(runs: Sequence[Run]) -> list[list[int]]:
    """Returns the indices of runs whose settings are equal but for seed, name, place and trackers, in groups of
    two seeds or more."""
    same: dict[str, list[int]] = defaultdict(list)
    for i, run in enumerate(runs):
        same[settings_hash(replace(run, seed=0, trackers=()))].append(i)
    return [group for group in same.values() if len({runs[i].seed for i in group}) > 1]


def averaged(
    runs: Sequence[list[Record]], keys: Sequence[str]
) -> tuple[list[Record], list[Record]]:
    """Returns the means and the spreads of `keys`, a row for each step that all `runs` have rows of. None where
    a run has no number. `elapsed_s` is the mean in both."""
    tables: list[dict[int, Record]] = [defaultdict(dict) for _ in runs]
    for table, rows in zip(tables, runs, strict=True):
        for row in rows:  # there may be several evaluations at a step
            table[row["step"]].update(row)
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    means: list[Record] = [{"step": step} for step in steps]
    spreads: list[Record] = [{"step": step} for step in steps]
    for key in ("elapsed_s", *keys):
        values = np.stack([column([table[step] for step in steps], key) for table in tables])
        spread = values.mean(0) if key == "elapsed_s" else values.std(0, ddof=1)
        for rows, numbers in ((means, values.mean(0)), (spreads, spread)):
            for row, number in zip(rows, numbers.tolist(), strict=True):
                row[key] = number if np.isfinite(number) else None
    return means, spreads


def mean_and_spread(values: Sequence[float | None]) -> tuple[float, float] | None:
    """Returns the two of the numbers; None if one is missing."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return float(np.mean(known)), float(np.std(known, ddof=1))


def group_name(runs: Sequence[Run]) -> str:
    """Example: "mean of 3 runs, seeds 0, 1, 2"."""
    seeds = ", ".join(str(run.seed) for run in runs)
    return f"mean of {plural(len(runs), 'run')}, seeds {seeds}"
