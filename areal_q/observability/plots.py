"""The curves of a run as one picture, `curves.png`, for the end of a run and for a README."""

from pathlib import Path
from typing import Any

from areal_q.observability.metrics_log import Record, read_metrics
from areal_q.observability.run_summary import mean
from areal_q.system.run_dir import METRICS_FILE

BLUE, ORANGE, GREEN, RED = "#2f6fb2", "#d9822b", "#3a9a5b", "#b8433f"
MAX_POINTS = 400
"""The most points of a curve; the steps of longer runs are averaged."""


def draw_curves(run_dir: str | Path) -> Path:
    """Draws the metrics of `run_dir` into curves.png there, and returns its path.

    Raises OSError if there are no metrics. A run without a step gives empty axes.
    """
    run_dir = Path(run_dir)
    records = read_metrics(run_dir / METRICS_FILE)
    png = run_dir / "curves.png"
    _figure(records, run_dir.name).savefig(png, dpi=130)
    return png


def _figure(records: list[Record], name: str) -> Any:
    # Without pyplot a figure needs no global state and no display, and need not be closed.
    from matplotlib.figure import Figure

    steps = thinned([r for r in records if r["kind"] == "step"])
    evals = [r for r in records if r["kind"] == "eval"]
    figure = Figure(figsize=(12, 6.4), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True)
    figure.suptitle(name, fontsize=13, fontweight="bold")
    reward, accuracy, lag, mismatch, clip, rate = axes.flat

    _panel(reward, "reward", "mean of a step")
    _panel(accuracy, "held-out accuracy")
    _panel(lag, "staleness", "versions")
    _panel(mismatch, "mismatch KL (k3)", "10⁻³ nats per token")
    _panel(clip, "clipped", "% of tokens")
    _panel(rate, "throughput", "1000 tokens/s")

    _line(reward, steps, "reward/mean", BLUE)
    _line(accuracy, evals, "eval/accuracy", GREEN, marker="o")
    _line(lag, steps, "lag/max", ORANGE, "max")
    _line(lag, steps, "lag/mean", BLUE, "mean")
    _line(mismatch, steps, "mismatch/kl_k3", RED, scale=1e3)
    _line(clip, steps, "policy/clip_fraction_up", ORANGE, "above", scale=100)
    _line(clip, steps, "policy/clip_fraction_down", BLUE, "below", scale=100)
    _line(rate, steps, "rollout/tokens_per_s", GREEN, "rollout", scale=1e-3)
    _line(rate, steps, "learner/tokens_per_s", BLUE, "learner", scale=1e-3)
    for axis in (lag, clip, rate):
        axis.set_ylim(bottom=0)
    accuracy.set_ylim(0, 1.02)
    reward.set_xlim(left=0)

    for axis in (lag, clip, rate):
        if axis.lines:
            axis.legend(frameon=False, fontsize=8, loc="best")
    for axis in axes[1]:
        axis.set_xlabel("minutes")
    for axis in axes[0]:
        _steps_on_top(axis, steps)
    return figure


def _panel(axis: Any, title: str, unit: str = "") -> None:
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_ylabel(unit, fontsize=8)
    axis.grid(color="#e6e6e6", linewidth=0.7)
    axis.tick_params(labelsize=8, color="#999999")
    axis.spines[["top", "right"]].set_visible(False)


def _line(
    axis: Any,
    records: list[Record],
    key: str,
    color: str,
    label: str = "",
    *,
    scale: float = 1.0,
    marker: str = "",
) -> None:
    points = [(r["elapsed_s"] / 60, r[key] * scale) for r in records if r.get(key) is not None]
    if points:
        x, y = zip(*points, strict=True)
        axis.plot(x, y, color=color, label=label, linewidth=1.6, marker=marker, markersize=3.5)


def _steps_on_top(axis: Any, steps: list[Record]) -> None:
    """Draws ticks for steps on the upper edge, each at the time of its step, as steps take different times."""
    if len(steps) < 2:
        return
    from matplotlib.ticker import MaxNLocator

    ticks = [t for t in MaxNLocator(5, integer=True).tick_values(0, steps[-1]["step"]) if t > 0]
    placed = [(t, next((r for r in steps if r["step"] >= t), None)) for t in ticks]
    top = axis.secondary_xaxis("top")
    top.set_xticks(
        [r["elapsed_s"] / 60 for _, r in placed if r], [f"{t:.0f}" for t, r in placed if r]
    )
    top.tick_params(labelsize=7, colors="#888888", length=2, pad=1)
    top.spines["top"].set_visible(False)
    axis.set_title("steps", fontsize=7, loc="right", color="#888888")


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
