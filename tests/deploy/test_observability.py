"""docker/prometheus and docker/grafana: nothing asks for a metric that no service exports."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.paths import DOCKER
from prometheus_client import CollectorRegistry, ProcessCollector

from areal_q.observability.health import MAX_AGE_S, complaint
from areal_q.observability.metric_table import METRICS, WORKER_METRICS
from areal_q.observability.prometheus_exporter import (
    CRASHES,
    PREFIX,
    PROGRESS_AGE,
    PROGRESS_LIMIT,
    Exporter,
    serve_metrics,
)

DASHBOARD = json.loads((DOCKER / "grafana" / "dashboards" / "areal-q.json").read_text())
PROMETHEUS = DOCKER / "prometheus"
ALERTS = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())
RULES = {rule["alert"]: rule for group in ALERTS["groups"] for rule in group["rules"]}
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
NAMES = {m.exported for m in (*METRICS, *WORKER_METRICS) if m.exported}
EXPORTED = {PREFIX + name for name in NAMES}
EXPORTED |= {PREFIX + name for name in (CRASHES, PROGRESS_AGE, PROGRESS_LIMIT)} | {
    sample.name
    for family in ProcessCollector(registry=CollectorRegistry()).collect()
    for sample in family.samples
}


def asked(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:areal_q|process)_\w+", expression))


def test_every_panel_asks_for_metrics_that_are_exported():
    for panel in PANELS:
        for target in panel["targets"]:
            names = asked(target["expr"])
            assert names and names <= EXPORTED, panel["title"]
    for variable in DASHBOARD["templating"]["list"]:
        assert asked(variable["definition"]) <= EXPORTED


def test_every_alert_asks_for_metrics_that_are_exported():
    (group,) = ALERTS["groups"]
    for rule in group["rules"]:
        names = asked(rule["expr"])
        assert names <= EXPORTED and (names or "up{" in rule["expr"]), rule["alert"]


def test_every_exported_number_is_on_the_dashboard_or_alerted():
    """Those that are not are named here, so that a new one is placed by choice."""
    (group,) = ALERTS["groups"]
    shown = {n for p in PANELS for t in p["targets"] for n in asked(t["expr"])}
    shown |= {n for rule in group["rules"] for n in asked(rule["expr"])}
    left_out = {name for name in NAMES if PREFIX + name not in shown}
    assert left_out == {
        "buffer_open_tickets",
        "held_out_loss_nats",  # of areal-q sft, which serves no metrics
        "train_learning_rate",
        "train_loss",
        "weights_bytes",
        "worker_busy_seconds_total",
        "worker_groups_total",
        "worker_resumed_total",
        "worker_swaps_total",
        "worker_tokens_total",
    }


def test_panels_do_not_overlap_and_have_ids_of_their_own():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells


def test_the_dashboard_reads_the_provisioned_source():
    provisioned = DOCKER / "grafana" / "provisioning"
    source = yaml.safe_load((provisioned / "datasources" / "prometheus.yaml").read_text())
    (uid,) = [found["uid"] for found in source["datasources"]]
    used = {p["datasource"]["uid"] for p in PANELS}
    used |= {t["datasource"]["uid"] for p in PANELS for t in p["targets"]}
    assert used == {uid}


def promtool(*arguments: str, directory: Path) -> None:
    """Runs promtool in `directory`; skips where there is none."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = shutil.which("promtool", path=path)
    if not command:
        pytest.skip("no promtool on PATH: make promtool")
    done = subprocess.run([command, *arguments], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_configuration(tmp_path: Path):
    for path in PROMETHEUS.iterdir():
        text = path.read_text().replace("/etc/prometheus/", f"{tmp_path}/")
        (tmp_path / path.name).write_text(text)
    promtool("check", "config", "prometheus.yml", directory=tmp_path)


@pytest.mark.timeout(60)
def test_alerts_fire_when_due_and_at_no_other_time():
    promtool("test", "rules", "alerts_test.yml", directory=PROMETHEUS)


def test_every_alert_has_a_case_for_firing_and_one_for_not():
    """A case that expects fewer alerts than it has runs, workers or services also says when not to fire."""
    fires: set[str] = set()
    quiet: set[str] = set()
    for case in yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]:
        subjects = {re.sub(r"^.*\{|cause=[^,}]*", "", x["series"]) for x in case["input_series"]}
        for asked_for in case["alert_rule_test"]:
            expected = len(asked_for["exp_alerts"])
            fires |= {asked_for["alertname"]} if expected else set()
            quiet |= {asked_for["alertname"]} if expected < len(subjects) else set()
    assert fires == quiet == set(RULES)


def test_no_rule_compares_a_counter_that_may_begin_again():
    for name, rule in RULES.items():
        bare = re.sub(r"increase\([^()]*\)", "", rule["expr"])
        assert "_total" not in bare, name


def test_alertmanagers_are_named_in_a_file_that_names_none():
    told = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["alerting"]
    (found,) = told["alertmanagers"]
    (path,) = found["file_sd_configs"][0]["files"]
    assert yaml.safe_load((PROMETHEUS / Path(path).name).read_text()) == []
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    mounted = {x["target"]: x["source"] for x in compose["services"]["prometheus"]["configs"]}
    assert compose["configs"][mounted[path]]["file"].endswith(f"/prometheus/{Path(path).name}")


def test_a_worker_is_well_while_its_heart_beats():
    exporter = Exporter(WORKER_METRICS, {"run": "r", "worker": "w"})
    port = serve_metrics("0", exporter)
    assert complaint(port, now_s=1000.0) is None
    exporter.update({"time_s": 1000.0})
    assert complaint(port, now_s=1000.0 + MAX_AGE_S) is None
    assert complaint(port, now_s=1001.0 + MAX_AGE_S) == "the last heartbeat is 31 s old"


def test_a_service_that_does_not_answer_is_not_well():
    assert "no metrics on port 1" in (complaint(1, now_s=0.0) or "")


def test_the_page_on_operating_says_what_to_do_for_every_alert():
    page = (DOCKER.parent / "docs" / "operating.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.count("|") == 4]
    rows = {name.strip() for cell in cells for name in cell.split(",")}
    alerts = {rule["alert"] for group in ALERTS["groups"] for rule in group["rules"]}
    assert alerts and alerts <= rows
