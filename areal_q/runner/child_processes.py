"""The processes of a run as the launcher's children, and the signals that ask the launcher to stop.

Every child leads a session of its own, so that a Ctrl-C at the terminal reaches only the launcher, and a child
is killed together with the processes that it has started.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from areal_q.errors import ChildDied, UserError
from areal_q.system.processes import BEGAN, command_began, die_with_parent
from areal_q.system.stop_request import Repeats

DRAIN_S = 60.0
"""Seconds that a learner may take for its checkpoint after another process died"""
LEARNER_ENDS = (0, 128 + signal.SIGTERM, 128 + signal.SIGINT)
"""Exit codes of a learner that is done, or was told to stop and has written a checkpoint"""
LOG_LINES = 15
"""Lines of a dead child's log that its error shows"""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
PLAIN_LOGS = {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"}


@dataclass(frozen=True)
class Program:
    """A process to start, for example Program("rollout-0", module_command("rollout", …), threads=1)."""

    name: str
    argv: list[str]
    threads: int = 1
    beside: bool = False
    """Its end, however it comes, is no end of the run"""
    env: Mapping[str, str] = field(default_factory=dict)
    """What its environment has beside that of the launcher"""


class ChildProcesses:
    """The child processes by name; their output is in `logs/NAME.log`."""

    def __init__(self, logs: Path, scratch: Path) -> None:
        self._logs = logs
        # torch's optimizers create this directory on import, by default among the temporary files.
        self._defaults = {"TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor")}
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._asked: set[str] = set()
        """Names of the children that were sent SIGTERM"""
        self._beside: set[str] = set()
        """Names of those whose end is no end of the run"""
        self._told: set[str] = set()
        """Names of those of them whose end was told"""

    def start(self, program: Program) -> None:
        began = {BEGAN: str(command_began())}
        self._beside |= {program.name} if program.beside else set()
        threads = dict.fromkeys(THREAD_VARIABLES, str(program.threads))
        with (self._logs / f"{program.name}.log").open("ab") as log:
            self._children[program.name] = subprocess.Popen(
                program.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **self._defaults,
                    **os.environ,
                    **threads,
                    **PLAIN_LOGS,
                    **began,
                    **program.env,
                },
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )

    def ended(self) -> str | None:
        """Returns the name of a child that has ended, or None. Of several it is the one that the others depend
        on. Workers that ended because the run is finished do not count, since their learner is about to end
        too."""
        for name, child in self._children.items():
            code = child.poll()
            finished = code == 0 and name.startswith("rollout")
            if code is not None and not finished and name not in self._beside:
                return name
        return None

    def lost_beside(self) -> Iterator[str]:
        """Yields a sentence for each child beside the run that has ended with an error, once."""
        for name in sorted(self._beside - self._told):
            if code := self._children[name].poll():
                self._told.add(name)
                log = self._logs / f"{name}.log"
                *_, said = ["", *log.read_text("utf-8", errors="replace").splitlines()]
                yield f"{name} {_how(code)}, and the run goes on: {said or f'see {log}'}"

    def exit_code(self, name: str) -> int | None:
        """Returns the exit code of child `name`; None if it was not started, or has not ended."""
        return self._children[name].poll() if name in self._children else None

    def alive(self, names: list[str]) -> bool:
        return any(n in self._children and self._children[n].poll() is None for n in names)

    def send(self, names: list[str], number: signal.Signals) -> None:
        for name in names:
            if self.alive([name]):
                self._children[name].send_signal(number)
                self._asked.add(name)

    def check(self, name: str) -> None:
        """Raises UserError or ChildDied for a child `name` that has ended with an error. Returns for a learner
        that is done or was told to stop."""
        child = self._children.get(name)
        if child is None or (name == "learner" and child.returncode in LEARNER_ENDS):
            return
        if name in self._asked and child.returncode == -signal.SIGTERM:
            return  # it was stopped before it handles signals, and has nothing yet to lose
        log = self._logs / f"{name}.log"
        lines = log.read_text("utf-8", errors="replace").splitlines()[-LOG_LINES:]
        speaker, colon, complaint = lines[-1].partition(": ") if lines else ("", "", "")
        if child.returncode == 2 and colon and name.startswith(speaker):
            raise UserError(complaint)
        told = "\n".join(f"  {line}" for line in lines) or "  (nothing)"
        short = child.returncode == -signal.SIGKILL
        why = ", as the kernel does where memory is short" if short else ""
        raise ChildDied(f"{name} {_how(child.returncode)}{why}; the end of {log}:\n{told}")

    def kill(self) -> None:
        """Kills the remaining processes, children of children included."""
        for child in self._children.values():
            # As long as its group has members, its number is nobody's; a process of it now is not ours.
            if child.returncode is not None and Path(f"/proc/{child.pid}").exists():
                continue
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _how(returncode: int | None) -> str:
    if returncode is None:
        return f"did not stop within {DRAIN_S:.0f} s"
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"ended with exit code {returncode}"


class Interrupts:
    """Counts the signals to stop, so that no KeyboardInterrupt is raised at an arbitrary place. `first` is the
    number of the first signal, 0 before it. Outside the main thread there are none: Python lets only that one
    handle signals. Within SAME_S of another only a Ctrl-C counts, and under nohup SIGHUP never does."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.count = self.first = 0
        self._repeats = Repeats()

    def __enter__(self) -> "Interrupts":
        mine = threading.current_thread() is threading.main_thread()
        signals = self.SIGNALS if mine else ()
        self._before = {number: signal.signal(number, self._count) for number in signals}
        if self._before.get(signal.SIGHUP) is signal.SIG_IGN:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        if self._repeats.is_new() or number == signal.SIGINT:
            self.count += 1
            self.first = self.first or number
