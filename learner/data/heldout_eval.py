"""Held-out accuracy during the run: evaluation tickets go to the same workers, which never stop."""

import logging
import threading
import time

from areal_q.errors import BufferFull
from areal_q.messages import Group
from areal_q.observability.metrics_log import MetricsLog
from areal_q.tasks import Tokenizer
from buffer.interface import LearnerSide
from learner.data.admission import Admission

logger = logging.getLogger(__name__)
SAMPLES = 5


class HeldOutEvaluation:
    """Asks for greedy answers under the published (quantized) weights and scores them as they come in.

    A worker starts on an evaluation ticket only with weights at least as new as the version that asked.
    """

    def __init__(
        self, admission: Admission, buffer: LearnerSide, tokenizer: Tokenizer, metrics: MetricsLog
    ) -> None:
        self._admission, self._buffer = admission, buffer
        self._tokenizer, self._metrics = tokenizer, metrics
        self._expected: dict[int, int] = {}
        self._answers: dict[int, list[Group]] = {}
        self.accuracy: float | None = None
        """Accuracy of the newest evaluation that is complete; None before the first."""

    def ask(self, version: int) -> None:
        """Begins an evaluation of `version`, unless Redis is full."""
        try:
            self._expected[version] = self._admission.evaluate(version)
        except BufferFull as error:
            logger.warning("no evaluation at version %d: %s", version, error)
            return
        self._answers[version] = []

    def collect(self) -> None:
        """Reads the answers that have come in, and writes an `eval` record for each evaluation that is
        complete."""
        for group in self._buffer.take_eval():
            # An evaluation of a history that a crash cut off is nobody's.
            self._answers.get(group.ticket.step, []).append(group)
        for version in [v for v, n in self._expected.items() if len(self._answers[v]) >= n]:
            del self._expected[version]
            self._write(version, self._answers.pop(version))

    def finish(self, stop: threading.Event, timeout_s: float) -> None:
        """Waits for the evaluations under way; gives up at `stop` or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self._expected and not stop.is_set() and time.monotonic() < deadline:
            self.collect()
            time.sleep(0.05)

    def _write(self, version: int, groups: list[Group]) -> None:
        """Writes the record. The accuracy is over the answers that could be scored, and missing if none
        could."""
        correct = [t.reward_parts.get("correct", 0.0) for g in groups for t in g.valid_trajectories]
        invalid = len(groups) - len(correct)
        values: dict[str, float] = {"eval/problems": len(groups), "eval/invalid": invalid}
        if correct:
            self.accuracy = sum(correct) / len(correct)
            values["eval/accuracy"] = self.accuracy
        else:
            logger.warning("evaluation at version %d: no answer could be scored", version)
        groups.sort(key=lambda g: g.ticket.number)
        samples = [self._sample(g) for g in groups[:SAMPLES]]
        self._metrics.write("eval", version, values, samples=samples)

    def _sample(self, group: Group) -> dict[str, str | bool]:
        t = group.trajectories[0]
        return {
            "prompt": group.ticket.prompt,
            "answer": group.ticket.answer,
            "response": self._tokenizer.decode(t.response_ids.numpy().tolist()),
            "correct": bool(t.reward_parts.get("correct", 0.0)),
        }
