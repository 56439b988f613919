"""The cluster of bench/chaos/storm.py: real processes that a supervisor restarts, as docker's `restart:` would.

redis ── learner ─┬─ rollout-0               never killed: its memory is watched
                  ├─ relay ─ rollout-1       behind a relay
                  └─ veth ── rollout-2       in a network namespace of its own, where root can make one
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from areal_q.observability.service_log import LOG_LEVEL
from areal_q.system.ports import free_ports
from areal_q.system.processes import die_with_parent
from buffer.redis_store.local_server import find_binary
from buffer.weight_sync import Endpoints

RUN = "chaos"
RESTART_S = 0.5
"""From the end of a process to its successor"""
RUN_DISK, REDIS_DISK = "768m", "512m"
"""Sizes of the file systems that a fault fills"""


@dataclass
class Notes:
    """What faults did to the present run that its judge must know."""

    flushed: set[int] = field(default_factory=set)
    """Tickets that were in Redis, open or with their group, when it was emptied"""
    spent: set[int] = field(default_factory=set)
    """Tickets that a foreign hand answered or began: what comes of them need not count, nor be of weights
    that there ever were"""
    moved: set[int] = field(default_factory=set)
    """Tickets whose group it put back at the end of the stream, or which a replica had yet to answer"""
    forged: set[bytes] = field(default_factory=set)
    """Records of groups that it altered"""
    spoiled: dict[str, str] = field(default_factory=dict)
    """These answers by their entry in the stream, with what is wrong"""
    breaches: list[str] = field(default_factory=list)
    """What a fault itself saw go wrong"""


@dataclass
class Service:
    """One process of the cluster and its successors."""

    name: str
    argv: list[str]
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    due_s: float = 0.0
    """When it may be started again, on the monotonic clock"""
    wanted: bool = True
    deaths: list[str] = field(default_factory=list)
    """How it ended when no fault had ended it"""
    expected: bool = False
    starts: int = 0

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process and self.process.poll() is None else None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | self.env,
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )
        self.starts += 1

    def send(self, number: signal.Signals) -> None:
        if self.process and self.process.poll() is None:
            self.expected |= number in (signal.SIGKILL, signal.SIGTERM)
            self.process.send_signal(number)

    def tend(self) -> None:
        """Starts it where it is to run and does not."""
        if self.process and self.process.poll() is not None:
            if not self.expected:
                self.deaths.append(f"{self.name}: {self.process.returncode}: {self.last_line()}")
            self.process, self.expected = None, False
            self.due_s = time.monotonic() + RESTART_S
        if self.process is None and self.wanted and time.monotonic() >= self.due_s:
            self.start()

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""


class Network:
    """A namespace behind a pair of virtual Ethernet devices; `host` is this side's address."""

    def __init__(self) -> None:
        number = os.getpid() % 250
        self.name = f"aq{os.getpid()}"
        self.host, self._peer = f"10.213.{number}.1", f"10.213.{number}.2"

    def make(self) -> bool:
        """False where this machine does not allow it."""
        device = self.name[-13:]
        pair = ["link", "add", f"{device}h", "type", "veth", "peer", "name", "eth0"]
        try:
            self._ip("netns", "add", self.name)
            self._ip(*pair, "netns", self.name)
            self._ip("addr", "add", f"{self.host}/30", "dev", f"{device}h")
            self._ip("link", "set", f"{device}h", "up")
            self._ip("-n", self.name, "addr", "add", f"{self._peer}/30", "dev", "eth0")
            self._ip("-n", self.name, "link", "set", "lo", "up")
            self.cut(False)
        except (OSError, subprocess.CalledProcessError):
            self.remove()
            return False
        return True

    def cut(self, down: bool) -> None:
        self._ip("-n", self.name, "link", "set", "eth0", "down" if down else "up")

    def remove(self) -> None:
        with suppress(OSError, subprocess.CalledProcessError):
            self._ip("netns", "del", self.name)

    def inside(self, argv: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self.name, *argv]

    def _ip(self, *args: str) -> None:
        subprocess.run(["ip", *args], check=True, capture_output=True)


@dataclass
class Cluster:
    root: Path
    host: str
    ports: dict[str, int]
    services: dict[str, Service]
    network: Network | None
    disks: dict[str, Path]
    """File systems of their own, which can be filled without harm; none where root cannot mount"""
    clocks: dict[str, Path]
    """By service: the file that tells libfaketime how far its clock is off"""
    ranks: int = 1
    """Processes of the learner, under torchrun where there are several"""
    notes: Notes = field(default_factory=Notes)
    run_number: int = 0
    """Runs of the same name that came before the present one"""
    ended: set[str] = field(default_factory=set)
    """Ids of those"""
    judge: Callable[[], None] = lambda: None
    """Called when the learner of a run was stopped, before the next run of its name begins"""

    @property
    def run_root(self) -> Path:
        return self.root / "runs" / str(self.run_number)

    @property
    def run_dir(self) -> Path:
        return self.run_root / RUN

    def learner(self, root: Path, announce: str = "", fetch: str = "") -> list[str]:
        """The command of a learner whose run's directory is in `root`, at any free port unless told."""
        ports = [f"tcp://{self.host}:{port}" for port in free_ports(2, self.host)]
        settings = ["--config", str(self.root / "config.toml"), f"root={root}", f"name={RUN}"]
        ends = ["--announce", announce or ports[0], "--fetch", fetch or ports[1]]
        url = f"redis://{self.host}:{self.ports['redis']}"
        split = ["--standalone", f"--nproc-per-node={self.ranks}"]
        several = ["-m", "areal_q.system.torchrun", *split] if self.ranks > 1 else []
        return [sys.executable, *several, "-m", "learner", "--redis", url, *settings, *ends]

    def relay(self, announce: str, fetch: str) -> list[str]:
        """The command of the relay, which follows whoever is at these endpoints."""
        command = [sys.executable, "-m", "buffer.weight_sync.commands.relay"]
        command += ["--from-announce", announce, "--from-fetch", fetch, "broadcast.timeout_s=2"]
        ends = self.endpoint("relay_announce"), self.endpoint("relay_fetch")
        return [*command, "--announce", ends[0], "--fetch", ends[1]]

    def next_run(self) -> None:
        """Ends the present run, has it judged, and lets the next start begin another of the same name, in a
        directory of its own. Workers go on."""
        self.stop("learner")
        self.ended.add((self.run_dir / "run-id").read_text().strip())
        self.judge()
        self.run_number += 1
        self.notes = Notes()
        service = self.services["learner"]
        service.argv = self.learner(self.run_root, *self.published)
        service.wanted = True

    def client(self) -> redis.Redis:
        """Returns a client that tries once: a stopped Redis must not hold up the storm, which is to wake it."""
        once = Retry(NoBackoff(), 0)
        return redis.Redis(self.host, self.ports["redis"], socket_timeout=5.0, retry=once)

    def endpoint(self, name: str) -> str:
        return f"tcp://{self.host}:{self.ports[name]}"

    @property
    def published(self) -> Endpoints:
        """The places where the learner announces versions, and where they are fetched."""
        return Endpoints(self.endpoint("announce"), self.endpoint("fetch"))

    def tend(self) -> None:
        for service in self.services.values():
            service.tend()

    def stop(self, *names: str, timeout_s: float = 120.0) -> None:
        """SIGTERM, and waits: what a deployment does."""
        for name in names:
            service = self.services[name]
            service.wanted = False
            service.send(signal.SIGCONT)
            service.send(signal.SIGTERM)
        for name in names:
            process = self.services[name].process
            if process:
                process.wait(timeout_s)


@contextmanager
def cluster(
    config: str, faketime: str | None, namespaces: bool = True, ranks: int = 1
) -> Iterator[Cluster]:
    """The processes of a run with settings `config` (TOML), not started yet: `tend` starts them."""
    root = Path(tempfile.mkdtemp(prefix="aq-chaos-"))
    network: Network | None = Network()
    if not (namespaces and network.make()):
        network = None
    host = network.host if network else "127.0.0.1"
    disks = {
        name: root / name
        for name, size in (("runs", RUN_DISK), ("redis", REDIS_DISK))
        if _mounted(root / name, size)
    }
    try:
        (root / "config.toml").write_text(config)
        made = _cluster(root, host, network, disks, faketime, ranks)
        try:
            yield made
        finally:
            for service in made.services.values():
                if service.process:
                    with suppress(ProcessLookupError):
                        os.killpg(service.process.pid, signal.SIGKILL)
                    service.process.wait()
    finally:
        for path in disks.values():
            subprocess.run(["umount", "-l", str(path)], check=False)
        if network:
            network.remove()
        shutil.rmtree(root, ignore_errors=True)


def _cluster(
    root: Path,
    host: str,
    network: Network | None,
    disks: dict[str, Path],
    faketime: str | None,
    ranks: int,
) -> Cluster:
    names: list[str] = ["redis", "announce", "fetch", "relay_announce", "relay_fetch"]
    ports: dict[str, int] = dict(zip(names, free_ports(len(names), host), strict=True))
    at = {name: f"tcp://{host}:{port}" for name, port in ports.items()}
    url = f"redis://{host}:{ports['redis']}"
    python = [sys.executable, "-m"]
    worker = [*python, "rollout", "--redis", url, "--run", RUN]
    relayed = ["--announce", at["relay_announce"], "--fetch", at["relay_fetch"]]
    away = [*worker, "--id", "rollout-2"]
    commands = {
        "redis": redis_server(root / "redis", host, ports["redis"]),
        "learner": [],
        "relay": [],
        "rollout-0": [*worker, "--id", "rollout-0"],
        "rollout-1": [*worker, "--id", "rollout-1", *relayed],
        "rollout-2": network.inside(away) if network else away,
    }
    # Not the learner: libfaketime lets time.sleep fail with EINVAL when the clock jumps meanwhile.
    clocks = {n: root / f"{n}.clock" for n in ("redis", "rollout-1")} if faketime else {}
    services = {
        name: Service(name, argv, root / f"{name}.log", _faked(faketime, clocks.get(name)))
        for name, argv in commands.items()
    }
    services["learner"].env[LOG_LEVEL] = "debug"  # it names each version before it leaves
    made = Cluster(root, host, ports, services, network, disks, clocks, ranks)
    services["learner"].argv = made.learner(made.run_root, *made.published)
    services["relay"].argv = made.relay(*made.published)
    return made


def redis_server(directory: Path, host: str, port: int) -> list[str]:
    """The command of a Redis whose append-only file is in `directory`, which is made."""
    directory.mkdir(exist_ok=True)
    settings = {
        "port": str(port),
        "bind": host,
        "protected-mode": "no",  # loopback, or a link that leads to our own namespace only
        "dir": str(directory),
        "save": "",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "auto-aof-rewrite-min-size": "16mb",
        "maxmemory-policy": "noeviction",
    }
    return [
        find_binary(),
        *(text for key, value in settings.items() for text in (f"--{key}", value)),
    ]


def _faked(library: str | None, clock: Path | None) -> dict[str, str]:
    if not library or not clock:
        return {}
    clock.write_text("+0")
    return {
        "LD_PRELOAD": library,
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def _mounted(path: Path, size: str) -> bool:
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
