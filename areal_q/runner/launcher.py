"""Starts all processes of a run on this machine in order, watches them, and stops them in order.

    start   redis ─▶ learner ─▶ rollout-0 … rollout-N, trackers
    stop    learner (writes a checkpoint) ─▶ rollout workers (give tickets back) ─▶ redis ─▶ trackers

| what happens                     | what follows                                            | result    |
|----------------------------------|---------------------------------------------------------|-----------|
| the learner exits with 0         | the others stop                                         | 0         |
| a worker exits with 0            | nothing: the run is finished, the learner ends, too     |           |
| a child exits with 2             | the others stop; its last line is the error             | UserError |
| a tracker ends                   | a line says so, and the run goes on                     |           |
| any other process ends by itself | the learner drains, the others stop                     | ChildDied |
| Ctrl-C                           | the learner drains, the others stop                     | 0         |
| SIGTERM or SIGHUP                | the same                                                | 143, 129  |
| Ctrl-C again, or another later   | everything is killed                                    | 130       |
| kill -9 of the launcher          | the kernel kills the children; the next launch tidies   |           |

Later is a second and more: a terminal that is closed sends SIGHUP twice. Under nohup SIGHUP does nothing.
A pretrained model is read before anything is started (areal_q/checks/__main__.py), without its weights.
A worker checks at its start whether it can do what the settings ask for, while the learner may still be at its
warm start.
"""

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import msgspec

from areal_q.checks.automatic import settled, why_dtype, why_smoothing
from areal_q.checks.disk_use import disk_use
from areal_q.checks.hub import fetched
from areal_q.checks.settings import preflight, without_effect
from areal_q.config import PretrainedModel, PythonEnvironment, Run, dump_toml
from areal_q.errors import BufferUnavailable, ChildDied, ConfigError, UserError
from areal_q.observability.run_end import note_failure
from areal_q.observability.trackers.described import keep_commit
from areal_q.runner.child_processes import DRAIN_S, ChildProcesses, Interrupts
from areal_q.runner.programs import TRACKER, Plan, plan
from areal_q.system.credentials import check_redis_url, redis_password
from areal_q.system.disk import DiskWatch, size
from areal_q.system.processes import module_command
from areal_q.system.run_dir import claimed, given_up, has_checkpoint, path_of
from areal_q.system.socket_dir import socket_dir
from areal_q.tasks import has_own_reward

KILLED = 130
"""Exit code of a run that a second Ctrl-C ended"""
_POLL_S = 0.2
_START_S = 30.0
"""Seconds within which Redis must answer, also if it loads a large append-only file"""
STOP_S = 10.0
"""Seconds from SIGTERM to SIGKILL for workers and Redis"""
TRACKERS_STOP_S = 60.0
"""Seconds that trackers may take for what is left, and for the report"""
FULL_BYTES = 32 << 20
"""Free bytes below which a full disk is the likeliest cause of a death"""


class View(Protocol):
    """What the user sees during the run; areal_q/runner/live_view.py has the implementations."""

    def start(self, run_dir: Path) -> None: ...
    def refresh(self) -> None: ...
    def note(self, text: str) -> None:
        """Prints a line that stays on the screen."""
        ...

    def stop(self) -> None: ...
    def finish(self) -> None:
        """Prints the summary, after all processes have ended."""
        ...


class QuietView:
    """A View that shows nothing but, by `say`, what is noted."""

    def __init__(self, say: Callable[[str], object] = lambda text: None) -> None:
        self._say = say

    def start(self, run_dir: Path) -> None: ...
    def refresh(self) -> None: ...
    def note(self, text: str) -> None:
        self._say(text)

    def stop(self) -> None: ...
    def finish(self) -> None: ...


def launch(
    run: Run,
    resume: bool,
    view_of: Callable[[Run], View],
    plan: Callable[[Run, Path, Path, bool], Plan] = plan,
    step: int | None = None,
) -> int:
    """Runs until done, drained or killed by a second Ctrl-C; if resumed, from the checkpoint of `step`, or the
    newest. Returns the exit code of the table above. `view_of` gets the settings without those of
    `areal-q sft`, which a run of RL may have beside its own.

    Raises UserError for an error that the user can correct, and ChildDied with the last lines of a dead child's
    log.
    """
    if run.sft and resume:
        directory = path_of(run)
        raise ConfigError(f"{directory}: a supervised run; go on: areal-q sft {directory} --resume")
    run = msgspec.structs.replace(run, sft=None)  # of a command of its own
    view = view_of(run)
    run = fetched(run)
    preflight(run)
    run = settled(run)
    _read_model(run, view)
    with (
        Interrupts() as interrupts,
        claimed(run, resume, step) as (run_dir, moved),
        socket_dir(run_dir) as sockets,
    ):
        if moved:
            view.note(f"an earlier run was in {run_dir}: moved to {moved}")
        children = ChildProcesses(run_dir / "logs", sockets)
        keep_commit(run_dir)
        view.start(run_dir)
        for sentence in _expected(run, resume):
            view.note(sentence)
        try:
            with _failure_noted(run_dir, moved, resume, children, view):
                programs = plan(run, run_dir, sockets, resume)
                code = _run(programs, children, view, interrupts, DiskWatch(run_dir))
        except _Killed:
            view.note("killed")
            return KILLED
        finally:
            children.kill()
            view.stop()
    view.finish()
    return code


def _expected(run: Run, resume: bool) -> Iterator[str]:
    """Yields what the settings come to on this machine, and what is wrong with that."""
    yield why_dtype(run)
    if smoothing := why_smoothing(run):
        yield smoothing
    use = disk_use(run)
    yield f"{'' if resume or use.fits else 'warning: '}disk: {use}"
    for sentence in without_effect(run):
        yield f"warning: {sentence}"


@contextmanager
def _failure_noted(
    run_dir: Path, moved: Path | None, resume: bool, children: ChildProcesses, view: View
) -> Iterator[None]:
    """Records the error that ends the run, which says then how to go on; or undoes a start that failed before
    anything was learnt."""
    try:
        yield
    except UserError as error:
        children.kill()
        if resume or not given_up(run_dir, moved):
            note_failure(run_dir, str(error))
        elif moved:
            view.note(f"nothing was learnt, so the earlier run is in {run_dir} again")
        raise
    except ChildDied as error:
        children.kill()
        hint = f"\nto go on: areal-q run {run_dir} --resume" if has_checkpoint(run_dir) else ""
        told = f"{error}{_disk_full(run_dir)}{hint}"
        note_failure(run_dir, told)
        raise ChildDied(told) from error


def _read_model(run: Run, view: View) -> None:
    """Says what a pretrained model is, as the learner will read it. Raises UserError for one, or for an
    objective, advantage, order, environment or reward of the user's own, that it or a worker would refuse."""
    own = isinstance(run.rollout.environment, PythonEnvironment) or run.learner.has_own_code
    own = own or has_own_reward(run)
    if not (isinstance(run.model, PretrainedModel) or own):
        return
    command = module_command("areal_q.checks")
    done = subprocess.run(command, input=dump_toml(run), capture_output=True, encoding="utf-8")
    if done.returncode == 2:
        raise UserError(done.stderr.strip().rpartition("\n")[2].partition(": ")[2])
    if done.returncode:
        raise ChildDied(f"reading the model ended with {done.returncode}:\n{done.stderr.strip()}")
    for line in done.stdout.splitlines():
        view.note(line)


def _disk_full(run_dir: Path) -> str:
    """Returns a line on the full disk if there is no room left, since that ends processes in many ways; else
    ""."""
    free = shutil.disk_usage(run_dir).free
    if free >= FULL_BYTES:
        return ""
    return f"\nthe disk is full: {size(free)} free at {run_dir}; make room there first"


def _run(
    plan: Plan, children: ChildProcesses, view: View, interrupts: Interrupts, disk: DiskWatch
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
            for sentence in children.lost_beside():
                view.note(f"warning: {sentence}")
            time.sleep(_POLL_S)

    if plan.redis:
        children.start(plan.redis)
        wait(lambda: interrupts.count or children.ended() or answers(plan.redis_url), _START_S)
    if not interrupts.count and not children.ended() and not answers(plan.redis_url):
        if plan.redis:
            raise BufferUnavailable(f"Redis did not answer within {_START_S:.0f} s")
        raise ConfigError("REDIS_URL: no Redis answers there")
    programs = [plan.learner, *plan.workers, *plan.trackers]
    for program in [] if interrupts.count or children.ended() else programs:
        children.start(program)
    wait(lambda: interrupts.count or children.ended())

    # A service manager may have stopped all processes at once, and then none of their ends is a failure.
    first = None if interrupts.count else children.ended()
    if first is None:
        view.note(
            "draining: waits for the learner to end its step and write a checkpoint, then for workers to hand "
            "back their tickets; Ctrl-C again kills"
        )
    _stop(plan, children, view, interrupts, wait, DRAIN_S if first else float("inf"))
    children.check(first or "learner")
    return _exit_code(children.exit_code("learner"), interrupts.first)


def _stop(
    plan: Plan,
    children: ChildProcesses,
    view: View,
    interrupts: Interrupts,
    wait: Callable[[Callable[[], object], float], None],
    drain_s: float,
) -> None:
    """Stops the processes in order; the learner may take `drain_s` seconds."""
    children.send(["learner"], signal.SIGTERM)
    wait(lambda: not children.alive(["learner"]), drain_s)
    workers = [program.name for program in plan.workers]
    trackers = [program.name for program in plan.trackers]
    children.send([*workers, *trackers], signal.SIGTERM)
    wait(lambda: not children.alive(workers), STOP_S)
    if children.alive(["redis"]):
        rewrite = _Rewrite(plan.redis_url)
        wait(lambda: not children.alive(["redis"]) or rewrite.ended(), STOP_S)
    children.send(["redis"], signal.SIGTERM)
    wait(lambda: not children.alive(["redis"]), STOP_S)
    if children.alive(trackers):
        before = interrupts.count
        view.note("waits for trackers to take the last records and the report; Ctrl-C leaves that")
        wait(
            lambda: not children.alive(trackers) or interrupts.count > before,
            TRACKERS_STOP_S,
        )
    for sentence in children.lost_beside():
        view.note(f"warning: {sentence}")
    for name in (name for name in trackers if children.alive([name])):
        to_go_on = f"areal-q track RUN --to {name.removeprefix(TRACKER)}"
        view.note(f"warning: {name} has not ended, and is killed; to go on: {to_go_on}")


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


def answers(url: str) -> bool:
    """Returns True if a Redis answers at `url`, with the password that REDIS_PASSWORD_FILE names. Raises
    ConfigError for a URL that is none."""
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


class _Killed(Exception):
    """Raised when the user asks to stop a second time."""
