"""docker/compose.yaml and its companions under a name of their own, with the quickstart made small."""

import io
import json
import os
import shlex
import signal
import subprocess
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml
from helpers.paths import ROOT

from areal_q.observability.metrics_log import Record
from buffer.logs.trajectory_log import iter_log

COMPOSE = ROOT / "docker" / "compose.yaml"
SMALL = [
    *("steps=100000", "task.digits=1", "task.heldout=20", "warmstart.steps=30"),
    *("model.layers=2", "model.width=64", "model.mlp=128", "rollout.sampling.max_tokens=4"),
    *("learner.groups=16", "eval.problems=20", "eval.every=1000", "checkpoint.every=20"),
]
"""The quickstart, made small enough for a step to take a fraction of a second, and without an end"""
SERVICES = ("redis", "learner", "rollout", "prometheus")
SUPERVISOR = "areal_q.observability.supervisor"
HOST_SERVICES = ("rollout", "relay")
"""Services that run on other hosts than the learner's"""
IMAGES = (
    *("areal-q/learner", "areal-q/rollout", "areal-q/tools"),
    *("redis:7-bookworm", "prom/prometheus:v2.55.1"),
)
Steps = list[Record]


def docker(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *args], capture_output=True, text=True, **options)


def missing(*args: str) -> str | None:
    """Why `docker ARGS` cannot be used; None if it can."""
    try:
        result = docker(*args, timeout=120)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (result.stderr.strip() or "it failed") if result.returncode else None


class Plain(yaml.SafeLoader):
    """To which compose's own tags, such as !reset, mean nothing."""


Plain.add_multi_constructor("!", lambda *_: None)


def read(file: Path) -> dict[str, Any]:
    return yaml.load(file.read_text(), Loader=Plain)


class Stack:
    """The real compose file under a project name of its own, with the quickstart made small."""

    def __init__(self, directory: Path, *files: Path, host: str = "", **more: str) -> None:
        """Takes the compose `files`; `host`, as NAME:ADDRESS, is one that workers know, `more` is for the
        environment."""
        self._name = f"areal-q-test-{directory.name.replace('_', '-')}-{os.getpid()}"
        self._environment = os.environ | {"ARGS": shlex.join(SMALL)} | more
        services = [name for file in files for name in read(file).get("services", {})]
        changes = {name: {"extra_hosts": [host]} for name in services if name in HOST_SERVICES}
        override = directory / "changes.yaml"
        override.write_text(yaml.dump({"services": changes if host else {}}))
        self._files = [arg for file in (*files, override) for arg in ("-f", str(file))]
        self._directory = directory
        self.up_said = ""

    def __call__(self, *args: str) -> str:
        result = self.tried(*args)
        assert result.returncode == 0, f"{shlex.join(args)}: {result.stderr}"
        return result.stdout

    def tried(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Returns what became of `docker compose ARGS`, which may fail."""
        return docker("compose", "-p", self._name, *self._files, *args, env=self._environment)

    @contextmanager
    def foreground(self) -> Iterator[Callable[[], str]]:
        """Runs `docker compose up` as in a terminal, ends it as Ctrl-C does and removes all. Yields a function
        that returns what it has said so far, and fails if it has ended."""
        said = self._directory / "foreground"
        command = ["docker", "compose", "-p", self._name, *self._files, "up", "--no-build"]
        with said.open("wb") as log:
            shown = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment)

        def text() -> str:
            assert shown.poll() is None, said.read_text()
            return said.read_text()

        try:
            yield text
        finally:
            shown.send_signal(signal.SIGINT)
            shown.wait()
            self.down()

    def down(self) -> None:
        self("--profile", "*", "down", "--volumes", "--timeout", "20")

    def scale(self, workers: int) -> None:
        scale = ["--scale", f"rollout={workers}"]
        self("up", "-d", "--no-build", "--no-recreate", "--no-deps", *scale, *SERVICES)

    def containers(self, service: str) -> list[str]:
        return self("ps", "--all", "--quiet", service).split()

    def state(self, container: str) -> dict[str, Any]:
        return json.loads(docker("inspect", container, "--format", "{{json .State}}").stdout)

    def restarts(self, service: str) -> int:
        (container,) = self.containers(service)
        return int(docker("inspect", container, "--format", "{{.RestartCount}}").stdout)

    def kill(self, container: str) -> None:
        """With the host's signal, as the kernel would: `docker kill` counts as a wish of the user."""
        self.signal(container, signal.SIGKILL)

    def signal(self, container: str, number: signal.Signals) -> None:
        """Sends the host's signal to the container's first process."""
        os.kill(self.state(container)["Pid"], number)

    def seconds_to_end(self, containers: Iterable[str], began: datetime) -> float:
        """Seconds from `began` until the last of the containers ended, though it may run again."""
        ends = [datetime.fromisoformat(self.state(name)["FinishedAt"]) for name in containers]
        return (max(ends) - began).total_seconds()

    def processes(self, service: str, pattern: str) -> list[int]:
        """Host's ids of the service's processes whose command holds `pattern`; not its supervisor's."""
        (container,) = self.containers(service)
        lines = docker("top", container, "-o", "pid,args").stdout.splitlines()[1:]
        found = [line for line in lines if pattern in line and SUPERVISOR not in line]
        return [int(line.split()[0]) for line in found]

    def freeze(self, service: str) -> None:
        """Stops, as SIGSTOP does, the process that does the work of a service: its supervisor's child."""
        (child,) = self.processes(service, f"-m {service}")
        os.kill(child, signal.SIGSTOP)

    def network(self, verb: str, container: str) -> None:
        result = docker("network", verb, f"{self._name}_cluster", container)
        assert result.returncode == 0, result.stderr

    def ways_out(self, service: str) -> set[str]:
        """Returns the networks of a service that are not internal, without the project's name."""
        self("up", "--no-start", "--no-build", "--no-deps", service)
        (container,) = self.containers(service)
        form = "{{json .NetworkSettings.Networks}}"
        names = json.loads(docker("inspect", container, "--format", form).stdout)
        found = json.loads(docker("network", "inspect", *names).stdout)
        return {n["Name"].removeprefix(f"{self._name}_") for n in found if not n["Internal"]}

    def health(self) -> set[str]:
        everybody = self.containers("learner") + self.containers("rollout")
        return {self.state(container)["Health"]["Status"] for container in everybody}

    def scraped(self) -> Counter[str]:
        """How many services of each kind Prometheus reads."""
        targets = self.get("http://prometheus:9090/api/v1/targets")["data"]["activeTargets"]
        return Counter(t["labels"]["job"] for t in targets if t["health"] == "up")

    def alerts(self) -> dict[str, str]:
        """Of each alert, its state."""
        groups = self.get("http://prometheus:9090/api/v1/rules")["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
        return {rule["name"]: rule["state"] for rule in rules}

    def redis(self, user: str, command: str) -> str:
        """What Redis answers to a command of one of its users; to nobody's if there is no name."""
        password = f'"$(cat /secrets/redis_{user})"'
        name = f"--user {user} --pass {password} --no-auth-warning " if user else ""
        return self("exec", "-T", "redis", "sh", "-c", f"redis-cli {name}{command}").strip()

    def listeners(self) -> int:
        """Workers that get their weights from the relay."""
        url = "http://prometheus:9090/api/v1/query?query=areal_q_relay_subscribers"
        found = self.get(url)["data"]["result"]
        return int(found[0]["value"][1]) if found else 0

    def behind_relay(self) -> None:
        """One worker, with weights from the relay and not from the learner."""
        self._environment |= {"ANNOUNCE": "tcp://relay:5561", "FETCH": "tcp://relay:5562"}
        options = ["-d", "--no-build", "--no-deps", "--force-recreate"]
        self("--profile", "relay", "up", *options, "relay", "rollout")

    def get(self, url: str) -> Any:
        """JSON over HTTP, asked from inside the network."""
        code = f"from urllib.request import urlopen; print(urlopen({url!r}).read().decode())"
        return json.loads(self("exec", "-T", "learner", "python", "-c", code))

    def records(self) -> list[Record]:
        """Of the metrics, as far as they are written; a last line may be torn."""
        result = self.tried("exec", "-T", "learner", "sh", "-c", "cat /runs/*/metrics.jsonl")
        return [msgspec.json.decode(x) for x in result.stdout.splitlines() if x.endswith("}")]

    def steps(self) -> Steps:
        return [r for r in self.records() if r["kind"] == "step"]

    def wait(self, until: Callable[[Steps], bool], what: str) -> Steps:
        """The records of steps, once `until` holds for them."""
        self.until(lambda: until(self.steps()), what)
        return self.steps()

    def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 300
        while not holds():
            assert time.monotonic() < deadline, f"no {what}:\n{self('logs', '--tail=30')}"
            time.sleep(0.5)

    def more(self, count: int) -> Steps:
        done = len(self.steps())
        return self.wait(lambda now: len(now) >= done + count, f"{count} more steps")

    def fetch(self, first: int, last: int) -> Path:
        """Returns the run as `areal-q fetch` brings it from the learner's container, with what these steps
        need."""
        asked = ["areal-q", "fetch", "/runs/quickstart", "--from", str(first), "--to", str(last)]
        command = ["docker", "compose", "-p", self._name, *self._files, "exec", "-T", "learner"]
        stream = subprocess.run(
            [*command, *asked], env=self._environment, check=True, stdout=subprocess.PIPE
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(stream)) as archive:
            archive.extractall(self._directory, filter="data")
        return self._directory / "quickstart"

    def used(self) -> tuple[list[int], int]:
        """(numbers of the tickets whose groups the learner used, groups that it dropped as too old)."""
        target = self._directory / "run"
        self("cp", "learner:/runs/quickstart", str(target))
        lines = (target / "metrics.jsonl").read_text().splitlines()
        *_, last = [r for r in map(msgspec.json.decode, lines) if r["kind"] == "step"]
        log = list(iter_log(target / "trajectories"))
        numbers = [group.ticket.number for _, groups in log for group in groups]
        return numbers, last["buffer/dropped_stale"]

    def in_redis(self) -> set[int]:
        """Numbers of the tickets that are open, or whose groups are not trimmed yet."""
        found = set()
        for what in ("tickets", "groups"):  # in the order in which a ticket moves
            peek = f"areal-q buffer peek --redis $REDIS_URL --run quickstart --what {what}"
            text = self("exec", "-T", "rollout", "sh", "-c", f"{peek} --count 100000 --json")
            found |= {row["ticket"] for row in json.loads(text)}
        return found


@contextmanager
def up(stack: Stack, *services: str) -> Iterator[Stack]:
    """The stack with `services` started, all if none are named: then a service may fail,
    and `up_said` holds what was said of it."""
    try:
        if services:
            stack("up", "-d", "--no-build", *services)
        else:
            stack.up_said = stack.tried("up", "-d", "--no-build").stderr
        yield stack
    finally:
        stack.down()
