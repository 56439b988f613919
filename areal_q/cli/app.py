"""The command `areal-q`. Each subcommand imports the heavy modules that it needs by itself.

Exit codes: 0 done, or drained after Ctrl-C; 143 drained after SIGTERM; 1 a process of the run died; 2 an error
that the user can correct (one line on stderr); 130 killed by a second Ctrl-C.
"""

import ast
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from areal_q import __version__
from areal_q.config import dump_toml, load
from areal_q.errors import AReaLQError, ConfigError, RecordError, UserError
from areal_q.system.command import (
    EXITS_OF_MOST,
    PLAIN,
    WIDTH,
    ConfigFile,
    Overrides,
    RunDirectory,
    accept_any_text,
    check_names,
    config_and_overrides,
    exit_with,
)
from areal_q.system.processes import become

EXITS = (
    "Exit codes: 0 done, or stopped by Ctrl-C with a checkpoint; 143 so stopped by SIGTERM; 1 a process of the "
    "run died; 2 something to mend, which one line names; 130 killed by a second Ctrl-C."
)
GROUPS = {
    "Train": ("init", "run", "sft", "plan", "check", "settings", "check-config"),
    "While a run goes on": ("watch", "status", "weights", "buffer"),
    "Afterwards, or meanwhile": ("report", "track", "doctor", "replay", "fetch", "eval"),
    "Models": ("formats", "export", "quantize"),
    "Several machines": ("launch", "learner", "rollout", "relay", "keys"),
    "Other": ("setup", "version"),
}


ELSEWHERE = {
    "init": "areal_q.cli.init",
    "setup": "areal_q.cli.setup",
    "plan": "areal_q.plan.cli",
    "launch": "areal_q.launch.cli",
    "report": "buffer.report.cli",
    "track": "areal_q.cli.track",
    "quantize": "areal_q.cli.quantize",
    "weights": "buffer.weight_sync.commands.inspect_weights",
    "keys": "buffer.weight_sync.commands.make_keys",
    "replay": "learner.replay.cli",
    "fetch": "learner.replay.fetch",
    "export": "learner.replay.export",
    "sft": "learner.sft.cli",
    "doctor": "learner.doctor.cli",
    "check": "rollout.commands.check",
    "status": "rollout.commands.status",
    "formats": "rollout.evaluation.formats",
    "eval": "rollout.evaluation.evaluate",
}
"""The module of each command that has one of its own. Its `main` is the command, its EXITS the end of the
help. It is imported when it is called for, as many of them import torch."""


class Commands(TyperGroup):
    """Lists the commands grouped by purpose, with those of ELSEWHERE."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module = import_module(ELSEWHERE[cmd_name])
        alone = typer.Typer(**PLAIN)
        exits = getattr(module, "EXITS", EXITS_OF_MOST)
        alone.command(cmd_name, epilog=exits, context_settings=WIDTH)(module.main)
        return typer.main.get_command(alone)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self._says(ctx, name)) for name in names])

    def _says(self, ctx: Any, name: str) -> str:
        if name not in ELSEWHERE:
            command = self.get_command(ctx, name)
            return command.get_short_help_str(limit=200) if command else ""
        spec = find_spec(ELSEWHERE[name])
        assert spec and spec.origin
        told = ast.parse(Path(spec.origin).read_text("utf-8")).body
        (main,) = (f for f in told if isinstance(f, ast.FunctionDef) and f.name == "main")
        return " ".join((ast.get_docstring(main) or "").partition("\n\n")[0].split())


app = typer.Typer(
    name="areal-q",
    help="Asynchronous off-policy RL for language models with quantized rollouts.",
    epilog=EXITS,
    cls=Commands,
    no_args_is_help=True,
    context_settings=WIDTH,
    **PLAIN,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"areal-q {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
]


@app.callback()
def options(version: Version = False) -> None: ...


PASS_THROUGH = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": [],
}


@app.command(epilog=EXITS)
def run(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG",
            help="a TOML file, the name of a configuration that comes with areal-q, such as quickstart, or the "
            "directory of an earlier run",
        ),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the newest checkpoint")
    ] = False,
    step: Annotated[
        int | None,
        typer.Option(
            "--from", min=0, help="with --resume: step of an older one; sets later ones aside"
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="name of the run; default: CONFIG's own")] = None,
) -> None:
    """Run on this machine: Redis, the learner and its rollout workers, until done or Ctrl-C.

    An earlier run of the same name is moved aside, never overwritten. With --resume and no CONFIG,
    the run under runs/ that was last active goes on.
    """
    from areal_q.runner.asked_run import asked_for
    from areal_q.runner.launcher import launch
    from areal_q.runner.live_view import build_view

    asked = asked_for(*config_and_overrides(config, overrides), resume, name, step)
    sys.exit(launch(asked, resume, build_view, step=step))


@app.command("check-config")
def check_config(
    config: ConfigFile,
    overrides: Overrides = None,
) -> None:
    """Print the settings that CONFIG resolves to, defaults included."""
    typer.echo(dump_toml(load(config, overrides)), nl=False)


@app.command()
def settings(
    word: Annotated[str, typer.Argument(metavar="WORD", help="such as lag, or objective")] = "",
) -> None:
    """List all settings, or those with WORD in them: type, choices, default, meaning."""
    from areal_q.cli.reference import settings_text

    text = settings_text(word)
    if not text:
        raise ConfigError(f"settings {word}: no setting has this word in its name or meaning")
    typer.echo(text)


@app.command()
def watch(
    directory: RunDirectory,
    serve: Annotated[
        bool, typer.Option("--serve", help="in a browser: the report, served on loopback")
    ] = False,
    port: Annotated[int, typer.Option(help="with --serve; 0: a free one")] = 0,
    open: Annotated[bool, typer.Option("--open", help="with --serve: in the browser here")] = False,
) -> None:
    """Watch a run that is going on, or that has ended, in a terminal of its own."""
    from areal_q.runner.live_view import watch as follow

    if serve:
        import_module(ELSEWHERE["report"]).main([directory], serve=True, port=port, open=open)
        return
    follow(load(directory / "config.toml"), directory)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"areal-q {__version__}")


@app.command(context_settings=PASS_THROUGH)
def learner(ctx: typer.Context) -> None:
    """The learner alone, as a service."""
    become("learner", *ctx.args)


@app.command(context_settings=PASS_THROUGH)
def rollout(ctx: typer.Context) -> None:
    """A rollout worker alone, as a service."""
    become("rollout", *ctx.args)


@app.command(context_settings=PASS_THROUGH)
def relay(ctx: typer.Context) -> None:
    """Pass weights on to the workers of a host or rack, as a service."""
    become("buffer.weight_sync.commands.relay", *ctx.args)


@app.command(context_settings=PASS_THROUGH)
def buffer(ctx: typer.Context) -> None:
    """Look into a run's Redis, live or not: status, peek, export, import, requeue, purge."""
    become("buffer", *ctx.args)


def main() -> None:
    accept_any_text()
    try:
        check_names()
        app(prog_name="areal-q")
    except AReaLQError as error:
        exit_with(error, 2 if isinstance(error, (UserError, RecordError)) else 1)
