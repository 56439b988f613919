"""`areal-q relay` follows a learner or another relay and serves the workers behind it.

    learner ──deltas, snapshots──▶ WeightSubscriber ──versions──▶ WeightServer ──▶ workers and further relays

One relay to a host or rack: the learner sends each version once to it, however many workers stand behind.
"""

import logging
from contextlib import closing
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from areal_q.config import BroadcastConfig, load
from areal_q.errors import WeightVersionError
from areal_q.observability import service_log
from areal_q.observability.metric_table import RELAY_METRICS
from areal_q.observability.prometheus_exporter import Exporter, serve_metrics
from areal_q.system.command import CurveKeys, MetricsPort, run_command
from areal_q.system.ports import allow_open_files
from areal_q.system.stop_request import StopRequest
from areal_q.weights.version import WeightVersion
from buffer.weight_sync.server import WeightServer
from buffer.weight_sync.sockets import Endpoints, WeightSource
from buffer.weight_sync.subscriber import WeightSubscriber

logger = logging.getLogger("relay")


class Relay:
    """Serves downstream what it verified from upstream, bit for bit, under the same epoch and numbers.

    Upstream it is a worker like any other, downstream a learner like any other. It holds `hold` versions and
    nothing on disk. docs/weights.md says what else holds (shown by tests/weight_sync/test_relay.py).
    """

    def __init__(self, upstream: WeightSource, listen: Endpoints, config: BroadcastConfig) -> None:
        self._server = WeightServer(*listen, config)
        self.endpoints = self._server.endpoints
        self._newest: WeightVersion | None = None
        assert upstream.announce and upstream.fetch
        self._subscriber = WeightSubscriber(
            upstream.announce,
            upstream.fetch,
            run=None,
            config=config,
            keys=upstream.load_keys(config.keys),
            on_version=self._pass_on,
        )

    def _pass_on(self, version: WeightVersion, delta: tuple[str, bytes] | None) -> None:
        self._newest = version
        self._server.publish(version, delta)

    def status(self) -> dict[str, float]:
        """Returns the relay's numbers, by the names in metric_table.RELAY_METRICS. Raises WeightVersionError if
        it follows or serves no more, so that nothing would ever reach the workers behind it."""
        for end, what in ((self._subscriber, "follows"), (self._server, "serves")):
            if not end.running:
                raise WeightVersionError(f"its thread that {what} has ended; start it again")
        sent, got = self._server.stats, self._subscriber.stats
        return {
            "version": self._newest.manifest.version if self._newest else -1,
            "subscribers": sent.subscribers,
            "received": got.received,
            "behind_s": self._subscriber.behind_s,
            "stalls": got.stalls + sent.stalls,
            "received_bytes": got.delta_bytes + got.fetch.fetched_bytes,
            "sent_bytes": sent.delta_bytes + sent.chunk_bytes,
            "fetches": sent.fetches,
            "catch_ups": sent.catch_ups,
            "refused": sent.refused + sent.strangers + got.all_refused,
        }

    def close(self) -> None:
        """Stops following, then serving."""
        self._subscriber.close()
        self._server.close()


UPSTREAM = "the learner's, or an upper relay's"


def main(
    from_announce: Annotated[str, Option(help=UPSTREAM, envvar="AREAL_Q_ANNOUNCE")],
    from_fetch: Annotated[str, Option(help=UPSTREAM, envvar="AREAL_Q_FETCH")],
    overrides: Annotated[
        list[str] | None, Argument(metavar="a.b=c", help="settings, such as broadcast.hold=2")
    ] = None,
    announce: Annotated[str, Option(help="for the workers")] = "tcp://127.0.0.1:5561",
    fetch: Annotated[str, Option(help="for the workers")] = "tcp://127.0.0.1:5562",
    config: Annotated[Path | None, Option(help="a TOML file; [broadcast] counts")] = None,
    keys: CurveKeys = None,
    client: Annotated[str, Option(help="whose key in it, towards the learner")] = "worker",
    metrics: MetricsPort = "",
    every_s: Annotated[float, Option(help="seconds between two lines of health")] = 10.0,
) -> None:
    """Relays weights until it is told to stop (SIGTERM: exit code 143, SIGINT: 130). One that can no longer
    follow or serve ends by itself (1)."""
    service_log.set_up("relay")
    allow_open_files()
    stop = StopRequest()
    stop.listen()
    named = [*(overrides or []), *([f'broadcast.keys="{keys}"'] if keys else [])]
    settings = load(config, named).broadcast
    exporter = Exporter(RELAY_METRICS, {"relay": announce})
    if metrics:
        logger.info("metrics on port %d", serve_metrics(metrics, exporter))
    upstream = WeightSource(from_announce, from_fetch, keys, client)
    with closing(Relay(upstream, Endpoints(announce, fetch), settings)) as relay:
        logger.info("relaying %s and %s at %s and %s", from_announce, from_fetch, *relay.endpoints)
        while not stop.wait(every_s):
            status = relay.status()
            exporter.update(status)
            logger.info(" ".join(f"{key}={value:g}" for key, value in status.items()))
    raise Exit(stop.exit_code)


if __name__ == "__main__":
    run_command("relay", main, who="relay")
