"""Estimates of accuracy from a set of answers, each with its 95 % interval. Imports no torch.

Notation: P problems, n answers sampled for each, c of them correct.

    accuracy     share of problems whose greedy answer is correct
    avg@n        mean over problems of c/n
    pass@k       chance that at least one of k answers is correct: 1 - C(n-c, k)/C(n, k), without bias
                 for any k ≤ n (Chen et al., arXiv 2107.03374 eq. 1)
    majority@n   share of problems whose most frequent answer is correct; a tie counts by its share

The interval is Wilson's if every problem counts 0 or 1, else a percentile bootstrap over problems (2,000
resamples, fixed seed). It covers the choice of problems of the same kind, and not further samples for these
problems.
"""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from areal_q.config import Sampling
from areal_q.decode_errors import in_words
from areal_q.errors import RecordError

_RESAMPLES = 2_000
_Z = 1.96


class ScoredReply(Struct, frozen=True, kw_only=True):
    """One answer of the model, scored."""

    response: str
    given: str | None
    """The answer in the response, in one spelling for equal answers; None if it gives none"""
    correct: bool
    reward: float
    tokens: int
    finished: bool
    """False if the response was cut off at max_tokens"""
    failed: bool = False
    """True if the reward function raised or took too long, so that nobody knows whether the answer is
    correct"""


class Answered(Struct, frozen=True, kw_only=True):
    """One problem with its answers, which is a line of the file of answers."""

    index: int
    """Its place among the problems that were asked, from 0, those that were left out among them"""
    prompt: str
    answer: str
    greedy: ScoredReply | None
    samples: list[ScoredReply]
    source: str = ""
    """The task of a mixture that the problem is of; "" where there is one task"""


class Estimate(Struct, frozen=True):
    """A value with its interval: Estimate("pass@8", 0.5, 0.31, 0.69) prints as "pass@8 0.500 [0.310,
    0.690]"."""

    name: str
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.name} {self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Evaluation(Struct, frozen=True, kw_only=True):
    """The content of the file beside the answers: which model was evaluated, how, and the results."""

    model: str
    task: str
    data: str | None
    preset: str | None
    format: str
    samples: int
    sampling: Sampling
    asked: int
    left_out: int = 0
    """Number of those that were not answered, since their prompts are too long for the model"""
    answered: int
    """Number of problems that were answered; fewer than the others if the evaluation was interrupted"""
    elapsed_s: float
    estimates: list[Estimate]


def read_evaluations(run_dir: Path) -> list[Evaluation]:
    """Returns the evaluations in `evals/` of a run, the oldest first. Raises RecordError, which names the file,
    for one that cannot be read."""
    found = []
    for path in sorted((run_dir / "evals").glob("*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=Evaluation))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RecordError(f"{path}: {in_words(error)}") from error
    return found


def estimates(answered: Sequence[Answered]) -> list[Estimate]:
    """Returns the accuracy if there are greedy answers, and the other estimates if there are samples. Answers
    that could not be scored are left out, and so are problems with too few others."""
    greedy = [float(a.greedy.correct) for a in answered if a.greedy and not a.greedy.failed]
    asked = max((len(a.samples) for a in answered), default=0)
    drawn = [s for s in ([r for r in a.samples if not r.failed] for a in answered) if s]
    counts = [(len(replies), sum(r.correct for r in replies)) for replies in drawn]
    values = {"accuracy": greedy, f"avg@{asked}": [c / n for n, c in counts]}
    if asked > 1:
        for k in pass_ks(asked):
            values[f"pass@{k}"] = [pass_at_k(n, c, k) for n, c in counts if n >= k]
        values[f"majority@{asked}"] = [majority(replies) for replies in drawn]
    return [
        Estimate(name, sum(each) / len(each), *interval(each))
        for name, each in values.items()
        if each
    ]


def estimates_by_source(answered: Sequence[Answered]) -> list[Estimate]:
    """Returns the estimates of all answers, and then those of each task of a mixture, by its name."""
    found = estimates(answered)
    for source in sorted({row.source for row in answered} - {""}):
        of_source = estimates([row for row in answered if row.source == source])
        found += [replace(estimate, name=f"{source} {estimate.name}") for estimate in of_source]
    return found


def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns the probability that k of n answers, drawn without replacement, include one of the c correct
    ones."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority(replies: Sequence[ScoredReply]) -> float:
    """Returns 1 if the most frequent answer is correct, else 0. If several are most frequent, returns the share
    of correct ones among them.

    All correct answers count as the same, and wrong ones by their spelling. A response without an answer has no
    vote.
    """
    voting = [r for r in replies if r.correct or r.given is not None]
    votes = Counter("correct" if r.correct else ("wrong", r.given) for r in voting)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    return float("correct" in winners) / len(winners)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the mean of `values`, one in [0, 1] for each problem."""
    if all(v in (0.0, 1.0) for v in values):
        return wilson(sum(values) / len(values), len(values))
    rng, array = np.random.default_rng(0), np.asarray(values)
    means = [array[rng.integers(0, len(array), len(array))].mean() for _ in range(_RESAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def wilson(p: float, n: int) -> tuple[float, float]:
    """Returns Wilson's score interval for a proportion `p` of `n` draws."""
    z = _Z
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_ks(n: int) -> list[int]:
    """Returns the k of pass@k for n samples: 2, 4, 8, … up to n, and n itself."""
    return sorted({2**i for i in range(1, n.bit_length()) if 2**i < n} | {n})
