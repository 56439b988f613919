"""Evaluations during the run: the workers answer evaluation tickets beside training tickets."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np

from areal_q.config import Run
from areal_q.errors import BufferFull
from areal_q.evaluation.estimates import pass_at_k, pass_ks
from areal_q.messages import Group, Trajectory
from areal_q.observability.metrics_log import MetricsLog, Record
from areal_q.observability.run_summary import in_time, plural
from areal_q.tasks import Tokenizer, without_end
from buffer.redis_store import LearnerBuffer
from learner.data.admission import Admission
from learner.data.eval_sets import HELD_OUT, EvaluationSet

logger = logging.getLogger(__name__)
SAMPLES = 5
"""Number of answers that an `eval` record contains as examples."""
TELL_EVERY_S = 10.0
"""Seconds from one record of an evaluation's progress to the next."""
LOOK_S = 1.0
"""Seconds between two searches for tickets that were lost."""
LONGEST_WAITS = 10
"""How many times as long an answer is waited for while workers draw."""


class BestVersion:
    """The version with the largest value so far of the metric `eval.best`, and how many evaluations came
    since."""

    def __init__(self, run: Run, records: Iterable[Record] = ()) -> None:
        """`records` are those of the run so far."""
        self._run, self._metric, self._patience = run, run.eval.best, run.eval.patience
        named = self._metric.removeprefix("eval/").rpartition("/")[0]
        self._set = named if named in run.eval.sets else HELD_OUT
        """The set whose evaluations have it; a mixture's task is a part of the held-out problems"""
        self.step, self.value, self.since = -1, float("-inf"), 0
        self.given_up = False
        for record in records:
            if record["kind"] == "eval":
                self.add(record["step"], record)
        self.given_up = self._waited_long
        """True once the newest `eval.patience` evaluations were no better than one before. A run that has ended
        so has ended, though what was still being evaluated then may be better."""

    def is_of(self, name: str) -> bool:
        """Returns True if the evaluations of this set have the metric."""
        return bool(self._metric) and name == self._set

    def add(self, version: int, values: Record) -> None:
        """Takes the metrics of an evaluation of `version`, unless it was answered too late (`in_time`): it is
        neither the best nor no better."""
        value = values.get(self._metric)
        if value is None or not in_time(values, self._metric, self._run):
            return
        self.since += 1
        if value > self.value:
            self.step, self.value, self.since = version, value, 0
        self.given_up = self.given_up or self._waited_long

    @property
    def _waited_long(self) -> bool:
        return 0 < self._patience <= self.since

    def __str__(self) -> str:
        worse = f"no better {self._metric} in {self.since} evaluations"
        return f"{worse} (eval.patience); the best was {self.value:.3f} at step {self.step}"


class HeldOutEvaluation:
    """Asks workers for answers, which they draw with the published (quantized) weights, and records the
    accuracies. A worker starts on an evaluation ticket only with weights at least as new as the ticket's
    version."""

    def __init__(
        self,
        admission: Admission,
        buffer: LearnerBuffer,
        tokenizer: Tokenizer,
        metrics: MetricsLog,
        run: Run,
        start: int = 0,
        records: Sequence[Record] = (),
    ) -> None:
        """`records` are those of the run so far, which goes on at version `start`."""
        self._admission, self._buffer = admission, buffer
        self._tokenizer, self._metrics = tokenizer, metrics
        self.best = BestVersion(run, records)
        self.missed = self._unrecorded(start, records)
        """What an earlier learner ended too early to evaluate"""
        self._expected: dict[int, int] = {}
        self._asked: dict[int, Sequence[EvaluationSet]] = {}
        """The sets of each version whose evaluation is in progress"""
        self._answers: dict[int, dict[int, Group]] = {}
        """The answers so far by version and number of the ticket"""
        self.accuracy: float | None = None
        """Accuracy of the newest evaluation that is complete; None before the first."""
        self._looked_s = time.monotonic()
        self._tell_s = 0.0
        """The time, by time.monotonic(), when the progress is told again"""

    @property
    def pending(self) -> frozenset[int]:
        """The versions whose evaluations are in progress."""
        return frozenset(self._expected)

    @property
    def spared(self) -> frozenset[int]:
        """The versions whose checkpoints stay: the best one, and those that may be better."""
        return frozenset({self.best.step, *filter(self.may_be_best, self._expected)})

    def may_be_best(self, version: int) -> bool:
        """Returns True if the evaluation of `version` has the metric by which the best is told."""
        sets = self._asked.get(version, self.due(version))
        return any(self.best.is_of(one.name) for one in sets)

    def due(self, step: int) -> list[EvaluationSet]:
        """Returns the sets that are evaluated after `step` steps."""
        return [one for one in self._admission.sets if step % one.every == 0]

    def _unrecorded(self, version: int, records: Iterable[Record]) -> list[EvaluationSet]:
        """Returns the sets whose newest evaluation up to `version` is not in `records`."""
        found = [record for record in records if record["kind"] == "eval"]
        return [
            one
            for one in self._admission.sets
            if not any(
                record["step"] >= version - version % one.every
                and _name(one.name, "problems") in record
                for record in found
            )
        ]

    def ask(self, version: int, sets: Sequence[EvaluationSet] | None = None) -> None:
        """Begins an evaluation of `version` on these sets, by default all; skips it if Redis is full."""
        try:
            self._expected[version] = self._admission.evaluate(version, sets)
        except BufferFull as error:
            logger.warning("no evaluation at version %d: %s", version, error)
            return
        self._asked[version] = self._admission.sets if sets is None else sets
        self._answers[version] = {}

    def collect(self) -> None:
        """Reads the answers that have come in, and writes an `eval` record for each complete evaluation, all of
        whose tickets are answered, quarantined or lost with Redis."""
        if not self._expected:
            return
        still_open = self._look()
        for group in self._buffer.take_eval():
            # Of what an earlier, crashed learner asked, only answers to what is asked again count, once.
            self._answers.get(group.ticket.step, {})[group.ticket.number] = group
        for version, asked in list(self._expected.items()):
            lost = asked - len(self._answers[version])
            if lost > 0 and (still_open is None or still_open[version]):
                continue
            if lost > 0:
                logger.warning(
                    "evaluation at version %d: %d of %s came to nothing; see areal-q buffer status",
                    version, lost, plural(asked, "problem"),
                )  # fmt: skip
            del self._expected[version]
            self._write(
                version, self._asked.pop(version), list(self._answers.pop(version).values())
            )

    def tell_progress(self) -> None:
        """Writes a `start` record of how far the oldest evaluation in progress is, every TELL_EVERY_S."""
        if time.monotonic() >= self._tell_s:
            self._tell_s = time.monotonic() + TELL_EVERY_S
            self._tell("evaluating")

    def tell_first_step(self) -> None:
        """Writes such a record before the first step, which may take a minute: it computes, and no answer is
        read meanwhile."""
        self._tell("the first step, and evaluating")

    def _tell(self, doing: str) -> None:
        for version, asked in islice(self._expected.items(), 1):
            done = len(self._answers[version])
            told = f"{doing}: {done} of {plural(asked, 'problem')}"
            self._metrics.write("start", 0, {}, doing=told)

    def _look(self) -> Counter[int] | None:
        """Returns the number of open tickets by version, or None between two searches. It must be called before
        the answers are read: a ticket that is open no longer was answered before, or lost."""
        now_s = time.monotonic()
        if not self._expected or now_s - self._looked_s < LOOK_S:
            return None
        self._looked_s = now_s
        return self._buffer.open_eval()

    def finish(
        self,
        stop: threading.Event,
        timeout_s: float,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Waits for the evaluations in progress, until `stop`, or until no answer came for `timeout_s` seconds,
        and LONGEST_WAITS times as long while workers draw, and says so then. `meanwhile` is called again and
        again."""
        since, before, silent_s = time.monotonic(), -1, 0.0
        while self._expected and not stop.is_set():
            self.collect()
            if (answered := sum(map(len, self._answers.values()))) != before:
                since, before = time.monotonic(), answered
            silent_s = time.monotonic() - since
            # They may draw for others, too, who ask the endpoint, hence the bound.
            if silent_s >= timeout_s and (
                silent_s >= LONGEST_WAITS * timeout_s
                or not any(worker.tokens_per_s for worker in self._buffer.workers())
            ):
                break
            meanwhile()
            time.sleep(0.05)
        for version, asked in self._expected.items() if not stop.is_set() else ():
            given_up = (
                f"the evaluation at version {version} is given up: {len(self._answers[version])} of {asked} "
                f"problems are answered, and none in the last {silent_s:.0f} s"
            )
            logger.warning("%s", given_up)
            self._metrics.write("warning", version, {}, message=given_up)

    def _write(self, version: int, sets: Sequence[EvaluationSet], groups: list[Group]) -> None:
        """Writes the `eval` record, for each of the sets that were asked, with the accuracies over the answers
        that could be scored, if there are any."""
        groups.sort(key=lambda g: g.ticket.number)
        by_set: dict[str, list[Group]] = {one.name: [] for one in sets}
        for group in groups:
            by_set.setdefault(self._admission.set_of(group.ticket).name, []).append(group)
        values: dict[str, float] = {}
        heldout = by_set.get(HELD_OUT, [])
        for source in sorted({group.ticket.source for group in heldout} - {""}):
            by_set[source] = [group for group in heldout if group.ticket.source == source]
        for name, answers in by_set.items():
            measured = set_metrics(answers, self._admission.episodes).items()
            values |= {_name(name, key): x for key, x in measured}
        for one in sets:
            if _name(one.name, "accuracy") not in values:
                told = f" of the set {one.name}" if one.name else ""
                logger.warning(
                    "evaluation%s at version %d: no answer could be scored", told, version
                )
        self.accuracy = values.get("eval/accuracy", self.accuracy)
        self.best.add(version, values)
        samples = [self._sample(g) for g in heldout[:SAMPLES]]
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


def _name(of: str, key: str) -> str:
    """Returns the name of a metric of a set, or of a task of a mixture."""
    return "/".join(filter(None, ("eval", of, key)))


def _episode_metrics(played: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the mean number of turns and mean reward of episodes, and how many failed by cause."""
    masks = [path.loss_mask.numpy() for t in played for path in (t, *t.branches)]
    # A turn is a stretch of drawn tokens.
    turns = sum(np.count_nonzero(np.diff(m.astype(np.int8), prepend=0) == 1) for m in masks)
    values = {"turns": turns / len(played)}
    if rewards := [t.reward for t in played if t.valid]:
        values["reward"] = sum(rewards) / len(rewards)
    causes = Counter(t.failure for t in played if t.failure)
    return values | {f"invalid/{cause}": float(n) for cause, n in causes.items()}


def set_metrics(groups: Sequence[Group], episodes: bool) -> dict[str, float]:
    """Returns the number of problems and of answers without a valid reward; if some have one, the accuracy, of
    several answers to a problem their mean, and the mean over problems of pass@k for each k that they suffice
    for; and by how many versions the weights that drew were newer than those to be evaluated, the mean over
    tokens. If the answers are `episodes`, these are measured as such, too."""
    right = [
        [t.reward_parts.get("correct", 0.0) for t in group.valid_trajectories] for group in groups
    ]
    answers = sum(len(group.trajectories) for group in groups)
    values = {
        "problems": float(len(groups)),
        "invalid": float(answers - sum(map(len, right))),
    }
    drawn = [
        (s.version - g.ticket.step, s.tokens)
        for g in groups
        for t in g.trajectories
        for s in t.all_spans
    ]
    if tokens := sum(n for _, n in drawn):
        values["late_by"] = sum(late * n for late, n in drawn) / tokens
    if scored := [each for each in right if each]:
        values["accuracy"] = sum(sum(e) / len(e) for e in scored) / len(scored)
    if episodes and answers:
        values |= _episode_metrics([t for group in groups for t in group.trajectories])
    most = max((len(group.trajectories) for group in groups), default=0)
    for k in pass_ks(most) if most > 1 else ():
        enough = [e for e in scored if len(e) >= k]
        passed = [pass_at_k(len(e), sum(x >= 1 for x in e), k) for e in enough]
        if passed:
            values[f"pass_at_{k}"] = sum(passed) / len(passed)
    return values
