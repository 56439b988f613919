"""The reference pages: they are current, every setting and every metric is on them, each with its meaning."""

import re
import subprocess
import sys

import msgspec
import pytest
from helpers.paths import ROOT

from areal_q.cli.reference import (
    attribute_docs,
    sections,
    settings_text,
)
from areal_q.config import Run, Tis, load
from areal_q.messages.trajectories import WorkerStatus
from areal_q.observability.metric_table import METRICS, WORKER_METRICS, describe
from areal_q.system.run_dir import flat
from docs.reference_pages import metrics_page, settings_page

SETTINGS = [setting for section in sections() for setting in section.settings]


@pytest.mark.parametrize(("page", "made"), [("settings", settings_page), ("metrics", metrics_page)])
def test_a_reference_page_is_what_the_code_says(page, made):
    written = (ROOT / "docs" / f"{page}.md").read_text()
    assert written == made(), f"docs/{page}.md is out of date: run `make reference`"


def test_every_setting_has_a_meaning():
    assert [s.name for s in SETTINGS if not s.meaning] == []


def test_every_setting_of_every_config_is_listed():
    """The oracle is `load`: what it resolves a file to."""
    listed = {s.name for s in SETTINGS}
    tables = {"reward.overlong", "rollout.aqn", "learner.lora", "learner.critic", "learner.teacher"}
    for path in sorted((ROOT / "configs").glob("*.toml")):
        if "path" in path.read_text() or path.name.endswith("gsm8k.toml"):
            continue
        names = set(flat(msgspec.to_builtins(load(path)))) - tables
        assert names <= listed, path.name
    assert set(flat(msgspec.to_builtins(load(None, [])))) - tables <= listed


def test_a_setting_shows_bounds_choices_and_default():
    by_name = {(s.name, s.variant): s for s in SETTINGS}
    lag = by_name["learner.max_lag", ""]
    assert (lag.kind, lag.default, lag.unit) == ("integer ≥ 0 and ≤ 1000", "`2`", "versions")
    assert by_name["warmstart.until_accuracy", ""].kind == "number ≥ 0 and ≤ 1"
    assert "`nvfp4`" in by_name["rollout.format", ""].kind
    assert by_name["learner.objective.type", ""].default == "`acr`"
    assert by_name["learner.objective.cap", "tis"].default == "`2.0`"
    assert by_name["task.path", "python"].default == "must be given"


def test_field_s_docstring_is_read_from_its_class_and_bases():
    docs = attribute_docs(Tis)
    assert docs["cap"] == "The mismatch weight w is truncated here."
    assert docs["clip_low"].startswith("The ratio is clipped")
    assert attribute_docs(Run)["root"] == "Everything a run writes goes to `root/name`."


def test_settings_are_searched_by_name_and_meaning():
    assert "learner.max_lag: integer ≥ 0 and ≤ 1000, versions; default 2" in settings_text(
        "max_lag"
    )
    assert "learner.objective.cap  (type = tis): number ≥ 1" in settings_text("tis")
    result = subprocess.run(
        [sys.executable, "-m", "areal_q", "settings", "nothinghasthis"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1


def written_metrics() -> set[str]:
    """Names of metrics as they stand in the code that records them; what is filled in is `x`."""
    text = "".join(
        path.read_text()
        for name in ("learner", "areal_q/algorithms")
        for path in (ROOT / name).rglob("*.py")
    )
    areas = "reward|response|eval|warmstart|train|loss|lag|mismatch|policy|reference|value|routing|fidelity"
    areas += "|learner|rollout|buffer|redis|weights"
    found = re.findall(rf'f?"((?:{areas})/[^"\s]*)"', text)
    return {re.sub(r"\{[^}]*\}", "x", name) for name in found if not name.endswith("/")}


def test_every_metric_that_is_recorded_is_in_the_table():
    names = {re.sub("^(mismatch|policy)/x", r"\1/", name) for name in written_metrics()}
    assert len(names) > 60
    assert sorted(name for name in names if describe(name) is None) == []


def test_every_number_of_a_heartbeat_is_in_the_table():
    told = {metric.key for metric in WORKER_METRICS}
    no_numbers = {"worker", "pid", "digest", "run_id", "waits_for", "failure"}
    assert set(WorkerStatus.__struct_fields__) - told == no_numbers


def test_no_metric_is_described_twice():
    keys = [metric.key for metric in METRICS]
    assert len(keys) == len(set(keys))
