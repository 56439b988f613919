"""The tests, in a process that the code which they test cannot reach, and whose word is the verdict.

    run_python ◀── verdict ── tests (this process) ── call, data ──▶ the code's process (candidate.py)
                                                   ◀── data ──────

The code's process is forked before this one knows anything of code or tests, so that there is nothing in its
memory to be found. Then it is confined (confine.py), and so is this one before it runs tests. What the code
answers is data, which is compared here; what a program prints, by the caller.
"""

import builtins
import importlib
import linecache
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from areal_q.sandbox.candidate import Candidate, run_program
from areal_q.sandbox.confine import NotIsolated, confine
from areal_q.sandbox.plain_data import (
    MOST_DIGITS,
    Channel,
    PeerGone,
    decoded,
    encoded,
    error_of,
    raised,
)
from areal_q.system.processes import end_with_parent

MOST_PRINTED = 1 << 20
"""Bytes that a program may print"""
_TESTS = "the tests"


def main(kind: str, memory_mib: str, timeout_s: str, site_packages: str) -> None:
    """Runs one trial of the `kind` "tests", or "program" for each request, for the socket that is stdin."""
    caller = Channel(socket.socket(fileno=os.dup(0)))
    seconds = float(timeout_s)
    limits = (int(memory_mib), int(seconds) + 1, site_packages == "1")

    def late(*_: object) -> None:
        caller.send(["timeout", f"took longer than {seconds:g} s"])
        os._exit(0)  # and the supervisor kills the code

    signal.signal(signal.SIGALRM, late)
    nothing = os.open(os.devnull, os.O_RDWR)
    for place in range(3):
        os.dup2(nothing, place)
    left_s = seconds
    while True:
        code = _Forked(kind, limits)
        if code.refused:
            caller.send(["refused", code.refused])
            return
        caller.send(["ready"])
        try:
            asked = caller.receive()
        except PeerGone:
            return
        signal.setitimer(signal.ITIMER_REAL, left_s)
        if kind == "tests":
            confine(*limits)
            caller.send(Trial(code).verdict(*asked))
            return
        verdict = code.printed(*asked)
        left_s, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        caller.send(verdict)


class _Forked:
    """The code's process."""

    def __init__(self, kind: str, limits: tuple[int, int, bool]) -> None:
        ours, theirs = socket.socketpair()
        self._input = os.memfd_create("input")
        self._output, output = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            ours.close()
            _become_code(kind, limits, theirs, self._input, output)
        theirs.close()
        os.close(output)
        self.channel = Channel(ours)
        try:
            said, *why = self.channel.receive()
        except PeerGone:
            said, why = "raised", [self.end()]
        self.refused = "" if said == "ready" else ": ".join(why)

    def printed(self, code: str, given: str) -> list[str]:
        """Returns what the program prints for an input, or what became of it."""
        data = given.encode("utf-8", "surrogatepass")
        os.truncate(self._input, 0)
        os.pwrite(self._input, data, 0)
        self.channel.send(["program", code])
        found = b""
        while part := os.read(self._output, 1 << 16):
            found += part
            if len(found) > MOST_PRINTED:
                return ["output", f"printed more than {MOST_PRINTED} bytes"]
        try:
            _, name, message = self.channel.receive()
            return _error(error_of(name, message), "")
        except (ValueError, TypeError, RecursionError) as error:
            return _error(error, "its process said ")
        except PeerGone:
            end = self.end()
        finally:
            os.close(self._input)
            os.close(self._output)
        return ["ended", end] if end else ["printed", found.decode(errors="replace")]

    def end(self) -> str:
        """Waits for the process, and returns how it ended; "" if it ended by itself."""
        _, status = os.waitpid(self._process, 0)
        if os.WIFSIGNALED(status):
            return f"its process was ended by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"exit status {code}" if (code := os.WEXITSTATUS(status)) else ""


def _become_code(
    kind: str, limits: tuple[int, int, bool], channel: socket.socket, given: int, output: int
) -> None:
    """Makes this process the code's, which never returns from here."""
    try:
        end_with_parent()  # also where the supervisor is killed, and with it the tests
        if kind == "program":
            os.dup2(given, 0)
            os.dup2(output, 1)
        os.dup2(channel.detach(), 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        said = Channel(socket.socket(fileno=3))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        try:
            confine(*limits)
        except (NotIsolated, OSError) as error:
            said.send(["refused", str(error)])
            os._exit(1)
        said.send(["ready"])
        if kind == "program":
            run_program(said)
        else:
            Candidate(said).serve()
    finally:
        os._exit(0)


class Trial:
    """The tests' side of a conversation with the code."""

    def __init__(self, code: _Forked) -> None:
        self._code, self._channel = code, code.channel
        self._functions: list[Callable[..., Any]] = []
        self._asked = 0

    def verdict(self, code: str, tests: str, names: list[str]) -> list[str]:
        """Returns "passed" only when all of `tests` has run. Nothing else that anyone says here leads to
        that."""
        sys.set_int_max_str_digits(MOST_DIGITS)
        try:
            compiled = compile(tests, _TESTS, "exec")
        except (SyntaxError, ValueError) as error:
            return ["tests", f"the tests cannot be compiled: {error}"]
        linecache.cache[_TESTS] = (len(tests), None, tests.splitlines(True), _TESTS)
        try:
            scope = self._scope(self._said(["run", code])[0], names)
            self._asked = 0
            exec(compiled, scope | {"__name__": "tests", "__builtins__": builtins})
        except PeerGone:
            return ["ended", self._code.end() or "it ended its process"]
        except BaseException as error:  # of the code or the tests, which may raise anything
            return _error(error, _line(error))
        if not self._asked and not {*compiled.co_names} & {*scope}:
            return ["tests", "the tests ask nothing of the code"]
        return ["passed", ""]

    def _scope(self, defined: dict[str, Any], names: list[str]) -> dict[str, Any]:
        """Returns what the code defines, as the tests see it. Python's own functions stay what they are, and so
        do its modules, under their own names. None of `__builtins__` and its
        like is the code's."""
        taken = {*dir(builtins)}
        scope: dict[str, Any] = {}
        for name, data in defined.items():
            if isinstance(data, list) and data[0] == "module":
                if data[1] == name and name in sys.stdlib_module_names:
                    scope[name] = importlib.import_module(name)
            elif not name.startswith("__") and (name in names or name not in taken):
                scope[name] = decoded(data, self._refer)
        return scope

    def ask(self, operation: str, *given: Any) -> Any:
        """Returns what the code's process answers, or raises what it raised. Lists, dicts and sets that are
        handed to a call are changed as the code changed them."""
        self._asked += 1
        said = self._said([operation, *(encoded(value, self._number) for value in given)])
        if operation == "call":
            for before, after in zip(given[1], decoded(said[1], self._refer), strict=True):
                kind = type(before)
                if kind in (list, dict, set) and kind is type(after) and before != after:
                    before.clear()
                    (before.extend if kind is list else before.update)(after)
        return decoded(said[0], self._refer)

    def _said(self, asked: list[Any]) -> list[Any]:
        self._channel.send(asked)
        while (said := self._channel.receive())[0] == "call":
            self._channel.send(self._called(*said[1:]))
        if said[0] == "raised":
            raise error_of(*said[1:])
        return said[1:]

    def _called(self, number: int, arguments: Any) -> list[Any]:
        """Calls a function of the tests that the code was handed."""
        try:
            value = self._functions[number](*decoded(arguments, self._refer))
            return ["gave", encoded(value, self._number)]
        except Exception as error:  # the tests' own
            return raised(error)

    def _refer(self, kind: str, number: int) -> Any:
        if kind != "object":
            raise TypeError(f"the code gave a {kind}")
        return RemoteObject(self.ask, number)

    def _number(self, value: Any) -> list[Any]:
        if isinstance(value, RemoteObject):
            return ["object", value._number]
        if not callable(value):
            raise TypeError(
                f"a test cannot hand over {type(value).__name__}: only data and functions"
            )
        self._functions.append(value)
        return ["function", len(self._functions) - 1]


class RemoteObject:
    """A function, a class or an object of the code's. It equals no data, whatever it says itself; only two such
    objects are compared by the code's own `__eq__` and `__lt__`."""

    def __init__(self, ask: Callable[..., Any], number: int) -> None:
        self.__dict__.update(_ask=ask, _number=number)

    def __call__(self, *arguments: Any, **by_name: Any) -> Any:
        return self._ask("call", self, [*arguments], by_name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("put", self, key, value)

    def __len__(self) -> int:
        return self._ask("len", self)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Any:
        return self._ask("iter", self)

    def __next__(self) -> Any:
        return self._ask("next", self)

    def __str__(self) -> str:
        return self._ask("str", self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteObject) and self._ask("eq", self, other) is True

    def __lt__(self, other: object) -> bool:
        return isinstance(other, RemoteObject) and self._ask("lt", self, other) is True

    def __hash__(self) -> int:
        return hash(self._number)


def _error(error: BaseException, where: str) -> list[str]:
    kind = {AssertionError: "failed", MemoryError: "memory"}.get(type(error), "error")
    return [kind, f"{where}{type(error).__name__}: {error}"[:1000]]


def _line(error: BaseException) -> str:
    """Returns the line of the tests at which they ended, before what is said of it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == _TESTS]
    return f"line {frames[-1].lineno} of the tests, {frames[-1].line}: " if frames else ""
