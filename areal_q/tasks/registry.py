"""The built-in tasks. To add one: a Struct in areal_q/config/tasks.py, a class here, a line below."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from areal_q.config import (
    Arithmetic,
    Calculator,
    Countdown,
    Mix,
    ModelConfig,
    ReasoningGym,
    SmallModel,
    TaskConfig,
    ToolCalculator,
    VerifiersTask,
    WarmStart,
)
from areal_q.config.tasks import chat_of
from areal_q.errors import ConfigError, TaskError
from areal_q.tasks.base import Columns, Problem, Task, Tokenizer
from areal_q.tasks.datasets.arithmetic import ArithmeticTask
from areal_q.tasks.datasets.calculator import CalculatorTask
from areal_q.tasks.datasets.countdown import CountdownTask
from areal_q.tasks.datasets.jsonl_rows import check_rows
from areal_q.tasks.datasets.procedural import ProceduralTask
from areal_q.tasks.datasets.row_tasks import READERS, FileTask, with_columns
from areal_q.tasks.datasets.tool_calculator import ToolCalculatorTask
from areal_q.tasks.encoding.tokenizer import CharTokenizer, load_tokenizer
from areal_q.tasks.environments.verifiers_rows import Taskset
from areal_q.tasks.lazy import Lazy
from areal_q.tasks.ordering.mixture import Mixture, parts_of

TASKS: dict[type, Callable[..., Task]] = {
    Arithmetic: ArithmeticTask,
    Calculator: CalculatorTask,
    Countdown: CountdownTask,
    ToolCalculator: ToolCalculatorTask,
    ReasoningGym: ProceduralTask,
    VerifiersTask: Taskset,
    **dict.fromkeys(READERS, FileTask),
}


def task_types() -> list[str]:
    """Returns the names that `task.type` can be."""
    return [str(cfg.__struct_config__.tag) for cfg in TASKS]


def build_task(cfg: TaskConfig, columns: Columns | Mapping[str, Columns] = ()) -> Task:
    """Returns the task with its problems, and these columns of their rows, in a mixture by the names of its
    tasks (rewards.py, `columns_for`). Raises TaskError naming file and line, ConfigError for an extra."""
    if isinstance(cfg, Mix):
        of = columns if isinstance(columns, Mapping) else dict.fromkeys(cfg.sources, columns)
        tasks = dict[str, Task]()
        for name, one in cfg.sources.items():
            with told_of(f"task.sources.{name}.task"):
                tasks[name] = build_task(one.task, of[name])
        return Mixture(tasks, {name: one.weight for name, one in cfg.sources.items()})
    return TASKS[type(cfg)](cfg, columns) if type(cfg) in READERS else TASKS[type(cfg)](cfg)


@contextmanager
def told_of(place: str) -> Iterator[None]:
    """Makes errors name the held-out problems of a task by its own place in the settings."""
    try:
        yield
    except TaskError as error:
        raise TaskError(str(error).replace("task.heldout", f"{place}.heldout")) from error


def all_problems(cfg: TaskConfig, columns: Columns = ()) -> list[Problem]:
    """Returns every row of the task's file, at least one, since a benchmark has nothing to train on. Raises as
    `build_task` does."""
    if type(cfg) not in READERS:
        raise ConfigError(f"task.type = {cfg.__struct_config__.tag!r} reads no such file")
    rows, path = READERS[type(cfg)](cfg), getattr(cfg, "path", "")
    check_rows(rows, path)
    return with_columns(rows, columns, path)


def asked_of(cfg: TaskConfig, columns: Columns = ()) -> Sequence[Problem]:
    """Returns the problems that an evaluation set of this task asks: all rows of its file, or what is held out
    where it reads none. Raises as `build_task` does."""
    return all_problems(cfg, columns) if type(cfg) in READERS else build_task(cfg).heldout


def check_characters(model: ModelConfig, warmstart: WarmStart, task: Task) -> None:
    """Raises TaskError for the first prompt that the built-in model's tokenizer cannot encode, and, with a warm
    start, for the first such answer. Of generated problems only one is checked, since they are all alike."""
    if not isinstance(model, SmallModel):
        return
    tokenizer, answers = CharTokenizer(), warmstart.steps > 0
    for problems in (*parts_of(task.train).values(), task.heldout):
        for problem in problems[:1] if isinstance(problems, Lazy) else problems:
            tokenizer.encode_prompt(problem.asked)
            if answers:
                tokenizer.encode(problem.answer)


def build_tokenizer(model: ModelConfig, task: TaskConfig) -> Tokenizer:
    """Returns the tokenizer of characters for the small model, or that in a pretrained model's directory, with
    the template for prompts that the task names."""
    if isinstance(model, SmallModel):
        return CharTokenizer()
    return load_tokenizer(model.path, chat_of(task))
