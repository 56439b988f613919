"""The steps of a supervised run, with held-out losses, checkpoints and the model at the end.

A checkpoint is that of a learner of RL that has published nothing: it has no digests of versions. Step n learns
from the rows n · batch … (n + 1) · batch - 1 of an endless sequence, so that nothing else need be kept.
"""

import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from areal_q.config import Run
from areal_q.observability.metrics_log import MetricsLog
from areal_q.tasks import Tokenizer
from buffer.interface import START
from learner import checkpoint
from learner.checkpoint.async_writer import CheckpointWriter
from learner.final_export import EXPORTED, export_model
from learner.policy_update import PolicyUpdater
from learner.sft.task_accuracy import greedy_accuracy
from learner.supervised.demonstrations import Demonstrations
from learner.supervised.supervised_step import held_out_loss, learn


@dataclass
class SupervisedRun:
    """A supervised run that is ready to train. learner/sft/cli.py creates it with all its components."""

    run: Run
    directory: Path
    run_id: str
    step: int
    """The next step, which is also the number of the checkpoint at the end."""
    data: Demonstrations
    batch: int
    """Rows in a step."""
    accuracy: bool
    """True to ask the task's held-out problems at the start and at the end."""
    tokenizer: Tokenizer
    updater: PolicyUpdater
    metrics: MetricsLog
    checkpoints: CheckpointWriter

    def train(self, stop: threading.Event) -> bool:
        """Runs the remaining steps, or until `stop`; then writes a checkpoint and the model. Returns True if
        the last step is done."""
        if self.step == 0:
            self.evaluate()
        while self.step < self.run.steps and not stop.is_set():
            self.take_step()
        done = self.step == self.run.steps
        self.save()
        self.checkpoints.finish()
        self.export()
        if done and not stop.is_set():
            self.evaluate()
        reason = "done" if done else "drained"
        self.metrics.write("end", self.step, {}, reason=reason, model=str(self.directory / "hf"))
        return done

    def take_step(self) -> None:
        """Learns from one batch, records it, and evaluates and saves where that is due."""
        began, first = time.monotonic(), self.step * self.batch
        samples = [self.data.at(number) for number in range(first, first + self.batch)]
        values = learn(self.updater, samples)
        self.step = step = self.step + 1
        took_s = time.monotonic() - began
        values |= {
            "train/epoch": step * self.batch / self.data.size,
            "learner/step_s": took_s,
            "learner/tokens_per_s": sum(sample.num_tokens for sample in samples) / took_s,
        }
        self.metrics.write("step", step, values)
        if step < self.run.steps:
            if step % self.run.eval.every == 0:
                self.evaluate()
            if step % self.run.checkpoint.every == 0:
                self.save()
        self.checkpoints.settle()

    def evaluate(self) -> None:
        """Records the held-out loss, and before the first step and after the last the task's accuracy, by
        answers of the model as it would be exported."""
        values: dict[str, float] = {}
        samples: list[dict[str, str | bool | None]] = []
        if self.data.heldout:
            values["eval/loss"] = held_out_loss(self.updater.policy, self.data.heldout)
        if self.accuracy and self.step in (0, self.run.steps):
            if self.step == 0:
                self.metrics.write("start", 0, {}, doing="asking the task's held-out problems")
                self.export()
            found, samples = greedy_accuracy(self.directory, self.run.eval.problems)
            values |= found
            if self.step == 0:  # what is killed must not leave the model of the start as its result
                for path in filter(Path.exists, (self.directory / name for name in EXPORTED)):
                    shutil.rmtree(path)
        if values:
            self.metrics.write("eval", self.step, values, samples=samples)

    def export(self) -> None:
        """Writes `hf/`, and for adapters `base/` and `adapter/`."""
        export_model(self.run, self.updater.policy.model, self.directory, self.tokenizer)

    def save(self) -> None:
        """Begins a checkpoint, after the one before it is on disk."""
        self.checkpoints.finish()
        policy = self.updater.policy
        state = checkpoint.State(
            run_id=self.run_id,
            step=self.step,
            position=START,
            cursor=self.step * self.batch,
            outstanding=[],
            digests={},
            updates=policy.updates,
            skipped=policy.skipped,
            model=policy.model.config.to_hf(),
        )
        self.checkpoints.save(state, self.updater)

    def close(self) -> None:
        """Ends the other ranks and the thread of checkpoints."""
        self.updater.close()
        self.checkpoints.close()
