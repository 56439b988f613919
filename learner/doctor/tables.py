"""The doctor's report: one screen, and `doctor.json` with the same numbers."""

from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from learner.doctor.diagnosis.token_ratios import (
    TERMS,
    by_lag,
    by_position,
    histogram,
    rms,
    split_by_term,
)
from learner.doctor.examine import Examined

BARS = " ▁▂▃▄▅▆▇█"
COLORS = {"error": "red", "warning": "yellow", "note": "dim"}
MEANING = {
    "staleness": "weights older than the learner's",
    "noise": "noise added before publishing (AQN)",
    "weights": "the published weights are quantized",
    "activations": "the format quantizes activations",
    "sampling": "drawn at another temperature",
    "cache": "keys and values of older weights",
    "engine": "the rest: the engine's own arithmetic",
}
LEGEND = """\
w = π_prox/π_behav: the learner's probability of a token over the rollout's
lag: versions behind; KL: mean of −log w, nats; rms: root mean square of log w
p1, p99: 1 % and 99 % of the tokens have a smaller w"""


def doctor_screen(x: Examined, console: Console) -> None:
    """Prints the verdict, the findings and the figures behind them, in 80 columns."""
    facts, tokens = x.facts, x.tokens
    said = f"  steps {x.first}–{x.stop - 1}: {facts.responses} responses, {facts.tokens} tokens, "
    console.print(Text.assemble((str(x.directory), "bold"), said, ", ".join(facts.formats)))
    console.print(_verdict(x))
    for finding in x.findings:
        name = (f"● {finding.name}", COLORS[finding.severity])
        change = (f"→ {finding.change}", "dim")
        console.print(Text.assemble(name, f": {finding.says}\n  ", change))
    if x.note:
        console.print(x.note, style="yellow")
    if x.exact is not None:
        how = "bit for bit" if x.exact else ("not as recorded: see areal-q replay", "yellow")
        by_replay = ("the weights of every version were made again by replay: ", "dim")
        console.print(Text.assemble(by_replay, how))
    if len(tokens):
        _figures(x, console)


def _verdict(x: Examined) -> Text:
    graver = [f for f in x.findings if f.severity != "note"]
    if graver:
        color = COLORS[graver[0].severity]
        return Text(f"look at: {', '.join(f.name for f in graver)}", f"{color} bold")
    also = ", but for the notes below" if x.findings else ""
    return Text.assemble(("fine", "green bold"), f": nothing that a rule knows is wrong{also}")


def _figures(x: Examined, console: Console) -> None:
    edge = max(0.01, 3 * rms(x.tokens.log_w))
    console.print(_ratios(x))
    console.print(f"log w before truncation, from −{edge:.2g} to {edge:.2g} nats:", style="dim")
    for lag, some in by_lag(x.tokens):
        console.print(f" lag {lag}  {bars(histogram(some, edge))}", no_wrap=True)
    console.print(_terms(x))
    where = "  ".join(
        f"{a}–{b} {v:.3f}" if b > a else f"{a} {v:.3f}" for a, b, _, v in by_position(x.tokens)
    )
    console.print(Text.assemble(("gap without staleness, nats rms by position:  ", "dim"), where))
    console.print(LEGEND, style="dim")


def _ratios(x: Examined) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for title in ("lag", "tokens", "KL (k3)", "rms", "p1 of w", "p99 of w", "largest w"):
        table.add_column(title, justify="right", no_wrap=True)
    for lag, some in by_lag(x.tokens):
        log_w = some.log_w
        low, high = np.exp(np.quantile(log_w, (0.01, 0.99)))
        table.add_row(
            str(lag),
            f"{len(some):,}",
            f"{k3(log_w):.4f}",
            f"{rms(log_w):.3f}",
            f"{low:.3f}",
            f"{high:.3f}",
            f"{np.exp(log_w.max()):.3g}",
        )
    return table


def _terms(x: Examined) -> Table:
    known = int(x.tokens.known.sum())
    table = Table(
        box=None,
        padding=(0, 1),
        header_style="dim",
        title=f"what log w is the sum of, {known:,} tokens",
        title_style="dim",
        title_justify="left",
    )
    table.add_column("cause", no_wrap=True)
    for title in ("rms", "k1", "share"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", style="dim")
    parts = split_by_term(x.tokens)
    for part in parts:
        row = (f"{part.rms:.4f}", f"{part.kl:+.5f}", f"{part.share:.1%}", MEANING[part.term])
        table.add_row(part.term, *row)
    if parts:
        total = x.tokens.where(x.tokens.known).log_w
        table.add_row("log w", f"{rms(total):.4f}", f"{-total.mean():+.5f}", "100.0%", "")
    return table


def k3(log_w: np.ndarray) -> float:
    """Returns the KL of log-ratios, float64 [N], in nats per token: mean(w − 1 − log w)."""
    return float((np.expm1(log_w) - log_w).mean())


def bars(counts: np.ndarray) -> str:
    """Returns a bar chart of one line, whose heights are the square roots of the counts to make tails
    visible."""
    heights = np.sqrt(counts / max(1, counts.max()))
    return "".join(BARS[int(np.ceil(h * (len(BARS) - 1)))] for h in heights)


def write_json(x: Examined, path: Path) -> None:
    """Writes JSON with `window`, `log`, `by_lag`, `terms` (in the order of TERMS), `by_position`,
    `findings`."""
    edge = max(0.01, 3 * rms(x.tokens.log_w)) if len(x.tokens) else 0.0
    lags = [
        {
            "lag": lag,
            "tokens": len(some),
            "kl_k3": k3(some.log_w),
            "rms": rms(some.log_w),
            "weight_max": float(np.exp(some.log_w.max())),
            "histogram": histogram(some, edge).tolist(),
            "terms": [msgspec.to_builtins(part) for part in split_by_term(some)],
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
        "terms": [msgspec.to_builtins(part) for part in split_by_term(x.tokens)],
        "by_position": [
            {"first": a, "last": b, "tokens": n, "rms": v} for a, b, n, v in by_position(x.tokens)
        ],
        "findings": [msgspec.to_builtins(finding) for finding in x.findings],
    }
    assert [part["term"] for part in out["terms"]] in ([], list(TERMS))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(out)))
