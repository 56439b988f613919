"""`areal-q doctor RUN` reports why a run does not learn, and where rollouts and learner disagree: what share
each cause has, and what to change.

It reads the log and the checkpoints, also while the run is in progress. Exit codes: 0 nothing worse than a
note, 1 a warning or an error was found, 2 no run or log (one line on stderr), 130 Ctrl-C.
"""

import time
from pathlib import Path
from typing import Annotated

from typer import Exit, Option, echo

from areal_q.errors import ConfigError
from areal_q.observability.metrics_log import has_ended
from areal_q.system import command
from areal_q.system.command import RunDirectory, StopBefore

FOLLOW_POLL_S = 1.0
"""Seconds between two checks whether the log has grown."""

EXITS = (
    "Exit codes: 0 nothing worse than a note; 1 a warning or an error was found; 2 no run or log."
)


PROBE = "go on for so many steps at learning rate 0, beside RUN, and look at these"


def main(
    directory: RunDirectory,
    first: Annotated[
        int | None, Option("--from", min=0, help="first step; default: 10 before the end")
    ] = None,
    stop: StopBefore = None,
    probe: Annotated[int, Option("--probe", min=0, help=PROBE)] = 0,
    follow: Annotated[
        bool, Option("--follow", help="again whenever the log has grown, until the run ends")
    ] = False,
) -> None:
    """Says why the run does not learn, and splits the gap between behaviour and learner by cause; writes
    RUN/doctor.json.

    What it says of learning is about the whole run, the gap about the last steps, or those of --from and --to.

    With --probe, every version has the same weights: what is left is quantization and the engine.

    Exit codes: 0 fine, or nothing worse than a note; 1 look at what is named; 2 no such run, or no log.
    """
    if follow and (probe or stop is not None):
        raise ConfigError("--follow: goes on to the log's end, so without --probe and --to")
    console = command.console()
    if probe:
        from learner.doctor.same_weights import same_weights_run

        directory, first, stop = same_weights_run(directory, probe, console), None, None
    stop, grave = _look(directory, first, stop, console)
    while follow and _grows(directory, stop):
        console.rule(time.strftime("%H:%M:%S"))
        stop, grave = _look(directory, first, None, console)
    raise Exit(1 if grave else 0)


def _look(directory: Path, first: int | None, stop: int | None, console) -> tuple[int, bool]:
    """Examines the steps, prints the result and writes doctor.json. Returns (the step after the last one, True
    if a finding is worse than a note)."""
    from learner.doctor.examine import examine
    from learner.doctor.tables import doctor_screen, write_json

    examined = examine(directory, first, stop)
    doctor_screen(examined, console)
    try:
        write_json(examined, directory / "doctor.json")
        echo(directory / "doctor.json")
    except OSError as error:  # the run may be readable but not writable
        echo(f"{directory / 'doctor.json'}: not written: {error.strerror}")
    return examined.stop, any(finding.severity != "note" for finding in examined.findings)


def _grows(directory: Path, stop: int) -> bool:
    """Waits until the log has steps from `stop` on, and returns True, or until the run has ended without one,
    and returns False."""
    from buffer.logs.trajectory_log import logged_steps

    while True:
        ended = has_ended(directory)
        if logged_steps(directory) > stop:
            return True
        if ended:
            return False
        time.sleep(FOLLOW_POLL_S)
