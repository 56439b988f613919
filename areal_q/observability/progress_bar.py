"""How far a command is: a bar on a terminal, elsewhere a line every tenth of the way."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from areal_q.system import command

PLAIN_EVERY = 0.1
"""Share of the whole after which a line is printed if the output is no terminal"""


@contextmanager
def progress_of(total: int, what: str) -> Iterator[Callable[[], None]]:
    """Shows progress on stderr. What it yields is called after each of `total` things, such as "problems"."""
    console = command.console(stderr=True)
    if not console.is_terminal:
        done, step = 0, max(1, round(total * PLAIN_EVERY))

        def count() -> None:
            nonlocal done
            done += 1
            if done % step == 0 and done < total:
                typer.echo(f"{done} of {total} {what}", err=True)

        yield count
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
