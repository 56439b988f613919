"""The learner's loop.

    Admission ──tickets──▶ Redis ──groups──▶ GroupReader ──▶ train_step ──▶ WeightPublisher ──▶ WeightServer
        ▲                                      │ too old: dropped, counted, its place refilled │
        └─────────── capacity for new tickets ◀┴────────────────── version ◀───────────────────┘

| wait                            | for                           | unblocked by                               |
|---------------------------------|-------------------------------|--------------------------------------------|
| GroupReader.take                | B groups within the bound     | workers' commits; a stop request           |
| Learner.settle                  | a checkpoint on disk          | its thread; before the next, at the end    |
| HeldOutEvaluation.finish        | the last evaluation's answers | workers' commits; a stop request; timeout  |
| Learner.wait_until_read         | weights that are still read   | two threads; before the optimizer writes   |
| WeightPublisher.wait_until_out  | the version begun last        | its thread; after the next step            |

Quantizing, diffing, compressing and sending overlap with the next step
(learner/publishing/weight_publisher.py).
"""

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from areal_q.config import Run, settings_hash
from areal_q.errors import BufferGone
from areal_q.messages import Group, WorkerStatus
from areal_q.observability.metrics_log import MetricsLog
from areal_q.system.watchdog import Progress
from areal_q.weights.version import WeightVersion
from buffer.logs.step_log import StepLog, StepRecord
from buffer.logs.token_log import TokenLog
from buffer.logs.trajectory_log import TrajectoryLog
from buffer.redis_store import START, LearnerBuffer
from buffer.sampling.replay_pool import SampledGroups
from buffer.weight_sync import WeightServer
from learner import checkpoint
from learner.arithmetic import machine_name
from learner.backends.single_device import TorchPolicy
from learner.checkpoint.async_writer import CheckpointWriter
from learner.data.admission import Admission
from learner.data.group_reader import GroupReader
from learner.data.staleness import VersionHistory
from learner.heldout_eval import HeldOutEvaluation
from learner.measure.agent_episodes import AgentEpisodes
from learner.measure.fidelity import FidelityMeter
from learner.measure.replay_check import ReplayCheck
from learner.measure.reward_check import RewardCheck
from learner.measure.token_recorder import TokenRecorder
from learner.measure.worker_rates import WorkerRates
from learner.policy_update import PolicyUpdater
from learner.publishing.version_builder import VersionBuilder
from learner.publishing.weight_publisher import WeightPublisher
from learner.train_step import train_step

logger = logging.getLogger(__name__)
TELL_EVERY_S = 10.0
"""Seconds from one record of the first evaluation's progress to the next"""


@dataclass
class Learner:
    """A learner that runs the steps of one run. learner/build.py creates it with all its components."""

    run: Run
    dir: Path
    start: int
    """The first step: 0, or the checkpoint's."""
    updater: PolicyUpdater
    buffer: LearnerBuffer
    admission: Admission
    group_reader: GroupReader
    heldout: HeldOutEvaluation
    history: VersionHistory
    replay_check: ReplayCheck
    forks: list[int]
    """The versions at which this history forked off abandoned ones, if they still matter for lags
    (learner/data/staleness.py)."""
    builder: VersionBuilder
    fidelity: FidelityMeter
    reward_check: RewardCheck
    weight_server: WeightServer
    log: TrajectoryLog | None
    steps: StepLog | None
    tokens: TokenLog | None
    recorder: TokenRecorder | None
    """Records the tokens of the last step for the token log."""
    metrics: MetricsLog
    checkpoints: CheckpointWriter
    totals_before: dict[str, float] = field(default_factory=dict)
    """Counts of the run's earlier learners, from the checkpoint, by the metric's name."""
    step: int = 0
    """The next step, which is also the number of the checkpoint at the end."""
    nbytes: int = 0
    """Size in bytes of the version published last."""
    awaiting_digest: StepRecord | None = None
    """The last step's record, until the digest of the version that the step made is known."""
    trimmed: str = START
    """The position in the stream of groups up to which Redis was asked to delete them."""
    tell_s: float = 0.0
    """The time, by time.monotonic(), when the first evaluation's progress is told again."""
    stuck: bool = False
    """True once it was logged that no checkpoint can make room in Redis."""
    evicts: bool = False
    """True if Redis was seen to delete what the run keeps there, once it is at its limit."""

    @property
    def policy(self) -> TorchPolicy:
        """The whole policy, as this process holds it."""
        return self.updater.policy

    progress: Progress = field(default_factory=Progress)
    """Notes each record and each poll for groups; the watchdog and health checks use it."""

    def __post_init__(self) -> None:
        self.publisher = WeightPublisher(self.builder, self.hand_to_server)
        self.policy.before_write = self.wait_until_read
        self.group_reader.on_starvation = self.warn
        self.group_reader.on_look = self.look
        self.metrics.also("progress", lambda record: self.progress.beat())
        self.group_reader.on_wait = self.record_episodes
        self.episodes = AgentEpisodes(self.run.rollout.environment)
        self.rates = WorkerRates()

    def train(self, stop: threading.Event) -> int:
        """Runs the remaining steps, or until `stop`. Returns the next step, whose checkpoint is on disk then.

        If everything is stopped at once, Redis may be gone first; the checkpoint does not need it."""
        self.step = self.start
        try:
            self.take_steps(stop)
            if self.step == self.run.steps and not stop.is_set():
                self.heldout.ask(self.step)
                self.heldout.finish(stop, timeout_s=120.0)
        except BufferGone as error:
            logger.warning("redis is gone, too: %s", error)
        self.progress.rest()
        self.save(self.step)
        self.settle(wait=True)
        return self.step

    def take_steps(self, stop: threading.Event) -> None:
        """Runs the remaining steps, or until `stop`; `step` is then the next one."""
        self.begin_version(self.step)
        # What workers drew for an earlier learner does not count.
        self.rates.metrics(self.buffer.workers())
        if self.step == 0:
            doing = (
                f"publishing the first weights, then evaluating {self.run.eval.problems} problems"
            )
            self.metrics.write("start", 0, {}, doing=doing)
            self.evaluate(0)
            if self.run.checkpoint.start:
                self.save(0)
        self.policy.build_optimizers()  # while workers draw the first groups
        while self.step < self.run.steps and not stop.is_set():
            step, began = self.step, time.monotonic()
            batch = self.group_reader.take(step, stop, self.make_room, self.wait_until_out)
            if batch is None:
                return
            waited = time.monotonic() - began
            values = train_step(self.updater, batch, self.history, step, self.recorder)
            self.wait_until_out()
            self.record(step, batch, values)
            values |= self.version_metrics()
            self.begin_version(step + 1)
            self.group_reader.consumed()
            self.step = step = step + 1
            self.progress.step()
            values |= self.fidelity.measure(batch.groups)
            values |= self.reward_check.metrics(batch.groups)
            self.report(step, values, batch.groups, began, waited)
            if step % self.run.eval.every == 0 and step < self.run.steps:
                self.evaluate(step)
            if step % self.run.checkpoint.every == 0 and step < self.run.steps:
                self.save(step)
            self.settle()

    def close(self) -> None:
        """Ends the threads of publisher, weight server, checkpoints and logs, and closes all sockets."""
        self.publisher.close()
        self.weight_server.close()
        self.updater.close()
        self.checkpoints.close()
        for log in (self.log, self.steps, self.tokens):
            if log:
                log.close()
        self.metrics.close()
        self.buffer.close()

    def look(self) -> None:
        """Notes, before each poll for groups, that the learner is alive, and reads the answers of evaluations,
        each of which is recorded as soon as it is complete. Before the first step it tells how far
        the first evaluation is."""
        self.progress.beat()
        self.heldout.collect()
        if self.step == 0 and time.monotonic() >= self.tell_s and self.heldout.progress:
            self.tell_s = time.monotonic() + TELL_EVERY_S
            done, asked = self.heldout.progress
            self.metrics.write("start", 0, {}, doing=f"evaluating: {done} of {asked} problems")

    def warn(self, step: int, sentence: str) -> None:
        """Writes a `warning` record, which the views display."""
        self.metrics.write("warning", step, {}, message=sentence)

    def record_episodes(self, step: int) -> None:
        """Writes a `waiting` record if the number of agents' episodes has changed while `step` waits."""
        if counts := self.episodes.changed(self.buffer.workers):
            self.metrics.write("waiting", step, counts)

    def evaluate(self, version: int) -> None:
        """Begins an evaluation beside the next step, whose tickets are admitted before: a worker that finds
        none of them fills up with the evaluation's."""
        self.admission.admit(version)
        self.heldout.ask(version)

    def begin_version(self, version: int) -> None:
        """Begins to publish the present weights as `version`, on the publisher's thread."""
        self.publisher.begin(self.policy.model, version, self.policy.kv_scales)

    def hand_to_server(self, made: WeightVersion) -> None:
        """Passes a version that was built to the weight server; runs on the publisher's thread."""
        # The history must contain a version before a worker draws with it, or its tokens would count as stale.
        self.history.add(made.manifest.version, made.manifest.digest)
        self.weight_server.publish(made)

    def wait_until_read(self) -> None:
        """Waits until neither a version nor a checkpoint reads the weights, so that the optimizer may write."""
        self.publisher.wait_until_read()
        self.checkpoints.wait_until_read()

    def wait_until_out(self) -> None:
        """Waits until the version begun last is published, then completes what needs its digest."""
        made = self.publisher.wait_until_out()
        if made is None:
            return
        self.nbytes = made.manifest.nbytes
        self.fidelity.remember(made)
        self.replay_check.compare(made.manifest.version, made.manifest.digest)
        if self.steps and self.awaiting_digest:
            digest = made.manifest.digest
            self.steps.append(msgspec.structs.replace(self.awaiting_digest, digest=digest))
            self.awaiting_digest = None

    def version_metrics(self) -> dict[str, float]:
        """Returns metrics about the version published last, which is the one that the last step began with."""
        waited_s, self.publisher.waited_s = self.publisher.waited_s, 0.0
        return {
            "weights/bytes": self.nbytes,
            "weights/publish_s": waited_s,
            "weights/make_s": self.builder.build_s,
            "weights/codes_moved": self.builder.codes_moved,
        }

    def record(self, step: int, batch: SampledGroups, values: dict[str, float]) -> None:
        """Logs step `step`, which is about to make version `step` + 1, with all that a replay needs."""
        if not self.log or not self.steps:
            return
        self.log.append(step, step, batch.groups)
        if self.tokens and self.recorder:
            self.tokens.append(step, self.recorder.scores())
        cfg = self.run.learner
        self.awaiting_digest = StepRecord(
            step=step,
            tickets=[group.ticket.number for group in batch.groups],
            seeds=[group.ticket.seed for group in batch.groups],
            weights=list(batch.weights),
            base_digest=self.history.digests[step],
            digest="",
            fork=self.history.fork,
            settings=settings_hash(self.run),
            machine=machine_name(cfg.device, str(cfg.backend.__struct_config__.tag)),
            metrics=dict(values),
        )

    def save(self, step: int) -> None:
        """Begins a checkpoint. The order matters: the log is on disk before the checkpoint marks its groups as
        finished, and Redis deletes them only after both (`settle`)."""
        self.settle(wait=True)
        self.wait_until_out()
        for log in (self.log, self.steps, self.tokens):
            if log:
                log.flush()
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
            forks=self.forks,
            updates=self.policy.updates,
            skipped=self.policy.skipped,
            model=self.policy.model.config.to_hf(),
        )
        self.checkpoints.save(state, self.updater)

    def totals_at_checkpoint(self) -> dict[str, float]:
        """Returns `totals` without the groups that a learner resuming from the checkpoint counts again."""
        again = self.group_reader.unfinished_totals()
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
                self.trimmed = state.position

    def make_room(self, step: int) -> None:
        """Makes room in a full Redis while the learner waits for groups of step `step`: after a checkpoint,
        Redis can delete the groups that were learnt from."""
        self.settle(wait=True)
        if self.group_reader.position != self.trimmed:
            logger.warning("redis is full: a checkpoint before its time makes room")
            self.save(step)
            self.settle(wait=True)
        elif not self.stuck:
            self.stuck = True
            logger.error(
                "redis is full of groups that are not learnt from yet: its maxmemory must hold "
                "(max_lag + 1) x groups + workers + 2 of them; waiting"
            )

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
        tokens = sum(t.num_tokens for g in groups for t in g.trajectories)
        total_s = time.monotonic() - began
        values |= {
            "learner/step_s": total_s,
            "learner/wait_s": waited,
            "learner/idle_share": waited / total_s,
            "learner/tokens_per_s": tokens / total_s,
            "buffer/open_tickets": len(self.admission.outstanding),
            "buffer/groups": self.group_reader.groups,
            "buffer/held": self.group_reader.held,
            **self.totals(),
        }
        values |= self.replay_check.metrics()
        workers: list[WorkerStatus] = []
        with suppress(BufferGone):  # the step counts all the same
            self.heldout.collect()
            workers = self.buffer.workers()
            values |= self.buffer_metrics(workers)
        self.metrics.write("step", step, values, workers=workers)

    def totals(self) -> dict[str, float]:
        """Returns the counts since the run began, over all its learners, by the metric's name."""
        sent = self.weight_server.stats
        counted = self.group_reader.totals() | {
            "buffer/refused_admissions": self.admission.refused,
            "weights/delta_bytes": sent.delta_bytes,
            "weights/fetches": sent.fetches,
            "weights/refused": sent.refused,
            "weights/catch_ups": sent.catch_ups,
            "weights/stalls": sent.stalls,
        }
        return {name: self.totals_before.get(name, 0.0) + n for name, n in counted.items()}

    def buffer_metrics(self, workers: list[WorkerStatus]) -> dict[str, float]:
        """Returns the metrics of Redis and of the workers' heartbeats."""
        memory = self.buffer.memory()
        if memory.evicts and not self.evicts:
            policy = f"maxmemory-policy is {memory.policy} now"
            self.warn(self.step, f"redis deletes groups and tickets at its limit: {policy}")
        self.evicts = memory.evicts
        return {
            **self.rates.metrics(workers),
            **self.episodes.metrics(workers),
            "buffer/quarantined": self.buffer.set_aside(),
            "buffer/refused_heartbeats": self.buffer.refused_heartbeats,
            "buffer/full": float(memory.full),
            "buffer/waiting_commits": sum(w.waiting for w in workers),
            "weights/behind_s": max((w.behind_s for w in workers), default=0.0),
            "redis/used_bytes": memory.used,
            "redis/limit_bytes": memory.limit,
        }
