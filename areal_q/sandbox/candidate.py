"""A model's code in the process that it has to itself: it is run, and its functions are called as the tests
ask.

| asked                          | answered                                              |
|--------------------------------|-------------------------------------------------------|
| ["run", code]                  | ["gave", {name: value}]: all that the code defines    |
| ["call", object, args, kwargs] | ["gave", value, args]: the arguments as they are then |
| [operation, object, …]         | ["gave", value]; the operations are OPERATIONS        |
| any                            | ["raised", type, message]                             |

Before its answer it may ask ["call", function, args] of a function of the tests that it was handed, and is told
["gave", value] or ["raised", …].

Nothing that is said here is believed to be more than data: this is the process of the code, which can say what
it likes (trial.py).
"""

import operator
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from areal_q.sandbox.plain_data import (
    MOST_DIGITS,
    Channel,
    PeerGone,
    decoded,
    encoded,
    error_of,
    raised,
)

OPERATIONS: dict[str, Callable[..., Any]] = {
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "put": operator.setitem,
    "len": len,
    "iter": iter,
    "next": next,
    "str": str,
    "eq": operator.eq,
    "lt": operator.lt,
}


class Candidate:
    """The code's objects, by the numbers under which the tests know them."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._objects: list[Any] = []

    def serve(self) -> None:
        """Answers until the tests have gone."""
        sys.set_int_max_str_digits(MOST_DIGITS)
        while True:
            try:
                asked = self._channel.receive()
            except PeerGone:
                return
            self._reply(*asked)

    def _reply(self, operation: str, *given: Any) -> None:
        try:
            if operation == "run":
                reply = ["gave", self._run(*given)]
            else:
                values = [decoded(one, self._refer) for one in given]
                if operation == "call":
                    function, arguments, by_name = values
                    value = self._encoded(function(*arguments, **by_name))
                    reply = ["gave", value, self._encoded(arguments)]
                else:
                    reply = ["gave", self._encoded(OPERATIONS[operation](*values))]
            self._channel.send(reply)
        except BaseException as error:  # the code's own, SystemExit and MemoryError among them
            self._channel.send(raised(error))

    def _run(self, code: str) -> dict[str, Any]:
        # A module of its own, since dataclasses and the like look for it while the code runs.
        module = sys.modules["solution"] = ModuleType("solution")
        exec(compile(code, "solution", "exec"), module.__dict__)
        named = [(name, value) for name, value in vars(module).items() if name[:2] != "__"]
        return {name: self._encoded(value) for name, value in named}

    def _encoded(self, value: Any) -> Any:
        return encoded(value, self._number)

    def _number(self, value: Any) -> list[Any]:
        if isinstance(value, ModuleType):
            return ["module", value.__name__]
        self._objects.append(value)
        return ["object", len(self._objects) - 1]

    def _refer(self, kind: str, number: int) -> Any:
        """Returns what the tests refer to: an object of this side, or a function of theirs."""
        if kind == "object":
            return self._objects[number]
        return lambda *arguments: self._called(number, arguments)

    def _called(self, number: int, arguments: tuple[Any, ...]) -> Any:
        self._channel.send(["call", number, self._encoded([*arguments])])
        while (answer := self._channel.receive())[0] not in ("gave", "raised"):
            self._reply(*answer)  # the function calls one of ours
        if answer[0] == "raised":
            raise error_of(*answer[1:])
        return decoded(answer[1], self._refer)


def run_program(channel: Channel) -> None:
    """Runs the program that it is sent, which reads its input and prints; of an error it tells."""
    _, code = channel.receive()
    module = sys.modules["__main__"] = ModuleType("__main__")
    try:
        exec(compile(code, "solution", "exec"), module.__dict__)
        sys.stdout.flush()
    except SystemExit:
        sys.stdout.flush()
    except BaseException as error:  # the code's own
        channel.send(raised(error))
