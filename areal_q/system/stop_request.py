"""Stopping a service by SIGTERM or SIGINT, and the exit codes of services.

| exit code | meaning                                                                          |
|-----------|----------------------------------------------------------------------------------|
| 0         | The run is finished and need not be started again.                               |
| 143, 130  | SIGTERM or SIGINT stopped the service before that; if started again, it goes on. |
| 2         | A person has to correct what one line names; a restart would be in vain.         |
| 1         | The service crashed; if started again, it goes on from the newest checkpoint.    |

If a service ended with 0 after SIGTERM, a Kubernetes Job would count it as complete, and Docker under
`restart: on-failure` would not start it again after its own restart.
"""

import _thread
import asyncio
import math
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from areal_q.errors import UserError

RANK_0_S = 30.0
"""Seconds that another rank leaves rank 0 to say what is wrong"""
SAME_S = 1.0
"""Seconds within which a further signal is the same request by another way: to the process group and passed on
by the supervisor, from each thread of a parent that ends, or by shell and kernel for a closed terminal"""


class StopRequest(threading.Event):
    """An event that is set once a signal asks this process to stop."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        """Number of the first signal; 0 if there was none yet."""

    @property
    def exit_code(self) -> int:
        """The exit code by convention: 128 plus the signal's number; 0 without a signal."""
        return 128 + self.number if self.number else 0

    def receive(self, number: int) -> None:
        """Records signal `number` and sets the event, in a thread of its own: a handler that interrupts `wait`,
        or the handler of the signal before, would wait for ever for the lock that these hold. A process that
        ends with its parent gets a signal from each of the parent's threads."""
        if not self.number:
            self.number = number
            # It is raised in a process that is just ending, or may start no more threads.
            with suppress(RuntimeError):
                _thread.start_new_thread(self.set, ())

    def is_set(self) -> bool:
        """Returns True from the signal on: whoever waits learns of it as soon as the thread runs."""
        return self.number > 0 or super().is_set()

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(timeout) or self.is_set()

    def listen(self) -> None:
        """Installs handlers for both signals. Only the main thread may call this."""
        for number in self.SIGNALS:
            signal.signal(number, lambda received, frame: self.receive(received))

    @contextmanager
    def left_to_rank_0(self) -> Iterator[None]:
        """A context for a rank other than 0, whose UserError is most often rank 0's too: it is raised only if
        no signal comes within RANK_0_S, as one does once rank 0 has said it and ended."""
        try:
            yield
        except UserError:
            if self.wait(RANK_0_S):
                sys.exit(2)
            raise


class Repeats:
    """Tells a further request to stop from the same one, which often comes by another way as well."""

    def __init__(self) -> None:
        self._told_s = -math.inf

    def is_new(self) -> bool:
        """Returns True for a signal that comes now, unless one for which it did so is less than SAME_S old."""
        now_s = time.monotonic()
        if now_s < self._told_s + SAME_S:
            return False
        self._told_s = now_s
        return True


async def unbroken(closing: Coroutine[Any, Any, None]) -> None:
    """Awaits `closing` to its end, and only then raises what cancels this task meanwhile: a launcher tells a
    worker to end that is just about to. A second cancellation of the task breaks it off."""
    work = asyncio.ensure_future(closing)
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await work
        raise


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """A context in which a signal of StopRequest ends this process at once: for a wait that looks for none."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in StopRequest.SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
