"""Weights & Biases."""

# pyright: reportMissingImports=false

from pathlib import Path

from areal_q.config import Wandb
from areal_q.observability.metrics_log import Record
from areal_q.observability.trackers.described import SAMPLE, TrackedRun, numbers, samples

AXIS = "step"
"""The learner's steps as an axis of their own: wandb's own counts calls, and takes no step after a later one,
as an evaluation beside the loop has it."""


class WandbTracker:
    """A run of wandb, offline in RUN/trackers/wandb/wandb. Its network is a process of wandb's own.

    It forgets nothing: online as offline, what was logged of a step stays.
    """

    def __init__(self, settings: Wandb, run: TrackedRun) -> None:
        import wandb

        self._wandb, self._settings, self._id = wandb, settings, run.id
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            tags=settings.tags,
            name=run.name,
            id=run.id,
            resume="allow",
            mode=settings.mode,
            dir=run.scratch,
            config={**run.settings, **run.about},
            # Of what this process prints nothing is the run's, nor is its code.
            settings=wandb.Settings(console="off", silent=True, disable_code=True),
        )
        self._run.define_metric(AXIS, hidden=True)
        self._run.define_metric("*", step_metric=AXIS)

    def log(self, record: Record) -> None:
        values: dict[str, object] = dict(numbers(record))
        if self._settings.samples and (rows := samples(record)):
            values["eval/samples"] = self._wandb.Table(columns=list(SAMPLE), data=rows)
        if values:
            self._run.log(values | {AXIS: record["step"]})

    def rewind(self, step: int) -> None:
        return None

    def finish(self, report: Path | None, reason: str) -> None:
        if report:
            artifact = self._wandb.Artifact(f"report-{self._id}", type="report")
            artifact.add_file(str(report))
            self._run.log_artifact(artifact)
        self._run.finish(exit_code=0 if reason else 1)
