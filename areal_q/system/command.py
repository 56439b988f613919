"""What all commands share: help in plain text under the name that a user types, exit codes, and output that
never fails on a character."""

import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from areal_q.errors import AReaLQError, BufferUnavailable, RankLost, RecordError, UserError

PLAIN: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # rich would read [a.b=c] as markup
}
PIPED_WIDTH = 1000
"""Columns of an output that is no terminal: so many that nothing is wrapped and grep finds whole lines."""
WIDTH = {"max_content_width": 100}
_EXITS = "Exit codes: 0 done; 2 something to mend, which one line names."

WatchdogSeconds = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0.0,
        help="end with exit code 75 after at least so long without progress; 0: never",
        envvar="AREAL_Q_WATCHDOG",
    ),
]
"""The option --watchdog of a service."""


def run_command(
    name: str, main: Callable[..., Any], exits: str = _EXITS, who: str = "areal-q: error"
) -> None:
    """Runs `main` on the arguments of this process as `areal-q NAME`; the help ends with `exits`.

    Exits with 2 for an error that the user can correct, and with 1 if Redis or another rank is gone; the error
    is one line on stderr, after `who`."""
    app = typer.Typer(**PLAIN)
    app.command(epilog=exits, context_settings=WIDTH)(main)
    accept_any_text()
    try:
        app(prog_name=f"areal-q {name}")
    except (UserError, RecordError) as error:
        exit_with(error, 2, who)
    except (BufferUnavailable, RankLost) as error:
        exit_with(error, 1, who)


def exit_with(error: AReaLQError, code: int, who: str = "areal-q: error") -> NoReturn:
    """Prints the lines of `error` to stderr and ends this process with exit code `code`."""
    for line in error.lines():
        print(f"{who}: {line}", file=sys.stderr)
    sys.exit(code)


def accept_any_text() -> None:
    """Makes stdout and stderr replace characters that their encoding lacks, which otherwise would end a run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def console() -> Console:
    """Returns a console for stdout, as wide as the terminal, or as COLUMNS says, or PIPED_WIDTH."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(width=wide)
