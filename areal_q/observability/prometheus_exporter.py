"""Prometheus metrics of a service, and the HTTP server that answers scrapes.

Values come from what each service records anyway:

    learner  METRICS         every record of metrics.jsonl (areal_q/observability/metrics_log.py)
    worker   WORKER_METRICS  every heartbeat (WorkerStatus)
    relay    RELAY_METRICS   its health line (buffer/weight_sync/commands/relay.py)

Exported is what has a name for it in these tables. The server listens on loopback unless another host is named,
and gives out numbers only.
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from areal_q.errors import ConfigError, os_errors_as
from areal_q.observability.metric_table import Metric
from areal_q.system.watchdog import Progress

PREFIX = "areal_q_"
PROGRESS_AGE, PROGRESS_LIMIT = "progress_age_seconds", "progress_limit_seconds"
CRASHES = "service_crashes"
CRASHES_VARIABLE = "AREAL_Q_CRASHES"
"""Environment variable by which a supervisor tells a service how often it crashed in the half hour before."""
HEALTH_AGENT = "areal-q-health"
"""The User-Agent of a health check, which does not store what it reads and so is no scrape."""

MOST_SCRAPES, SCRAPE_S = 16, 10.0
"""The most clients that are answered at once, each by a thread, and the seconds that one may keep it waiting"""


class Exporter(Collector):
    """Exports the newest value of each metric of `table` that has a name for it, with constant `labels` (run,
    worker)."""

    def __init__(self, table: tuple[Metric, ...], labels: Mapping[str, str]) -> None:
        self._table = [metric for metric in table if metric.exported]
        self._labels = dict(labels)
        self._values: dict[str, Any] = {}
        self._changes = threading.Condition()
        self._read_s = 0.0
        self.progress: Progress | None = None
        """Its age and limit are exported too, unless it is None; see areal_q/system/watchdog.py."""

    def update(self, record: Mapping[str, Any]) -> None:
        """Takes over the values of `record`; those that it lacks stay as they were. Safe from any thread."""
        with self._changes:
            self._values = {**self._values, **record}

    def was_read(self, began_s: float) -> None:
        """Records that a scrape which began at `began_s`, by time.monotonic(), was answered in full."""
        with self._changes:
            self._read_s = max(self._read_s, began_s)
            self._changes.notify_all()

    def wait_until_read(self, stop: threading.Event, timeout_s: float = 30.0) -> None:
        """Waits until the present values were scraped, so that the last values before a process ends are not
        lost. Returns at once if there never was a scrape, at `stop`, and after `timeout_s` seconds."""
        now_s = time.monotonic()
        with self._changes:
            while 0 < self._read_s < now_s and not stop.is_set():
                if time.monotonic() - now_s > timeout_s:
                    return
                self._changes.wait(0.1)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        values = self._values
        for line in self._table:
            names = [*self._labels, *filter(None, [line.label])]
            counter = line.exported.endswith("_total")
            family = CounterMetricFamily if counter else GaugeMetricFamily
            metric = family(PREFIX + line.exported, line.meaning, labels=names)
            for key in values if line.label else [line.key]:
                found, value = line.match(key), values.get(key)
                if found and value is not None:
                    number = float(len(value) if isinstance(value, list) else value)
                    metric.add_metric([*self._labels.values(), *found.groups()], number)
            yield metric
        if crashes := os.environ.get(CRASHES_VARIABLE):
            yield self._gauge(CRASHES, "Crashes in the half hour before this start", float(crashes))
        if self.progress:
            limit_s = self.progress.limit_s
            yield self._gauge(PROGRESS_AGE, "Since the work last got on", self.progress.age_s)
            yield self._gauge(PROGRESS_LIMIT, "Age at which the service counts as stuck", limit_s)

    def _gauge(self, name: str, help: str, value: float) -> GaugeMetricFamily:
        metric = GaugeMetricFamily(PREFIX + name, help, labels=list(self._labels))
        metric.add_metric(list(self._labels.values()), value)
        return metric


def serve_metrics(address: str, exporter: Exporter) -> int:
    """Serves `exporter` and this process's memory, CPU time and open files at [HOST:]PORT; returns the port.

    HOST is 127.0.0.1 unless given; port 0 takes any free one. The server's thread ends with the process. More
    than MOST_SCRAPES clients at once are hung up on, and one that says nothing for SCRAPE_S.
    Raises ConfigError if `address` is no such address or cannot be bound.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--metrics: {address!r} is not [HOST:]PORT")
    registry = CollectorRegistry()
    registry.register(exporter)
    ProcessCollector(registry=registry)
    with os_errors_as(ConfigError, f"--metrics: {address}"):
        server, _ = start_http_server(int(port), host or "127.0.0.1", registry)
    server.socket.listen(
        8 * MOST_SCRAPES
    )  # with socketserver's 5, a burst makes a scrape wait seconds
    server.RequestHandlerClass = _noting(server.RequestHandlerClass, exporter)
    room = threading.Semaphore(MOST_SCRAPES)
    server.verify_request = lambda request, client_address: room.acquire(blocking=False)
    finish = server.finish_request

    def finish_request(request: Any, client_address: Any) -> None:
        try:
            with suppress(OSError):  # it left, or said nothing in time
                finish(request, client_address)
        finally:
            room.release()

    server.finish_request = finish_request
    return server.server_port


def _noting(handler: Any, exporter: Exporter) -> type[WSGIRequestHandler]:
    """Returns a subclass of `handler` that reports each scrape to `exporter`, and waits for no client longer
    than SCRAPE_S."""

    class Noting(handler):
        timeout = SCRAPE_S

        def handle(self) -> None:
            began_s = time.monotonic()
            super().handle()
            headers = getattr(self, "headers", None)  # there are none if what came is no request
            if headers is not None and headers.get("User-Agent") != HEALTH_AGENT:
                exporter.was_read(began_s)

    return Noting
