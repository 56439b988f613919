"""What all commands share: their help in plain text under the name that a user types, and an output that takes
any text."""

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
    "rich_markup_mode": None,  # rich takes [a.b=c] for markup
}
PIPED_WIDTH = 1000
"""Columns of an output that is no terminal: nothing is wrapped, so that grep finds whole lines."""
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
"""An option of a service"""


def run_command(
    name: str, main: Callable[..., Any], exits: str = _EXITS, who: str = "areal-q: error"
) -> None:
    """Runs `main` on the arguments of this process as `areal-q NAME`; the help ends with `exits`.

    Exits with 2 for what a user can mend, with 1 where Redis or another rank went away, and says on stderr what
    it is, after `who`."""
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
    """Ends this process with `code`, after each line of `error` on stderr."""
    for line in error.lines():
        print(f"{who}: {line}", file=sys.stderr)
    sys.exit(code)


def accept_any_text() -> None:
    """Has stdout and stderr replace what their encoding lacks: no terminal, UTF-8 or not, may end a run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def console() -> Console:
    """Returns the console of stdout, as wide as the terminal; COLUMNS counts where there is none."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(width=wide)
