"""Held-out accuracy during the run: evaluation tickets go to the same workers, which never stop."""

import logging
import threading
import time
from collections import Counter

from areal_q.errors import BufferFull
from areal_q.messages import Group
from areal_q.observability.metrics_log import MetricsLog
from areal_q.tasks import Tokenizer
from buffer.interface import LearnerSide
from learner.data.admission import Admission

logger = logging.getLogger(__name__)
SAMPLES = 5
LOOK_S = 1.0
"""Between two looks for tickets that came to nothing"""


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
        self._looked_s = time.monotonic()

    def ask(self, version: int) -> None:
        """Begins an evaluation of `version`, unless Redis is full."""
        try:
            self._expected[version] = self._admission.evaluate(version)
        except BufferFull as error:
            logger.warning("no evaluation at version %d: %s", version, error)
            return
        self._answers[version] = []

    def collect(self) -> None:
        """Reads the answers that have come in, and writes an `eval` record for each complete evaluation:
        all of its tickets are answered, or have come to nothing, in the quarantine or with a Redis that lost
        them."""
        still_open = self._look()
        for group in self._buffer.take_eval():
            # An evaluation of a history that a crash cut off is nobody's.
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

    def _look(self) -> Counter[int] | None:
        """Returns the open tickets by version, every LOOK_S while there is an evaluation. It is called before
        the answers are taken: what is open no longer is among them."""
        now_s = time.monotonic()
        if not self._expected or now_s - self._looked_s < LOOK_S:
            return None
        self._looked_s = now_s
        return self._buffer.open_eval()

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

    def _sample(self, group: Group) -> dict[str, str | bool | None]:
        t = group.trajectories[0]
        return {
            "prompt": group.ticket.prompt,
            "answer": group.ticket.answer,
            "response": self._tokenizer.decode(t.response_ids.numpy().tolist()),
            "correct": bool(t.reward_parts.get("correct", 0.0)) if t.valid else None,
        }
