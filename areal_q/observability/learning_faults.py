"""Why a run does not learn: the faults that its metrics show.

The views and the learner's log warn by them while the run goes on, Prometheus exports them, and the summary,
the report and the doctor repeat them: all by this one judge. Causes come before their consequences.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from areal_q.config import PretrainedModel, Run, SmallModel
from areal_q.config.tasks import chat_of
from areal_q.observability.metrics_log import Record
from areal_q.observability.reward_signal import RewardFailures, reward_name

FaultName = Literal[
    "policy diverged",
    "rewards fail",
    "reward contradicts",
    "records set aside",
    "responses cut off",
    "reward collapsed",
    "reward is flat",
    "answers stay wrong",
]
FAULTS: tuple[FaultName, ...] = get_args(FaultName)
LASTING = 5
"""Number of steps in a row for which rewards must be flat, responses cut off, or answers wrong."""
AVERAGED = 10
"""Number of steps over which the reward is averaged."""
FLAT_SHARE = 0.9
"""Share of uniform groups, over LASTING steps, from which the rewards are flat."""
CUT_OFF_SHARE = 0.5
"""Share of responses cut off from which a step counts."""
AWAY_NATS = 0.5
"""Policy KL of one step, in nats per token, that is beyond any clip: the mean token's ratio is twice as far off
as the widest usual clip, 1.28, by its logarithm. Steps that learn move the policy by 1e-4 to 1e-2, a few by
0.3."""
JUMP = 100.0
"""Times the median gradient norm before that is a jump; after equal rewards it may, so only with a fall.
Chosen: the largest was 9.3 in the runs of tests/helpers/ruined_runs, 1.8 in the healthy one of them, and
1.5 in the 63 of bench/results/stability.csv."""
LOST_SHARE = 0.1
"""Share of the groups that were set aside, or of the responses without a score, from which that keeps a run
from learning. Chosen: below it the work that is lost is less than a tenth."""
SOLVED = 0.9
"""Held-out accuracy from which uniform groups are a success."""
RARELY = 0.05
"""Held-out accuracy that a whole run has never exceeded from which the model may be asked in another form than
it was taught; twice that is the mean reward from which it hits. Chosen: a trained model that was so asked
had 0 of 20 right in all of ten steps and a mean reward of 0.05, one that learns 0 of 20 and 0.25."""
FEW = 2
"""Responses that do not make a contradiction yet; records set aside that do not matter."""
OPINIONS = ("right", "right_refused", "wrong", "wrong_accepted")
_SIGMAS = 4.0
"""A fall counts if it exceeds so many standard errors."""


@dataclass(frozen=True)
class Fault:
    name: FaultName
    steps: int
    """The number of steps that it has lasted, or that show it."""
    says: str
    always: bool = False
    """True if it has lasted since the first step."""
    minor: bool = False
    """True if the run may learn all the same."""


@dataclass(frozen=True)
class _Level:
    """The mean reward up to a step, or the accuracy at it."""

    value: float
    error: float
    """Standard error of `value`."""
    least: float
    """A fall from here that is smaller does not count, however sure it is."""
    step: int

    def lost(self, now: "_Level") -> bool:
        fall = self.value - now.value
        return fall > self.least and fall > _SIGMAS * math.hypot(self.error, now.error)


class LearningJudge:
    """Takes a run's records one by one, in bounded memory, and says which faults it has.

    Example: after ten steps whose rewards are all 0, `faults()` is [Fault("reward is flat", 10, "all rewards
    were 0 for 10 steps: nothing to learn from", True)].
    """

    def __init__(self) -> None:
        self._steps = self._equal = self._flat = self._cut = self._away = self._failing = 0
        self._failures = RewardFailures()
        self._recent: deque[Record] = deque(maxlen=AVERAGED)
        self._uniform: deque[float] = deque(maxlen=LASTING)
        """Shares of uniform groups."""
        self._furthest: Record = {}
        """The step that moved the policy furthest, of those that moved it by AWAY_NATS."""
        self._jump = (0.0, 0, 0.0)
        """The gradient norm's largest one of JUMP times: times the median before, step, norm."""
        self._rewards: list[_Level] = []
        """At first, at the highest and at last."""
        self._evals: list[_Level] = []
        """The same of the accuracy."""
        self._judged = Counter[str]()
        """Responses that are right, or wrong, by a second opinion, and those the reward contradicts."""

    def add(self, record: Record) -> None:
        self._failures.add(record)
        if record["kind"] == "step":
            self._add_step(record)
        elif record["kind"] == "eval" and record.get("eval/accuracy") is not None:
            accuracy, asked = record["eval/accuracy"], record.get("eval/problems") or 1.0
            # Of so few that all or none are right, one could as well not be.
            error = math.sqrt(max(accuracy * (1 - accuracy), 1 / asked) / asked)
            _keep(self._evals, _Level(accuracy, error, accuracy / 2, record["step"]))

    def faults(self, over: bool = False) -> list[Fault]:
        """Returns the present faults. If the run is `over`, what lasted for all of fewer than LASTING steps is
        one as well."""
        lasting = min(LASTING, max(1, self._steps)) if over else LASTING
        found = [*self._causes(lasting), *self._collapse(), *self._flatness(lasting)]
        if over and all(fault.minor for fault in found):
            found += self._unsolved()
        return sorted(found, key=lambda fault: fault.minor)

    def _add_step(self, record: Record) -> None:
        self._steps += 1
        self._failing += bool(self._failures)
        norm = record.get("train/grad_norm") or 0.0
        before = [n for r in self._recent if (n := r.get("train/grad_norm"))]
        if len(before) >= LASTING and (times := norm / statistics.median(before)) >= JUMP:
            self._jump = max(self._jump, (times, record["step"], norm))
        self._recent.append(record)
        # By a teacher, or a reference policy.
        taught = any(record.get(key) is not None for key in ("teacher/kl", "reference/kl"))
        equal = record.get("reward/std") == 0 and not taught
        cut = (record.get("response/cut_off_share") or 0) >= CUT_OFF_SHARE
        self._equal = self._equal + 1 if equal else 0
        self._cut = self._cut + 1 if cut else 0
        uniform = 0.0 if taught else record.get("reward/uniform_share") or 0.0
        self._uniform.append(1.0 if equal else uniform)
        flat = statistics.fmean(self._uniform) >= FLAT_SHARE
        self._flat = max(self._flat + 1, len(self._uniform)) if flat else 0
        if (moved := abs(record.get("policy/kl") or 0)) >= AWAY_NATS:
            self._away += 1
            if not self._furthest or moved > abs(self._furthest["policy/kl"]):
                self._furthest = record
        self._judged.update({k: record.get(f"reward/{k}") or 0 for k in OPINIONS})
        if (now := self._reward_level()) is not None:
            _keep(self._rewards, now)

    def _reward_level(self) -> _Level | None:
        """Returns the mean over the last AVERAGED steps, whose differences from each other tell its error; None
        before there are so many. The error is doubled, as the best of a long run is that by chance, too.
        A fall by half of single rewards' spread is no small one."""
        means = [m for r in self._recent if (m := r.get("reward/mean")) is not None]
        if len(means) < AVERAGED:
            return None
        error = 2 * statistics.stdev(means) / math.sqrt(AVERAGED)
        least = self._mean("reward/std") / 2
        return _Level(statistics.fmean(means), error, least, self._recent[-1]["step"])

    def _runaway(self) -> Iterator[Fault]:
        if at := self._furthest:
            told = f"step {at['step']} moved the policy by {abs(at['policy/kl']):.3g} nats a token"
            # A ratio near 1 was taken before the step moved anything.
            if (ratio := at.get("policy/ratio_max") or 0.0) > math.exp(AWAY_NATS):
                told += f", the largest ratio was {ratio:.2g}"
            yield Fault("policy diverged", self._away, f"{told}: beyond any clip")
        elif self._jump[0] and [*self._collapse()]:
            times, step, norm = self._jump
            told = f"the gradient norm of step {step} was {norm:.3g}, {times:.0f} times the median before"
            yield Fault("policy diverged", 1, told)

    def _set_aside(self) -> Iterator[Fault]:
        newest = self._recent[-1] if self._recent else {}
        refused, groups = newest.get("buffer/quarantined") or 0, newest.get("buffer/groups") or 0
        if refused > max(FEW, LOST_SHARE * (groups + refused)):
            told = (
                f"{refused:.0f} records were set aside, beside {groups:.0f} groups that were taken"
            )
            yield Fault("records set aside", self._steps, told)

    def _causes(self, lasting: int) -> Iterator[Fault]:
        yield from self._runaway()
        if failures := self._failures:
            minor = failures.left_out < max(1, LOST_SHARE * failures.responses)
            yield Fault("rewards fail", max(1, self._failing), str(failures), minor=minor)
        for kind, against, said in (
            ("right", "right_refused", "wrong"),
            ("wrong", "wrong_accepted", "right"),
        ):
            of, count = self._judged[kind], self._judged[against]
            if count > max(of / 2, FEW):
                told = f"the reward calls {count:.0f} of {of:.0f} {kind} answers {said}"
                yield Fault("reward contradicts", self._steps, told, True)
                break
        yield from self._set_aside()
        if self._cut >= lasting and self._accuracy < CUT_OFF_SHARE:
            share = self._mean("response/cut_off_share")
            told = f"{share:.0%} of the responses were cut off"
            always = self._cut == self._steps
            yield Fault("responses cut off", self._cut, f"{told}, for {_plural(self._cut)}", always)

    def _collapse(self) -> Iterator[Fault]:
        for what, levels in (("held-out accuracy", self._evals), ("the reward", self._rewards)):
            if not levels:
                continue
            first, best, now = levels
            # What rose far and fell by less than half of it has still learnt.
            if best.lost(now) and best.value - now.value > (best.value - first.value) / 2:
                told = f"{what} fell from {best.value:.3g} at step {best.step} to {now.value:.3g}"
                told += f" at step {now.step}"
                yield Fault("reward collapsed", now.step - best.step, told)
                return

    def _flatness(self, lasting: int) -> Iterator[Fault]:
        always = self._flat == self._steps
        # Groups that were uniform from the first step on say nothing of what was solved.
        if self._flat < lasting or (self._accuracy >= SOLVED and not always):
            return
        mean = self._recent[-1].get("reward/mean")
        if self._equal >= lasting:
            what = "all rewards were equal" if mean is None else f"all rewards were {mean:g}"
            told = f"{what} for {_plural(self._equal)}: nothing to learn from"
        else:
            share, mean = statistics.fmean(self._uniform), self._mean("reward/mean")
            told = (
                f"{share:.0%} of the groups had equal rewards, {mean:.3g} on average, "
                f"for {_plural(self._flat)}: hardly anything to learn from"
            )
        yield Fault("reward is flat", self._flat, told, always)

    def _unsolved(self) -> Iterator[Fault]:
        """A short run has no other sign of a prompt that the model was not taught, if it hits by luck."""
        if not self._evals or self._steps < LASTING or (best := self._evals[1].value) > RARELY:
            return
        # Drawn answers may be right though the likeliest ones to a few held-out problems are not.
        means = [m for r in self._recent if (m := r.get("reward/mean")) is not None]
        if means and statistics.fmean(means) > 2 * RARELY:
            return
        told = f"held-out accuracy was never above {best:.3g}, for {_plural(self._steps)}"
        yield Fault("answers stay wrong", self._steps, told, True)

    @property
    def _accuracy(self) -> float:
        """The accuracy of the newest evaluation; 0 without one."""
        return self._evals[-1].value if self._evals else 0.0

    def _mean(self, key: str) -> float:
        """Returns the mean over the last LASTING steps of `key`; NaN without any value."""
        last = [*self._recent][-LASTING:]
        values = [r[key] for r in last if r.get(key) is not None]
        return statistics.fmean(values) if values else math.nan


def _keep(levels: list[_Level], now: _Level) -> None:
    """Keeps the first level, the highest and the newest of all that were given."""
    first, best = levels[:2] or (now, now)
    levels[:] = first, max(best, now, key=lambda level: level.value), now


def _plural(steps: int) -> str:
    return f"{steps:,} step{'s' * (steps != 1)}"


def learning_faults(records: Iterable[Record]) -> list[Fault]:
    """Returns the faults of a run that is over, or as if it were, after `records`."""
    judge = LearningJudge()
    for record in records:
        judge.add(record)
    return judge.faults(over=True)


def with_advice(faults: Sequence[Fault], run: Run) -> list[tuple[Fault, str]]:
    """Returns each fault with what to change, or where to look; all but the first and the minor ones may be its
    consequences."""
    return [
        (fault, advice(fault, run) if fault.minor or not i else f"mend first: {faults[0].name}")
        for i, fault in enumerate(faults)
    ]


def advice(fault: Fault, run: Run) -> str:
    """Returns what to change in the settings of `run`, or where to look, as if nothing else were wrong."""
    match fault.name:
        case "policy diverged" | "reward collapsed":
            lr = run.learner.optimizer.rate
            before = "from a checkpoint before it (areal-q run RUN --resume --from STEP)"
            return f"a smaller learner.optimizer.lr (now {lr:g}), {before}"
        case "rewards fail":
            mended = f"mend the reward {reward_name(run.task, run.reward)}"
            return (
                f"{mended}, or raise reward.timeout_s (now {run.reward.timeout_s:g}) if it is slow"
            )
        case "reward contradicts":
            return f"mend the reward {reward_name(run.task, run.reward)}"
        case "records set aside":
            return "mend what sends them: areal-q buffer peek RUN --what quarantine says why"
        case "responses cut off":
            longer = f"a larger rollout.sampling.max_tokens (now {run.rollout.sampling.max_tokens})"
            return f"{longer}; {_prompt_advice(run)}" if fault.always else longer
        case "answers stay wrong" | "reward is flat" if _is_untrained(run):
            return (
                "the built-in model starts from random weights: set warmstart.steps=400, "
                "or take a trained one by model.type=pretrained model.path=DIR"
            )
        case "answers stay wrong":
            return f"{_prompt_advice(run)}; else more steps, or easier problems"
        case "reward is flat":
            other = (
                "easier problems (harder ones, if these are solved), more responses a group "
                "(learner.group_size), a finer reward"
            )
            return f"{other}; {_prompt_advice(run)}" if fault.always else other


def _is_untrained(run: Run) -> bool:
    return isinstance(run.model, SmallModel) and not run.warmstart.steps


def _prompt_advice(run: Run) -> str:
    """Returns advice for a model that never did as it should: is it asked as it was taught?"""
    if isinstance(run.model, PretrainedModel) and not chat_of(run.task) and has_template(run.model):
        return "task.template=chat: the model has a chat template, and is asked without"
    return "is the model asked as it was taught? areal-q report shows a prompt's tokens"


def has_template(model: PretrainedModel) -> bool:
    """Returns True if the model's directory has a chat template."""
    path = Path(model.path)
    try:
        return (path / "chat_template.jinja").exists() or "chat_template" in (
            path / "tokenizer_config.json"
        ).read_text("utf-8")
    except OSError:
        return False
