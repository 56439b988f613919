"""`areal-q doctor RUN`: where rollouts and learner disagree, how much of it comes from what, and what to
change. From the log and the checkpoints; also of a run that is going on.

Exit codes: 0 nothing worse than a note, 1 a warning or an error was found, 2 no run or log (one line on
stderr), 130 Ctrl-C.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from areal_q.errors import RecordError, UserError


def main(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="a run's directory")],
    first: Annotated[
        int | None, typer.Option("--from", min=0, help="first step; default: 10 before the end")
    ] = None,
    stop: Annotated[
        int | None, typer.Option("--to", min=1, help="step to stop before; default: the log's end")
    ] = None,
    probe: Annotated[
        int,
        typer.Option(
            "--probe",
            min=0,
            help="go on for so many steps at learning rate 0, beside RUN, and look at these",
        ),
    ] = 0,
) -> None:
    """Splits the gap between behaviour and learner by cause; writes RUN/doctor.json.

    With --probe, every version has the same weights: what is left is quantization and the engine.
    """
    from rich.console import Console

    from learner.doctor_examine import examine
    from learner.doctor_show import screen, write

    console = Console()
    if probe:
        from learner.doctor_same import same_weights_run

        directory, first, stop = same_weights_run(directory, probe, console), None, None
    examined = examine(directory, first, stop, console)
    write(examined, directory / "doctor.json")
    screen(examined, console)
    typer.echo(directory / "doctor.json")
    grave = any(finding.severity != "note" for finding in examined.findings)
    raise typer.Exit(1 if grave else 0)


if __name__ == "__main__":
    try:
        typer.run(main)
    except (UserError, RecordError) as error:
        print(f"areal-q: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
