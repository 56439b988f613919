"""`areal-q buffer COMMAND [RUN]` inspects and changes a run's state in Redis, while it trains or afterwards.

RUN is a run's directory. If its Redis is not running, one is started on the data that it left. For any other
Redis give --redis URL --run NAME. Exit codes: 0 done, 1 some records are still refused, 2 an error that the
user can correct, in one line on stderr.
"""

import sys
from pathlib import Path
from typing import Annotated, cast

import msgspec
import typer

from areal_q.errors import AReaLQError, ConfigError
from areal_q.system.command import PLAIN, WIDTH, RunIfAny, accept_any_text, console, escaped
from areal_q.system.credentials import no_password
from buffer.admin import actions, inspect_state, tables
from buffer.admin.open_run import open_run

app = typer.Typer(
    name="areal-q buffer",
    help="Look into a run's Redis, live or not.",
    epilog="Exit codes: 0 done; 1 records stayed refused; 2 something to mend, which one line names.",
    no_args_is_help=True,
    context_settings=WIDTH,
    **PLAIN,
)
_Url = Annotated[
    str | None, typer.Option("--redis", help="URL of the buffer, with --run", callback=no_password)
]
_Name = Annotated[str | None, typer.Option("--run", help="name of the run, with --redis")]
_Json = Annotated[bool, typer.Option("--json", help="one JSON document instead of tables")]
_Yes = Annotated[bool, typer.Option("--yes", help="do not ask")]
_To = Annotated[Path, typer.Option("--to", help="a new directory")]
_KINDS = ("groups", "tickets", "eval", "quarantine")


@app.command()
def status(directory: RunIfAny = None, url: _Url = None, run: _Name = None, json: _Json = False):
    """Streams, memory, workers: how much waits where, and since when."""
    with open_run(directory, url, run) as (client, name):
        found = inspect_state.read_status(client, name)
    if json:
        _print_json(found)
    else:
        console().print(tables.status_table(found))


@app.command()
def peek(
    directory: RunIfAny = None,
    url: _Url = None,
    run: _Name = None,
    what: Annotated[str, typer.Option(help=f"one of {', '.join(_KINDS)}")] = "groups",
    ticket: Annotated[int | None, typer.Option(help="this group in full, token by token")] = None,
    count: Annotated[int, typer.Option(min=1, help="entries to show")] = 20,
    json: _Json = False,
):
    """What is in the buffer; with --ticket N one group: its texts, tokens, log-probs, versions, rewards."""
    if what not in _KINDS:
        raise ConfigError(f"--what {what}: none of {', '.join(_KINDS)}")
    with open_run(directory, url, run) as (client, name):
        if ticket is not None:
            found = next(
                (g for _, g in inspect_state.groups(client, name) if g.ticket.number == ticket),
                None,
            )
            if found is None:
                raise ConfigError(f"--ticket {ticket}: no such group in the buffer")
            tokenizer = tables.tokenizer_of(client, name)
            if json:
                _print_json(tables.group_facts(found))
            else:
                console().print(tables.group_view(found, tokenizer))
        elif json:
            _print_json(tables.facts(client, name, what, count))
        else:
            console().print(tables.entries_table(client, name, what, count))


@app.command()
def export(to: _To, directory: RunIfAny = None, url: _Url = None, run: _Name = None) -> None:
    """Write the committed groups as Parquet, in the format of the trajectory log. They stay in Redis."""
    with open_run(directory, url, run) as (client, name):
        typer.echo(f"{actions.export_groups(client, name, to)} groups in {to}")


@app.command("import")
def import_(
    log: Annotated[
        Path,
        typer.Option("--from", help="a log's directory: an export, or RUN/trajectories"),
    ],
    directory: RunIfAny = None,
    url: _Url = None,
    run: _Name = None,
    from_step: Annotated[int, typer.Option(min=0, help="first step")] = 0,
    to_step: Annotated[int | None, typer.Option(min=1, help="step to stop before")] = None,
) -> None:
    """Add logged groups to the buffer, bit for bit. Those of tickets that are there are passed over."""
    with open_run(directory, url, run) as (client, name):
        added, passed = actions.import_groups(client, name, log, from_step, to_step)
    typer.echo(f"{added} groups imported, {passed} passed over: they were there")


@app.command()
def requeue(
    ids: Annotated[list[str] | None, typer.Argument(help="ids of the quarantine; see peek")] = None,
    directory: Annotated[Path | None, typer.Option("--dir", help="a run's directory")] = None,
    url: _Url = None,
    run: _Name = None,
    everything: Annotated[bool, typer.Option("--all", help="all of the quarantine")] = False,
) -> None:
    """Put refused records back where they came from. What would be refused again stays, with the reason."""
    if bool(ids) == everything:
        raise ConfigError("either ids of the quarantine, or --all")
    with open_run(directory, url, run) as (client, name):
        put_back, stayed = actions.requeue_records(client, name, ids or [])
    for line in stayed:
        typer.echo(f"stays: {escaped(line)}", err=True)
    typer.echo(f"{len(put_back)} records put back, {len(stayed)} stay")
    if stayed:
        raise typer.Exit(1)


@app.command()
def purge(
    directory: RunIfAny = None,
    url: _Url = None,
    run: _Name = None,
    what: Annotated[str, typer.Option(help="quarantine, groups, or all of the run")] = "quarantine",
    yes: _Yes = False,
) -> None:
    """Delete from Redis. Groups that are deleted before they were learnt from are lost."""
    if what not in ("quarantine", "groups", "all"):
        raise ConfigError(f"--what {what}: none of quarantine, groups, all")
    with open_run(directory, url, run) as (client, name):
        found = inspect_state.read_status(client, name)
        if what == "all" and found.workers:
            raise ConfigError(f"--what all: workers are at work for {name}; stop the run first")
        if not yes:
            typer.confirm(f"delete {tables.what_goes(found, what)} of run {name}?", abort=True)
        count = actions.purge_run(client, name, cast(actions.What, what))
    typer.echo(f"{count} {'keys' if what == 'all' else 'entries'} deleted")


def _print_json(value: object) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value)).decode())


def main() -> None:
    accept_any_text()
    try:
        app(prog_name="areal-q buffer")
    except AReaLQError as error:
        said = escaped(" ".join(str(error).split()))
        typer.echo(f"areal-q buffer: error: {said}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
