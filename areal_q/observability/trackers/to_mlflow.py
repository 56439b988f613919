"""MLflow."""

# pyright: reportMissingImports=false

import os
import re
from pathlib import Path

from areal_q.config import Mlflow
from areal_q.observability.metrics_log import Record
from areal_q.observability.trackers.described import SAMPLE, TrackedRun, numbers, samples
from areal_q.system.run_dir import flat

ID = "areal_q.id"
"""The tag by which a run is found again."""
MOST_AT_ONCE = 100
"""Parameters that one request of MLflow takes"""
LONGEST = 500
"""Characters of a parameter, which all of its stores take"""


class MlflowTracker:
    """A run of MLflow. Of a step it keeps all values that it ever got, so that it cannot forget; the same
    value of the same time, as after kill -9, is one."""

    def __init__(self, settings: Mlflow, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._settings = Metric, settings
        self._client = MlflowClient(tracking_uri=settings.uri)
        experiment = self._experiment(settings.experiment)
        found = self._client.search_runs([experiment], f"tags.`{ID}` = '{run.id}'")
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        tags = {ID: run.id, **run.about}
        if commit := run.about.get("commit"):
            tags["mlflow.source.git.commit"] = commit.removesuffix("+changes")
        self._run = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        params = [Param(key, str(v)[:LONGEST]) for key, v in flat(run.settings).items()]
        for first in range(0, len(params), MOST_AT_ONCE):
            self._client.log_batch(self._run, params=params[first : first + MOST_AT_ONCE])

    def _experiment(self, name: str) -> str:
        """Returns the id of the experiment of that name. Two runs that make it at once get the same."""
        from mlflow.exceptions import MlflowException

        if found := self._client.get_experiment_by_name(name):
            return found.experiment_id
        try:
            return self._client.create_experiment(name)
        except MlflowException:
            if found := self._client.get_experiment_by_name(name):
                return found.experiment_id
            raise

    def log(self, record: Record) -> None:
        step, time_ms = record["step"], round(record["time_s"] * 1000)
        # What a reward's parts are called, a user decides; MLflow takes no other characters than these.
        values = {re.sub(r"[^\w\-. :/]", "_", key): v for key, v in numbers(record).items()}
        metrics = [self._metric(key, value, time_ms, step) for key, value in values.items()]
        if metrics:
            self._client.log_batch(self._run, metrics=metrics)
        if self._settings.samples and (rows := samples(record)):
            table = {name: [row[i] for row in rows] for i, name in enumerate(SAMPLE)}
            # A file for each evaluation: where MLflow adds to one, it turns a text "07" into the number 7.
            self._client.log_table(self._run, table, f"samples/step-{step:06d}.json")

    def rewind(self, step: int) -> None:
        return None

    def finish(self, report: Path | None, reason: str) -> None:
        if report:
            self._client.log_artifact(self._run, str(report))
        status = "FINISHED" if reason == "done" else "KILLED" if reason else "FAILED"
        self._client.set_terminated(self._run, status)
