"""Runs that differ in their seed alone, as their mean and spread; numpy and statistics are the oracles."""

import statistics
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_q.config import load
from areal_q.observability.metrics_log import read_metrics
from buffer.report.runs import overview, read_runs
from buffer.report.seeds import averaged, mean_and_spread, seed_groups

NUMBERS = st.floats(-1e6, 1e6) | st.none()


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        (["seed=0", "seed=1", "seed=2"], [[0, 1, 2]]),
        (["seed=0 name=a root=x", 'seed=1 name=b trackers=[{type="wandb"}]'], [[0, 1]]),
        (["seed=0", "seed=0"], []),
        (["seed=0 learner.max_lag=1", "seed=1 learner.max_lag=2"], []),
        (
            ["learner.max_lag=1", "seed=1", "learner.max_lag=1 seed=5", "seed=2", "steps=7 seed=3"],
            [[0, 2], [1, 3]],
        ),
    ],
)
def test_groups_are_of_runs_with_equal_settings_but_seeds(settings, groups):
    assert seed_groups([load(None, words.split()) for words in settings]) == groups


@given(
    st.lists(
        st.dictionaries(st.integers(0, 6), NUMBERS, min_size=1, max_size=6), min_size=2, max_size=4
    )
)
def test_means_and_spreads_are_those_of_the_steps_that_all_have(tables):
    runs = [
        [{"step": step, "elapsed_s": float(i), "a/b": value} for step, value in table.items()]
        for i, table in enumerate(tables)
    ]
    means, spreads = averaged(runs, ["a/b"])
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    assert [row["step"] for row in means] == [row["step"] for row in spreads] == steps
    for mean, spread in zip(means, spreads, strict=True):
        values = [table[mean["step"]] for table in tables]
        assert mean["elapsed_s"] == spread["elapsed_s"] == statistics.mean(range(len(tables)))
        if None in values:
            assert mean["a/b"] is spread["a/b"] is None
        else:
            assert mean["a/b"] == pytest.approx(statistics.mean(values), rel=1e-9, abs=1e-6)
            assert spread["a/b"] == pytest.approx(statistics.stdev(values), rel=1e-6, abs=1e-6)


def test_a_group_with_a_missing_number_has_no_mean():
    assert mean_and_spread([1.0, 2.0, 6.0]) == (3.0, pytest.approx(statistics.stdev([1, 2, 6])))
    assert mean_and_spread([1.0, None]) is None


def test_the_page_gets_each_group_and_every_run(write_run, tmp_path):
    names, steps = ("a", "b", "c", "other"), (5, 3, 4, 4)
    settings = ("seed=0", "seed=1", "seed=2", "learner.max_lag=9")
    directories = [
        write_run(tmp_path / name, count, setting)
        for name, count, setting in zip(names, steps, settings, strict=True)
    ]
    meta, arrays = overview(read_runs(directories))
    (group,) = meta["groups"]
    assert (group["runs"], group["name"]) == ([0, 1, 2], "mean of 3 runs, seeds 0, 1, 2")
    rewards = np.array(
        [
            [r["reward/mean"] for r in read_metrics(d / "metrics.jsonl") if r["kind"] == "step"][:3]
            for d in directories[:3]
        ]
    )
    assert arrays["g0/step/step"].tolist() == [1, 2, 3]
    np.testing.assert_allclose(arrays["g0/step/reward/mean"], rewards.mean(0))
    np.testing.assert_allclose(arrays["g0/spread/step/reward/mean"], rewards.std(0, ddof=1))
    assert len(arrays["0/step/reward/mean"]) == 5 and "3/step/reward/mean" in arrays
    assert not [name for name in arrays if name.startswith("g1")]
    accuracies = [0.5, 0.3, 0.4]
    assert group["finals"]["eval/accuracy"] == pytest.approx(
        (statistics.mean(accuracies), statistics.stdev(accuracies))
    )


@pytest.mark.timeout(60)
def test_the_command_says_mean_and_spread_of_a_group(write_run, tmp_path):
    for seed, name in enumerate("ab"):
        write_run(tmp_path / name, 4 + 2 * seed, f"seed={seed}")
    command = [sys.executable, "-P", "-m", "areal_q", "report", "a", "b", "--out", "r.html"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0 and result.stderr == ""
    told = "mean of 2 runs, seeds 0, 1: held-out accuracy 0.500 ± 0.141, reward "
    assert result.stdout.splitlines()[2].startswith(told)
