"""Prometheus metrics of a service: a table of them, and the HTTP server that answers scrapes.

Values come from what each service records anyway:

    learner  every record of metrics.jsonl (areal_q/observability/metrics_log.py)
    worker   every heartbeat (WorkerStatus)
    relay    its health line (buffer/weight_sync/commands/relay.py)

The server listens on loopback unless another host is named, and gives out numbers only. To export another
number, add a line to LEARNER, WORKER or RELAY.
"""

import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from areal_q.errors import ConfigError
from areal_q.observability.metric_table import WORKER_METRICS, describe
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


@dataclass(frozen=True)
class Exported:
    name: str
    """The name without PREFIX. It ends with its unit, or with `_total` for a counter."""
    key: str
    """The key of the record; `lag_*` in it makes one series for each lag, `engine_*` one for each engine."""
    help: str = ""
    """The meaning of a key that the table of metrics lacks."""
    split: str = ""
    """The label that tells the metric's series apart, if the key does not name it."""

    @property
    def meaning(self) -> str:
        """The meaning: `help`, or else the text in docs/metrics.md."""
        found = describe(self.key) or describe(self.key, WORKER_METRICS)
        return self.help or (found.meaning if found else "")

    @property
    def kind(self) -> Literal["gauge", "counter"]:
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def label(self) -> str | None:
        """The label that tells the metric's series apart; None for a single series."""
        found = re.search(r"(\w+)_\*", self.key)
        return self.split or (found[1] if found else None)


LEARNER = (
    Exported("learner_step", "step", "Learner steps done; the newest weight version"),
    Exported("learner_record_timestamp_seconds", "time_s", "Unix time of the newest record"),
    Exported("reward_mean", "reward/mean"),
    Exported("held_out_accuracy_ratio", "eval/accuracy"),
    Exported("reward_uniform_ratio", "reward/uniform_share"),
    Exported("response_tokens_mean", "response/tokens_mean"),
    Exported("response_cut_off_ratio", "response/cut_off_share"),
    Exported(
        "learning_fault_steps",
        "fault/*",
        "For how many steps a fault of learning has lasted; 0 without it",
        split="fault",
    ),
    Exported("lag_mean_versions", "lag/mean"),
    Exported("lag_max_versions", "lag/max"),
    Exported("mismatch_kl_nats", "mismatch/kl_k3"),
    Exported("mismatch_weight_max", "mismatch/weight_max"),
    Exported("mismatch_weight_p99", "mismatch/weight_p99"),
    Exported("mismatch_ess_ratio", "mismatch/ess"),
    Exported("mismatch_kl_by_lag_nats", "mismatch/lag_*/kl_k3"),
    Exported("fidelity_gap_mean_nats", "fidelity/engine_*/gap_mean_nats"),
    Exported("fidelity_gap_max_nats", "fidelity/engine_*/gap_max_nats"),
    Exported("fidelity_bound_nats", "fidelity/engine_*/bound_nats"),
    Exported("routing_disagreement_ratio", "routing/disagreement"),
    Exported("policy_kl_nats", "policy/kl"),
    Exported("policy_ratio_max", "policy/ratio_max"),
    Exported("policy_entropy_nats", "policy/entropy"),
    Exported("policy_clipped_up_ratio", "policy/clip_fraction_up"),
    Exported("policy_clipped_down_ratio", "policy/clip_fraction_down"),
    Exported("policy_masked_ratio", "policy/mask_fraction"),
    Exported("train_loss", "train/loss"),
    Exported("train_grad_norm", "train/grad_norm"),
    Exported("train_learning_rate", "train/lr"),
    Exported("train_skipped_steps_total", "train/skipped_steps"),
    Exported("learner_step_seconds", "learner/step_s"),
    Exported("learner_wait_seconds", "learner/wait_s"),
    Exported("learner_tokens_per_second", "learner/tokens_per_s"),
    Exported("rollout_tokens_per_second", "rollout/tokens_per_s"),
    Exported("workers", "workers", "Workers with a recent heartbeat"),
    Exported(
        "run_ended",
        "run/ended",
        "1 once the last step is done and exported; 0 before",
    ),
    Exported("disk_free_bytes", "disk/free_bytes", "Free bytes on the disk of the run's directory"),
    Exported("disk_size_bytes", "disk/size_bytes", "Size of the disk of the run's directory"),
    Exported("disk_needed_bytes", "disk/needed_bytes", "Bytes that the run will still add to it"),
    Exported("redis_up", "redis/up", "1 while Redis answers the learner; 0 while it does not"),
    Exported("buffer_groups_total", "buffer/groups"),
    Exported("buffer_open_tickets", "buffer/open_tickets"),
    Exported("buffer_dropped_stale_total", "buffer/dropped_stale"),
    Exported("buffer_dropped_uniform_total", "buffer/dropped_uniform"),
    Exported("buffer_dropped_invalid_total", "buffer/dropped_invalid"),
    Exported("buffer_responses_total", "buffer/responses"),
    Exported("buffer_reward_errors_total", "buffer/reward_errors"),
    Exported("buffer_invalid_total", "buffer/invalid/*", split="cause"),
    Exported("buffer_removed_total", "buffer/removed"),
    Exported("buffer_duplicates_total", "buffer/duplicates"),
    Exported("buffer_held_groups", "buffer/held"),
    Exported("buffer_quarantined_total", "buffer/quarantined"),
    Exported("buffer_full", "buffer/full"),
    Exported("buffer_waiting_commits", "buffer/waiting_commits"),
    Exported("redis_used_bytes", "redis/used_bytes"),
    Exported("redis_limit_bytes", "redis/limit_bytes"),
    Exported("weights_bytes", "weights/bytes"),
    Exported("weights_publish_seconds", "weights/publish_s"),
    Exported("weights_delta_bytes_total", "weights/delta_bytes"),
    Exported("weights_fetches_total", "weights/fetches"),
    Exported("weights_refused_total", "weights/refused"),
    Exported("weights_catch_ups_total", "weights/catch_ups"),
    Exported("weights_stalls_total", "weights/stalls"),
    Exported("weights_behind_seconds", "weights/behind_s"),
)
WORKER = (
    Exported("worker_weights_version", "version"),
    Exported("worker_record_timestamp_seconds", "time_s", "Unix time of the newest heartbeat"),
    Exported("worker_active_responses", "active"),
    Exported("worker_slots", "slots"),
    Exported("worker_timeouts_total", "timeouts"),
    Exported("worker_resumed_total", "resumed"),
    Exported("worker_tokens_total", "tokens"),
    Exported("worker_tokens_per_second", "tokens_per_s"),
    Exported("worker_idle_ratio", "idle_share"),
    Exported("worker_busy_seconds_total", "busy_s"),
    Exported("worker_loop_lag_seconds", "loop_lag_s"),
    Exported("worker_loop_lag_max_seconds", "loop_lag_max_s"),
    Exported("worker_waiting_groups", "waiting"),
    Exported("worker_episodes", "episodes"),
    Exported("worker_open_episodes", "open_episodes"),
    Exported("worker_full_seconds_total", "full_s"),
    Exported("worker_groups_total", "groups"),
    Exported("worker_swaps_total", "swaps"),
    Exported("worker_swap_seconds", "swap_s"),
    Exported("worker_behind_seconds", "behind_s"),
    Exported("worker_stalls_total", "stalls"),
)
RELAY = (
    Exported("relay_weights_version", "version", "Version that it serves"),
    Exported("relay_subscribers", "subscribers", "Workers and relays that listen"),
    Exported("relay_received_total", "received", "Versions verified"),
    Exported("relay_behind_seconds", "behind_s", "Newer weights known, and none arrived"),
    Exported("relay_stalls_total", "stalls", "Times that this went on for too long"),
    Exported("relay_received_bytes_total", "received_bytes", "Deltas and payloads from upstream"),
    Exported("relay_sent_bytes_total", "sent_bytes", "Deltas (once each) and chunks"),
    Exported("relay_fetches_total", "fetches", "Snapshots fetched by workers"),
    Exported("relay_catch_ups_total", "catch_ups", "Deltas fetched by workers behind"),
    Exported("relay_refused_total", "refused", "Malformed frames and unknown keys"),
)


class Exporter(Collector):
    """Exports the newest value of each line of `table`, with constant `labels` (run, worker)."""

    def __init__(self, table: tuple[Exported, ...], labels: Mapping[str, str]) -> None:
        self._table = table
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
            names = [*self._labels, line.label] if line.label else list(self._labels)
            family = CounterMetricFamily if line.kind == "counter" else GaugeMetricFamily
            metric = family(PREFIX + line.name, line.meaning, labels=names)
            for split, value in _series(line, values):
                labels = list(self._labels.values())
                metric.add_metric([*labels, split] if line.label else labels, value)
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
    try:
        server, _ = start_http_server(int(port), host or "127.0.0.1", registry)
    except OSError as error:
        raise ConfigError(f"--metrics: {address}: {error.strerror or error}") from error
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


def _series(line: Exported, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields (value of the label, number) for each series that has a number. A line without a label has one
    series, for which the first is empty."""
    if line.label:
        pattern = re.compile(re.escape(line.key).replace(r"\*", r"([^/]+)"))
        found = ((pattern.fullmatch(key), value) for key, value in values.items())
        yield from ((m[1], float(v)) for m, v in found if m and v is not None)
        return
    value = values.get(line.key)
    if isinstance(value, list):
        yield "", float(len(value))
    elif value is not None:
        yield "", float(value)
