"""Table and figure of the stability laboratory, from its stored results alone."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.common import ROOT, table

CSV = ROOT / "bench" / "results" / "stability.csv"
FIGURE = ROOT / "docs" / "images" / "stability.png"
Row = dict[str, Any]
"""arm, seed, step, and a float for each of COLUMNS that was measured"""

COLUMNS = {
    "reward": "reward/mean",
    "accuracy": "eval/accuracy",
    "kl": "mismatch/kl",
    "k3": "mismatch/kl_k3",
    "weight_max": "mismatch/weight_max",
    "ess": "mismatch/ess",
    "truncated": "mismatch/truncated_fraction",
    "up": "policy/clip_fraction_up",
    "down": "policy/clip_fraction_down",
    "dual": "policy/clip_fraction_dual",
    "ratio_max": "policy/ratio_max",
    "grad_norm": "train/grad_norm",
    "entropy": "policy/entropy",
    "cpu_s": "cpu_s",
}
"""Column of the file: metric of a step"""
COLORS = {
    "reference": "#111111",
    "bf16": "#8c8c8c",
    "int8": "#2f6fb2",
    "fp8-channel": "#3a9a5b",
    "int4": "#d9822b",
    "int3": "#b8433f",
    "int8 smoothed": "#3a9a5b",
    "int8-weight": "#6fb1d6",
    "int4 awq": "#b8433f",
    "nvfp4": "#8a63b0",
    "fp8-channel smoothed": "#8c7a5a",
    "icepop": "#6fb1d6",
    "naive": "#b8433f",
    "ppo": "#d9822b",
    "tis": "#2f6fb2",
    "mis": "#8a63b0",
    "acr": "#3a9a5b",
    "gspo": "#8c7a5a",
    "tbpo": "#d06aa8",
}
MODEL_FORMATS = (
    "int8",
    "int8 smoothed",
    "int8-weight",
    "fp8-channel smoothed",
    "nvfp4",
    "int4",
    "int4 awq",
)
"""Of the pretrained model, as the figure shows them"""
REFERENCE = "bf16 tis"
Band = tuple[list[float], list[float], list[float], list[float]]
"""Steps, and mean, least and largest over the seeds at each"""
LAST = 0.2
"""Share of the steps, at the end, that a final value is the mean of"""


def write(rows: Sequence[Row], path: Path = CSV) -> None:
    """Writes `rows` to `path`, in place of what it holds of the same runs; of other runs it keeps all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = {(row["arm"], row["seed"]) for row in rows}
    before = read(path) if path.exists() else []
    kept = [row for row in before if (row["arm"], row["seed"]) not in fresh]
    arms = list(dict.fromkeys(row["arm"] for row in (*before, *rows)))
    ordered = sorted((*kept, *rows), key=lambda r: (arms.index(r["arm"]), r["seed"], r["step"]))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["arm", "seed", "step", *COLUMNS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(ordered)


def read(path: Path = CSV) -> list[Row]:
    kinds = {"arm": str, "seed": int, "step": int}
    with path.open(newline="") as file:
        return [
            {k: kinds.get(k, float)(v) for k, v in line.items() if v}
            for line in csv.DictReader(file)
        ]


class Results:
    """Runs by arm and seed."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.runs: dict[str, dict[int, list[Row]]] = {}
        for row in rows:
            self.runs.setdefault(row["arm"], {}).setdefault(int(row["seed"]), []).append(row)

    def final(self, arm: str, column: str) -> dict[int, float]:
        """Returns, by seed, the mean over the last steps; of a maximum the largest; of an accuracy the last."""
        values = {}
        for seed, rows in self.runs[arm].items():
            found = [r[column] for r in rows[-max(1, round(LAST * len(rows))) :] if column in r]
            if column == "accuracy":
                values[seed] = [r[column] for r in rows if column in r][-1]
            else:
                values[seed] = max(found) if column.endswith("max") else sum(found) / len(found)
        return values

    def largest(self, arm: str, column: str) -> float:
        """Over all steps and seeds."""
        return max(r[column] for rows in self.runs[arm].values() for r in rows)

    def band(self, arm: str, column: str) -> Band:
        found: dict[float, list[float]] = {}
        for rows in self.runs[arm].values():
            for row in rows:
                if column in row:
                    found.setdefault(row["step"], []).append(row[column])
        values = found.values()
        means = [sum(v) / len(v) for v in values]
        return [*found], means, [min(v) for v in values], [max(v) for v in values]


def summary(rows: Sequence[Row]) -> str:
    """A line for each arm. Shares are of the reference's with the same seed."""
    results = Results(rows)
    whole = results.final(REFERENCE, "reward") if REFERENCE in results.runs else {}
    lines = []
    for arm, runs in results.runs.items():
        reward = results.final(arm, "reward")
        shares = [value / whole[seed] for seed, value in reward.items() if whole.get(seed)]

        def mean(column: str, digits: str, scale: float = 1.0, arm: str = arm) -> str:
            found = results.final(arm, column).values()
            return format(scale * sum(found) / len(found), digits)

        lines.append(
            [
                arm,
                str(len(runs)),
                spread([*reward.values()]),
                spread(shares) if shares else "–",
                spread([*results.final(arm, "accuracy").values()]),
                mean("kl", ".3f"),
                mean("k3", ".4f") if any("k3" in r for rs in runs.values() for r in rs) else "–",
                f"{results.largest(arm, 'weight_max'):.3g}",
                mean("ess", ".2f"),
                "/".join(mean(c, ".1f", 100) for c in ("up", "down", "dual")),
                mean("truncated", ".1f", 100),
                mean("grad_norm", ".2f"),
            ]
        )
    return table(HEADER, lines)


HEADER = (
    "arm",
    "seeds",
    "final reward",
    "share of reference",
    "held-out accuracy",
    "mismatch KL",
    "k3",
    "largest w",
    "ESS",
    "clipped up/down/dual, %",
    "truncated, %",
    "gradient norm",
)


def spread(values: Sequence[float]) -> str:
    """Example: "0.61 (0.58–0.65)", mean, least and largest."""
    return f"{sum(values) / len(values):.2f} ({min(values):.2f}–{max(values):.2f})"


PANELS: dict[str, tuple[str, str]] = {
    "reward": ("reward of the rollouts", "linear"),
    "accuracy": ("held-out accuracy in bf16", "linear"),
    "kl": ("mismatch KL, nats per token", "linear"),
    "k3": ("mismatch k3, nats per token", "log"),
    "weight_max": ("largest w in 10 steps", "log"),
}
"""Rows of the figure; one that no arm has a value for is left out."""
VIEWS: dict[str, Callable[[list[str]], str | None]] = {
    "int3, no UAQ": lambda arm: arm[1] if arm[0] == "int3" and len(arm) == 2 else None,
    "int3, UAQ 1.5": lambda arm: arm[1] if arm[0] == "int3" and arm[2:] == ["uaq1.5"] else None,
    "naive in other formats": lambda arm: (
        arm[0] if arm[1:] == ["naive"] and arm[0] != "int3" else None
    ),
    "ACR, by format": lambda arm: (
        name
        if arm[1] == "acr" and (name := " ".join([arm[0], *arm[2:]])) in MODEL_FORMATS
        else None
    ),
    "int4 with AWQ's scales": lambda arm: (
        arm[1] if arm[0] == "int4" and arm[2:] == ["awq"] else None
    ),
}
"""Columns of the figure: what an arm, by the words of its name, is called there; None: it is not shown.
The reference is in each; a column with fewer than two others is left out."""


def figure(rows: Sequence[Row], path: Path = FIGURE) -> None:
    from matplotlib.figure import Figure
    from PIL import Image

    results = Results(rows)
    panels = {column: row for column, row in PANELS.items() if any(column in r for r in rows)}
    counts = {
        t: sum(bool(called(arm.split())) for arm in results.runs) for t, called in VIEWS.items()
    }
    views = {t: called for t, called in VIEWS.items() if counts[t] >= min(2, max(counts.values()))}
    size = 5 * max(2, len(views)), 2.5 * len(panels)
    drawing = Figure(figsize=size, layout="constrained")
    shape = len(panels), len(views)
    axes = drawing.subplots(*shape, sharex=True, sharey="row", squeeze=False)
    for line, (column, (label, scale)) in zip(axes, panels.items(), strict=True):
        line[0].set_ylabel(label, fontsize=9)
        for axis, (title, called) in zip(line, views.items(), strict=True):
            for arm in results.runs:
                name = "reference" if arm == REFERENCE else called(arm.split())
                if name:
                    _band(axis, results.band(arm, column), name)
            axis.set_yscale(scale)
            axis.grid(color="#e6e6e6", linewidth=0.7)
            axis.spines[["top", "right"]].set_visible(False)
            if column == "reward":
                axis.set_title(title, fontsize=10, loc="left")
                axis.legend(frameon=False, fontsize=7, ncols=4)
    for axis in axes[-1]:
        axis.set_xlabel("learner steps", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=80)
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)


def _band(axis: Any, values: Band, name: str) -> None:
    steps, mean, least, most = values
    axis.plot(steps, mean, color=COLORS[name], label=name, linewidth=1.5)
    axis.fill_between(steps, least, most, color=COLORS[name], alpha=0.12, linewidth=0)
