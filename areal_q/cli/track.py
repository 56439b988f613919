"""`areal-q track RUN` hands the metrics of a run to a tracker, afterwards or while the run goes on.

The launcher starts one such process for each of the run's `trackers`. So a tracker that does not answer, does
not end, or dies, reaches no process that learns.
"""

import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from areal_q import __version__
from areal_q.config import Run, TrackerConfig, load
from areal_q.config.load import merge, nested, parsed
from areal_q.config.trackers import labelled
from areal_q.decode_errors import not_among
from areal_q.errors import AReaLQError, ConfigError, TrackerFailed
from areal_q.observability.run_end import is_held
from areal_q.observability.run_summary import plural
from areal_q.observability.trackers.described import describe, scratch_of
from areal_q.observability.trackers.feed import Feed, Logged
from areal_q.observability.trackers.registry import TRACKERS, open_tracker
from areal_q.system.files import alone_in
from areal_q.system.processes import module_command
from areal_q.system.stop_request import StopRequest

EXITS = (
    "Exit codes: 0 done; 1 the tracker failed, and the same command goes on; 2 something to mend."
)
LOOK_EVERY_S = 0.5
REPORT_S = 300.0
"""Seconds that the report may take"""
logger = logging.getLogger("areal-q track")


def main(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="such as runs/demo")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="a=b", help="the tracker's settings on top, such as project=sums"),
    ] = None,
    to: Annotated[
        str, typer.Option(help="wandb, mlflow, trackio or python; default: the run's trackers")
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", help="go on until the run has ended, or Ctrl-C")
    ] = False,
    anew: Annotated[
        bool, typer.Option("--anew", help="as a new run there, from the first record on")
    ] = False,
) -> None:
    """Send a run's metrics, settings, samples and report to wandb, MLflow, trackio or code of one's own.

    What a tracker has taken already it does not get again, so that the command goes on where it, or the
    run's own tracker, was stopped.
    """
    logging.basicConfig(level=logging.WARNING, format="areal-q track: %(message)s")
    run = load(directory / "config.toml")
    trackers = chosen(run, directory, to, settings or [])
    if follow and len(trackers) > 1:
        raise ConfigError(f"--follow: one of {', '.join(trackers)} at a time: --to NAME")
    for label, tracker in trackers.items():
        taken = f"another process hands this run to {label}"
        with alone_in(scratch_of(directory, label), taken), _failing(directory, label):
            if anew:
                for scratch in ("id", "logged"):
                    (scratch_of(directory, label) / scratch).unlink(missing_ok=True)
            _track(run, directory, label, tracker, follow)


def chosen(run: Run, directory: Path, to: str, settings: list[str]) -> dict[str, TrackerConfig]:
    """Returns the trackers by their labels: the run's, or the one `to` with settings on top of the run's.
    Raises ConfigError if the run has none, or `to` or a setting is none."""
    known = labelled(run.trackers)
    if not to:
        if settings:
            raise ConfigError(f"{settings[0]}: of which tracker? --to NAME")
        if not known:
            raise ConfigError(f"{directory}: its settings name no trackers; --to wandb, for one")
        return known
    types = [str(one.__struct_config__.tag) for one in TRACKERS]
    if to not in [*known, *types]:
        raise ConfigError(f"--to {to}: {not_among(to, [*dict.fromkeys([*known, *types])])}")
    table = msgspec.to_builtins(known[to]) if to in known else {"type": to}
    for setting in settings:
        table = merge(table, nested(*parsed(setting)))
    one = load(directory / "config.toml", [("trackers", [table])])
    return {to: one.trackers[0]}


def _track(run: Run, directory: Path, label: str, settings: TrackerConfig, follow: bool) -> None:
    stop = StopRequest()
    if follow:
        stop.listen()
    told = describe(run, directory, label, settings, __version__)
    logged = Logged(told.scratch / "logged")
    tracker = open_tracker(settings, told)
    feed = Feed(directory, tracker, logged)
    taken = feed.pass_on()
    while follow and not stop.is_set() and not (feed.end and not is_held(directory)):
        stop.wait(LOOK_EVERY_S)
        taken += feed.pass_on()
    taken += feed.pass_on()  # what came between the last look and the signal
    for number in stop.SIGNALS if follow else ():
        signal.signal(number, signal.SIG_DFL)  # from here on a second Ctrl-C ends it at once
    report = _report(directory, told.scratch) if getattr(settings, "report", False) else None
    tracker.finish(report, str(feed.end.get("reason", "")) if feed.end else "")
    if report:
        report.unlink(missing_ok=True)
    kept = f"; {plural(feed.kept_back, 'record')} of steps that it has already" * bool(
        feed.kept_back
    )
    typer.echo(f"{label}: {plural(taken, 'record')} of {told.name}, {len(logged)} in all{kept}")


def _report(directory: Path, scratch: Path) -> Path | None:
    """Returns the run's report, made by `areal-q report` in a process of its own; None if that failed."""
    out = scratch / "report.html"
    command = module_command("areal_q", "report", str(directory), "--out", str(out))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=REPORT_S)
    except subprocess.TimeoutExpired:
        logger.warning("the report took more than %.0f s, and is left out", REPORT_S)
        return None
    if done.returncode:
        logger.warning("there is no report: %s", done.stderr.strip().rpartition("\n")[2])
        return None
    return out


@contextmanager
def _failing(directory: Path, label: str) -> Iterator[None]:
    """Turns whatever a tracker raises into TrackerFailed, of one line."""
    try:
        yield
    except AReaLQError:
        raise
    except KeyboardInterrupt:
        print(f"stopped; areal-q track {directory} --to {label} goes on", file=sys.stderr)
        raise typer.Exit(130) from None
    except Exception as error:  # the libraries of others raise anything
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise TrackerFailed(
            f"{label}: {what}; to go on: areal-q track {directory} --to {label}"
        ) from error
