"""`areal-q report RUN [RUN2 …]` writes the report of runs as one HTML file, or serves it on loopback, as
`areal-q watch RUN --serve` does.

Exit codes: 0 done; 2 if there is no such run, or a port or file cannot be used (one line on stderr).
"""

import logging
import os
import socket
import sys
import time
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from areal_q.errors import ConfigError, LogError, os_errors_as
from areal_q.observability.run_summary import plural
from areal_q.system.files import write_whole

Out = Annotated[
    Path | None, typer.Option("--out", help="the file; default: report.html in the first RUN")
]
Csv = Annotated[
    Path | None, typer.Option("--csv", help="directory for the data of every plot, one file each")
]
MaxMb = Annotated[
    float, typer.Option("--max-mb", min=0.5, help="size of the file; the rest is left out")
]


def main(
    directories: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="directories of runs, such as runs/demo")
    ],
    out: Out = None,
    csv: Csv = None,
    max_mb: MaxMb = 10.0,
    serve: Annotated[
        bool, typer.Option("--serve", help="on loopback, live, with every trajectory of the log")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="with --serve; 0: a free one")] = 0,
    open: Annotated[bool, typer.Option("--open", help="with --serve: in the browser here")] = False,
) -> None:
    """Draws the report of a run, or of several in comparison.

    A file holds the curves, the list of all trajectories, and token by token those of as many steps as fit into
    --max-mb, the telling ones first. Served, every trajectory of the log is there.
    """
    logging.basicConfig(level=logging.WARNING, format="areal-q report: %(message)s")
    # Imported here, so that a wrong option is refused at once.
    from buffer.report.runs import read_runs

    if serve:
        _serve(directories, port, open)
        return
    _tell(f"reading {plural(len(directories), 'run')}")
    runs = read_runs(directories)
    for run in runs:
        if not run.records:
            raise LogError(f"{run.directory}: no metrics yet; --serve waits for them")
    out = out or directories[0] / "report.html"
    if out.parent.is_dir() and not os.access(out.parent, os.W_OK):
        raise ConfigError(f"{out.parent}: cannot be written to; name a file elsewhere: --out FILE")
    with os_errors_as(ConfigError):
        _write(runs, out, int(max_mb * 1e6), csv)


def _write(runs, out: Path, max_bytes: int, csv: Path | None) -> None:
    from areal_q.runner.final_screen import last_screen
    from buffer.report.figures import write_figures_csv
    from buffer.report.page import whole_file
    from buffer.report.runs import group_lines, one_line

    began = time.monotonic()
    if len(runs) == 1:
        last_screen(runs[0].run, runs[0].directory)
    else:
        for line in (*map(one_line, runs), *group_lines(runs)):
            typer.echo(line)
    _tell(f"writing {sum(run.index.num_trajectories for run in runs):,} trajectories")
    page = whole_file(runs, max_bytes)
    write_whole(out, page)
    took = time.monotonic() - began
    typer.echo(f"{out}: {out.stat().st_size / 1e6:.1f} MB in {took:.1f} s")
    if csv:
        count = write_figures_csv([run.name for run in runs], [run.records for run in runs], csv)
        typer.echo(f"{csv}: {count} files of CSV")


def _tell(text: str) -> None:
    """Prints a line of progress if stderr is a terminal."""
    if sys.stderr.isatty():
        typer.echo(f"{text} …", err=True)


def elsewhere(port: int) -> str:
    """Returns the ssh command that makes the port reachable from another host, for a host without a display; ""
    if this host has one."""
    if any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")):
        return ""
    return f"from another machine: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}"


def _serve(directories: list[Path], port: int, open: bool) -> None:
    from buffer.report.runs import read_runs
    from buffer.report.serve import ReportServer

    with os_errors_as(ConfigError, f"port {port}"):
        server = ReportServer(read_runs(directories), port)
    typer.echo(f"{server.url}  (Ctrl-C ends)")
    if hint := elsewhere(server.server_address[1]):
        typer.echo(hint)
    if open:
        webbrowser.open(server.url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
