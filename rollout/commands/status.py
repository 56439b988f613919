"""`areal-q status [RUN]` shows a running cluster on one screen, or how the run ended
(rollout/commands/cluster.py).

Exit codes: 0 if all is well; 1 if something is wrong, with a line for each fault; 2 for a call that is invalid.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from areal_q.config import load
from areal_q.errors import ConfigError
from areal_q.observability.metrics_log import read_metrics
from areal_q.observability.progress import History
from areal_q.observability.run_end import how_it_ended, is_held
from areal_q.observability.run_summary import step_line
from areal_q.system import command
from areal_q.system.command import CurveClient, CurveKeys, RunIfAny
from areal_q.system.credentials import no_password
from areal_q.system.run_dir import METRICS_FILE

if TYPE_CHECKING:
    from rollout.commands.cluster import ClusterStatus

SILENT_S = 120.0
"""Seconds without a new version after which the learner is said to be stuck; `--silent-s` sets it."""


class EndedRun(msgspec.Struct, frozen=True):
    """The document that `areal-q status --json` prints of a run that has ended."""

    run: str
    ended: str
    well: bool


class Supervised(msgspec.Struct, frozen=True):
    """The document that `areal-q status --json` prints of a supervised run in progress."""

    run: str
    step: int
    steps: int
    last: dict | None
    """The newest step's record; None before the first"""


def _end_if_ended(directory: Path, json: bool) -> None:
    """Prints how the run in `directory` ended and raises typer.Exit, with 0 if it ended as it should; or how
    far it is, if it is a supervised one. Returns if the run is one of RL that has not ended."""
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such run")
    if told := how_it_ended(directory):
        said = msgspec.json.encode(EndedRun(directory.name, *told)).decode()
        typer.echo(said if json else f"{directory}: {told[0]}")
        raise typer.Exit(0 if told[1] else 1)
    _tell_supervised(directory, json)


def _tell_supervised(directory: Path, json: bool) -> None:
    """Prints how far a supervised run is, which has neither Redis nor workers, and raises typer.Exit. Returns
    for any other run."""
    if not (run := load(directory / "config.toml")).sft:
        return
    history = History(run)
    path = directory / METRICS_FILE
    for record in read_metrics(path) if path.exists() else []:
        history.add(record)
    done = Supervised(run.name, history.step, run.steps, history.last)
    line = (
        f"step {done.step}/{done.steps}  {step_line(history.last)}"
        if history.last
        else history.doing
    )
    typer.echo(msgspec.json.encode(done).decode() if json else f"{directory}: {line}")
    raise typer.Exit


EXITS = (
    "Exit codes: 0 all is well, or the run has ended as it should; 1 something is wrong, each "
    "named in a line; 2 nothing to ask."
)


_AGAIN = "again every S seconds, until the run ends or Ctrl-C"
_Watch = Annotated[float | None, typer.Option(metavar="S", min=0.1, help=_AGAIN)]


def main(
    directory: RunIfAny = None,
    url: Annotated[
        str | None, typer.Option("--redis", help="its Redis, with --run", callback=no_password)
    ] = None,
    run: Annotated[str | None, typer.Option(help="its name, with --redis")] = None,
    fetch: Annotated[
        str | None, typer.Option(help="the learner's endpoint as seen from here")
    ] = None,
    keys: CurveKeys = None,
    client: CurveClient = "worker",
    silent_s: Annotated[
        float, typer.Option(min=0, help="seconds without a new version that are too many")
    ] = SILENT_S,
    watch: _Watch = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON document a look")] = False,
) -> None:
    """Learner, workers, buffer and weights of a running cluster; exit code 1 when something is wrong."""
    if directory is not None:
        _end_if_ended(directory, json)
    # Imported here, since a run that has ended does without them, and they take half a second.
    from buffer.admin.open_run import open_run
    from buffer.weight_sync import WeightSource
    from rollout.commands.cluster import gather

    source = WeightSource(None, fetch, keys, client)
    with open_run(directory, url, run) as (connected, name):
        while True:
            held = directory is not None and is_held(directory)
            with _goes_on_without_redis(bool(watch and held)):
                found = gather(connected, name, source, silent_s, held)
                _show(found, json, bool(watch))
                if not watch:
                    raise typer.Exit(int(bool(found.wrong)))
            time.sleep(watch or 0.0)
            if directory is not None:
                _end_if_ended(directory, json)


@contextmanager
def _goes_on_without_redis(held: bool) -> Iterator[None]:
    """A context that says in a line that Redis does not answer, if the run's directory is `held`: a run that
    ends stops Redis before it lets go of that. Else the error is raised."""
    import redis

    try:
        yield
    except redis.RedisError as error:
        if not held:
            raise
        typer.echo(f"redis: {error}; looks again, as the run has not ended", err=True)


def _show(found: "ClusterStatus", json: bool, clear: bool) -> None:
    from rollout.commands.cluster import screen

    if json:
        typer.echo(msgspec.json.encode(found))
        return
    console = command.console()
    if clear:
        console.clear()
    console.print(screen(found))
