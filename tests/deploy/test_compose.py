"""docker/: what the files promise, read as YAML; the schema, by compose. On an engine: test_docker_engine.py"""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.compose_stack import docker, missing
from helpers.paths import DOCKER, ROOT

from areal_q.config import Gsm8k, PretrainedModel, load
from areal_q.errors import ConfigError

pytestmark = pytest.mark.timeout(60)  # compose itself takes a second and more
COMPOSE = DOCKER / "compose.yaml"
GPU, HEAD, WORKERS, ACL = (
    DOCKER / f"compose.{name}.yaml" for name in ("gpu", "head", "workers", "acl")
)
HOSTS = {"HEAD_HOST": "head.example", "HEAD_ADDRESS": "10.0.0.1"}
TARGETS = {
    "rollout": ["areal-q", "rollout"],
    "learner": ["areal-q", "learner"],
    "tools": ["areal-q"],
    "rollout-engine": ["areal-q", "rollout"],
}
SUPERVISED = ["python", "-m", "areal_q.observability.supervisor", "--health", "9464"]
Resolve = Callable[..., dict[str, Any]]


def settings() -> dict[str, str]:
    lines = (ROOT / "docker" / ".env").read_text().splitlines()
    pairs = (line.partition("=") for line in lines if not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def filled(text: str, values: dict[str, str]) -> str:
    """`text` with ${NAME}, ${NAME:-default} and ${NAME:+instead} filled in, innermost first."""

    def value(found: re.Match[str]) -> str:
        name, sign, other = found.groups()
        if sign is None:
            return values[name]
        return other if bool(values.get(name)) == (sign == ":+") else values.get(name, "")

    before = ""
    while before != text:
        before, text = text, re.sub(r"(?<!\$)\$\{(\w+)(?:(:[-+])([^{}]*))?\}", value, text)
    return text


@pytest.fixture
def compose() -> dict[str, Any]:
    """The file with its variables filled in, and `$$` as the `$` that a container sees."""
    return yaml.safe_load(filled(COMPOSE.read_text(), settings()).replace("$$", "$"))


def test_no_port_is_published_beyond_loopback(compose):
    ports = [str(p) for service in compose["services"].values() for p in service.get("ports", [])]
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []
    assert "ports" not in compose["services"]["redis"]
    assert compose["networks"]["cluster"] == {"internal": True}
    services = dict(compose["services"])
    assert services.pop("secrets")["network_mode"] == "none"
    assert not any("network_mode" in service for service in services.values())
    assert [name for name, x in services.items() if x["networks"] != ["cluster"]] == ["grafana"]


def test_every_service_has_limits_and_bounded_logs(compose):
    for name, service in compose["services"].items():
        if name != "secrets":  # ends at once
            assert service["mem_limit"] and service["pids_limit"], name
            assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name


def test_redis_may_take_twice_what_it_may_hold(compose):
    limit = compose["services"]["redis"]["mem_limit"]
    assert (settings()["REDIS_MAXMEMORY"], limit) == ("1gb", "2g")


def test_services_that_can_hang_are_restarted_a_few_times(compose):
    for name in ("learner", "rollout", "relay"):
        service = compose["services"][name]
        assert service["restart"] == "on-failure:3"
        supervised = "python -m areal_q.observability.supervisor --health 9464 "
        assert service["entrypoint"].startswith(supervised)
        assert "--metrics=0.0.0.0:9464" in service["command"]


def test_one_learner_starts_without_torchrun(resolved):
    entrypoint = resolved([COMPOSE], [])["services"]["learner"]["entrypoint"]
    assert entrypoint == [*SUPERVISED, "python", "-m", "learner"]


@pytest.mark.parametrize(
    ("files", "asked", "ranks"),
    [
        ([COMPOSE], {"RANKS": "3"}, "3"),
        ([COMPOSE, GPU], {}, "gpu"),
        ([COMPOSE, GPU], {"RANKS": "3"}, "3"),
    ],
    ids=["CPU", "all GPUs", "three GPUs"],
)
def test_ranks_start_by_torchrun_under_a_supervisor(resolved, files, asked, ranks):
    learner = resolved(files, [], **asked)["services"]["learner"]
    torchrun = ["python", "-m", "areal_q.system.torchrun", "--standalone"]
    assert learner["entrypoint"] == [
        *(*SUPERVISED, *torchrun, f"--nproc-per-node={ranks}", "-m", "learner")
    ]
    assert learner["restart"] == "on-failure:3"


def test_no_file_of_a_working_directory_shadows_a_module():
    """The variable reaches the processes that torchrun starts; `python -P` would not."""
    lines = [x.strip(" \\") for x in (DOCKER / "Dockerfile").read_text().splitlines()]
    stages = [line for line in lines if line.startswith("FROM ") or line == "PYTHONSAFEPATH=1"]
    assert stages[stages.index("PYTHONSAFEPATH=1") - 1] == "FROM ${BASE} AS dependencies"
    assert [x.split()[1] for x in stages if x.startswith("FROM ")] == [
        *("${BASE}", "${BASE}", "dependencies", "base", "base", "base", "dependencies")
    ]


def test_secrets_are_made_by_what_ends_at_once_and_reads_only(compose):
    service = compose["services"]["secrets"]
    assert service["cap_drop"] == ["ALL"]
    assert set(service["cap_add"]) == {"CHOWN", "DAC_OVERRIDE"}
    assert (service["read_only"], service["restart"]) == (True, "no")
    binds = [volume for volume in service["volumes"] if isinstance(volume, dict)]
    assert {volume["target"].split("/")[1] for volume in binds} == {"own", "named"}
    assert all(volume["read_only"] for volume in binds)


@pytest.mark.parametrize(
    ("limits", "sum_"), [("2g 512m 1000t", "1001T"), ("1m 4kb 5", ""), ("", "")]
)
def test_limits_beyond_the_machine_are_said_at_the_start(compose, tmp_path, limits, sum_):
    script = (DOCKER / "make-secrets.sh").read_text().replace("/secrets/", f"{tmp_path}/")
    told = {"SECRETS": "", "LIMITS": limits, "PATH": os.environ["PATH"]}
    said = subprocess.run(
        ["sh", "-c", script], env=told, capture_output=True, text=True, check=True
    )
    assert (f"the services may have {sum_}, this machine has" in said.stdout) == bool(sum_)
    assert (said.stdout == "") == (sum_ == "")
    services = compose["services"]
    limited = [name for name in services if name not in ("secrets", "relay", "tools")]
    counted = services["secrets"]["environment"]["LIMITS"].split()
    assert sorted(counted) == sorted(services[name]["mem_limit"] for name in limited)


def test_no_service_has_more_rights_than_it_needs(compose):
    services = {name: x for name, x in compose["services"].items() if name != "secrets"}
    for name, service in services.items():
        asked = {"privileged", "cap_add", "devices", "pid", "ipc", "userns_mode"} & service.keys()
        assert asked == set(), name
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"] is True, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        mounts = service.get("volumes", [])
        volumes = [mount for mount in mounts if isinstance(mount, str)]
        assert [m for m in volumes if m.split(":")[0] not in compose["volumes"]] == [], name
        binds = [mount for mount in mounts if isinstance(mount, dict)]
        assert all(m["read_only"] and m["target"].startswith("/input/") for m in binds), name
    assert compose["services"]["redis"]["user"] == "redis"


def test_each_service_sees_a_file_with_its_own_password_alone(compose):
    assert "secrets" not in compose
    for name, service in compose["services"].items():
        if name != "secrets":
            volumes = [v for v in service.get("volumes", []) if isinstance(v, str)]
            seen = [v for v in volumes if v.split(":")[1] == "/secrets"]
            owner = "learner" if name == "tools" else name
            expected = [] if name in ("prometheus", "relay") else [f"{owner}-secrets:/secrets:ro"]
            assert seen == expected, name
            assert not any("made" in str(volume) for volume in service.get("volumes", []))
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
    option, config, *others = shlex.split(learner)
    run = load(mounted(compose, config), [text for text in others if not text.startswith("--")])
    metrics = "--metrics=0.0.0.0:9464"
    assert metrics in others
    assert (option, rollout) == ("--config", ["--run", run.name, metrics])
    assert run.broadcast.host == "learner"
    assert "runs:/runs" in compose["services"]["learner"]["volumes"] and run.root == "/runs"


def mounted(compose: dict[str, Any], target: str) -> Path:
    """The file that the learner sees as `target`."""
    binds = [v for v in compose["services"]["learner"]["volumes"] if isinstance(v, dict)]
    return DOCKER / next(v["source"] for v in binds if v["target"] == target)


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
    for name, command in TARGETS.items():
        users = [rest for word, rest in stages[name] if word == "USER"]
        assert users and users[-1] not in ("root", "0")
        (entry,) = [rest for word, rest in stages[name] if word == "ENTRYPOINT"]
        assert json.loads(entry) == command
    for name, service in compose["services"].items():
        if "build" in service:
            assert service["build"]["target"] == name
            assert service["image"] == f"areal-q/{name}"


@pytest.fixture
def resolved(tmp_path: Path) -> Resolve:
    """What compose makes of files and profiles, with every variable filled in and `extends` followed."""
    if reason := missing("compose", "version"):
        pytest.skip(f"docker compose: {reason}")

    def resolve(files: list[Path], profiles: list[str], **hosts: str) -> dict[str, Any]:
        named = [part for path in files for part in ("-f", str(path))]
        wanted = [part for profile in profiles for part in ("--profile", profile)]
        environment = {**os.environ, "COMPOSE_PROJECT_NAME": "", **hosts}
        result = docker("compose", *named, *wanted, "config", "--format=json", env=environment)
        if result.returncode:
            raise ConfigError(result.stderr)
        assert "warning" not in result.stderr.lower()
        return json.loads(result.stdout)

    return resolve


@pytest.mark.parametrize(
    ("files", "profiles", "services"),
    [
        ([ROOT / "compose.yaml"], [], {"redis", "learner", "rollout", "prometheus", "grafana"}),
        ([COMPOSE], [], {"redis", "learner", "rollout", "prometheus", "grafana"}),
        ([COMPOSE], ["relay", "tools"], {"relay", "tools", "learner"}),
        ([COMPOSE, ACL], [], {"redis", "learner", "rollout", "prometheus", "grafana"}),
        ([COMPOSE, GPU], ["gpus-2"], {"learner", "rollout-gpu1"}),
        ([COMPOSE, GPU], ["gpus-8"], {"learner", *(f"rollout-gpu{n}" for n in range(1, 8))}),
        ([COMPOSE, GPU], ["half-4"], {"learner", "rollout-gpu2", "rollout-gpu3"}),
        ([COMPOSE, HEAD], ["relay"], {"redis", "learner", "rollout", "relay"}),
        ([COMPOSE, ACL], [], {"redis", "learner", "rollout"}),
        ([WORKERS], ["relay"], {"rollout", "relay"}),
    ],
)
def test_compose_accepts_each_file_and_keeps_it_locked(resolved, files, profiles, services):
    project = resolved(files, profiles, **HOSTS)
    # Text in the compose file itself would be copied into the container, whose file system is read-only.
    assert not any("content" in config for config in project.get("configs", {}).values())
    found = project["services"]
    assert services <= found.keys()
    for name, service in found.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"] is True, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        if name != "secrets":
            assert not {"privileged", "cap_add", "network_mode"} & service.keys(), name


@pytest.mark.parametrize(
    ("profile", "gpus", "learning"),
    [("gpus-2", 2, 1), ("gpus-4", 4, 1), ("gpus-8", 8, 1), ("half-4", 4, 2), ("half-8", 8, 4)],
)
def test_every_gpu_has_one_service_and_cpu_workers_stay_away(resolved, profile, gpus, learning):
    found = resolved([COMPOSE, GPU], [profile], LEARNER_GPUS=str(learning))["services"]
    assert "rollout" not in found
    devices = {
        name: service["deploy"]["resources"]["reservations"]["devices"]
        for name, service in found.items()
        if service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices")
    }
    assert [d["count"] for d in devices.pop("learner")] == [learning]
    taken = sorted(d["device_ids"] for found in devices.values() for d in found)
    assert taken == [[str(gpu)] for gpu in range(learning, gpus)]
    assert "learner.device=cuda" in found["learner"]["command"]
    built = [service["build"]["args"] for service in found.values() if "build" in service]
    assert built and not any("cpu" in args["TORCH"] + args["PIP_EXTRA_INDEX_URL"] for args in built)
    for name, service in found.items():
        if name.startswith("rollout-gpu"):
            assert service["build"]["target"] == "rollout-engine"
            assert "rollout" in service["networks"]["cluster"]["aliases"]


def test_a_port_is_open_to_other_hosts_only_with_tls_and_keys(resolved):
    found = resolved([COMPOSE, HEAD], [], **HOSTS)
    ports = {
        (name, port["target"], port["host_ip"])
        for name, service in found["services"].items()
        for port in service.get("ports", [])
        if not port["host_ip"].startswith("127.")
    }
    address = HOSTS["HEAD_ADDRESS"]
    assert ports == {
        ("redis", 6380, address),
        ("learner", 5551, address),
        ("learner", 5552, address),
    }
    assert "broadcast.keys=/keys" in found["services"]["learner"]["command"]
    (mounted,) = [c for c in found["services"]["redis"]["configs"] if "redis.d" in c["target"]]
    text = Path(found["configs"][mounted["source"]]["file"]).read_text()
    said = dict(line.split() for line in text.splitlines() if not line.startswith("#"))
    secrets = {secret["target"] for secret in found["services"]["redis"]["secrets"]}
    assert said["tls-port"] == "6380" and "port" not in said
    assert {said["tls-cert-file"], said["tls-key-file"]} <= secrets

    workers = resolved([WORKERS], ["relay"], **HOSTS)["services"]
    assert not any("ports" in service for service in workers.values())
    assert workers["rollout"]["environment"]["REDIS_URL"].startswith("rediss://head.example:6380?")
    keys = {secret["target"] for secret in workers["rollout"]["secrets"]}
    assert {"/keys/server.key", "/keys/worker.key_secret"} <= keys
    assert "/keys/server.key_secret" not in keys
    assert "--keys=/keys" in workers["relay"]["command"]


def test_the_root_has_the_same_services_as_the_file_it_includes(resolved):
    from_root = resolved([ROOT / "compose.yaml"], ["relay", "tools"])
    direct = resolved([COMPOSE], ["relay", "tools"])
    assert {k: from_root[k] for k in ("name", "configs", "volumes", "networks")} == {
        k: direct[k] for k in ("name", "configs", "volumes", "networks")
    }
    of_docker = json.dumps(direct["services"]).replace(f"{DOCKER}/configs", f"{ROOT}/configs")
    assert from_root["services"] == json.loads(of_docker)


def test_further_settings_are_split_as_a_shell_would(resolved):
    asked = 'steps=7 learner.objective.type=tbpo task.path="/a b"'
    for files in ([COMPOSE], [COMPOSE, GPU], [COMPOSE, HEAD]):
        command = resolved(files, [], ARGS=asked, **HOSTS)["services"]["learner"]["command"]
        assert command[-3:] == ["steps=7", "learner.objective.type=tbpo", "task.path=/a b"]


@pytest.mark.parametrize("files", [[ROOT / "compose.yaml"], [COMPOSE, GPU], [COMPOSE, HEAD]])
def test_own_model_and_problems_reach_learner_and_workers(resolved, tmp_path, files):
    (tmp_path / "train.jsonl").touch()
    own = {"MODEL": str(tmp_path), "DATA": str(tmp_path / "train.jsonl"), "FILES": str(tmp_path)}
    found = resolved(files, ["gpus-2"], **own, **HOSTS)["services"]
    (worker,) = [x for name, x in found.items() if name in ("rollout", "rollout-gpu1")]
    for service in (found["learner"], worker):
        mounts = {v["target"]: v for v in service["volumes"] if v["type"] == "bind"}
        sources = [mounts[f"/input/{name.lower()}"]["source"] for name in own]
        assert sources == list(own.values())
        assert all(mount["read_only"] for mount in mounts.values())
    _, config, *others = found["learner"]["command"]
    run = load(mounted({"services": found}, config), [x for x in others if x[0] != "-"])
    assert isinstance(run.model, PretrainedModel) and isinstance(run.task, Gsm8k)
    assert (run.model.path, run.task.path) == ("/input/model", "/input/data")
    assert worker["command"][:2] == ["--run", run.name] == ["--run", "quickstart-hf"]


def test_the_workers_of_other_hosts_mount_the_model_as_well(resolved, tmp_path):
    worker = resolved([WORKERS], [], MODEL=str(tmp_path), **HOSTS)["services"]["rollout"]
    mounts = {v["target"]: v["source"] for v in worker["volumes"] if v["type"] == "bind"}
    assert mounts["/input/model"] == str(tmp_path)
    assert worker["command"][:2] == ["--run", "quickstart-hf"]


def test_names_are_given_up_soon_unless_they_are_of_other_hosts(resolved):
    """A look-up of a Redis that ended first took 10 s, several times, before a learner could end."""
    egress = COMPOSE.with_name("compose.egress.yaml")
    inside, outside = resolved([COMPOSE], []), resolved([COMPOSE, egress], [])
    elsewhere = resolved([WORKERS], ["relay"], **HOSTS)["services"]
    for name in ("learner", "rollout"):
        assert inside["services"][name]["dns_opt"] == ["timeout:1", "attempts:1"]
        assert "dns_opt" not in outside["services"][name]
    assert not any("dns_opt" in service for service in elsewhere.values())


def test_a_way_out_is_asked_for_and_lets_nobody_in(resolved):
    found = resolved([COMPOSE, COMPOSE.with_name("compose.egress.yaml")], ["tools"])
    out = {name for name, x in found["services"].items() if "egress" in x.get("networks", {})}
    assert out == {"learner", "rollout", "tools"}
    assert not any("ports" in found["services"][name] for name in out)
    assert "egress" not in resolved([COMPOSE], ["tools"])["networks"]


def test_the_files_for_several_hosts_ask_for_the_hosts(resolved):
    with pytest.raises(ConfigError, match="HEAD_ADDRESS"):
        resolved([COMPOSE, HEAD], [], HEAD_HOST="head.example")
    with pytest.raises(ConfigError, match="HEAD_HOST"):
        resolved([WORKERS], [])


def test_the_learner_of_each_file_understands_its_settings(resolved):
    for files in ([COMPOSE], [COMPOSE, GPU], [COMPOSE, HEAD]):
        learner = resolved(files, [], **HOSTS)["services"]["learner"]
        _, config, *others = learner["command"]
        settings = [text for text in others if not text.startswith("--")]
        run = load(mounted({"services": {"learner": learner}}, config), settings)
        assert (run.root, run.broadcast.fetch) == ("/runs", "tcp://0.0.0.0:5552")
