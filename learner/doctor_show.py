"""What the doctor says: one screen, and `doctor.json` with the same numbers."""

from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from areal_q.diagnosis.tokens import TERMS, by_lag, by_position, histogram, rms, split
from learner.doctor_examine import Examined

BARS = " ▁▂▃▄▅▆▇█"
COLORS = {"error": "red", "warning": "yellow", "note": "dim"}
MEANING = {
    "staleness": "learner's weights − those of the version that drew",
    "noise": "these − the same with the published noise (AQN)",
    "weights": "these − what was published for them",
    "activations": "published weights − the format's own arithmetic",
    "sampling": "learner's temperature − the recorded one",
    "cache": "rest, in responses begun with older weights",
    "engine": "rest: − the log-prob that was recorded",
}


def screen(x: Examined, console: Console) -> None:
    """Prints the examination."""
    facts, tokens = x.facts, x.tokens
    console.print(
        f"[bold]{x.directory}[/]  steps {x.first}–{x.stop - 1}: {facts.responses} responses, "
        f"{facts.tokens} tokens, {', '.join(facts.formats)}"
    )
    if x.note:
        console.print(f"[yellow]{x.note}[/]")
    if x.exact is not None:
        how = "bit for bit" if x.exact else "[yellow]not as recorded: see areal-q replay[/]"
        console.print(f"[dim]the weights of every version were made again by replay:[/] {how}")
    if len(tokens):
        edge = max(0.01, 3 * rms(tokens.log_w))
        console.print(_ratios(x, edge))
        console.print(_terms(x))
        where = "  ".join(
            f"{a}–{b} {v:.3f}" if b > a else f"{a} {v:.3f}" for a, b, _, v in by_position(tokens)
        )
        console.print(f"[dim]gap without staleness, nats rms by position:[/]  {where}")
    for finding in x.findings:
        color = COLORS[finding.severity]
        console.print(f"[{color}]● {finding.name}[/]: {finding.says}\n  [dim]→ {finding.change}[/]")
    if not x.findings:
        console.print("[green]● nothing that a rule knows is wrong[/]")


def _ratios(x: Examined, edge: float) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for title in ("lag", "tokens", "KL", "rms", "p1 of w", "p99 of w", "largest w"):
        table.add_column(title, justify="right")
    table.add_column(f"log w before truncation, −{edge:.2g} … {edge:.2g} nats")
    for lag, some in by_lag(x.tokens):
        log_w = some.log_w
        low, high = np.exp(np.quantile(log_w, (0.01, 0.99)))
        table.add_row(
            str(lag),
            f"{len(some):,}",
            f"{-log_w.mean():.4f}",
            f"{rms(log_w):.3f}",
            f"{low:.3f}",
            f"{high:.3f}",
            f"{np.exp(log_w.max()):.3g}",
            bars(histogram(some, edge)),
        )
    return table


def _terms(x: Examined) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    known = int(x.tokens.known.sum())
    table.add_column(f"the gap log w = sum of ({known:,} tokens)")
    for title in ("rms", "KL", "share"):
        table.add_column(title, justify="right")
    table.add_column("")
    parts = split(x.tokens)
    for part in parts:
        row = (
            f"{part.rms:.4f}",
            f"{part.kl:+.5f}",
            f"{part.share:.1%}",
            f"[dim]{MEANING[part.term]}",
        )
        table.add_row(part.term, *row)
    if parts:
        total = x.tokens.where(x.tokens.known).log_w
        table.add_row("log w", f"{rms(total):.4f}", f"{-total.mean():+.5f}", "100.0%", "")
    return table


def bars(counts: np.ndarray) -> str:
    """A line of blocks, the square root of the counts so that tails are seen."""
    heights = np.sqrt(counts / max(1, counts.max()))
    return "".join(BARS[int(np.ceil(h * (len(BARS) - 1)))] for h in heights)


def write(x: Examined, path: Path) -> None:
    """JSON: `window`, `log`, `by_lag`, `terms` (in the order of TERMS), `by_position`, `findings`."""
    edge = max(0.01, 3 * rms(x.tokens.log_w)) if len(x.tokens) else 0.0
    lags = [
        {
            "lag": lag,
            "tokens": len(some),
            "kl": float(-some.log_w.mean()),
            "rms": rms(some.log_w),
            "weight_max": float(np.exp(some.log_w.max())),
            "histogram": histogram(some, edge).tolist(),
            "terms": [msgspec.to_builtins(part) for part in split(some)],
        }
        for lag, some in by_lag(x.tokens)
    ]
    facts = {k: getattr(x.facts, k) for k in x.facts.__dataclass_fields__}
    sampling = [msgspec.to_builtins(s) | {"responses": n} for s, n in facts.pop("sampling").items()]
    out = {
        "window": {"first": x.first, "stop": x.stop, "exact": x.exact, "note": x.note},
        "log": facts | {"sampling": sampling, "formats": dict(facts["formats"])},
        "histogram_edge_nats": edge,
        "by_lag": lags,
        "terms": [msgspec.to_builtins(part) for part in split(x.tokens)],
        "by_position": [
            {"first": a, "last": b, "tokens": n, "rms": v} for a, b, n, v in by_position(x.tokens)
        ],
        "findings": [msgspec.to_builtins(finding) for finding in x.findings],
    }
    assert [part["term"] for part in out["terms"]] in ([], list(TERMS))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(out)))
