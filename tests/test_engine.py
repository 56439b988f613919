"""docker/compose.yaml on a real engine: what it trains, loses and survives.

Needs an engine and the images, which it does not build:
    docker compose -f docker/compose.yaml build rollout learner
or, on a Debian machine without Docker, docker/engine.sh.
"""

import json
import os
import shlex
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from areal_q.metrics import Record
from buffer.log import read_log

COMPOSE = Path(__file__).resolve().parent.parent / "docker" / "compose.yaml"
SMALL = [
    *("steps=100000", "task.digits=1", "task.heldout=20", "warmstart.steps=30"),
    *("model.layers=2", "model.width=64", "model.mlp=128", "rollout.sampling.max_tokens=4"),
    *("learner.groups=16", "eval.problems=20", "eval.every=1000", "checkpoint.every=20"),
]
"""The quickstart, made small enough for a step to take a fraction of a second, and without an end"""
MAX_LAG = 2
USERS = ("learner", "rollout", "monitor")
"""Those of users.acl"""
SERVICES = ("redis", "learner", "rollout", "prometheus")
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
        result = docker(*args, timeout=20)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (result.stderr.strip() or "it failed") if result.returncode else None


class Stack:
    """The real compose file under a project name of its own, with the quickstart made small."""

    def __init__(self, directory: Path, password: Path, *overlays: Path) -> None:
        self._project = f"areal-q-test-{os.getpid()}"
        self._environment = os.environ | dict.fromkeys(
            ("REDIS_PASSWORD_FILE", "GRAFANA_PASSWORD_FILE"), str(password)
        )
        small = yaml.safe_load(COMPOSE.read_text())["services"]["learner"]["command"] + SMALL
        override = directory / "small.yaml"
        secrets = {f"redis_{user}": {"file": str(password)} for user in USERS if overlays}
        changes = {"services": {"learner": {"command": small}}, "secrets": secrets}
        override.write_text(yaml.safe_dump(changes))
        self._files = [arg for file in (COMPOSE, *overlays, override) for arg in ("-f", str(file))]
        self._directory = directory

    def __call__(self, *args: str) -> str:
        command = ["compose", "-p", self._project, *self._files, *args]
        result = docker(*command, env=self._environment)
        assert result.returncode == 0, f"{shlex.join(args)}: {result.stderr}"
        return result.stdout

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
        os.kill(self.state(container)["Pid"], signal.SIGKILL)

    def network(self, verb: str, container: str) -> None:
        result = docker("network", verb, f"{self._project}_cluster", container)
        assert result.returncode == 0, result.stderr

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
        password = f"$(cat /run/secrets/redis_{user})"
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
        result = docker(
            *("compose", "-p", self._project, *self._files, "exec", "-T", "learner"),
            *("sh", "-c", "cat /runs/*/metrics.jsonl"),
            env=self._environment,
        )
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

    def used(self) -> tuple[list[int], int]:
        """(numbers of the tickets whose groups the learner used, groups that it dropped as too old)."""
        target = self._directory / "run"
        self("cp", "learner:/runs/quickstart", str(target))
        lines = (target / "metrics.jsonl").read_text().splitlines()
        *_, last = [r for r in map(msgspec.json.decode, lines) if r["kind"] == "step"]
        log = read_log(target / "trajectories")
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


@pytest.fixture
def stack(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """Up; with the overlays that a test names."""
    for image in IMAGES:
        if reason := missing("image", "inspect", image):
            pytest.skip(f"no engine, or not built: {reason}")
    if reason := missing("compose", "version"):
        pytest.skip(f"docker compose: {reason}")
    password = tmp_path / "password"
    password.write_text("a-password-of-tests")
    password.chmod(0o644)
    stack = Stack(tmp_path, password, *getattr(request, "param", ()))
    stack("up", "-d", "--no-build", *SERVICES)
    yield stack
    stack("--profile", "*", "down", "--volumes", "--timeout", "20")


def workers(count: int) -> Callable[[Steps], bool]:
    return lambda steps: bool(steps) and len(steps[-1]["workers"]) == count


def assert_a_history_without_gaps(steps: Steps) -> None:
    assert [r["step"] for r in steps] == list(range(1, len(steps) + 1))
    assert max(r["lag/max"] for r in steps) <= MAX_LAG


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_workers_come_and_go_without_a_pause_or_a_lost_group_and_the_stack_drains(stack):
    stack.wait(lambda steps: len(steps) >= 5, "training")
    stack.scale(6)
    stack.wait(workers(6), "six workers")
    stack.more(10)
    stack.until(lambda: stack.scraped() == {"learner": 1, "rollout": 6}, "metrics of all seven")
    stack.until(lambda: stack.health() == {"healthy"}, "health of all")

    stack.scale(2)
    stack.wait(workers(2), "four workers that left")
    steps = stack.more(20)
    assert_a_history_without_gaps(steps)
    assert stack.restarts("learner") == 0

    left = ("pending", "firing")
    stack.until(lambda: stack.alerts()["WorkerLost"] in left, "alert of workers that left")
    assert stack.alerts()["NoWorkers"] == "inactive"

    stack("stop", "learner")
    (learner,) = stack.containers("learner")
    assert stack.state(learner)["ExitCode"] == 0
    used, dropped = stack.used()
    assert len(used) == len(set(used))
    lost = set(range(max(used))) - set(used) - stack.in_redis()
    assert len(lost) == dropped
    stack("--profile", "tools", "run", "--rm", "tools", "report", "/runs/quickstart")
    stack("start", "learner")
    steps = stack.more(10)
    assert_a_history_without_gaps(steps)
    assert "resuming in /runs" in stack("logs", "learner")
    stack("stop", "rollout")
    assert {stack.state(c)["ExitCode"] for c in stack.containers("rollout")} == {0}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_and_cut_off_services_come_back_by_themselves(stack):
    stack.scale(2)
    stack.wait(workers(2), "two workers")
    stack.kill(stack.containers("rollout")[0])
    stack.more(10)
    stack.kill(stack.containers("learner")[0])
    stack.until(lambda: stack.restarts("learner") == 1, "restart of the learner")
    stack.more(10)
    stack.kill(stack.containers("redis")[0])
    stack.until(lambda: stack.restarts("redis") == 1, "restart of Redis")
    stack.more(10)

    cut = stack.containers("rollout")[1]
    stack.network("disconnect", cut)
    stack.wait(workers(1), "worker that is missed")
    stack.more(10)
    stack.network("connect", cut)
    stack.wait(workers(2), "worker that is back")
    assert_a_history_without_gaps(stack.more(10))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_behind_the_relay_train_as_those_of_the_learner_do(stack):
    stack.wait(lambda steps: len(steps) >= 5, "training")
    stack("stop", "rollout")
    stack.behind_relay()
    steps = stack.more(20)
    assert_a_history_without_gaps(steps)
    stack.until(lambda: stack.listeners() == 1, "worker that listens to the relay")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "stack", [[COMPOSE.parent / "compose.acl.yaml"]], indirect=True, ids=["acl"]
)
def test_each_service_trains_under_its_own_name_and_is_refused_what_others_may(stack):
    stack.scale(2)
    stack.wait(workers(2), "two workers")
    stack.kill(stack.containers("rollout")[0])
    assert_a_history_without_gaps(stack.more(20))
    stack.until(lambda: stack.health() == {"healthy"}, "health of all")

    assert "NOAUTH" in stack.redis("", "PING")
    groups, run = "'{areal-q:quickstart}:groups'", "'{areal-q:quickstart}:run'"
    assert stack.redis("monitor", f"EXISTS {groups} {run}") == "2"
    for user, command in {
        "monitor": f"DEL {groups}",
        "rollout": f"XRANGE {groups} - + COUNT 1",
        "learner": "FLUSHALL",
    }.items():
        assert "NOPERM" in stack.redis(user, command), (user, command)
    stack("stop", "learner", "rollout")
    services = (*stack.containers("learner"), *stack.containers("rollout"))
    assert {stack.state(container)["ExitCode"] for container in services} == {0}
