"""docker/: what the files promise, read as YAML; the schema, by compose; the whole of it, on a real engine.

The last needs an engine and its images, which it does not build:
    docker compose -f docker/compose.yaml build
"""

import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from areal_q.config import load
from areal_q.metrics import Record

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = ROOT / "docker" / "compose.yaml"
SMALL = [
    *("steps=100000", "task.digits=1", "task.heldout=20", "warmstart.steps=30"),
    *("model.layers=2", "model.width=64", "model.mlp=128", "rollout.sampling.max_tokens=4"),
    *("learner.groups=16", "eval.problems=20", "eval.every=1000", "checkpoint.every=20"),
]
"""The quickstart, made small enough for a step to take a fraction of a second, and without an end"""


def settings() -> dict[str, str]:
    lines = (ROOT / "docker" / ".env").read_text().splitlines()
    pairs = (line.partition("=") for line in lines if not line.startswith("#"))
    return {name: value for name, _, value in pairs}


@pytest.fixture
def compose() -> dict[str, Any]:
    """The file with its variables filled in, and `$$` as the `$` that a container sees."""
    values = settings()
    text = re.sub(r"(?<!\$)\$\{(\w+)\}", lambda m: values[m[1]], COMPOSE.read_text())
    return yaml.safe_load(text.replace("$$", "$"))


def test_no_port_is_published_beyond_loopback(compose):
    ports = [str(p) for service in compose["services"].values() for p in service.get("ports", [])]
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []
    assert "ports" not in compose["services"]["redis"]
    assert not any("network_mode" in service for service in compose["services"].values())
    assert compose["networks"]["cluster"] == {"internal": True}
    reached = [name for name, x in compose["services"].items() if x["networks"] != ["cluster"]]
    assert reached == ["grafana"]


def test_no_service_has_more_rights_than_it_needs(compose):
    for name, service in compose["services"].items():
        asked = {"privileged", "cap_add", "devices", "pid", "ipc", "userns_mode"} & service.keys()
        assert asked == set(), name
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"] is True, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        mounts = [str(volume) for volume in service.get("volumes", [])]
        assert [m for m in mounts if m.split(":")[0] not in compose["volumes"]] == [], name
    assert compose["services"]["redis"]["user"] == "redis"


def test_the_password_is_only_ever_a_file(compose):
    assert all(secret.keys() == {"file"} for secret in compose["secrets"].values())
    for name, service in compose["services"].items():
        needed = {"grafana": ["grafana_password"], "prometheus": []}
        assert service.get("secrets", []) == needed.get(name, ["redis_password"]), name
        environment = service.get("environment", {})
        said = [key for key in environment if "PASSWORD" in key and not key.endswith("_FILE")]
        assert said == [], name
        assert "@" not in environment.get("REDIS_URL", ""), name


def test_redis_keeps_what_it_answered_to_and_never_evicts(compose):
    (_, _, script) = compose["services"]["redis"]["command"]
    assert {"appendonly yes", "appendfsync everysec", "maxmemory-policy noeviction"} <= set(
        script.splitlines()
    )
    assert "redis:/data" in compose["services"]["redis"]["volumes"]


def test_learner_and_workers_agree_on_run_and_endpoints(compose):
    learner, rollout = (compose["services"][name]["command"] for name in ("learner", "rollout"))
    option, config, *others = learner
    run = load(ROOT / config, [setting for setting in others if not setting.startswith("--")])
    metrics = "--metrics=0.0.0.0:9464"
    assert metrics in others
    assert (option, rollout) == ("--config", ["--run", run.name, metrics])
    assert run.broadcast.host == "learner"
    assert run.root in [m.split(":")[1] for m in compose["services"]["learner"]["volumes"]]


def test_images_run_as_a_user_and_pass_signals_to_the_process(compose):
    stages: dict[str, list[list[str]]] = {}
    lines = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", "").splitlines()
    stage: list[list[str]] = []
    for words in (line.split(maxsplit=1) for line in lines if line and line[0] not in "# "):
        if words[0] == "FROM":
            base, _, name = words[1].split()
            stage = stages[name] = list(stages.get(base, []))
        else:
            stage.append(words)
    for name in ("learner", "rollout"):
        assert compose["services"][name]["build"]["target"] == name
        users = [rest for word, rest in stages[name] if word == "USER"]
        assert users and users[-1] not in ("root", "0")
        (entry,) = [rest for word, rest in stages[name] if word == "ENTRYPOINT"]
        assert json.loads(entry) == ["areal-q", name]


def docker(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *args], capture_output=True, text=True, **options)


def missing(*args: str) -> str | None:
    """Why `docker ARGS` cannot be used; None if it can."""
    try:
        result = docker(*args, timeout=20)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (result.stderr.strip() or "it failed") if result.returncode else None


@pytest.fixture
def password(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text("a-password-of-tests")
    path.chmod(0o644)
    return path


def secrets_in(password: Path) -> dict[str, str]:
    return dict.fromkeys(("REDIS_PASSWORD_FILE", "GRAFANA_PASSWORD_FILE"), str(password))


def test_compose_accepts_the_file(password):
    if reason := missing("compose", "version"):
        pytest.skip(f"docker compose: {reason}")
    environment = os.environ | secrets_in(password)
    result = docker("compose", "-f", str(COMPOSE), "config", "-q", env=environment)
    assert (result.returncode, result.stderr) == (0, "")


class Stack:
    """The real compose file under a project name of its own, with the quickstart made small."""

    def __init__(self, password: Path, override: Path) -> None:
        self._files = ["-f", str(COMPOSE), "-f", str(override)]
        self._project = f"areal-q-test-{os.getpid()}"
        self._environment = os.environ | secrets_in(password)

    def __call__(self, *args: str) -> str:
        command = ["compose", "-p", self._project, *self._files, *args]
        result = docker(*command, env=self._environment)
        assert result.returncode == 0, f"{shlex.join(args)}: {result.stderr}"
        return result.stdout

    def scale(self, workers: int) -> None:
        scale = ["--scale", f"rollout={workers}"]
        self("up", "-d", "--no-build", "--no-recreate", *scale, "redis", "learner", "rollout")

    def records(self) -> list[Record]:
        """Of the metrics, as far as they are written; a last line may be torn."""
        text = self("exec", "-T", "learner", "sh", "-c", "cat /runs/*/metrics.jsonl || true")
        return [msgspec.json.decode(line) for line in text.splitlines() if line.endswith("}")]

    def wait(self, until: Callable[[list[Record]], bool], what: str) -> list[Record]:
        """The records of steps, once `until` holds for them."""
        deadline = time.monotonic() + 180
        while not until(steps := [r for r in self.records() if r["kind"] == "step"]):
            assert time.monotonic() < deadline, f"no {what}:\n{self('logs', '--tail=30')}"
            time.sleep(0.5)
        return steps


@pytest.fixture
def stack(password: Path, tmp_path: Path) -> Iterator[Stack]:
    for image in ("areal-q/learner", "areal-q/rollout", "redis:7-bookworm"):
        if reason := missing("image", "inspect", image):
            pytest.skip(f"no engine, or not built: {reason}")
    if reason := missing("compose", "version"):
        pytest.skip(f"docker compose: {reason}")
    learner = yaml.safe_load(COMPOSE.read_text())["services"]["learner"]
    override = tmp_path / "small.yaml"
    command = [*learner["command"], *SMALL]
    override.write_text(yaml.safe_dump({"services": {"learner": {"command": command}}}))
    stack = Stack(password, override)
    yield stack
    stack("down", "--volumes", "--timeout", "20")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_stack_trains_while_workers_come_and_go_and_drains(stack):
    def workers(count: int) -> Callable[[list[Record]], bool]:
        return lambda steps: bool(steps) and len(steps[-1]["workers"]) == count

    stack.scale(1)
    stack.wait(lambda steps: len(steps) >= 3, "training")
    stack.scale(2)
    stack.wait(workers(2), "second worker")
    stack.scale(1)
    steps = stack.wait(workers(1), "worker that left")
    steps = stack.wait(lambda now: len(now) >= len(steps) + 10, "training with one again")

    stack("stop", "learner")
    state = json.loads(stack("ps", "--all", "--format", "json", "learner").splitlines()[0])
    assert state["ExitCode"] == 0
    stack("start", "learner")
    steps = stack.wait(lambda now: len(now) >= len(steps) + 10, "training after a restart")
    assert [r["step"] for r in steps] == list(range(1, len(steps) + 1))
    assert max(r["lag/max"] for r in steps) <= 2
    assert "resuming in /runs" in stack("logs", "learner")
    stack("stop", "rollout")
    state = json.loads(stack("ps", "--all", "--format", "json", "rollout").splitlines()[0])
    assert state["ExitCode"] == 0
