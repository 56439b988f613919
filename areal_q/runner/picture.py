"""The picture of a run in progress: what the live view shows on a terminal, made from the records so far."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_q.observability.metrics_log import Record
from areal_q.observability.progress import History
from areal_q.observability.run_summary import (
    ACCURACY,
    LIVE_ROWS,
    SUPERVISED_ROWS,
    best_of,
    duration,
    figures,
    is_supervised,
    of_heldout,
    shown,
    unscored,
)
from areal_q.system.command import escaped

WIDE, NARROW = 108, 72
"""Width of a terminal in columns from which figures are in two columns, and from which a header fits in one
line"""
_WORKER = (
    "{version:d}|{tokens_per_s:,.0f}|{idle_share:.0%}|{active:d}|{groups:d}|{swaps:d}|{swap_s:ms}"
)


def picture(
    name: str,
    history: History,
    elapsed_s: float,
    warnings: Sequence[str] = (),
    awaits: str = "",
    width: int = WIDE,
) -> RenderableType:
    """Returns the whole live view, for a terminal of `width` columns."""
    parts: list[RenderableType] = [_header(name, history, elapsed_s, width)]
    if cache := (history.warmstart or {}).get("cache"):
        parts.append(Text(f"warm start from the cache: {cache}", "dim"))
    if awaits:
        parts.append(Text(f"… {awaits}", "cyan"))
    if history.last or history.evals:
        parts += [Text(), _figures(history, width)]
    for problem in history.unfaithful.values():
        parts.append(Text(f"✗ {problem}", "red"))
    complaints = [history.warning] if history.warning else []
    parts += [Text(f"✗ {warning}", "red") for warning in [*complaints, *warnings]]
    last = history.last or {}
    if workers := last.get("workers"):
        parts += [Text(), _workers(workers, width)]
    if left_out := last.get("workers_left_out"):
        parts.append(Text(f"and {left_out:,} more workers: areal-q status", "dim"))
    return Group(*parts)


def _header(name: str, history: History, elapsed_s: float, width: int) -> RenderableType:
    """Returns name, progress bar and times in one line, or in two if they do not fit into one."""
    done, total = history.progress
    times = duration(elapsed_s)
    if history.eta_s is not None:
        times += f", {duration(history.eta_s)} left"
    what = [Text(name, "bold"), Text(history.phase, "cyan")]
    bar = ProgressBar(total=max(1.0, total), completed=done)
    count = Text(f"{done:.0f}/{total:.0f}")
    if width >= NARROW:
        return _line([*what, bar, count, Text(times)], stretched=2)
    return Group(_line([*what, count]), _line([bar, Text(times)], stretched=0))


def _line(cells: list[RenderableType], stretched: int | None = None) -> Table:
    grid = Table.grid(padding=(0, 2), expand=stretched is not None)
    for i in range(len(cells)):
        grid.add_column(no_wrap=True, ratio=1 if i == stretched else None)
    grid.add_row(*cells)
    return grid


def _figures(history: History, width: int) -> RenderableType:
    """Returns the labelled numbers, in two columns if there is room."""
    last = history.last or {}
    rows = figures(last, SUPERVISED_ROWS if is_supervised(last) else LIVE_ROWS)
    if history.course:
        rows.insert(1, ("reward so far", history.course))
    if history.evals and "eval/loss" in history.evals[-1]:
        rows.insert(1, ("held-out", shown("{eval/loss:.4f} nats a token", history.evals[-1])))
    elif heldout := of_heldout(history.evals):
        best = best_of(heldout, "eval/accuracy", history.run)
        told = f", best {shown(ACCURACY, best)} at {best['step']}" if best else ""
        told += unscored(heldout[-1], "eval")
        rows.insert(1, ("held-out", shown(ACCURACY, heldout[-1]) + told))
    rows[2:2] = [(name, shown("{x:.3f}", {"x": value})) for name, value in history.sets.items()]
    grid = Table.grid(padding=(0, 2))
    pairs = 2 if width >= WIDE else 1
    for _ in range(pairs):
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
    cells = [cell for row in rows for cell in row]
    for i in range(0, len(cells), 2 * pairs):
        grid.add_row(*cells[i : i + 2 * pairs])
    return grid


def _workers(workers: list[Record], width: int) -> RenderableType:
    """Returns a table with a line for each worker; on a narrow terminal it has only the first columns."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    names = ("worker", "version", "tok/s", "idle", "active", "groups", "swaps", "swap")
    count = len(names) if width >= NARROW else 4
    for name in names[:count]:
        table.add_column(name, justify="left" if name == "worker" else "right", no_wrap=True)
    for w in workers:
        told = shown(_WORKER, w).split("|")
        table.add_row(Text(escaped(w["worker"])), *told[: count - 1])
    return table
