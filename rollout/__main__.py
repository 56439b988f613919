"""`python -m rollout`: a rollout worker as a process of its own. It needs the address of Redis and a run's
name.

On SIGTERM or SIGINT it stops generating and gives its tickets back to the queue, with the tokens drawn for
them; the exit code is then 143 or 130 (areal_q/system/stop_request.py). It is 0 when the run is finished.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from areal_q.config import load
from areal_q.errors import ConfigError
from areal_q.messages import LONGEST_NAME
from areal_q.observability import service_log
from areal_q.observability.metric_table import WORKER_METRICS
from areal_q.observability.prometheus_exporter import Exporter, serve_metrics
from areal_q.system.command import (
    CurveClient,
    CurveKeys,
    MetricsPort,
    RedisUrl,
    WatchdogSeconds,
    run_command,
)
from areal_q.system.ports import allow_open_files, check_free
from areal_q.system.processes import use_huge_pages
from areal_q.system.stop_request import Repeats, StopRequest
from areal_q.system.watchdog import Progress, watched

logger = logging.getLogger("rollout")
FINISHED_WAIT_S = 60.0
"""Seconds that a worker waits for its learner to resume a finished run, where both are started together"""

_EXITS = (
    "Exit codes: 0 the run is finished; 143 ended by SIGTERM, 130 by SIGINT, its tickets handed back; 2 a "
    "setting that cannot be used, which one line names; 75 ended by its own watchdog; 1 a crash."
)


_RunName = Annotated[str, typer.Option(help="name of the run to work for")]
_Id = Annotated[str, typer.Option(help="unique name; default HOST-PID")]
_RELAY = "a relay's, instead of the learner's"
_Announce = Annotated[str | None, typer.Option(help=_RELAY, envvar="AREAL_Q_ANNOUNCE")]
_Fetch = Annotated[str | None, typer.Option(help=_RELAY, envvar="AREAL_Q_FETCH")]
_ServeAt = Annotated[
    str,
    typer.Option(
        "--serve",
        metavar="[HOST:]PORT",
        help="serve OpenAI's API; on loopback",
        envvar="AREAL_Q_SERVE",
    ),
]
_TOKEN = "file with the bearer token it asks for"
_ServeToken = Annotated[str | None, typer.Option(help=_TOKEN, envvar="AREAL_Q_SERVE_TOKEN_FILE")]
_CONFIG = "a TOML file: what it asks for and cannot be done is refused at once"
_Config = Annotated[Path | None, typer.Option(help=_CONFIG)]
_FINISHED = "how long to wait, at the start, for a learner that goes on with a finished run; or inf"
_FinishedWait = Annotated[
    float, typer.Option(metavar="SECONDS", help=_FINISHED, envvar="AREAL_Q_FINISHED_WAIT")
]


def main(
    redis: RedisUrl,
    run: _RunName,
    id: _Id = "",
    metrics: MetricsPort = "",
    announce: _Announce = None,
    fetch: _Fetch = None,
    keys: CurveKeys = None,
    serve_at: _ServeAt = "",
    serve_token: _ServeToken = None,
    config: _Config = None,
    client: CurveClient = "worker",
    finished_wait: _FinishedWait = FINISHED_WAIT_S,
    watchdog: WatchdogSeconds = 0.0,
) -> None:
    """Generates for a run until it is finished, or until told to stop."""
    service_log.set_up("rollout")
    allow_open_files()
    use_huge_pages()
    name = _checked(id or f"{socket.gethostname()}-{os.getpid()}")
    exporter = Exporter(WORKER_METRICS, {"run": run, "worker": name})
    if metrics:
        logger.info("metrics on port %d", serve_metrics(metrics, exporter))
    import uvloop

    from buffer.weight_sync import WeightSource
    from rollout.build import EndpointAddress, build_parts, serve
    from rollout.openai_server.access import bound_to

    source = WeightSource(announce, fetch, keys, client)
    address = EndpointAddress(serve_at, serve_token)
    if address.at:
        check_free("rollout.serve (--serve)", *bound_to(*address)[:2])
    if config:
        # The learner may be at its warm start for hours; what is wrong with the settings is said before that.
        build_parts(load(config), run, address)
    exporter.progress = watched(watchdog)
    observe = _observer(exporter, exporter.progress)
    work = serve(redis, run, name, source, observe, address, finished_wait)
    raise typer.Exit(uvloop.run(_until_signal(work)))


def _checked(name: str) -> str:
    """Returns a worker's `name`. Raises ConfigError for one that no table has room for."""
    if len(name) > LONGEST_NAME or not name.isprintable():
        raise ConfigError(f"--id {name[:LONGEST_NAME]!r}: not {LONGEST_NAME} printable characters")
    return name


def _observer(exporter: Exporter, progress: Progress) -> Callable[[dict[str, Any]], None]:
    """Returns a function to call with the status of each heartbeat. The watchdog counts a heartbeat as progress
    if tokens were drawn since the last one, or if none were asked for."""
    drawn = -1

    def observe(status: dict[str, Any]) -> None:
        nonlocal drawn
        exporter.update(status)
        if status["tokens"] != drawn or not status["active"]:
            progress.step()
        drawn = status["tokens"]

    return observe


async def _until_signal(work: Coroutine[Any, Any, None]) -> int:
    """Runs `work`, which SIGTERM and SIGINT cancel, so that it can clean up: a second one while it does, SAME_S
    after the first, breaks that off. Returns the exit code."""
    task, stop, repeats = asyncio.ensure_future(work), StopRequest(), Repeats()

    def end(number: int) -> None:
        stop.receive(number)
        if repeats.is_new():
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in StopRequest.SIGNALS:
        loop.add_signal_handler(number, end, number)
    try:
        await task
    except asyncio.CancelledError:
        logger.info("stopped")
        return stop.exit_code
    return 0


if __name__ == "__main__":
    run_command("rollout", main, _EXITS, who="rollout")
