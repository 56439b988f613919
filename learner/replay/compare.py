"""Comparison of replayed steps with their records: which numbers differ, and by how much."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from areal_q.observability.metric_table import METRICS
from learner.replay.replay_steps import Replayed

WEIGHTS = "weights"
LEADING = {metric.key for metric in METRICS if metric.leading or metric.rounding}
"""Metrics that are named first if several differ."""
TOLERANCES = {metric.key: metric.rounding for metric in METRICS if metric.rounding}
"""(relative, absolute) tolerances by metric, for a replay in which only rounding can differ, because of another
device, instruction set or size of micro-batches."""


@dataclass(frozen=True)
class Difference:
    """One number of one step that differs from its record."""

    step: int
    metric: str
    recorded: float | None
    """The recorded value; None if it was not recorded or is no number."""
    replayed: float | None

    def __str__(self) -> str:
        if self.recorded is None or self.replayed is None:
            what = "differ" if self.metric == WEIGHTS else f"{self.recorded} became {self.replayed}"
            return f"{self.metric} {what}"
        by = self.replayed - self.recorded
        share = f", {abs(by / self.recorded):.2g} of it" if self.recorded else ""
        return f"{self.metric} {self.recorded:.9g} became {self.replayed:.9g} ({by:+.3g}{share})"


def compare(one: Replayed, exact: bool) -> list[Difference]:
    """Returns the differences of a step from its record, those of LEADING first: in any bit if `exact`, else
    beyond TOLERANCES. Metrics that were not recorded are not compared."""
    recorded = one.record.metrics
    names = sorted(
        recorded if exact else TOLERANCES.keys() & recorded.keys(),
        key=lambda name: (name not in LEADING, name),
    )
    out = [
        Difference(one.record.step, name, recorded[name], one.metrics.get(name))
        for name in names
        if not _same(name, recorded[name], one.metrics.get(name), exact)
    ]
    if exact and one.digest and one.digest != one.record.digest:
        out.append(Difference(one.record.step, WEIGHTS, None, None))
    return out


def step_ranges(steps: Iterable[int]) -> str:
    """Returns the steps as text. Example: [3] → "step 3", [0, 1, 2] → "steps 0–2"."""
    steps = list(steps)
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}–{steps[-1]}"


def _same(name: str, recorded: float, replayed: float | None, exact: bool) -> bool:
    if replayed is None:
        return False
    if recorded == replayed or (math.isnan(recorded) and math.isnan(replayed)):
        return True
    relative, absolute = TOLERANCES.get(name, (0.0, 0.0))
    return not exact and math.isclose(recorded, replayed, rel_tol=relative, abs_tol=absolute)
