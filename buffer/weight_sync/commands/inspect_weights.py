"""`areal-q weights` shows operators what a learner or relay publishes.

    RUN                    a run's directory: where it serves, and what its workers say they run
    --fetch, --announce    or any learner's or relay's endpoints

Exit codes: 0; 1 where --verify finds a worker that runs other bytes than were published, or nobody answers;
2 for a setting that cannot be used.
"""

import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from typer import Exit, Option, echo

from areal_q.config import load
from areal_q.errors import ConfigError, os_errors_as
from areal_q.messages import Delta, HeldVersion, Manifest, WorkerStatus
from areal_q.observability.metrics_log import read_metrics
from areal_q.observability.run_end import how_it_ended
from areal_q.system import command
from areal_q.system.command import CurveClient, CurveKeys, RunIfAny
from areal_q.system.run_dir import METRICS_FILE, RUN_ID_FILE
from areal_q.system.socket_dir import sockets_of
from buffer.weight_sync.client import WeightClient
from buffer.weight_sync.sockets import WeightSource

_LEARNER = {"announce": "tcp://127.0.0.1:5551", "fetch": "tcp://127.0.0.1:5552"}
"""Endpoints of a learner that was started by itself."""


def verdicts(workers: list[WorkerStatus], held: list[HeldVersion]) -> list[dict[str, Any]]:
    """Compares what each worker says it runs with what was published; returns a row for each worker.

    `verdict`: `same` bytes; `OTHER` bytes under a published number; `unknown` where that version is no
    longer remembered, or the worker has none yet.
    """
    digests = {(v.version, v.digest) for v in held}
    numbers = {v.version for v in held}
    newest = held[-1].version if held else 0

    def judge(w: WorkerStatus) -> str:
        if not w.digest or w.version not in numbers:
            return "unknown"
        return "same" if (w.version, w.digest) in digests else "OTHER"

    return [
        {
            "worker": w.worker,
            "version": w.version,
            "behind": newest - w.version,
            "digest": w.digest,
            "verdict": judge(w),
        }
        for w in workers
    ]


def workers_of(directory: Path) -> list[WorkerStatus]:
    """Returns the workers' last heartbeats, as the learner's newest record of metrics has them.

    Raises ConfigError where the run has no metrics.
    """
    with os_errors_as(ConfigError, directory):
        records = read_metrics(directory / METRICS_FILE)
    beats = next((r["workers"] for r in reversed(records) if "workers" in r), [])
    return msgspec.convert(beats, list[WorkerStatus])


def table(rows: list[dict[str, Any]]) -> RenderableType:
    """Returns the rows as a table, numbers to the right."""
    if not rows:
        return "(none)"
    shown = Table(box=None, pad_edge=False)
    for name, value in rows[0].items():
        shown.add_column(name, justify="right" if isinstance(value, int | float) else "left")
    for row in rows:
        shown.add_row(*(Text(_text(value)) for value in row.values()))
    return shown


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _listed(v: HeldVersion) -> dict[str, Any]:
    return {
        "version": v.version,
        "digest": v.digest,
        "format": v.format,
        "bytes": v.nbytes,
        "delta_bytes": v.delta_bytes,
        "smaller": f"{v.nbytes / v.delta_bytes:,.0f}×" if v.delta_bytes else None,
        "whole": v.held,
        "age_s": round(time.time() - v.published_s, 1),
    }


def _changed(client: WeightClient, held: list[HeldVersion]) -> list[dict[str, Any]]:
    """Returns a row for each tensor that the newest version changed; none without a held delta."""
    changes = client.changes(held[-2]) if len(held) > 1 else None
    return [
        {"tensor": name, "changed": n, "of": of, "share": f"{n / max(1, of):.4%}"}
        for name, (n, of) in (changes or {}).items()
    ]


def _show(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        echo(msgspec.json.encode(rows))
    else:
        command.console().print(table(rows))


def _follow(client: WeightClient, as_json: bool) -> None:
    """Shows a line for each new version, until Ctrl-C."""
    from areal_q.weights import delta  # needs torch, which listing the versions does not

    seen: set[tuple[str, int]] = set()
    manifest = client.manifest()
    for told, body in client.follow():
        if (told.epoch, told.version) in seen:
            continue
        seen = {(told.epoch, told.version)}
        line: dict[str, Any] = {"version": told.version, "digest": told.digest}
        if isinstance(told, Delta):
            if manifest is None or manifest.epoch != told.epoch:
                manifest = client.manifest()
            line |= {"base": told.base, "delta_bytes": len(body), "share": None}
            if manifest:
                counts = delta.changed(manifest, body).values()
                share = sum(n for n, _ in counts) / max(1, sum(of for _, of in counts))
                line["share"] = f"{share:.4%}"
        _show([line], as_json)


def _client(run: Path | None, source: WeightSource, verify: bool) -> WeightClient:
    """Returns a client of the endpoints that `source` names, else of those at which RUN's learner serves, else
    of a learner's defaults. Raises ConfigError if the run has ended, so that nothing serves there."""
    if run is None:
        if source.fetch is None or verify:
            raise ConfigError("RUN is needed" + (" to verify its workers" if verify else ""))
        return WeightClient(*source.endpoints(_LEARNER), source.load_keys(None))
    settings = load(run / "config.toml").broadcast
    if source.fetch is None and settings.fetch is None and (ended := how_it_ended(run)):
        how = ended[0].partition("\n")[0]
        raise ConfigError(f"{run}: {how}; nobody serves its weights any more")
    sockets, told = sockets_of(run), dict(_LEARNER)
    if sockets.is_dir():
        told = {kind: f"ipc://{sockets / kind}" for kind in told}
    told |= {k: v for k in told if (v := getattr(settings, k))}
    return WeightClient(*source.endpoints(told), source.load_keys(settings.keys))


def _check_run(directory: Path, newest: Manifest | None) -> None:
    """Raises ConfigError if the newest weights are of another run than that of `directory`, whose learner has
    gone while another one serves at the same place. Where either has no id they are not compared."""
    path = directory / RUN_ID_FILE
    own = path.read_text().strip() if path.is_file() else ""
    if newest and newest.run_id and own not in ("", newest.run_id):
        raise ConfigError(
            f"{directory}: its endpoint is that of another run now, {newest.run!r}, id {newest.run_id}"
        )


EXITS = (
    "Exit codes: 0 told; 1 nobody answers, or --verify found a worker that runs other bytes "
    "than were published; 2 something to mend."
)


def main(
    run: RunIfAny = None,
    fetch: Annotated[str | None, Option(help="a learner's or relay's endpoint")] = None,
    announce: Annotated[str | None, Option(help="likewise, for --follow")] = None,
    keys: CurveKeys = None,
    client: CurveClient = "worker",
    tensors: Annotated[
        bool, Option("--tensors", help="what the newest version changed, by tensor")
    ] = False,
    verify: Annotated[
        bool, Option("--verify", help="compare what RUN's workers say they run")
    ] = False,
    follow: Annotated[bool, Option("--follow", help="a line for each new version")] = False,
    as_json: Annotated[bool, Option("--json", help="JSON instead of tables")] = False,
) -> None:
    """Lists the versions that can be fetched; more with the options."""
    with closing(_client(run, WeightSource(announce, fetch, keys, client), verify)) as asked:
        if run is not None:
            _check_run(run, asked.manifest())
        held = asked.held().versions
        if verify and run is not None:
            rows = verdicts(workers_of(run), held)
            _show(rows, as_json)
            raise Exit(int(any(row["verdict"] == "OTHER" for row in rows)))
        if follow and not tensors:
            with suppress(KeyboardInterrupt):
                _follow(asked, as_json)
        else:
            rows = _changed(asked, held) if tensors else [_listed(v) for v in held]
            _show(rows, as_json)
