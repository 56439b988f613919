"""The summary of a run, computed from its settings and metrics: for the last screen, the report and the log."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, TypeVar

from areal_q.config import Run
from areal_q.observability.learning_faults import Fault, learning_faults
from areal_q.observability.metrics_log import Record
from areal_q.system.disk import size

_T = TypeVar("_T")
SUMMARY_ROWS = (
    ("staleness", "{lag/mean:.2f} versions on average, {lag/max:.0f} at most"),
    (
        "responses",
        "{response/tokens_mean:.1f} tokens on average, {response/cut_off_share:.1%} cut off",
    ),
    ("mismatch KL", "{mismatch/kl_k3:.2e} nats per token (k3)"),
    ("other experts", "{routing/disagreement:.2%} of the routes, without replay"),
    (
        "clipped tokens",
        "{policy/clip_fraction_up:.2%} above, {policy/clip_fraction_down:.2%} below",
    ),
    ("rollout", "{rollout/tokens_per_s:,.0f} tokens/s, idle {rollout/idle_share:.1%}"),
    ("learner", "{learner/tokens_per_s:,.0f} tokens/s, idle {learner/idle_share:.1%}"),
    ("weights", "{weights/bytes:size} a version, {weights/publish_s:ms} of the learner"),
)
"""The rows of a summary and of the live view: label, and metrics with their formats (`shown`)."""
LIVE_ROWS = (
    ("reward", "{reward/mean:.3f} ± {reward/std:.3f}"),
    *SUMMARY_ROWS,
    ("entropy", "{policy/entropy:.3f} nats"),
    ("buffer", "{buffer/open_tickets:.0f} open, {buffer/dropped_stale:.0f} dropped"),
)
STEP_LINE = (
    "reward {reward/mean:.3f}  lag {lag/mean:.2f}/{lag/max:.0f}  KL (k3) {mismatch/kl_k3:.1e}  "
    "rollout {rollout/tokens_per_s:,.0f} tok/s  learner {learner/tokens_per_s:,.0f} tok/s"
)
"""A step as a part of a line of text."""
SUPERVISED_LINE = (
    "loss {train/loss:.4f}  lr {train/lr:.2e}  pass {train/epoch:.2f}  "
    "learner {learner/tokens_per_s:,.0f} tok/s"
)
"""The same of a supervised step."""
SUPERVISED_ROWS = (
    ("loss", "{train/loss:.4f} nats a token, gradient {train/grad_norm:.3g}"),
    ("passes", "{train/epoch:.2f}, learning rate {train/lr:.2e}"),
    ("learner", "{learner/tokens_per_s:,.0f} tokens/s"),
)
"""The rows of a supervised run's live view."""
ACCURACY = "{eval/accuracy:.3f}"
HELD_OUT = (("accuracy", ACCURACY), ("loss", "{eval/loss:.4f}"))
"""What an evaluation measured: label, and the metric with its format"""


@dataclass(frozen=True)
class ExampleAnswer:
    """One held-out problem, answered before and after. Example: ExampleAnswer("12+34=", "64", "46", "64")."""

    prompt: str
    expected: str
    before: str
    after: str
    correct_before: bool | None
    """True if `before` is right; None if it could not be scored."""
    correct_after: bool | None


@dataclass(frozen=True)
class Gap:
    """How far an engine's log-probs are off those that its weights give (learner/measure/fidelity.py).

    Example: Gap("vllm", 0.12, 0.03, None, 7.0)
    """

    engine: str
    gap_nats: float
    """Mean gap over a step's sampled tokens, in nats per token."""
    bound_nats: float
    """What a faithful engine keeps to: the setting, or what noise alone may reach."""
    noise_nats: float | None
    """Mean distance that float32's own rounding makes; None if it was not measured."""
    version: float | None
    """The newest weight version that was measured; None in records without it."""

    def __str__(self) -> str:
        at = "" if self.version is None else f" at version {self.version:.0f}"
        off = f"engine {self.engine}: log-probs {self.gap_nats:.2g} nats off its weights{at}"
        bound = f"bound {self.bound_nats:.2g}"
        if self.noise_nats is None:
            return f"{off} ({bound})"
        noise = f"{min(self.noise_nats, self.gap_nats):.2g} of it noise that no alignment removes"
        return f"{off}, {noise}" if self.faithful else f"{off}, only {noise} ({bound})"

    @property
    def share(self) -> float:
        """The gap as a share of its bound."""
        return self.gap_nats / self.bound_nats

    @property
    def faithful(self) -> bool:
        return self.gap_nats <= self.bound_nats


@dataclass(frozen=True)
class Summary:
    title: str
    rows: list[tuple[str, str]]
    """Begin with the faults."""
    answers: list[ExampleAnswer]
    faults: list[Fault]
    """Why the run did not learn; empty if it did."""
    reason: str
    """The end's reason: done, drained, or "" if no `end` record was written."""
    step: int
    """The last step."""


def unfaithful(records: Iterable[Record]) -> list[Gap]:
    """Returns, for each engine whose gap ever exceeded its bound, its worst step."""
    return [gap for gap in gaps(records) if not gap.faithful]


def gaps(records: Iterable[Record]) -> list[Gap]:
    """Returns, for each engine that was measured, the step in which its gap was the largest share of its
    bound."""
    worst: dict[str, Gap] = {}
    for record in records:
        for key, gap in record.items():
            if not key.startswith(
                "fidelity/engine_"
            ):  # most keys; matching the pattern with each is slow
                continue
            found = re.fullmatch(r"fidelity/engine_(.+)/gap_mean_nats", key)
            if found is None or gap is None:
                continue
            engine = found[1]
            bound, noise, version = (
                record.get(f"fidelity/engine_{engine}/{name}")
                for name in ("bound_nats", "noise_mean_nats", "version")
            )
            one = Gap(engine, gap, math.inf if bound is None else bound, noise, version)
            if engine not in worst or one.share > worst[engine].share:
                worst[engine] = one
    return list(worst.values())


def summarize(records: Sequence[Record], run: Run) -> Summary:
    """Returns the summary of a run's records: means over all steps, and the accuracies of the first and the
    last evaluation."""
    steps = [r for r in records if r["kind"] == "step"]
    evals = [r for r in records if r["kind"] == "eval"]
    ends = [r for r in records if r["kind"] == "end"]
    reason = str(ends[-1].get("reason", "")) if ends else ""
    last_step = max((r["step"] for r in records), default=0)
    elapsed = records[-1]["elapsed_s"] if records else 0.0
    title = f"{reason or 'stopped'} after {plural(last_step, 'step')} in {duration(elapsed)}"
    warnings = [
        ("fidelity", f"{'' if gap.faithful else '✗ '}{gap}")
        for gap in gaps(steps)
        if not gap.faithful or gap.noise_nats is not None
    ]
    faults = learning_faults(records)
    rows = [
        *((fault.name, f"✗ {fault.says}") for fault in faults),
        *_held_out_rows(of_heldout(evals), run),
        *_set_rows(evals),
    ]
    rows += [*_step_rows(steps), *warnings]
    return Summary(title, rows, _answers(of_heldout(evals)), faults, reason, last_step)


def set_accuracies(record: Record) -> dict[str, float | None]:
    """Returns the accuracies of an evaluation by the set, or the task of a mixture, that they are of."""
    found = ((re.fullmatch(r"eval/(.+)/accuracy", key), value) for key, value in record.items())
    return {match[1]: value for match, value in found if match}


def in_time(record: Record, key: str, run: Run) -> bool:
    """Returns True if an evaluation counts where the best value of `key` is looked for: unless it was answered
    so late that it measures another version, such as that of the next evaluation."""
    of_set, _, _ = key.rpartition("/")
    one = run.eval.sets.get(of_set.removeprefix("eval/"))
    every = (one and one.every) or run.eval.every
    late = record.get(f"{of_set}/late_by") or 0.0
    # Workers answer what is later first. The next version comes while they answer even without a lag.
    return late <= max(1, run.learner.max_lag) and late < every


def best_of(
    evals: Iterable[Record], key: str, run: Run, best: Callable[..., Any] = max
) -> Record | None:
    """Returns the evaluation with the best value of `key`, of those that count (`in_time`); None without."""
    timely = (r for r in evals if in_time(r, key, run))
    return best(timely, key=lambda r: r.get(key) or 0.0, default=None)


def of_heldout(evals: Iterable[Record]) -> list[Record]:
    """Returns the evaluations that asked held-out problems, and not sets alone."""
    of_them = {"eval/problems", "eval/accuracy", "eval/loss"}
    return [record for record in evals if of_them & record.keys()]


def _set_rows(evals: list[Record]) -> Iterable[tuple[str, str]]:
    """Yields the first and the last accuracy of each evaluation set, and its last pass@k with the largest k."""
    for name in dict.fromkeys(name for record in evals for name in set_accuracies(record)):
        key = f"eval/{name}/accuracy"
        its = [record for record in evals if key in record]
        first, last = (shown("{" + key + ":.3f}", record) for record in (its[0], its[-1]))
        passed = [k for k in its[-1] if k.startswith(f"eval/{name}/pass_at_")][-1:]
        told = [f"pass@{k.rpartition('_')[2]} {its[-1][k]:.3f}" for k in passed]
        asked = plural(round(its[-1][f"eval/{name}/problems"]), "problem")
        told.append(asked + unscored(its[-1], f"eval/{name}"))
        yield name, f"{first if len(its) == 1 else f'{first} → {last}'}   ({', '.join(told)})"


def is_supervised(step: Record) -> bool:
    """Returns True for the record of a step of `areal-q sft`, which no reward was given for."""
    return "train/epoch" in step


def step_line(step: Record) -> str:
    """Returns a step as a part of a line of text."""
    return shown(SUPERVISED_LINE if is_supervised(step) else STEP_LINE, step)


def held_out(record: Record) -> str:
    """Returns what an evaluation measured, such as "held-out accuracy 0.500, loss 1.2345"."""
    rows = figures(record, HELD_OUT) or [("accuracy", shown(ACCURACY, record))]
    told = ", ".join(f"{label} {value}" for label, value in rows)
    return f"held-out {told}{unscored(record, 'eval')}"


def unscored(record: Record, name: str) -> str:
    """Returns how many answers an evaluation's accuracy leaves out, such as ", 354 answers without a score"."""
    count = round(record.get(f"{name}/invalid") or 0)
    return f", {plural(count, 'answer')} without a score" if count else ""


def _held_out_rows(evals: list[Record], run: Run) -> Iterable[tuple[str, str]]:
    """Yields the change of the held-out loss and of the accuracy, and where either was best."""
    measured = any("eval/loss" in r for r in evals)
    for key, label, template, best in (
        ("eval/loss", "held-out loss", "{eval/loss:.4f}", min),
        ("eval/accuracy", "held-out accuracy", ACCURACY, max),
    ):
        known = [r for r in evals if r.get(key) is not None]
        if not known and (measured or key == "eval/loss" or not evals):
            continue
        known = known or evals  # no answer could be scored
        first, last = known[0], known[-1]
        asked = last.get("eval/problems")
        problems = "" if asked is None else f", {plural(round(asked), 'problem')}"
        problems += unscored(last, "eval")
        if len(known) == 1:
            yield label, f"{shown(template, last)}   (at {duration(last['elapsed_s'])}{problems})"
            continue
        times = f"from {duration(first['elapsed_s'])} to {duration(last['elapsed_s'])}{problems}"
        yield label, f"{shown(template, first)} → {shown(template, last)}   ({times})"
        if top := best_of(known, key, run, best):
            yield "best", f"{shown(template, top)} at step {top['step']}"


def _step_rows(steps: list[Record]) -> Iterable[tuple[str, str]]:
    if not steps:
        return
    tenth = max(1, len(steps) // 10)
    name, key = ("loss", "train/loss") if is_supervised(steps[-1]) else ("reward", "reward/mean")
    first, last = (
        shown(f"{{{key}:.3f}}", {key: mean(part, key)}) for part in (steps[:tenth], steps[-tenth:])
    )
    yield name, f"{first} → {last}   (first and last tenth of the steps)"
    keys = {key for _, template in SUMMARY_ROWS for key in _keys(template)}
    means = {key: mean(steps, key) for key in keys if any(key in r for r in steps)}
    if "lag/max" in means:
        means["lag/max"] = max(
            (x for r in steps if (x := r.get("lag/max")) is not None), default=None
        )
    yield from figures(means)


def figures(
    record: Record, rows: Sequence[tuple[str, str]] = SUMMARY_ROWS
) -> list[tuple[str, str]]:
    """Returns the `rows` filled in from `record`, without those whose metrics it lacks altogether."""
    return [
        (label, shown(template, record))
        for label, template in rows
        if any(key in record for key in _keys(template))
    ]


def shown(template: str, record: Record) -> str:
    """Returns `template` with each {METRIC:FORMAT} filled in. FORMAT is Python's, `size` for bytes or `ms` for
    seconds; a metric that is missing or was not finite is a dash."""
    return _Formatter().vformat(template, (), record)


class _Formatter(Formatter):
    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        return kwargs.get(key)

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "–"
        if format_spec == "size":
            return size(value)
        return f"{value * 1e3:.3g} ms" if format_spec == "ms" else format(value, format_spec)


def _keys(template: str) -> list[str]:
    return [key for _, key, _, _ in Formatter().parse(template) if key]


def _answers(evals: list[Record]) -> list[ExampleAnswer]:
    """Returns the problems of which both the first and the last evaluation recorded the answer."""
    if len(evals) < 2:
        return []
    before = {s["prompt"]: s for s in evals[0].get("samples", [])}
    answers = []
    for after in evals[-1].get("samples", []):
        if old := before.get(after["prompt"]):
            answers.append(
                ExampleAnswer(
                    prompt=after["prompt"],
                    expected=after["answer"],
                    before=old["response"],
                    after=after["response"],
                    correct_before=old["correct"],
                    correct_after=after["correct"],
                )
            )
    return answers


def mean(records: Iterable[Record], key: str) -> float | None:
    """Returns the mean of all finite values of `key`; None if there are none."""
    values = [r[key] for r in records if r.get(key) is not None]
    return sum(values) / len(values) if values else None


def evenly(rows: Sequence[_T], most: int) -> list[_T]:
    """Returns at most `most` of `rows`, evenly spaced from the first to the last."""
    count = min(most, len(rows))
    chosen = {round(i * (len(rows) - 1) / max(1, count - 1)) for i in range(count)}
    return [rows[i] for i in sorted(chosen)]


def duration(seconds: float) -> str:
    """Returns seconds as text. Example: 9.25 → "9.2 s", 192 → "3:12", 4000 → "1:06:40"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
