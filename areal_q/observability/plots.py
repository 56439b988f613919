"""Curves as pictures: `curves.png` at the end of a run, and the two histories of a replay."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from areal_q.errors import ConfigError, installing
from areal_q.observability.metric_table import FIGURES, METRICS
from areal_q.observability.metrics_log import Record, read_metrics
from areal_q.observability.run_summary import is_supervised, mean, plural
from areal_q.system.run_dir import METRICS_FILE

MAX_POINTS = 400
"""The most points of a curve; the steps of longer runs are averaged."""
_COLUMNS = 4


class Curve(NamedTuple):
    label: str
    points: Sequence[tuple[float, float]]


class Panel(NamedTuple):
    title: str
    unit: str
    curves: Sequence[Curve]


def draw_curves(run_dir: str | Path) -> Path:
    """Draws the leading metrics of `run_dir` over its minutes into curves.png there, and returns its path.

    Raises OSError if there are no metrics, ConfigError without matplotlib. A metric without a value has no
    axes; a run without any has empty ones.
    """
    run_dir = Path(run_dir)
    records = read_metrics(run_dir / METRICS_FILE)
    steps = thinned([r for r in records if r["kind"] == "step"])
    evals = [r for r in records if r["kind"] == "eval"]
    supervised = bool(steps) and is_supervised(steps[-1])
    panels = []
    for figure in FIGURES:
        rows = evals if figure.source == "eval" else steps
        curves = []
        shown = (m for m in METRICS if m.leading or (supervised and m.key == "train/loss"))
        for metric in (m for m in shown if m.figure == figure.id):
            known = [r for r in rows if r.get(metric.key) is not None]
            points = [(r["elapsed_s"] / 60, figure.scale * r[metric.key]) for r in known]
            curves.append(Curve(metric.line, points))
        if curves:
            panels.append(Panel(figure.title, figure.unit, curves))
    panels = [panel for panel in panels if any(c.points for c in panel.curves)] or panels
    title = f"{run_dir.name}, {plural(steps[-1]['step'] if steps else 0, 'step')}"
    draw(panels, title, "minutes", run_dir / "curves.png")
    return run_dir / "curves.png"


def draw(panels: Sequence[Panel], title: str, across: str, path: Path) -> None:
    """Draws the panels, _COLUMNS in a row, into the file `path`; `across` names the x axis. Raises ConfigError
    without matplotlib."""
    try:
        # Without pyplot a figure needs no global state and no display, and need not be closed.
        from matplotlib.figure import Figure
    except ImportError as error:
        needs = f"needs matplotlib: {installing('plots')}"
        raise ConfigError(f"{path.name} {needs}") from error
    rows = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(15, 3.2 * rows), layout="constrained")
    figure.suptitle(title, fontsize=12)
    for place, panel in enumerate(panels, start=1):
        axis = figure.add_subplot(rows, _COLUMNS, place)
        axis.set_title(panel.title, fontsize=10, loc="left")
        axis.set_title(panel.unit, fontsize=8, loc="right", color="#888888")
        axis.set_xlabel(across, fontsize=8)
        axis.grid(color="#e6e6e6", linewidth=0.7)
        axis.tick_params(labelsize=8, color="#999999")
        axis.spines[["top", "right"]].set_visible(False)
        for curve in panel.curves:
            x, y = zip(*curve.points, strict=True) if curve.points else ((), ())
            axis.plot(
                x,
                y,
                label=curve.label,
                linewidth=1.6,
                marker="o" if len(x) < 20 else "",
                markersize=3,
            )
        if any(curve.label for curve in panel.curves):
            axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def thinned(steps: list[Record], most: int = MAX_POINTS) -> list[Record]:
    """Returns at most `most` records, by averaging neighbours; of metrics named `…max` it takes the maximum."""
    width = -(-len(steps) // most)
    if width <= 1:
        return steps
    out = []
    for start in range(0, len(steps), width):
        part = steps[start : start + width]
        keys = [k for k, v in part[-1].items() if "/" in k and isinstance(v, float)]
        point: Record = {"step": part[-1]["step"], "elapsed_s": part[-1]["elapsed_s"]}
        for key in keys:
            top = max(r.get(key) or 0.0 for r in part)
            point[key] = top if key.endswith("max") else mean(part, key)
        out.append(point)
    return out
