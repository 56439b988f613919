"""Starts all processes of a run on this machine in order, watches them, and stops them in order.

    start   redis ─▶ learner ─▶ rollout-0 … rollout-N
    stop    learner (writes a checkpoint) ─▶ rollout workers (give tickets back) ─▶ redis

| what happens                     | what follows                                            | result    |
|----------------------------------|---------------------------------------------------------|-----------|
| the learner exits with 0         | the others stop                                         | 0         |
| a worker exits with 0            | nothing: the run is finished, the learner ends, too     |           |
| a child exits with 2             | the others stop; its last line is the error             | UserError |
| any other process ends by itself | the learner drains, the others stop                     | ChildDied |
| Ctrl-C                           | the learner drains, the others stop                     | 0         |
| SIGTERM or SIGHUP                | the same                                                | 143, 129  |
| a second one                     | everything is killed                                    | 130       |
| kill -9 of the launcher          | the kernel kills the children; the next launch tidies   |           |

A worker checks at its start whether it can do what the settings ask for, while the learner may still be at its
warm start.

Every child leads a session of its own, so that a Ctrl-C at the terminal reaches only the launcher, and a child
is killed together with the processes that it has started.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from areal_q.checks.settings import preflight, served_at, without_effect
from areal_q.config import Run
from areal_q.errors import BufferUnavailable, ChildDied, ConfigError, UserError
from areal_q.observability.run_summary import size
from areal_q.system.credentials import check_redis_url, redis_password
from areal_q.system.disk import DiskWatch
from areal_q.system.processes import die_with_parent, module_command
from areal_q.system.run_dir import claimed, given_up, has_checkpoint, try_lock

_POLL_S = 0.2
_START_S = 30.0
"""Seconds within which Redis must answer, also if it loads a large append-only file"""
DRAIN_S = 60.0
"""Seconds that a learner may take for its checkpoint after another process died"""
STOP_S = 10.0
"""Seconds from SIGTERM to SIGKILL for workers and Redis"""
LEARNER_ENDS = (0, 128 + signal.SIGTERM, 128 + signal.SIGINT)
"""Exit codes of a learner that is done, or was told to stop and has written a checkpoint"""
LOG_LINES = 15
FULL_BYTES = 32 << 20
"""Free bytes below which a full disk is the likeliest cause of a death"""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
PLAIN_LOGS = {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"}
MAX_SOCKET_BYTES = 100
SOCKETS_PREFIX = "areal-q-sockets-"


class View(Protocol):
    """What the user sees during the run; areal_q/cli/live_view.py has the implementations."""

    def start(self, run_dir: Path) -> None: ...
    def refresh(self) -> None: ...
    def note(self, text: str) -> None:
        """Prints a line that stays on the screen."""
        ...

    def stop(self) -> None: ...
    def finish(self) -> None:
        """Prints the summary and the curves, after all processes have ended."""
        ...


@dataclass(frozen=True)
class Program:
    """A process to start, for example Program("rollout-0", module_command("rollout", …), threads=1)."""

    name: str
    argv: list[str]
    threads: int = 1


@dataclass(frozen=True)
class Plan:
    """The processes to start. `redis` is None if REDIS_URL names a server that runs already."""

    redis: Program | None
    redis_url: str
    learner: Program
    workers: list[Program]


def plan(run: Run, run_dir: Path, sockets: Path, resume: bool) -> Plan:
    """Returns the processes that `run` asks for; `sockets` is a directory with a short path."""
    # The children inherit REDIS_URL, since every user of the machine can read the arguments of a process.
    redis, url, where = None, os.environ.get("REDIS_URL", ""), []
    if not url:
        socket = sockets / "redis"
        url = f"unix://{socket}"
        where = ["--redis", url]
        argv = ["--dir", str(run_dir / "redis"), "--socket", str(socket)]
        redis = Program("redis", module_command("buffer.redis_store.local_server", *argv))
    announce = run.broadcast.announce or f"ipc://{sockets / 'announce'}"
    fetch = run.broadcast.fetch or f"ipc://{sockets / 'fetch'}"
    learner = module_command("learner", *where, "--run-dir", str(run_dir))
    learner += ["--announce", announce, "--fetch", fetch, *(["--resume"] if resume else [])]
    worker = module_command("rollout", *where, "--run", run.name)
    # Workers wait without a limit, since the learner of this launch resumes a finished run.
    worker += ["--config", str(run_dir / "config.toml"), "--finished-wait", "inf"]
    names = [f"rollout-{i}" for i in range(run.rollout.workers)]
    return Plan(
        redis,
        url,
        Program("learner", learner, run.learner.threads),
        [
            Program(name, [*worker, "--id", name, *_serve(run, i)], run.rollout.threads)
            for i, name in enumerate(names)
        ],
    )


def _serve(run: Run, index: int) -> list[str]:
    address = served_at(run.rollout.serve, index)
    if address is None:
        return []
    host, port = address
    return ["--serve", f"{host}:{port}" if host else str(port)]


def launch(
    run: Run,
    resume: bool,
    view: View,
    plan: Callable[[Run, Path, Path, bool], Plan] = plan,
) -> int:
    """Runs until done, drained or killed by a second Ctrl-C. Returns the exit code of the table above.

    Raises UserError for an error that the user can correct, and ChildDied with the last lines of a dead child's
    log.
    """
    preflight(run)
    with (
        Interrupts() as interrupts,
        claimed(run, resume) as (run_dir, moved),
        _sockets(run_dir) as sockets,
    ):
        if moved:
            view.note(f"an earlier run was in {run_dir}: moved to {moved}")
        family = Family(run_dir / "logs", sockets)
        view.start(run_dir)
        for sentence in without_effect(run):
            view.note(f"warning: {sentence}")
        try:
            programs = plan(run, run_dir, sockets, resume)
            code = _run(programs, family, view, interrupts, DiskWatch(run_dir))
        except _Killed:
            view.note("killed")
            return 130
        except UserError:
            family.kill()
            if not resume and given_up(run_dir, moved) and moved:
                view.note(f"nothing was learnt, so the earlier run is in {run_dir} again")
            raise
        except ChildDied as error:
            hint = f"\nto go on: areal-q run {run_dir} --resume" if has_checkpoint(run_dir) else ""
            raise ChildDied(f"{error}{_disk_full(run_dir)}{hint}") from error
        finally:
            family.kill()
            view.stop()
    view.finish()
    return code


def _disk_full(run_dir: Path) -> str:
    """Returns a line on the full disk if there is no room left, since that ends processes in many ways; else
    ""."""
    free = shutil.disk_usage(run_dir).free
    if free >= FULL_BYTES:
        return ""
    return f"\nthe disk is full: {size(free)} free at {run_dir}; make room there first"


def _run(
    plan: Plan, family: "Family", view: View, interrupts: "Interrupts", disk: DiskWatch
) -> int:
    """Starts the processes, watches them, and stops them. Returns the exit code."""

    def wait(until: Callable[[], object], timeout_s: float = float("inf")) -> None:
        """Refreshes the view until `until` is true or `timeout_s` is over. Raises _Killed at a second
        interrupt."""
        deadline = time.monotonic() + timeout_s
        while not until() and time.monotonic() < deadline:
            if interrupts.count > 1:
                raise _Killed
            view.refresh()
            if complaint := disk.complaint():
                view.note(f"warning: {complaint}")
            time.sleep(_POLL_S)

    if plan.redis:
        family.start(plan.redis)
        wait(lambda: interrupts.count or family.ended() or _answers(plan.redis_url), _START_S)
    if not interrupts.count and not family.ended() and not _answers(plan.redis_url):
        raise _no_redis(plan)
    for program in [] if interrupts.count or family.ended() else [plan.learner, *plan.workers]:
        family.start(program)
    wait(lambda: interrupts.count or family.ended())

    # A service manager may have stopped all processes at once, and then none of their ends is a failure.
    first = None if interrupts.count else family.ended()
    if first is None:
        view.note(
            "draining: waits for the learner to end its step and write a checkpoint, then for workers to hand "
            "back their tickets; Ctrl-C again kills"
        )
    family.send(["learner"], signal.SIGTERM)
    wait(lambda: not family.alive(["learner"]), DRAIN_S if first else float("inf"))
    workers = [program.name for program in plan.workers]
    family.send(workers, signal.SIGTERM)
    wait(lambda: not family.alive(workers), STOP_S)
    if family.alive(["redis"]):
        rewrite = _Rewrite(plan.redis_url)
        wait(lambda: not family.alive(["redis"]) or rewrite.ended(), STOP_S)
    family.send(["redis"], signal.SIGTERM)
    wait(lambda: not family.alive(["redis"]), STOP_S)
    family.check(first or "learner")
    return _exit_code(family.exit_code("learner"), interrupts.first)


def _exit_code(learner: int | None, interrupt: int) -> int:
    """Returns 0 for a finished run, and for one that was interrupted with Ctrl-C. For another signal returns
    the exit code that its learner has too (areal_q/system/stop_request.py)."""
    if learner == 0 or interrupt == signal.SIGINT:
        return 0
    return 128 + interrupt if interrupt else learner or 0


class _Rewrite:
    """Makes Redis rewrite its append-only file. The state at the end of a run, which is all that a resumed run
    needs, is about a fiftieth of the file. If the rewrite fails, the old file stays complete."""

    def __init__(self, url: str) -> None:
        import redis

        self._client = redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5)
        with suppress(redis.RedisError):
            self._client.bgrewriteaof()

    def ended(self) -> bool:
        import redis

        try:
            state = dict(self._client.info("persistence"))  # pyright: ignore[reportArgumentType]
        except redis.RedisError:
            return True
        return not (state.get("aof_rewrite_in_progress") or state.get("aof_rewrite_scheduled"))


def _no_redis(plan: Plan) -> Exception:
    if plan.redis:
        return BufferUnavailable(f"Redis did not answer within {_START_S:.0f} s")
    return ConfigError("REDIS_URL: no Redis answers there")


def _answers(url: str) -> bool:
    import redis

    check_redis_url(url)
    try:
        options = {"socket_timeout": 5, "socket_connect_timeout": 5}
        with redis.Redis.from_url(url, password=redis_password(url), **options) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False
    except ValueError as error:
        raise ConfigError(f"REDIS_URL: {error}") from error


class Family:
    """The child processes by name; their output is in `logs/NAME.log`."""

    def __init__(self, logs: Path, scratch: Path) -> None:
        self._logs = logs
        # torch's optimizers create this directory on import, by default among the temporary files.
        self._defaults = {"TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor")}
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._asked: set[str] = set()
        """Names of the children that were sent SIGTERM"""

    def start(self, program: Program) -> None:
        threads = dict.fromkeys(THREAD_VARIABLES, str(program.threads))
        with (self._logs / f"{program.name}.log").open("ab") as log:
            self._children[program.name] = subprocess.Popen(
                program.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._defaults, **os.environ, **threads, **PLAIN_LOGS},
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )

    def ended(self) -> str | None:
        """Returns the name of a child that has ended, or None. Of several it is the one that the others depend
        on. Workers that ended because the run is finished do not count, since their learner is about to end
        too."""
        return next((name for name in self._children if self._has_ended(name)), None)

    def _has_ended(self, name: str) -> bool:
        code = self._children[name].poll()
        return code is not None and not (code == 0 and name.startswith("rollout"))

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
        raise ChildDied(f"{name} {_how(child.returncode)}; the end of {log}:\n{told}")

    def kill(self) -> None:
        """Kills the remaining processes, children of children included."""
        for child in self._children.values():
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
    number of the first signal, 0 before it."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.count = self.first = 0

    def __enter__(self) -> "Interrupts":
        self._before = {number: signal.signal(number, self._count) for number in self.SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or number


class _Killed(Exception):
    """Raised when the user asks to stop a second time."""


def sockets_of(run_dir: Path) -> Path:
    """Returns the run's private directory for sockets, whose path is short enough for their addresses. It
    exists while the run goes on.

    The path is the same at every launch, so that the endpoints that an earlier launch wrote into Redis are
    still right when the run is resumed.
    """
    digest = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:12]
    name = f"{SOCKETS_PREFIX}{os.getuid()}-{digest}"
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent / name / "announce")) > MAX_SOCKET_BYTES:
        parent = Path("/tmp")
    return parent / name


@contextmanager
def _sockets(run_dir: Path) -> Iterator[Path]:
    directory, lock = sockets_of(run_dir), None
    _tidy(directory.parent)
    while lock is None:  # another launcher may have removed the directory before it was locked
        try:
            directory.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError(f"TMPDIR: {error.strerror} - {directory}") from error
        lock = try_lock(directory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _tidy(parent: Path) -> None:
    """Removes the directories of launchers that were killed: those of this user that no process has locked."""
    for directory in parent.glob(f"{SOCKETS_PREFIX}*"):
        with suppress(OSError):
            if directory.stat().st_uid == os.getuid() and (lock := try_lock(directory)) is not None:
                shutil.rmtree(directory, ignore_errors=True)
                os.close(lock)
