"""Prometheus metrics over real HTTP, and the log's two formats."""

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from urllib.request import urlopen

import pytest
from helpers.commands import stretched
from prometheus_client.parser import text_string_to_metric_families

from areal_q.errors import ConfigError
from areal_q.observability import prometheus_exporter
from areal_q.observability.health import complaint
from areal_q.observability.metric_table import METRICS, RELAY_METRICS, WORKER_METRICS
from areal_q.observability.prometheus_exporter import (
    CRASHES,
    CRASHES_VARIABLE,
    MOST_SCRAPES,
    PREFIX,
    Exporter,
    serve_metrics,
)
from areal_q.observability.service_log import LOG_FORMAT, LOG_LEVEL, JsonFormatter, set_up


def scraped(port: int) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    with urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        families = text_string_to_metric_families(page.read().decode())
        out: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for sample in (sample for family in families for sample in family.samples):
            out.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return out


def test_what_a_step_recorded_is_what_prometheus_reads():
    exporter = Exporter(METRICS, {"run": "demo"})
    port = serve_metrics("0", exporter)
    assert PREFIX + "reward_mean" not in scraped(port)
    exporter.update({"step": 3, "reward/mean": 0.25, "workers": [{}, {}]})
    exporter.update({"step": 4, "mismatch/lag_0/kl_k3": 0.5, "mismatch/lag_12/kl_k3": 1.5})
    found = scraped(port)
    mine = (("run", "demo"),)
    assert found[PREFIX + "learner_step"] == {mine: 4.0}
    assert found[PREFIX + "reward_mean"] == {mine: 0.25}
    assert found[PREFIX + "workers"] == {mine: 2.0}
    assert found[PREFIX + "mismatch_kl_by_lag_nats"] == {
        (("lag", "0"), *mine): 0.5,
        (("lag", "12"), *mine): 1.5,
    }
    if sys.platform == "linux":
        assert found["process_open_fds"][()] > 0


def test_crashes_that_a_supervisor_counted_are_exported(monkeypatch: pytest.MonkeyPatch):
    port = serve_metrics("0", Exporter(METRICS, {"run": "demo"}))
    assert PREFIX + CRASHES not in scraped(port)
    monkeypatch.setenv(CRASHES_VARIABLE, "0")
    assert scraped(port)[PREFIX + CRASHES] == {(("run", "demo"),): 0.0}
    monkeypatch.setenv(CRASHES_VARIABLE, "3")
    assert scraped(port)[PREFIX + CRASHES] == {(("run", "demo"),): 3.0}


def test_a_number_that_was_not_finite_is_no_sample():
    exporter = Exporter(METRICS, {"run": "demo"})
    exporter.update({"train/loss": None, "train/grad_norm": 2.0})
    values = {f.name: [s.value for s in f.samples] for f in exporter.collect()}
    assert values[PREFIX + "train_loss"] == [] and values[PREFIX + "train_grad_norm"] == [2.0]


def test_metrics_are_on_loopback_only():
    port = serve_metrics("0", Exporter(WORKER_METRICS, {"run": "demo", "worker": "w"}))
    elsewhere = socket.gethostbyname(socket.gethostname())
    if elsewhere.startswith("127."):
        pytest.skip("this host knows no address of its own but loopback")
    with pytest.raises(OSError):
        socket.create_connection((elsewhere, port), timeout=stretched(2))


@pytest.mark.parametrize("address", ["", "here", "127.0.0.1:", "127.0.0.1:x", "70000"])
def test_what_is_no_address_is_named(address):
    with pytest.raises(ConfigError, match="--metrics"):
        serve_metrics(address, Exporter(WORKER_METRICS, {}))


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--metrics: {port}: Address already in use"):
            serve_metrics(str(port), Exporter(WORKER_METRICS, {}))


def test_names_are_those_of_prometheus():
    names = [m.exported for m in (*METRICS, *WORKER_METRICS, *RELAY_METRICS) if m.exported]
    assert all(name.replace("_", "").isalnum() and name == name.lower() for name in names)
    assert len(set(names)) == len(names) > 80


def test_json_logs_are_one_object_a_line_whatever_the_message():
    formatter = JsonFormatter("learner")
    try:
        raise ValueError("no\nway")
    except ValueError:
        record = logging.LogRecord("x.y", 30, "f", 1, "a %s\n", ("\u2028",), sys.exc_info())
    line = formatter.format(record)
    assert "\n" not in line and "\u2028" not in line
    said = json.loads(line)
    assert said["message"] == "a \u2028\n" and said["level"] == "warning"
    assert said["service"] == "learner" and said["time"].endswith("Z")
    assert "ValueError: no\nway" in said["trace"]


@pytest.mark.parametrize(("variable", "known"), [(LOG_FORMAT, "json"), (LOG_LEVEL, "warning")])
def test_an_unknown_log_format_or_level_is_named(monkeypatch, variable, known):
    monkeypatch.setenv(variable, "xml")
    with pytest.raises(ConfigError, match=f"{variable}: 'xml' .*{known}"):
        set_up("learner")


@pytest.mark.parametrize(("level", "written"), [("", 2), ("debug", 3), ("error", 1)])
def test_a_service_writes_from_the_level_that_is_asked_for(level, written):
    code = (
        "import logging; from areal_q.observability.service_log import set_up; set_up('relay'); "
        "[getattr(logging, name)('said') for name in ('debug', 'info', 'error')]"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {LOG_LEVEL: level},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stderr.count("said") == written


def test_the_last_values_are_read_before_a_service_ends():
    exporter, stop = Exporter(METRICS, {"run": "demo"}), threading.Event()
    exporter.wait_until_read(stop)  # nobody ever read: nothing to wait for
    port = serve_metrics("0", exporter)
    scraped(port)
    while not exporter._read_s:  # the reader has its answer before the server notes it
        time.sleep(0.01)
    exporter.update({"run/ended": 1.0})
    ends = threading.Thread(target=exporter.wait_until_read, args=[stop, 600.0])
    ends.start()
    assert complaint(port, now_s=0.0) is None  # a health check keeps nothing
    ends.join(0.3)
    assert ends.is_alive()
    assert scraped(port)[PREFIX + "run_ended"] == {(("run", "demo"),): 1.0}
    ends.join()


def test_a_service_told_to_go_waits_for_no_reader():
    exporter, stop = Exporter(METRICS, {"run": "demo"}), threading.Event()
    scraped(serve_metrics("0", exporter))
    stop.set()
    exporter.wait_until_read(stop, timeout_s=600.0)


@pytest.mark.timeout(60)
def test_clients_that_say_nothing_leave_room_for_a_scrape(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """More of them at once than are answered; none of them, nor one that leaves, is worth a traceback."""
    monkeypatch.setattr(prometheus_exporter, "SCRAPE_S", 0.2)
    threads = threading.active_count()
    port = serve_metrics("0", Exporter(METRICS, {"run": "demo"}))
    with ExitStack() as stack:
        for said in [b"", b"GET /metrics HTTP/1.1\r\nX: ", b"\r\n"] * 2 * MOST_SCRAPES:
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            with suppress(ConnectionError):
                peer.sendall(said)
            # One that has given up its place may not have ended yet.
            assert threading.active_count() <= threads + 1 + 2 * MOST_SCRAPES
        while True:
            with suppress(OSError):
                assert scraped(port)
                break
            time.sleep(0.01)
    while threading.active_count() > threads + 1:
        time.sleep(0.01)
    assert "Traceback" not in capfd.readouterr().err
