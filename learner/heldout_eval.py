"""Held-out accuracy during the run: the workers answer evaluation tickets beside training tickets."""

import logging
import threading
import time
from collections import Counter

from areal_q.errors import BufferFull
from areal_q.messages import Group
from areal_q.observability.metrics_log import MetricsLog
from areal_q.tasks import Tokenizer, without_end
from buffer.redis_store import LearnerBuffer
from learner.data.admission import Admission

logger = logging.getLogger(__name__)
SAMPLES = 5
"""Number of answers that an `eval` record contains as examples."""
TELL_EVERY_S = 10.0
"""Seconds from one record of an evaluation's progress to the next."""
LOOK_S = 1.0
"""Seconds between two searches for tickets that were lost."""


class HeldOutEvaluation:
    """Asks workers for greedy answers, which they draw with the published (quantized) weights, and records the
    accuracy. A worker starts on an evaluation ticket only with weights at least as new as the ticket's version.
    """

    def __init__(
        self, admission: Admission, buffer: LearnerBuffer, tokenizer: Tokenizer, metrics: MetricsLog
    ) -> None:
        self._admission, self._buffer = admission, buffer
        self._tokenizer, self._metrics = tokenizer, metrics
        self._expected: dict[int, int] = {}
        self._answers: dict[int, list[Group]] = {}
        self.accuracy: float | None = None
        """Accuracy of the newest evaluation that is complete; None before the first."""
        self._looked_s = time.monotonic()
        self._tell_s = 0.0
        """The time, by time.monotonic(), when the progress is told again"""

    def ask(self, version: int) -> None:
        """Begins an evaluation of `version`; skips it if Redis is full."""
        try:
            self._expected[version] = self._admission.evaluate(version)
        except BufferFull as error:
            logger.warning("no evaluation at version %d: %s", version, error)
            return
        self._answers[version] = []

    def collect(self) -> None:
        """Reads the answers that have come in, and writes an `eval` record for each complete evaluation, all of
        whose tickets are answered, quarantined or lost with Redis."""
        if not self._expected:
            return
        still_open = self._look()
        for group in self._buffer.take_eval():
            # Answers of evaluations that an earlier, crashed learner asked for are ignored.
            self._answers.get(group.ticket.step, []).append(group)
        for version, asked in list(self._expected.items()):
            lost = asked - len(self._answers[version])
            if lost > 0 and (still_open is None or still_open[version]):
                continue
            if lost > 0:
                logger.warning(
                    "evaluation at version %d: %d of %d problems came to nothing; see areal-q buffer status",
                    version, lost, asked,
                )  # fmt: skip
            del self._expected[version]
            self._write(version, self._answers.pop(version))

    def tell_progress(self) -> None:
        """Writes a `start` record of how far the oldest evaluation in progress is, every TELL_EVERY_S."""
        if not self._expected or time.monotonic() < self._tell_s:
            return
        self._tell_s = time.monotonic() + TELL_EVERY_S
        version, asked = next(iter(self._expected.items()))
        done = len(self._answers[version])
        self._metrics.write("start", 0, {}, doing=f"evaluating: {done} of {asked} problems")

    def _look(self) -> Counter[int] | None:
        """Returns the number of open tickets by version, or None between two searches. It must be called before
        the answers are read: a ticket that is open no longer was answered before, or lost."""
        now_s = time.monotonic()
        if not self._expected or now_s - self._looked_s < LOOK_S:
            return None
        self._looked_s = now_s
        return self._buffer.open_eval()

    def finish(self, stop: threading.Event, timeout_s: float) -> None:
        """Waits for the evaluations in progress, until `stop` or for `timeout_s` seconds at most."""
        deadline = time.monotonic() + timeout_s
        while self._expected and not stop.is_set() and time.monotonic() < deadline:
            self.collect()
            time.sleep(0.05)

    def _write(self, version: int, groups: list[Group]) -> None:
        """Writes the `eval` record, with the accuracy over the answers that could be scored, if there are
        any."""
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

    def _sample(self, group: Group) -> dict[str, str | bool | None]:
        t = group.trajectories[0]
        said = without_end(t.response_ids.numpy().tolist(), self._tokenizer.stops)
        return {
            "prompt": group.ticket.prompt,
            "answer": group.ticket.answer,
            "response": self._tokenizer.decode(said),
            "correct": bool(t.reward_parts.get("correct", 0.0)) if t.valid else None,
        }
