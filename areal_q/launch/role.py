"""`python -m areal_q.launch.role ROLE PLACE` is a role of a run on one host of a cluster.

| ROLE | what it does | ends with |
|---|---|---|
| learner | Redis on the first host, and the learner, or this host's ranks of it | the learner's code |
| worker | a rollout worker, wherever the learner is just now | the worker's code |
| learner-once, worker-once | what is begun again after a crash: finds the learner, becomes the service | |

Each service runs under areal_q/observability/supervisor.py, which starts a crashed one again. SIGTERM, and
SIGUSR1 by which Slurm warns of the end of a job's time, are passed on: the learner ends its step and writes a
checkpoint, a worker hands its tickets back. So they do if the process that started the role is killed. Exit
codes are those of areal_q/system/stop_request.py.

Redis and the weights listen beyond loopback here, since other hosts have to reach them: Redis asks for the
password in PLACE/secrets, the weights for a key of PLACE/keys. Without --head their ports are free ones, which
PLACE/endpoint.json tells; with it they are PORTS of that host, for clusters whose hosts share no directory.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from areal_q.checks.packages import learner_python, worker_python
from areal_q.config import load
from areal_q.errors import BufferUnavailable, ConfigError
from areal_q.launch import place as places
from areal_q.launch.place import KEYS, PASSWORD, SETTINGS, RunAddresses
from areal_q.observability import service_log
from areal_q.observability.supervisor import Supervisor
from areal_q.runner.child_processes import PLAIN_LOGS, THREAD_VARIABLES
from areal_q.runner.launcher import answers
from areal_q.system.command import run_command
from areal_q.system.ports import free_ports
from areal_q.system.processes import become, die_with_parent, end_with_parent, module_command
from areal_q.system.torchrun import by_torchrun

logger = logging.getLogger("role")
PORTS = (6379, 5551, 5552, 29_500)
"""Ports of Redis, announcements, weights and the ranks among themselves, where none are said to be free"""
MEND = "exit code 2, see the line above: it has to be mended; then launch again"
_START_S, _STOP_S = 60.0, 20.0
"""Seconds that Redis may take to answer, and to end"""
_FAREWELL_S = 15.0
"""Seconds for which Redis stays after the last step, so that workers learn of it"""
_LOOK_S = 1.0
_GIVE_UP_S = 600.0
"""Seconds after which a worker, or another rank, that cannot see the learner's first host takes it to have
ended"""


def main(
    role: Annotated[
        Literal["learner", "worker", "learner-once", "worker-once"], typer.Argument(metavar="ROLE")
    ],
    place: Annotated[Path, typer.Argument(metavar="PLACE")],
    head: Annotated[str, typer.Option(help="the learner's first host; else PLACE says it")] = "",
    host: Annotated[str, typer.Option(help="this host's name among the others")] = "",
    nodes: Annotated[int, typer.Option(help="hosts of the learner")] = 1,
    rank: Annotated[int, typer.Option(help="this one among them")] = 0,
    ranks: Annotated[int, typer.Option(help="the learner's processes on each host")] = 1,
    workers: Annotated[int, typer.Option(help="workers of the launch, for its learner")] = 0,
    start: Annotated[str, typer.Option(help="a name of this start, one for all its hosts")] = "",
    id: Annotated[str, typer.Option(help="a worker's name")] = "",
    redis: Annotated[str, typer.Option(help="URL of a Redis that runs already")] = "",
) -> None:
    """A role of a run on one host of a cluster, as the scripts of `areal-q launch` start it."""
    service_log.set_up("role")
    end_with_parent(signal.SIGTERM)  # a scheduler may kill what started this
    if head:  # on hosts that share no directory, to which a bucket brings files without their modes
        places.close_secrets(place)
    run = load(place / SETTINGS)
    if not redis:
        os.environ["REDIS_PASSWORD_FILE"] = str(place / PASSWORD)
    os.environ.setdefault("AREAL_Q_WATCHDOG", "600")
    os.environ["PYTHONSAFEPATH"] = "1"  # also for what torchrun starts
    if role.endswith("-once"):
        at = _found(place, head, redis, start)
        if role == "worker-once":
            become(*_worker(place, at, run.name, id, bool(head)), python=worker_python(run))
        become(*_learner(place, at, nodes, rank, ranks), python=learner_python(run))
    if role == "learner" and rank:
        _found(place, head, redis, start)  # without end where the first host refuses this start
    elif role == "learner":
        places.claim(place)  # Redis's file and endpoint.json are those of one learner
    signal.signal(signal.SIGUSR1, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
    threads = run.rollout.threads if role == "worker" else run.learner.threads
    os.environ |= {**dict.fromkeys(THREAD_VARIABLES, str(threads)), **PLAIN_LOGS}
    once = module_command("areal_q.launch.role", f"{role}-once", *sys.argv[2:])
    service = Supervisor(once, mend=MEND)
    if role == "worker" or rank:
        raise typer.Exit(service.run() if rank else _work(service, place, id))
    at = _endpoint(head, host, redis, start)
    raise typer.Exit(_learn(service, place, at, workers, with_redis=not redis))


def _learn(
    service: Supervisor, place: Path, at: RunAddresses, workers: int, with_redis: bool
) -> int:
    """Runs the learner, and Redis if there is none, until the learner or all workers have ended for good, and
    returns the exit code."""
    places.write_ended(place, None)
    with _redis(place, at, with_redis):
        places.write_endpoint(place, at)
        # It would wait for them in vain, with the GPUs that it holds.
        why = "all workers ended with 2: their logs say what to mend; then launch again"
        _end_when(partial(places.all_refused, place, workers), partial(logger.error, why))
        code = service.run()
        if code and places.all_refused(place, workers):
            code = 2
        if code in (0, 2):
            places.write_ended(place, code)
            time.sleep(_FAREWELL_S if code == 0 else 0)
    return code


def _work(service: Supervisor, place: Path, id: str) -> int:
    """Runs a worker until it, or the learner, has ended for good, and returns the exit code."""
    why = partial(logger.info, "the learner ended, and so does this")
    _end_when(partial(places.read_ended, place), why)
    code = service.run()
    if ended := places.read_ended(place):
        return ended.code
    if code == 2 and id:
        places.write_refused(place, id)
    return code


def _end_when(over: Callable[[], object], tell: Callable[[], None]) -> None:
    """Tells this process to end as soon as `over` returns something true; `tell` says why."""

    def look() -> None:
        holds = None
        while not holds:
            time.sleep(_LOOK_S)  # also before the first look: the service has taken SIGTERM by then
            with suppress(OSError):  # of a directory that hosts share
                holds = over()
        tell()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look, daemon=True).start()


def _endpoint(head: str, host: str, redis: str, start: str) -> RunAddresses:
    """Returns where this host's learner will be."""
    name = host or head or socket.gethostname()
    at, announce, fetch, ranks = PORTS if head else free_ports(4, "0.0.0.0")
    return RunAddresses(
        host=name,
        redis=redis or f"redis://{name}:{at}",
        announce=announce,
        fetch=fetch,
        ranks=ranks,
        start=start,
    )


def _found(place: Path, head: str, redis: str, start: str = "") -> RunAddresses:
    """Waits until the learner's host has said where it is, with `start` in a start of this name. Ends the
    process if the learner ended for good. Raises ConfigError if no such start is there after _GIVE_UP_S."""
    if head:
        return _endpoint(head, "", redis, start)
    said, deadline = False, time.monotonic() + _GIVE_UP_S
    while True:
        found, ended = places.read_endpoint(place), places.read_ended(place)
        mine = found is not None and start in ("", found.start)
        if ended is not None and (mine or not start):
            logger.info("the learner ended with %d: nothing is left to do here", ended.code)
            sys.exit(ended.code)
        if found is not None and mine:
            return found
        if start and time.monotonic() > deadline:
            raise ConfigError(f"{place}: the learner's first host did not begin this start")
        if not said:
            logger.info("waits for the learner's host, which writes to %s", place)
            said = True
        time.sleep(_LOOK_S)


def _await_redis(url: str, seconds: float, pause_s: float, late: Exception) -> None:
    """Waits until Redis answers. Raises `late` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not answers(url):
        if time.monotonic() > deadline:
            raise late
        time.sleep(pause_s)


def _worker(place: Path, at: RunAddresses, run: str, id: str, unsaid: bool) -> list[str]:
    """Returns the module that is a worker, and its arguments. If it is `unsaid` whether the learner's host is
    there, waits until Redis answers."""
    if unsaid:
        gone = ConfigError(f"{at.redis}: no Redis answers, so the learner's host has ended")
        _await_redis(at.redis, _GIVE_UP_S, _LOOK_S, gone)
    settings = ["--config", str(place / SETTINGS), "--keys", str(place / KEYS)]
    named = ["--id", id] if id else []
    return ["rollout", "--redis", at.redis, "--run", run, *settings, *named]


def _learner(place: Path, at: RunAddresses, nodes: int, rank: int, ranks: int) -> list[str]:
    """Returns the module that is the learner, or this host's ranks of it, and its arguments."""
    arguments = ["--redis", at.redis, "--config", str(place / SETTINGS)]
    arguments += [f"broadcast.announce=tcp://0.0.0.0:{at.announce}"]
    arguments += [f"broadcast.fetch=tcp://0.0.0.0:{at.fetch}", f"broadcast.host={at.host}"]
    arguments += [f"broadcast.keys={place / KEYS}"]
    if nodes * ranks == 1:
        return ["learner", *arguments]
    hosts = [f"--nnodes={nodes}", f"--nproc-per-node={ranks}", f"--node-rank={rank}"]
    first = at.host if nodes > 1 else "127.0.0.1"
    meeting = [f"--master-addr={first}", f"--master-port={at.ranks}"]
    return [*by_torchrun(*hosts, *meeting), *arguments]


@contextmanager
def _redis(place: Path, endpoint: RunAddresses, started_here: bool) -> Iterator[None]:
    """Runs Redis on this host meanwhile, if it is to be started here. Raises BufferUnavailable if it does not
    answer."""
    server = None
    if started_here:
        at = f"0.0.0.0:{endpoint.redis.rpartition(':')[2]}"
        where = ["--dir", str(place / "redis"), "--listen", at]
        command = module_command("buffer.redis_store.local_server", *where)
        server = subprocess.Popen(
            module_command("areal_q.observability.supervisor", *command),
            start_new_session=True,  # it is stopped last, whoever signals all of this session
            preexec_fn=die_with_parent(),
        )
    try:
        late = BufferUnavailable(f"{endpoint.redis}: Redis did not answer within {_START_S:.0f} s")
        _await_redis(endpoint.redis, _START_S, 0.2, late)
        yield
    finally:
        if server is not None:
            server.terminate()
            try:
                server.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()


if __name__ == "__main__":
    run_command("role", main, who="role")
