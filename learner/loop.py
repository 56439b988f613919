"""The learner's loop.

    Admission ──tickets──▶ Redis ──groups──▶ GroupReader ──▶ train_step ──▶ WeightPublisher ──▶ WeightServer
        ▲                                      │ too old: dropped, counted, its place refilled │
        └─────────── capacity for new tickets ◀┴────────────────── version ◀───────────────────┘

| wait                            | for                           | unblocked by                               |
|---------------------------------|-------------------------------|--------------------------------------------|
| GroupReader.take                | B groups within the bound     | workers' commits; a stop request           |
| Learner.settle                  | a checkpoint on disk          | its thread; before the next, at the end    |
| HeldOutEvaluation.finish        | the last evaluation's answers | workers' commits; a stop request; timeout  |
| TorchPolicy.wait_until_read     | weights that are still read   | two threads; before the optimizer writes   |
| WeightPublisher.wait_until_out  | the version begun last        | its thread; after the next step            |

Quantizing, diffing, compressing and sending overlap with the next step
(learner/publishing/weight_publisher.py).
"""

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from areal_q.config import External, Run
from areal_q.errors import BufferGone, Stopped
from areal_q.messages import Group, WorkerStatus
from areal_q.observability.metrics_log import MetricsLog
from areal_q.observability.run_summary import plural
from areal_q.system.watchdog import Progress
from buffer.redis_store import LearnerBuffer
from buffer.weight_sync import WeightServer
from learner import checkpoint
from learner.backends.single_device import TorchPolicy
from learner.checkpoint.async_writer import CheckpointWriter
from learner.data.admission import Admission
from learner.data.eval_sets import EvaluationSet
from learner.data.group_reader import GroupReader, WhileWaiting
from learner.data.staleness import VersionHistory
from learner.heldout_eval import HeldOutEvaluation
from learner.measure.buffer_metrics import BufferMetrics
from learner.measure.fidelity import FidelityMeter
from learner.measure.replay_check import ReplayCheck
from learner.measure.reward_check import RewardCheck
from learner.measure.step_logs import StepLogs
from learner.policy_update import PolicyUpdater
from learner.publishing.weight_publisher import WeightPublisher
from learner.teacher.scoring import Teacher
from learner.train_step import train_step

logger = logging.getLogger(__name__)


@dataclass
class Learner(WhileWaiting):
    """A learner that runs the steps of one run. learner/build.py creates it with all its components."""

    run: Run
    step: int
    """The next step, which is also the number of the checkpoint at the end: at first 0, or a checkpoint's."""
    updater: PolicyUpdater
    buffer: LearnerBuffer
    admission: Admission
    group_reader: GroupReader
    heldout: HeldOutEvaluation
    history: VersionHistory
    replay_check: ReplayCheck
    fidelity: FidelityMeter
    reward_check: RewardCheck
    buffer_metrics: BufferMetrics
    publisher: WeightPublisher
    weight_server: WeightServer
    logs: StepLogs
    metrics: MetricsLog
    checkpoints: CheckpointWriter
    teacher: Teacher | None
    """What scores the groups of a step before it is learnt from and logged; None without `learner.teacher`."""
    progress: Progress
    """Notes each record and each poll for groups; the watchdog and health checks use it."""
    totals_before: dict[str, float]
    """Counts of the run's earlier learners, from the checkpoint, by the metric's name."""

    @property
    def policy(self) -> TorchPolicy:
        """The whole policy, as this process holds it."""
        return self.updater.policy

    def train(self, stop: threading.Event) -> int:
        """Runs the remaining steps, or until `stop`. Returns the next step, whose checkpoint is on disk then.

        If everything is stopped at once, Redis may be gone first; the checkpoint does not need it."""
        try:
            self.take_steps(stop)
            if self.over and not stop.is_set():
                if self.step not in self.heldout.pending:
                    self.heldout.ask(self.step)
                agents = self.run.rollout.environment
                # Each of an episode's agents may fall silent, and the next one plays it.
                silent_s = agents.longest_silence_s if isinstance(agents, External) else 0.0
                self.heldout.finish(stop, 120.0 + silent_s, self.look_at_episodes)
        except BufferGone as error:
            logger.warning("redis is gone, too: %s", error)
        self.progress.rest()
        self.save(self.step)
        self.settle(wait=True)
        return self.step

    def take_steps(self, stop: threading.Event) -> None:
        """Runs the remaining steps, or until `stop` or no evaluation was better for long; `step` is then the
        next one."""
        self.begin()
        while not self.over and not stop.is_set():
            step, began = self.step, time.monotonic()
            batch = self.group_reader.take(step, stop, meanwhile=self)
            if batch is None:
                return
            waited = time.monotonic() - began
            if step == 0:
                self.heldout.collect()
                self.heldout.tell_first_step()
            if self.teacher:
                try:
                    batch = batch._replace(groups=self.teacher.scored(batch.groups))
                except Stopped:  # the groups stay in the pool
                    return
            scored_s = time.monotonic() - began - waited
            values = train_step(self.updater, batch, self.history, step, self.logs.recorder)
            self.wait_until_out()
            self.logs.append(step, batch, self.history, values)
            values |= self.publisher.metrics()
            self.begin_version(step + 1)
            self.group_reader.consumed()
            self.step = step = step + 1
            self.progress.step()
            values |= self.fidelity.measure(batch.groups)
            values |= self.reward_check.metrics(batch.groups)
            if self.teacher:
                values["teacher/score_s"] = scored_s
            self.report(step, values, batch.groups, began, waited)
            if step < self.run.steps:
                self.evaluate(step)
                # A version that may be the best is saved before anybody knows whether it is.
                if step % self.run.checkpoint.every == 0 or self.heldout.may_be_best(step):
                    self.save(step)
            self.settle()
        if self.step < self.run.steps and self.over:
            self.metrics.write("note", self.step, {}, message=f"the run ends: {self.heldout.best}")

    def begin(self) -> None:
        """Begins to publish the weights that there are, and to evaluate them if they are the first, or if an
        earlier learner ended too early for that."""
        self.begin_version(self.step)
        self.buffer_metrics.begin()
        if self.step == 0:
            asked = self.run.eval.problems
            doing = f"publishing the first weights, then evaluating {plural(asked, 'problem')}"
            self.metrics.write("start", 0, {}, doing=doing)
            self.evaluate(0)
            if self.run.checkpoint.start or self.heldout.may_be_best(0):
                self.save(0)
        elif self.heldout.missed:
            self.evaluate(self.step, self.heldout.missed)
        self.policy.build_optimizers()  # while workers draw the first groups

    def close(self) -> None:
        """Ends the threads of publisher, weight server, checkpoints and logs, and closes all sockets."""
        self.publisher.close()
        self.weight_server.close()
        self.updater.close()
        self.checkpoints.close()
        self.logs.close()
        self.metrics.close()
        self.buffer.close()

    def look(self) -> None:
        """Notes, before each poll for groups, that the learner is alive, and reads the answers of evaluations,
        each of which is recorded as soon as it is complete, and whether rewards fail. Before the first step it
        tells how far the first evaluation is."""
        self.progress.beat()
        self.heldout.collect()
        self.buffer_metrics.record_failures(self.step, self.totals)
        if self.step == 0:
            self.heldout.tell_progress()

    def warn(self, step: int, sentence: str) -> None:
        """Writes a `warning` record, which the views display."""
        self.metrics.write("warning", step, {}, message=sentence)

    def look_at_episodes(self) -> None:
        """Notes, while the last evaluation is waited for, that the learner is alive, and how episodes end."""
        self.progress.beat()
        self.record_episodes(self.step)

    def record_episodes(self, step: int) -> None:
        self.buffer_metrics.record_episodes(step)

    @property
    def over(self) -> bool:
        """True after the last step, or once evaluations were no better for long (`eval.patience`)."""
        return self.step >= self.run.steps or self.heldout.best.given_up

    def evaluate(self, version: int, sets: Sequence[EvaluationSet] | None = None) -> None:
        """Begins the evaluations of these sets, by default those that are due, beside the next step, whose
        tickets are admitted before: a worker that finds none of them fills up with the evaluation's."""
        if sets := self.heldout.due(version) if sets is None else sets:
            self.admission.admit(version)
            self.heldout.ask(version, sets)

    def begin_version(self, version: int) -> None:
        """Begins to publish the present weights as `version`, on the publisher's thread."""
        self.publisher.begin(self.policy.model, version, self.policy.kv_scales)

    def wait_until_out(self) -> None:
        """Waits until the version begun last is published, then completes what needs its digest."""
        made = self.publisher.wait_until_out()
        if made is None:
            return
        self.fidelity.remember(made)
        self.replay_check.compare(made.manifest.version, made.manifest.digest)
        self.logs.complete(made.manifest.digest)

    def save(self, step: int) -> None:
        """Begins a checkpoint. The order matters: the log is on disk before the checkpoint marks its groups as
        finished, and Redis deletes them only after both (`settle`)."""
        self.settle(wait=True)
        self.wait_until_out()
        self.logs.flush()
        state = checkpoint.State(
            run_id=self.buffer.run_id,
            step=step,
            position=self.group_reader.position,
            cursor=self.admission.cursor,
            outstanding=sorted(self.admission.outstanding),
            uses=self.group_reader.uses,
            lost=sorted(self.admission.lost),
            digests=dict(self.history.digests),
            totals=self.totals_at_checkpoint(),
            forks=self.history.forks,
            updates=self.policy.updates,
            skipped=self.policy.skipped,
            model=self.policy.model.config.to_hf(),
            order=self.admission.order.state(),
        )
        self.checkpoints.save(state, self.updater, self.heldout.spared)

    def totals_at_checkpoint(self) -> dict[str, float]:
        """Returns `totals` without the groups that a learner resuming from the checkpoint counts again."""
        reader = self.group_reader
        again = reader.unfinished_totals() | {"buffer/groups": reader.held}
        return {name: n - again.get(name, 0.0) for name, n in self.totals().items()}

    def settle(self, wait: bool = False) -> None:
        """Deletes from Redis the groups that a checkpoint no longer needs, once it is on disk; with `wait`,
        waits for a checkpoint that is being written. Raises what writing it raised."""
        stands = self.checkpoints.finish() if wait else self.checkpoints.settle()
        if stands:
            state, path = stands
            logger.info("checkpoint %s", path)
            with suppress(BufferGone):  # the next learner's first checkpoint deletes them
                self.buffer.trim(state.position)

    def make_room(self, step: int) -> bool:
        """Makes room in a full Redis while the learner waits for groups of step `step`: after a checkpoint,
        Redis can delete the groups that were learnt from. Returns False if there are none."""
        self.settle(wait=True)
        if self.group_reader.position == self.buffer.trimmed:
            return False
        logger.warning("redis is full: a checkpoint before its time makes room")
        self.save(step)
        self.settle(wait=True)
        return True

    def report(
        self,
        step: int,
        values: dict[str, float],
        groups: Sequence[Group],
        began: float,
        waited: float,
    ) -> None:
        """Writes the metrics of the step that made version `step`. It began at `began`, by time.monotonic(),
        and waited `waited` seconds for groups."""
        tokens = sum(t.all_tokens for g in groups for t in g.trajectories)
        total_s = time.monotonic() - began
        values |= {
            "learner/step_s": total_s,
            "learner/wait_s": waited,
            "learner/idle_share": waited / total_s,
            "learner/tokens_per_s": tokens / total_s,
            "buffer/open_tickets": len(self.admission.outstanding),
            "buffer/held": self.group_reader.held,
            **self.totals(),
        }
        values |= self.replay_check.metrics()
        workers: list[WorkerStatus] = []
        with suppress(BufferGone):  # the step counts all the same
            self.heldout.collect()
            workers = self.buffer.workers()
            values |= self.buffer_metrics.measure(step, workers)
        self.metrics.write("step", step, values, workers=workers)

    def totals(self) -> dict[str, float]:
        """Returns the counts since the run began, over all its learners, by the metric's name."""
        sent = self.weight_server.stats
        counted = self.group_reader.totals() | {
            "buffer/groups": self.group_reader.groups,
            "buffer/refused_admissions": self.admission.refused,
            "weights/delta_bytes": sent.delta_bytes,
            "weights/fetches": sent.fetches,
            "weights/refused": sent.refused,
            "weights/catch_ups": sent.catch_ups,
            "weights/stalls": sent.stalls,
        }
        return {name: self.totals_before.get(name, 0.0) + n for name, n in counted.items()}
