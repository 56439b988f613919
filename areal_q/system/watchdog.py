"""Ends a service that is alive but no longer makes progress.

    main loop ──beat──▶ Progress ──age, limit──▶ metrics ──▶ areal_q/observability/health.py
                           │
                           └──▶ Watchdog, a thread: past the limit it logs one line and all stacks, exit code 75

| service | beats                                                                                          |
|---------|------------------------------------------------------------------------------------------------|
| learner | each record (a step, an evaluation, a warning), and each poll for groups, as waiting is no fault |
| worker  | each second in which tokens were drawn, or its engine had nothing to draw                        |

The limit is ten times the longest time between two beats so far, and at least LEAST_S. The first step, which
may have to compile and load, has FIRST_S. What precedes it, such as a warm start, is not watched.
"""

import faulthandler
import logging
import os
import sys
import threading
import time

logger = logging.getLogger(__name__)
LEAST_S = 1800.0
FIRST_S = 3600.0
TIMES_LONGEST = 10.0
STUCK = 75
"""Exit code of a process that its watchdog ended; if started again, it goes on."""


class Progress:
    """The times at which a service made progress. Any thread may use it."""

    def __init__(self, least_s: float = LEAST_S, first_s: float = FIRST_S) -> None:
        self._least_s, self._first_s = least_s, max(least_s, first_s)
        self._last_s: float | None = None
        self._longest_s = 0.0
        self._first_done = False

    def beat(self) -> None:
        """Records that the work goes on."""
        now_s = time.monotonic()
        if self._last_s is not None:
            self._longest_s = max(self._longest_s, now_s - self._last_s)
        self._last_s = now_s

    def step(self) -> None:
        """Records a step; from the first one on, the limit is that of ordinary work."""
        if not self._first_done:
            self._first_done = True
            self._last_s = None  # the first step's time says nothing about the others
        self.beat()

    def rest(self) -> None:
        """Suspends watching until the next beat, such as for the export at the end."""
        self._last_s = None

    def forgive(self, seconds: float) -> None:
        """Does not count seconds in which the whole process was stopped."""
        if self._last_s is not None:
            self._last_s += seconds

    @property
    def age_s(self) -> float:
        """Seconds since the last beat; 0 before the first."""
        return 0.0 if self._last_s is None else time.monotonic() - self._last_s

    @property
    def limit_s(self) -> float:
        """Seconds after which the service counts as stuck."""
        if not self._first_done:
            return self._first_s
        return max(self._least_s, TIMES_LONGEST * self._longest_s)


def watched(least_s: float) -> Progress:
    """Returns the Progress of this process. A Watchdog ends it by that, if `least_s` seconds, the least limit,
    are not 0."""
    progress = Progress(least_s or LEAST_S)
    if least_s:
        Watchdog(progress).start()
    return progress


class Watchdog(threading.Thread):
    """Ends this process with exit code STUCK once the last beat of `progress` is older than its limit, after
    one line of log and the stacks of all threads on stderr.

    If code that holds the interpreter's lock keeps this thread from running, `faulthandler`, which needs no
    lock, writes the stacks and ends the process with 1."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._progress = progress

    def run(self) -> None:
        never = threading.Event()
        while True:
            tick_s = min(5.0, self._progress.limit_s / 10)
            began_s = time.monotonic()
            faulthandler.dump_traceback_later(self._progress.limit_s + tick_s, exit=True)
            never.wait(tick_s)
            paused_s = time.monotonic() - began_s - tick_s
            if paused_s > 10 * tick_s:  # stopped by a signal, or with the machine
                self._progress.forgive(paused_s)
            age_s, limit_s = self._progress.age_s, self._progress.limit_s
            if age_s > limit_s:
                self._end(age_s, limit_s)

    def _end(self, age_s: float, limit_s: float) -> None:
        logger.error(
            "stuck: no progress for %.0f s, more than %.0f s; the stacks of all threads follow, exit code %d",
            age_s, limit_s, STUCK,
        )  # fmt: skip
        sys.stderr.flush()
        faulthandler.dump_traceback(all_threads=True)
        os._exit(STUCK)
