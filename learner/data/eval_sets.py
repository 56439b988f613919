"""What an evaluation asks: the held-out problems, greedily, and each set of `eval.sets` in its own way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from areal_q.config import EvalConfig, Run, Sampling
from areal_q.evaluation.benchmarks import drawn_as
from areal_q.tasks import Problem, Task, Tokenizer, asked_of, columns_of_one, told_of
from areal_q.tasks.prompt_lengths import short

HELD_OUT = ""
"""The name of the set of held-out problems"""


@dataclass(frozen=True)
class EvaluationSet:
    """Problems that are asked together."""

    name: str
    problems: Sequence[Problem]
    every: int
    """Steps from one evaluation to the next"""
    sampling: Sampling
    samples: int
    """Responses to each problem"""
    first: int
    """Number of the ticket of the first problem; the next ones follow"""


def problems_of_sets(run: Run, tokenizer: Tokenizer, longest: int) -> dict[str, Sequence[Problem]]:
    """Returns the problems of each set that has its own, without those whose prompts have more than `longest`
    tokens. Raises TaskError or ConfigError for data that cannot be read."""
    found: dict[str, Sequence[Problem]] = {}
    for name, one in run.eval.sets.items():
        if one.task or one.path:
            of = run.of(name)
            with told_of(f"eval.sets.{name}.task"):
                asked = asked_of(of.task, columns_of_one(of))[: one.problems or run.eval.problems]
            named = [replace(problem, source=name) for problem in asked]
            found[name] = short(named, tokenizer, longest)
    return found


def evaluation_sets(
    cfg: EvalConfig, sampling: Sampling, task: Task, own: Mapping[str, Sequence[Problem]]
) -> list[EvaluationSet]:
    """Returns the held-out problems of `task` and the sets, `own` being the problems of those that have some.
    Raises ConfigError for a preset that there is not, or that needs longer responses."""
    greedy = replace(sampling, temperature=0.0)
    heldout = task.heldout[: cfg.problems]
    sets = [EvaluationSet(HELD_OUT, heldout, cfg.every, greedy, 1, 0)]
    for name, one in cfg.sets.items():
        problems = own.get(name, task.heldout[: one.problems or cfg.problems])
        samples, way = drawn_as(one, sampling, f"eval.sets.{name}.preset")
        every, first = one.every or cfg.every, sets[-1].first + len(sets[-1].problems)
        sets.append(EvaluationSet(name, problems, every, way, samples, first))
    return sets
