"""Problems from the user's own Python file, which is trusted code.

    def problems():                          # for task.type = "python"
        return [("2+2=", "4"), …]            # (prompt or list of messages, answer), or tables of more columns

Its reward is beside it: areal_q/tasks/grading/own_reward.py. Imports no torch.
"""

from typing import Any

from areal_q.config.tasks import Python
from areal_q.errors import TaskError
from areal_q.plugins import load_function, user_code
from areal_q.tasks.base import Problem, columns_of
from areal_q.tasks.datasets.conversations import problem_of


def problems(cfg: Python) -> list[Problem]:
    """Returns what the file's `problems()` returns. Raises TaskError naming the file, and the index of an empty
    prompt."""
    function = load_function(cfg.path, "problems")
    with user_code(cfg.path, "problems(): "):
        rows = list(function(**cfg.settings))
    return [
        _problem(row, cfg, f"{cfg.path}: problems()[{index}]") for index, row in enumerate(rows)
    ]


def _problem(row: Any, cfg: Python, where: str) -> Problem:
    """Returns the problem of a pair, or of a table, whose other columns go to the reward."""
    match row:
        case (str() | list() as prompt, str(answer)):
            return problem_of(prompt, answer, cfg.template, where)
        case {"prompt": str() | list() as prompt, "answer": str(answer)}:
            return problem_of(prompt, answer, cfg.template, where, columns_of(row, where))
        case _:
            raise TaskError(
                f"{where}: must be a pair, or a table with `prompt` and `answer`: the prompt is a text or a "
                "list of messages, the answer a text"
            )
