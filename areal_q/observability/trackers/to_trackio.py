"""Trackio: a file of SQLite here, or a Space of Hugging Face."""

# pyright: reportMissingImports=false

from pathlib import Path
from typing import Any

from areal_q.config import Trackio
from areal_q.observability.metrics_log import Record
from areal_q.observability.trackers.described import SAMPLE, TrackedRun, numbers, samples
from areal_q.system.run_dir import flat


class TrackioTracker:
    """A run of trackio, which goes on by its name; so that has a part of the id. A thread of trackio's writes
    what it is given, twice a second."""

    def __init__(self, settings: Trackio, run: TrackedRun) -> None:
        self._settings = settings
        self._name = f"{run.name}-{run.id[:6]}"
        self._config = flat(run.settings) | run.about
        self._run = self._begun()

    def _begun(self) -> Any:
        import trackio

        return trackio.init(
            project=self._settings.project,
            name=self._name,
            group=self._settings.group,
            space_id=self._settings.space,
            config=self._config,
            resume="allow",
            embed=False,
        )

    def log(self, record: Record) -> None:
        import trackio

        values: dict[str, Any] = dict(numbers(record))
        if self._settings.samples and (rows := samples(record)):
            values["eval/samples"] = trackio.Table(columns=list(SAMPLE), data=rows)
        if values:
            self._run.log(values, step=record["step"])

    def rewind(self, step: int) -> int | None:
        """A run on this disk is removed, to be written anew; one in a Space stays."""
        if self._settings.space:
            return None
        import trackio

        self._run.finish()
        for run in trackio.Api().runs(self._settings.project):
            if run.name == self._name:
                run.delete()
        self._run = self._begun()
        return -1

    def finish(self, report: Path | None, reason: str) -> None:
        if report:
            self._run.log_artifact(report, name=f"report-{self._name}", type="report")
        self._run.finish()
