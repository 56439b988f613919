"""Prometheus metrics of a service: a documented table, filled from what the service records anyway.

    learner  every record of metrics.jsonl (areal_q/observability/metrics_log.py)
    worker   every heartbeat (WorkerStatus)
    relay    its health line (buffer/weight_sync/commands/relay.py)

Served over HTTP on loopback unless another host is named; nothing but numbers leaves. To export one more
number: one line in LEARNER or WORKER.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from areal_q.errors import ConfigError

PREFIX = "areal_q_"


@dataclass(frozen=True)
class Exported:
    name: str
    """Without PREFIX; ends with its unit, a counter's with `_total`"""
    key: str
    """The key of the record; `lag_*` in it makes one series for each lag, `engine_*` one for each engine."""
    help: str
    split: str = ""
    """What its series are split by, where the key does not name it."""

    @property
    def kind(self) -> Literal["gauge", "counter"]:
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def label(self) -> str | None:
        """What its series are split by."""
        found = re.search(r"(\w+)_\*", self.key)
        return self.split or (found[1] if found else None)


LEARNER = (
    Exported("learner_step", "step", "Learner steps done; the newest weight version"),
    Exported("learner_record_timestamp_seconds", "time_s", "Unix time of the newest record"),
    Exported("reward_mean", "reward/mean", "Mean reward of the step's responses"),
    Exported("held_out_accuracy_ratio", "eval/accuracy", "Accuracy of the newest evaluation"),
    Exported("response_tokens_mean", "response/tokens_mean", "Mean length of a response"),
    Exported("lag_mean_versions", "lag/mean", "Mean staleness of the step's tokens"),
    Exported("lag_max_versions", "lag/max", "Largest staleness of the step's tokens"),
    Exported("mismatch_kl_nats", "mismatch/kl", "KL(behaviour || proximal), a token"),
    Exported("mismatch_weight_max", "mismatch/weight_max", "Largest w before truncation"),
    Exported("mismatch_weight_p99", "mismatch/weight_p99", "99th percentile of w, raw"),
    Exported("mismatch_ess_ratio", "mismatch/ess", "Effective sample size of w, share of tokens"),
    Exported("mismatch_kl_by_lag_nats", "mismatch/lag_*/kl", "mismatch_kl_nats by staleness"),
    Exported(
        "fidelity_gap_mean_nats", "fidelity/engine_*/gap_mean_nats", "Engine - rescored, a token"
    ),
    Exported("fidelity_gap_max_nats", "fidelity/engine_*/gap_max_nats", "The same, largest"),
    Exported(
        "fidelity_bound_nats", "fidelity/bound_nats", "Mean gap that is too much, by the settings"
    ),
    Exported(
        "routing_disagreement_ratio",
        "routing/disagreement",
        "Routes that the learner would not take",
    ),
    Exported("policy_kl_nats", "policy/kl", "KL(proximal || policy), a token"),
    Exported("policy_ratio_max", "policy/ratio_max", "Largest policy ratio R"),
    Exported("policy_entropy_nats", "policy/entropy", "Entropy of the policy, a token"),
    Exported("policy_clipped_up_ratio", "policy/clip_fraction_up", "Tokens clipped above"),
    Exported("policy_clipped_down_ratio", "policy/clip_fraction_down", "Tokens clipped below"),
    Exported("policy_masked_ratio", "policy/mask_fraction", "Tokens that the objective masked"),
    Exported("train_loss", "train/loss", "Loss, mean over the optimizer steps"),
    Exported("train_grad_norm", "train/grad_norm", "Gradient norm before clipping"),
    Exported("train_learning_rate", "train/lr", "Learning rate"),
    Exported("train_skipped_steps_total", "train/skipped_steps", "Steps with gradients not finite"),
    Exported("learner_step_seconds", "learner/step_s", "Wall time of the newest step"),
    Exported("learner_wait_seconds", "learner/wait_s", "Of it, waiting for groups"),
    Exported("learner_tokens_per_second", "learner/tokens_per_s", "Response tokens learnt from"),
    Exported("rollout_tokens_per_second", "rollout/tokens_per_s", "Drawn by all live workers"),
    Exported("workers", "workers", "Workers with a recent heartbeat"),
    Exported("buffer_open_tickets", "buffer/open_tickets", "Admitted and not yet learnt from"),
    Exported("buffer_dropped_stale_total", "buffer/dropped_stale", "Groups too old to be used"),
    Exported("buffer_dropped_uniform_total", "buffer/dropped_uniform", "Groups of equal rewards"),
    Exported("buffer_dropped_invalid_total", "buffer/dropped_invalid", "Groups of too few rewards"),
    Exported("buffer_responses_total", "buffer/responses", "Responses read"),
    Exported("buffer_reward_errors_total", "buffer/reward_errors", "Rewards that failed"),
    Exported(
        "buffer_invalid_total", "buffer/invalid/*", "Responses left out, by cause", split="cause"
    ),
    Exported("buffer_removed_total", "buffer/removed", "Groups over a bound of buffer.removal"),
    Exported("buffer_duplicates_total", "buffer/duplicates", "Groups whose ticket had counted"),
    Exported("buffer_held_groups", "buffer/held", "Groups that a step can choose from"),
    Exported("buffer_quarantined_total", "buffer/quarantined", "Records refused"),
    Exported("buffer_full", "buffer/full", "1 while Redis is at its memory limit"),
    Exported("buffer_waiting_commits", "buffer/waiting_commits", "Groups that wait for room"),
    Exported("redis_used_bytes", "redis/used_bytes", "Memory that Redis uses"),
    Exported("redis_limit_bytes", "redis/limit_bytes", "Its maxmemory; 0: none"),
    Exported("weights_bytes", "weights/bytes", "Size of a version"),
    Exported("weights_publish_seconds", "weights/publish_s", "Learner time for a version"),
    Exported("weights_delta_bytes_total", "weights/delta_bytes", "Deltas sent"),
    Exported("weights_fetches_total", "weights/fetches", "Snapshots fetched"),
    Exported("weights_refused_total", "weights/refused", "Malformed requests on the weight ports"),
    Exported("weights_catch_ups_total", "weights/catch_ups", "Deltas fetched by workers behind"),
    Exported("weights_stalls_total", "weights/stalls", "Deltas that took too long to make"),
    Exported("weights_behind_seconds", "weights/behind_s", "Longest a live worker is behind"),
)
WORKER = (
    Exported("worker_weights_version", "version", "Version that the engine runs"),
    Exported("worker_record_timestamp_seconds", "time_s", "Unix time of the newest heartbeat"),
    Exported("worker_active_responses", "active", "Responses being generated"),
    Exported("worker_slots", "slots", "Responses that the engine can generate at once"),
    Exported("worker_timeouts_total", "timeouts", "Responses cut by their time limit"),
    Exported("worker_resumed_total", "resumed", "Responses continued from another worker's"),
    Exported("worker_tokens_total", "tokens", "Response tokens drawn"),
    Exported("worker_tokens_per_second", "tokens_per_s", "Over the last heartbeat interval"),
    Exported("worker_idle_ratio", "idle_share", "Share of the interval without work"),
    Exported("worker_waiting_groups", "waiting", "Finished groups that wait for room in Redis"),
    Exported("worker_full_seconds_total", "full_s", "Time that commits waited for room"),
    Exported("worker_groups_total", "groups", "Groups committed"),
    Exported("worker_swaps_total", "swaps", "Weight versions swapped in"),
    Exported("worker_swap_seconds", "swap_s", "Mean pause of generation for a swap"),
    Exported("worker_behind_seconds", "behind_s", "Newer weights known, and none arrived"),
    Exported("worker_stalls_total", "stalls", "Times that this went on for too long"),
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
    """The newest value of each line of `table`, under constant `labels` (run, worker)."""

    def __init__(self, table: tuple[Exported, ...], labels: Mapping[str, str]) -> None:
        self._table = table
        self._labels = dict(labels)
        self._values: dict[str, Any] = {}

    def update(self, record: Mapping[str, Any]) -> None:
        """Keeps what the record says; what it does not name stays as it was. Safe from any thread."""
        self._values = {**self._values, **record}

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        values = self._values
        for line in self._table:
            names = [*self._labels, line.label] if line.label else list(self._labels)
            family = CounterMetricFamily if line.kind == "counter" else GaugeMetricFamily
            metric = family(PREFIX + line.name, line.help, labels=names)
            for split, value in _series(line, values):
                labels = list(self._labels.values())
                metric.add_metric([*labels, split] if line.label else labels, value)
            yield metric


def serve_metrics(address: str, exporter: Exporter) -> int:
    """Serves `exporter` and this process's memory, time and open files at [HOST:]PORT; returns the port.

    HOST is 127.0.0.1 unless given, port 0 is any free one. The server's thread ends with the process.
    Raises ConfigError for what is no address, and where it cannot be bound.
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
    return server.server_port


def _series(line: Exported, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(label's value, value) of each series that has a number; the first is empty unless the line is split."""
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
