"""The order of problems, by the ticket's number alone: exact over a crash, a resumption, a replay.

| `learner.order.type` | problem of ticket n                                                        |
|----------------------|----------------------------------------------------------------------------|
| shuffled             | each epoch has all of them, in another order                               |
| python               | the index that the user's `order(number, problems, seed, …)` gives         |

Imports no torch.
"""

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from areal_q.config import OrderConfig, PythonOrder, Shuffled
from areal_q.errors import TaskError
from areal_q.plugins import load_function, place_of, user_code
from areal_q.tasks.base import Problem
from areal_q.tasks.shuffle import shuffled

_load = cache(lambda path, digest: load_function(path, "order"))
"""The function of these, loaded once for each digest of its files."""


def own_order(cfg: PythonOrder, number: int, problems: Sequence[Problem], seed: int) -> int:
    """Returns the index that the user's function gives. Raises TaskError, with the user's line, if it raises or
    gives something else."""
    function = _load(cfg.path, cfg.digest)
    with user_code(cfg.path):
        given = function(number, problems, seed, **cfg.settings)
    try:
        index = operator.index(given)
    except TypeError:
        index = -1
    if not 0 <= index < len(problems):
        raise TaskError(
            f"{place_of(function)}: gave {given!r} for ticket {number} where an index below "
            f"{len(problems)} is due"
        )
    return index


ORDERS: dict[type, Callable[[Any, int, Sequence[Problem], int], int]] = {
    Shuffled: lambda cfg, number, problems, seed: shuffled(number, len(problems), seed),
    PythonOrder: own_order,
}


def problem_of_ticket(
    cfg: OrderConfig, number: int, problems: Sequence[Problem], seed: int
) -> Problem:
    """Returns the problem of ticket `number` of a run with this seed. Raises TaskError as `own_order` does."""
    return problems[ORDERS[type(cfg)](cfg, number, problems, seed)]
