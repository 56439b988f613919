"""A small Ray for tests: tasks are threads of this process, and every place is this machine."""

import threading
from collections.abc import Callable
from typing import Any

from ray import util  # noqa: F401

ASKED: list[dict[str, Any]] = []
"""What each task asked for, in turn."""


class Task(threading.Thread):
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        super().__init__(target=self._work, args=(function, *arguments), daemon=True)
        self.result: Any = None
        self.start()

    def _work(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.result = function(*arguments)


class Remote:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def options(self, **asked: Any) -> "Remote":
        ASKED.append(asked)
        return self

    def remote(self, *arguments: Any) -> Task:
        return Task(self._function, *arguments)


def remote(**options: Any) -> Callable[[Callable[..., Any]], Remote]:
    return Remote


def init() -> None: ...


def get(tasks: Any) -> Any:
    if not isinstance(tasks, list):
        return tasks
    for task in tasks:
        task.join()
    return [task.result for task in tasks]


def cancel(task: Task) -> None:
    assert not task.is_alive()
