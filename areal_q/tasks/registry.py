"""The built-in tasks. To add one: a Struct in areal_q/config/tasks.py, a class here, a line below."""

from collections.abc import Callable
from typing import Any

from areal_q.config import Arithmetic, Calculator, Gsm8k, Run, SmallModel, TaskConfig
from areal_q.tasks import arithmetic, calculator, gsm8k
from areal_q.tasks.base import Problem, Score, Task, Tokenizer
from areal_q.tasks.tokenizers import CharTokenizer, load_tokenizer

ScoreFn = Callable[[Problem, str], Score]

TASKS: dict[type, Callable[[Any], Task]] = {
    Arithmetic: arithmetic.ArithmeticTask,
    Calculator: calculator.CalculatorTask,
    Gsm8k: gsm8k.Gsm8kTask,
}

SCORES: dict[type, ScoreFn] = {
    Arithmetic: arithmetic.score,
    Calculator: calculator.score,
    Gsm8k: gsm8k.score,
}


def build_task(cfg: TaskConfig) -> Task:
    """The task with its problems. Raises TaskError naming file and line, ConfigError for an extra."""
    return TASKS[type(cfg)](cfg)


def build_score(cfg: TaskConfig) -> ScoreFn:
    """The task's reward alone: a worker needs no data file."""
    return SCORES[type(cfg)]


def build_tokenizer(run: Run) -> Tokenizer:
    """Characters for the small model; whatever a pretrained model's directory holds."""
    if isinstance(run.model, SmallModel):
        return CharTokenizer()
    template = run.task.template if isinstance(run.task, Gsm8k) else "plain"
    return load_tokenizer(run.model.path, template)
