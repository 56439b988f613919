"""`python -m areal_q.observability.supervisor [--health PORT] COMMAND...` runs COMMAND as a container's
service.

| COMMAND                                    | what follows                                                  |
|--------------------------------------------|---------------------------------------------------------------|
| ends with 0: its run is finished           | this process ends with 0                                      |
| ends after SIGTERM or SIGINT, passed on    | this process ends with the same code                          |
| ends with 2 before it ran for WELL_S       | this process ends with 2: no restart corrects a setting       |
| ends with 2 later, such as for a full disk | it is started again after each of MENDING_S, then as above    |
| ends otherwise, killed or by a crash       | it is started again, after 1, 2, 4 … at most 60 s             |
| runs, but is unhealthy for STUCK_S,        | it is killed, then as above (areal_q/observability/health.py) |
| in which this process ran as well          |                                                               |

Docker restarts a container whatever its exit code, and does not restart one that is unhealthy; hence this
program. Exit codes are those of areal_q/system/stop_request.py.

The health checks are the second line behind a service's own watchdog (areal_q/system/watchdog.py), which leaves
the stacks of all threads and needs no container, but is a thread of the process that it watches: a process that
was stopped, waits in the kernel, or holds the interpreter's lock before its watchdog runs is seen from outside
alone.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from areal_q.observability import service_log
from areal_q.observability.health import complaint
from areal_q.observability.prometheus_exporter import CRASHES_VARIABLE
from areal_q.observability.run_summary import duration
from areal_q.system.disk import size
from areal_q.system.stop_request import Repeats, StopRequest

logger = logging.getLogger("supervisor")
WELL_S = 60.0
"""Seconds of running after which a command's settings are known to be usable."""
STUCK_S = 120.0
"""Seconds of failed health checks after which the command is killed."""
LOOK_EVERY_S = 10.0
"""Seconds from one health check to the next. Each counts for that long, however much later it came, since a
machine that stood still stopped the command as well."""
LATE_S = 20.0
"""Seconds after which a health check came late: this process itself did not run meanwhile, or hardly."""
MENDING_S = (10.0, 60.0, 300.0)
"""Seconds before each restart of a command that ended with 2 after it had run well: time for a person, or
another service, to remove the cause."""
LONGEST_WAIT_S = 60.0
"""The most seconds before the restart of a command that crashed."""
RECENT_S = 1800.0
"""Seconds for which a crash counts in what a command is told of earlier ones."""
CGROUP = Path("/sys/fs/cgroup")
IN_VAIN = (
    "exit code 2, see the line above: it has to be mended. Docker starts this service three times more within "
    "seconds; after that it has ended for good, and the others wait for it: Ctrl-C, mend, up"
)
"""What a container's log says of a command that no restart corrects."""


class Supervisor:
    """Runs `command` again and again, until it finishes, a signal comes, or a restart would be in vain."""

    def __init__(
        self, command: Sequence[str], health_port: int | None = None, mend: str = IN_VAIN
    ) -> None:
        """`mend` is logged where no restart corrects what is wrong."""
        self._command, self._port, self._mend = command, health_port, mend
        self._stop, self._repeats = StopRequest(), Repeats()
        self._child: subprocess.Popen[bytes] | None = None
        self._crashes = self._faults = 0
        self._crashed_at: list[float] = []

    def run(self) -> int:
        """Runs the command as the table above says, and returns the exit code of this process."""
        for number in StopRequest.SIGNALS:
            signal.signal(number, self._pass_on)
        while True:
            code, lasted_s = self._run_once()
            if code == 0 or self._stop.is_set():
                return code
            if lasted_s >= WELL_S:
                self._crashes = self._faults = 0
            wait_s = self._wait_before_again(code, lasted_s)
            if wait_s is None:
                logger.error(self._mend)
                return code
            logger.warning("%s; started again in %g s", self._how(code), wait_s)
            if self._stop.wait(wait_s):
                return self._stop.exit_code

    def _wait_before_again(self, code: int, lasted_s: float) -> float | None:
        """Returns the seconds to wait before the next start; None where there is none."""
        if code == 2:
            self._faults += lasted_s >= WELL_S or self._faults > 0
            return MENDING_S[self._faults - 1] if 0 < self._faults <= len(MENDING_S) else None
        self._crashes += 1
        self._crashed_at.append(time.monotonic())
        return min(2.0 ** (self._crashes - 1), LONGEST_WAIT_S)

    def _run_once(self) -> tuple[int, float]:
        """Runs the command once and returns (its exit code, or 128 plus the number of the signal that ended it;
        the seconds that it ran)."""
        began = time.monotonic()
        self._memory_before = MemoryEvents.read()
        recent = sum(began - at < RECENT_S for at in self._crashed_at)
        self._child = subprocess.Popen(
            self._command, env=os.environ | {CRASHES_VARIABLE: str(recent)}
        )
        if self._stop.is_set():  # between two starts
            self._child.send_signal(self._stop.number)
        code = self._watch(self._child)
        return code if code >= 0 else 128 - code, time.monotonic() - began

    def _watch(self, child: subprocess.Popen[bytes]) -> int:
        was_well, failed = False, 0
        while True:
            began = time.monotonic()
            try:
                return child.wait(LOOK_EVERY_S)
            except subprocess.TimeoutExpired:
                found = complaint(self._port, time.time()) if self._port else None
            if found is None:
                was_well, failed = True, 0
            elif was_well and time.monotonic() - began <= LATE_S:
                failed += 1
            if failed * LOOK_EVERY_S > STUCK_S and not self._stop.is_set():
                logger.error("%s for %s: killed", found, duration(failed * LOOK_EVERY_S))
                # The parent first, which might end with 0, as if it had finished, when a child of its own ends.
                for pid in [child.pid, *_descendants(child.pid)]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def _how(self, code: int) -> str:
        """Returns a text that says how the command ended, such as "killed by SIGKILL"."""
        if cause := MemoryEvents.read().cause_since(self._memory_before):
            return f"killed for want of memory: {cause}"
        return (
            f"killed by {signal.Signals(code - 128).name}" if code > 128 else f"ended with {code}"
        )

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._stop.receive(number)
        # Of three requests torchrun's last would end the ranks before their checkpoint.
        if self._child and self._repeats.is_new():
            self._child.send_signal(number)


def _descendants(pid: int) -> list[int]:
    """Returns the ids of all descendants of a process. Those of torchrun would outlive it, since they have
    sessions of their own."""
    found: list[str] = []
    with suppress(OSError):  # it has ended meanwhile
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, found) for each in [*_descendants(child), child]]


class MemoryEvents(NamedTuple):
    """What the kernel has counted of this container so far."""

    kills: int
    """Processes killed for want of memory, the container's or the machine's."""
    at_limit: int
    """Times that the container's own limit was reached and nothing could be freed; with version 1 of cgroups,
    times that it was reached."""

    @classmethod
    def read(cls) -> "MemoryEvents":
        events, control = CGROUP / "memory.events", CGROUP / "memory" / "memory.oom_control"
        if events.exists():
            counts = _counts(events)
            return cls(counts.get("oom_kill", 0), counts.get("oom", 0))
        if control.exists():
            reached = int((control.parent / "memory.failcnt").read_text())
            return cls(_counts(control).get("oom_kill", 0), reached)
        return cls(0, 0)

    def cause_since(self, before: "MemoryEvents") -> str:
        """Returns for want of whose memory the kernel has killed a process since `before`; "" if it has not."""
        if self.kills <= before.kills:
            return ""
        limit = _limit()
        if limit and self.at_limit > before.at_limit:
            return f"the container may have {size(limit)} (mem_limit; docker/.env)"
        below = f"; the container was below its own limit of {size(limit)}" if limit else ""
        return f"the machine had none left{below}"


def _counts(path: Path) -> dict[str, int]:
    return {name: int(n) for name, n in map(str.split, path.read_text().splitlines())}


def _limit() -> int | None:
    """Returns how many bytes this container may have; None without a limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = CGROUP / name
        if path.exists() and (text := path.read_text().strip()).isdecimal():
            return int(text) if int(text) < 1 << 60 else None
    return None


def main(arguments: list[str]) -> int:
    """Runs the service that `arguments` name and returns the exit code."""
    service_log.set_up("supervisor")
    port = None
    if arguments[:1] == ["--health"]:
        port, arguments = int(arguments[1]), arguments[2:]
    return Supervisor(arguments, port).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
