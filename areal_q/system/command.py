"""What all commands share: help in plain text under the name that a user types, exit codes, and output that
never fails on a character, and that no text of others can turn into commands for a terminal."""

import errno
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from areal_q.errors import (
    AReaLQError,
    BufferUnavailable,
    ConfigError,
    RankLost,
    RecordError,
    TeacherUnavailable,
    UserError,
    WeightVersionError,
)
from areal_q.system.credentials import no_password

PLAIN: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # rich would read [a.b=c] as markup
}
PIPED_WIDTH = 1000
"""Columns of an output that is no terminal: so many that nothing is wrapped and grep finds whole lines."""
TERMINAL_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
"""Characters that command a terminal, or turn the direction of the text that follows; not line end and tab"""
WIDTH = {"max_content_width": 100}
EXITS_OF_MOST = "Exit codes: 0 done; 2 something to mend, which one line names."

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
MetricsPort = Annotated[
    str, typer.Option(metavar="[HOST:]PORT", help="serve Prometheus metrics; on loopback")
]
RedisUrl = Annotated[
    str, typer.Option(help="URL of the buffer", envvar="REDIS_URL", callback=no_password)
]
RunDirectory = Annotated[
    Path, typer.Argument(metavar="RUN", help="a run's directory, such as runs/demo")
]
RunIfAny = Annotated[
    Path | None, typer.Argument(metavar="RUN", help="a run's directory, such as runs/demo")
]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="a TOML file, or its name")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="a.b=c", help="settings on top, such as learner.max_lag=4"),
]
StopBefore = Annotated[
    int | None, typer.Option("--to", min=1, help="step to stop before; default: the log's end")
]
CurveKeys = Annotated[
    str | None,
    typer.Option(help="directory of CURVE keys, before the settings'", envvar="AREAL_Q_KEYS"),
]
CurveClient = Annotated[str, typer.Option(help="whose key in it")]


def run_command(
    name: str, main: Callable[..., Any], exits: str = EXITS_OF_MOST, who: str = "areal-q: error"
) -> None:
    """Runs `main` on the arguments of this process as `areal-q NAME`; the help ends with `exits`.

    Exits with 2 for an error that the user can correct, and with 1 if Redis, another rank, a teacher or what
    brings weights is gone; the error is one line on stderr, after `who`."""
    app = typer.Typer(**PLAIN)
    app.command(epilog=exits, context_settings=WIDTH)(main)
    accept_any_text()
    try:
        check_names()
        app(prog_name=f"areal-q {name}")
    except (UserError, RecordError) as error:
        exit_with(error, 2, who)
    except (BufferUnavailable, RankLost, TeacherUnavailable, WeightVersionError) as error:
        exit_with(error, 1, who)


def config_and_overrides(
    config: str | None, overrides: list[str] | None
) -> tuple[str | None, list[str]]:
    """Returns CONFIG and the settings on top of it, for a command that does without CONFIG: a word such as
    a.b=c in its place is the first of the settings, unless a file or a directory has that name."""
    if config is not None and "=" in config and not os.path.exists(config):
        return None, [config, *(overrides or [])]
    return config, overrides or []


def exit_with(error: AReaLQError, code: int, who: str = "areal-q: error") -> NoReturn:
    """Prints the lines of `error` to stderr and ends this process with exit code `code`."""
    for line in error.lines():
        print(f"{who}: {line}", file=sys.stderr)
    sys.exit(code)


def accept_any_text() -> None:
    """Makes stdout and stderr harmless to a terminal, whoever writes to them, and replace characters that their
    encoding lacks, which otherwise would end a run."""
    sys.stdout, sys.stderr = _printable(sys.stdout), _printable(sys.stderr)


def check_names() -> None:
    """Raises ConfigError for an argument, or a working directory, that is no text in this locale, since a run
    could not write it down, and for a working directory that is gone."""
    try:
        here = os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the working directory is gone: cd to one that is there") from error
    for name in (*sys.argv[1:], here):
        try:
            name.encode()
        except UnicodeEncodeError as error:
            encoding = sys.getfilesystemencoding()
            raise ConfigError(
                f"{name}: no {encoding} text: another name, or another locale (LANG=C.UTF-8)"
            ) from error


def harmless(text: str) -> str:
    r"""Returns `text` with the characters of TERMINAL_COMMANDS as \uNNNN, which is what JSON and TOML write for
    them. Example: "a\x1b[2J" → r"a\u001b[2J"."""
    return TERMINAL_COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def escaped(text: str) -> str:
    r"""Returns `text` with everything that is not printable as \xNN or \uNNNN: control, bidirectional and
    invisible characters, and line ends. Example: "a\x1b[2J" → r"a\x1b[2J"."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """Returns `text` as one printable line. Of a long one the end is shown, since that is what is scored."""
    flat = escaped(text.replace("\n", "⏎"))
    return flat if len(flat) <= 32 else "…" + flat[-31:]


def page(width: int) -> Console:
    """Returns a console for text without colours, which is captured or goes to a notebook."""
    return _Console(width=width, color_system=None, force_terminal=False, force_jupyter=False)


def console(stderr: bool = False) -> Console:
    """Returns a console for stdout, or for stderr, as wide as the terminal, or as COLUMNS says, or
    PIPED_WIDTH."""
    stream = sys.stderr if stderr else sys.stdout
    wide = None if stream.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    # While a live view is drawn rich puts a stream of its own in the place of stdout.
    return _Console(width=wide, file=stream.beneath if isinstance(stream, _Printable) else stream)


class _Console(Console):
    """Makes all text harmless, while its own styles and moves of the cursor stay as they are. A bracket
    is one, and begins no style: whoever styles a part of a text does it with a Text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else harmless(text), style, control)


class _Printable:
    """A stream for text alone. A console writes its styles to the one beneath."""

    def __init__(self, stream: Any) -> None:
        self.beneath = stream

    def write(self, text: str) -> int:
        # A bar of a library begins with a return, to draw itself anew.
        start = "\r" if text.startswith("\r") else ""
        self.beneath.write(start + harmless(text.removeprefix("\r")))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.beneath, name)


class _Outliving:
    """The stream of a terminal that may be closed. What is written from then on is lost and no error, since a
    run has still to write its checkpoint."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._outlived():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._outlived():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _outlived(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            # Also for what the stream still holds, and would write at the end of the process.
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())


def _printable(stream: Any) -> Any:
    if stream is None or isinstance(stream, _Printable):
        return stream
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="replace")
    return _Printable(_Outliving(stream) if stream.isatty() else stream)
