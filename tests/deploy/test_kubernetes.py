"""docker/kubernetes, as kustomize builds it: valid for Kubernetes' own schemas, locked down, and in step with
the code."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import redis
import yaml
from helpers.kubernetes.overlays import (
    COMBINATIONS,
    NAMESPACE,
    blocks_of_the_page,
    build,
    kustomization,
    written,
)
from helpers.paths import DOCKER, ROOT
from redis.exceptions import AuthenticationError, NoPermissionError

from areal_q.checks.disk_use import disk_use
from areal_q.config import load
from areal_q.system.ports import free_ports
from buffer.redis_store.keys import Keys

KUBERNETES = DOCKER / "kubernetes"
SCHEMA = "1.32"
EVERYTHING = COMBINATIONS[-1]
TABLE_OF_7B = b'{"w":{"dtype":"BF16","shape":[100000,76000],"data_offsets":[0,15200000000]}}'
HEADER_OF_7B = len(TABLE_OF_7B).to_bytes(8, "little") + TABLE_OF_7B
FOREIGN = ("keda.sh/", "monitoring.coreos.com/")
Objects = list[dict[str, Any]]
Built = Callable[..., Objects]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Builds an overlay with components, by a kustomization as a user writes it; each once."""
    known: dict[str, Objects] = {}

    def made(overlay: str = "base", *components: str, **changed: Any) -> Objects:
        key = repr((overlay, components, changed))
        if key not in known:
            directory = tmp_path_factory.mktemp("own")
            known[key] = build(kustomization(directory, overlay, *components, **changed))
        return known[key]

    return made


def found(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    (one,) = [x for x in objects if (x["kind"], x["metadata"]["name"]) == (kind, name)]
    return one


def settings(objects: Objects) -> dict[str, str]:
    """Returns the settings that services get in their environment: of two sources the later one wins."""
    maps = {x["metadata"]["name"]: x["data"] for x in objects if x["kind"] == "ConfigMap"}
    sources = [
        [source["configMapRef"]["name"] for source in one["envFrom"]]
        for _, spec in pods(objects)
        for one in [*spec["containers"], *spec.get("initContainers", [])]
        if "envFrom" in one
    ]
    assert all(names == sources[0] for names in sources)
    return {key: value for name in sources[0] for key, value in maps[name].items()}


def pods(objects: Objects) -> Iterator[tuple[str, dict[str, Any]]]:
    for one in objects:
        if "template" in one.get("spec", {}):
            yield one["metadata"]["name"], one["spec"]["template"]["spec"]
    yield "loader", yaml.safe_load((KUBERNETES / "own-model" / "loader.yaml").read_text())["spec"]


def container(objects: Objects, name: str) -> dict[str, Any]:
    (one,) = [c for _, spec in pods(objects) for c in spec["containers"] if c["name"] == name]
    return one


@pytest.mark.parametrize(("overlay", "components"), COMBINATIONS)
def test_every_combination_fits_the_schemas(built: Built, overlay: str, components: list[str]):
    objects = built(overlay, *components)
    assert len(objects) >= 15
    for one in objects:
        assert one["metadata"]["namespace"] == NAMESPACE
        if not one["apiVersion"].startswith(FOREIGN):
            kubernetes_validate.validate(one, SCHEMA, strict=True)
    assert settings(objects)["RUN"] == "quickstart"


def test_the_schema_check_can_fail(built: Built):
    broken = found(built(), "Deployment", "rollout") | {"spec": {"selectors": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, SCHEMA, strict=True)


CHECK_FOREIGN = """
import { readFileSync } from "node:fs";
const packages = {
  "keda.sh/v1alpha1": "@kubernetes-models/keda",
  "monitoring.coreos.com/v1": "@kubernetes-models/prometheus-operator",
};
for (const one of JSON.parse(readFileSync(0, "utf8"))) {
  const kinds = await import(`${packages[one.apiVersion]}/${one.apiVersion}`);
  try {
    new kinds[one.kind](one).validate();
  } catch (error) {
    console.log(`${one.kind} ${one.metadata.name}: ${error.message}`);
  }
}
"""


def faults_of_foreign(objects: Objects) -> str:
    """Returns what the validators of KEDA's and the Prometheus operator's kinds complain of, a line each."""
    validators, node = Path(sys.prefix) / "crds", shutil.which("node")
    if not node or not (validators / "node_modules").exists():
        pytest.skip("no validators of KEDA's and the operator's kinds: make crds")
    command = [node, "--input-type=module", "--eval", CHECK_FOREIGN]
    done = subprocess.run(
        command, cwd=validators, input=json.dumps(objects), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(60)
def test_kinds_of_keda_and_the_operator_fit_their_definitions(built: Built):
    objects = [
        x for x in built(EVERYTHING[0], *EVERYTHING[1]) if x["apiVersion"].startswith(FOREIGN)
    ]
    kinds = {one["kind"] for one in objects}
    assert kinds == {"ScaledObject", "TriggerAuthentication", "PodMonitor", "PrometheusRule"}
    assert faults_of_foreign(objects) == ""
    (scaled,) = [one for one in objects if one["kind"] == "ScaledObject"]
    broken = scaled | {"spec": scaled["spec"] | {"cooldownPeriod": "ten minutes"}}
    assert "cooldownPeriod must be integer" in faults_of_foreign([broken])


def test_every_file_is_in_a_kustomization():
    for file in KUBERNETES.rglob("kustomization.yaml"):
        text = file.read_text()
        for beside in file.parent.glob("*.*"):
            named = beside.name in text or beside.name in ("kustomization.yaml", "rules.py")
            assert named or beside.name == "loader.yaml", beside


def test_no_pod_has_more_rights_than_it_needs(built: Built):
    specs = dict(pods(built(EVERYTHING[0], *EVERYTHING[1])))
    assert specs.keys() == {"redis", "learner", "rollout", "relay", "loader"}
    for name, spec in specs.items():
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch", name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        for one in [*spec["containers"], *spec.get("initContainers", [])]:
            assert one["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert "env" not in one, name  # secrets are files
        assert all("hostPath" not in volume for volume in spec["volumes"]), name


def test_every_container_and_scratch_volume_has_its_bounds(built: Built):
    for name, spec in pods(built(EVERYTHING[0], *EVERYTHING[1])):
        for one in [*spec["containers"], *spec.get("initContainers", [])]:
            assert {"cpu", "memory"} <= one["resources"]["requests"].keys(), name
            assert {"cpu", "memory"} <= one["resources"]["limits"].keys(), name
            assert one["imagePullPolicy"] == "IfNotPresent", name
        for volume in spec["volumes"]:
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""}), (name, volume)


@pytest.mark.parametrize(("overlay", "components"), [("base", []), EVERYTHING])
def test_probes_wait_for_a_loaded_node(built: Built, overlay: str, components: list[str]):
    """A probe is a Python that starts; half a second on an idle node, and the default limit is one second."""
    probes = ("startupProbe", "livenessProbe", "readinessProbe")
    for name, spec in pods(built(overlay, *components)):
        for one in spec["containers"]:
            assert name == "loader" or {*probes[:2]} <= one.keys()
            for probe in (one[kind] for kind in probes if kind in one):
                assert probe["timeoutSeconds"] >= 5, name


def arguments(objects: Objects, name: str) -> list[str]:
    """Returns a container's arguments with the settings of its environment in their place."""
    said = container(objects, name)["args"]
    for key, value in settings(objects).items():
        said = [text.replace(f"$({key})", value) for text in said]
    return said


def test_learner_and_workers_are_told_what_the_code_understands(built: Built):
    objects = built("base", settings={"ARGS": "steps=7 learner.max_lag=1"})
    learner, told = arguments(objects, "learner"), settings(objects)
    overrides = [text for text in learner if not text.startswith("--")]
    run = load(ROOT / told["CONFIG"], [*overrides, *shlex.split(told["ARGS"])])
    assert (run.steps, run.learner.max_lag) == (7, 1)
    assert container(objects, "learner")["command"][2] == 'exec areal-q learner "$@" $ARGS'
    assert run.broadcast.host == found(objects, "Service", "learner")["metadata"]["name"]
    assert arguments(objects, "rollout")[0] == f"--run={run.name}"
    service = found(objects, "Service", "learner")["spec"]
    ports = {p["name"]: p["port"] for p in service["ports"]}
    assert run.broadcast.announce == f"tcp://0.0.0.0:{ports['announce']}"
    assert run.broadcast.fetch == f"tcp://0.0.0.0:{ports['fetch']}"
    assert f"--metrics=0.0.0.0:{ports['metrics']}" in learner
    mounts = {m["mountPath"] for m in container(objects, "learner")["volumeMounts"]}
    assert {run.root, str(Path(told["REDIS_PASSWORD_FILE"]).parent)} <= mounts


def test_run_and_namespace_stand_once_and_reach_all_parts(built: Built):
    objects = built("gpu", namespace="mine", settings={"RUN": "other"})
    trigger = found(objects, "ScaledObject", "rollout")["spec"]["triggers"][0]["metadata"]
    assert trigger["stream"] == Keys("other").tickets
    assert trigger["address"] == "redis.mine.svc:6379"
    assert "name=other" in arguments(objects, "learner")
    assert "--run=other" in arguments(objects, "rollout")
    assert "quickstart}" not in json.dumps(objects) and "areal-q.svc" not in json.dumps(objects)


def test_workers_follow_open_tickets_while_a_learner_is_there(built: Built):
    """KEDA's redis-streams scaler without a consumer group counts the entries of the stream."""
    objects = built()
    scaled = found(objects, "ScaledObject", "rollout")["spec"]
    assert scaled["scaleTargetRef"] == {"name": "rollout"}
    assert "replicas" not in found(objects, "Deployment", "rollout")["spec"]
    tickets, learner = scaled["triggers"]
    assert tickets["type"] == "redis-streams" and "consumerGroup" not in tickets["metadata"]
    assert tickets["metadata"]["username"] == "monitor"
    secret = found(objects, "TriggerAuthentication", "redis")["spec"]["secretTargetRef"]
    assert secret == [{"parameter": "password", "name": "redis-monitor", "key": "password"}]
    assert learner["type"] == "kubernetes-workload"
    labels = found(objects, "Job", "learner")["spec"]["template"]["metadata"]["labels"]
    assert learner["metadata"]["podSelector"] == f"app={labels['app']}"
    names = [tickets["name"], learner["name"]]
    formula = scaled["advanced"]["scalingModifiers"]["formula"]
    assert all(name in formula for name in names)


def test_each_service_has_its_own_user_of_redis(built: Built):
    objects = built()
    acl = (DOCKER / "redis" / "users.acl").read_text()
    for name in ("learner", "rollout"):
        assert f"--redis=redis://{name}@redis:6379" in container(objects, name)["args"]
        assert f"\nuser {name} on " in acl
        volumes = dict(pods(objects))[name]["volumes"]
        secrets = [v["secret"]["secretName"] for v in volumes if "secret" in v]
        assert secrets == [f"redis-{name}"]
    (users,) = [x for x in objects if "users.acl" in x.get("data", {})]
    assert users["data"]["users.acl"] == acl


@pytest.mark.timeout(60)
def test_redis_knows_its_users_and_nobody_else(
    built: Built, binary_of: Callable[[str], str], tmp_path: Path, stack: ExitStack
):
    """The container's own script on a real server, with the paths of this machine."""
    port = free_ports(1)[0]
    for user in ("learner", "rollout", "monitor"):
        (tmp_path / user).write_text(f"{user} 's password\n")
    (tmp_path / "memory").write_text(str(8 << 30))
    (script,) = container(built(), "redis")["args"]
    for there, here in (
        ("/run/secrets/redis/", f"{tmp_path}/"),
        ("/etc/redis/users.acl", str(DOCKER / "redis" / "users.acl")),
        ("/tmp/users.acl", f"{tmp_path}/users.acl"),
        ("dir /data", f"dir {tmp_path}\nport {port}"),
        ("redis-server", binary_of("valkey 9")),
    ):
        assert there in script
        script = script.replace(there, here)
    server = stack.enter_context(subprocess.Popen(["sh", "-ec", script]))
    stack.callback(server.terminate)
    as_user = {
        user: stack.enter_context(redis.Redis(port=port, username=user, password=password))
        for user, password in (("health", "any"), ("monitor", "monitor 's password"))
    }
    while not answers(as_user["health"]):
        assert server.poll() is None
    assert as_user["monitor"].xlen(Keys("quickstart").tickets) == 0
    assert as_user["monitor"].info("memory")["maxmemory"] == 4 << 30  # half of the container's
    with pytest.raises(NoPermissionError):
        as_user["monitor"].set(Keys("quickstart").cursor, 1)
    with redis.Redis(port=port) as nobody, pytest.raises(AuthenticationError):
        nobody.ping()


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        time.sleep(0.05)
        return False


def test_nobody_speaks_or_is_spoken_to_but_those_who_are_named(built: Built):
    objects = built(EVERYTHING[0], *EVERYTHING[1])
    default = found(objects, "NetworkPolicy", "nobody")["spec"]
    assert default == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for one in objects:
        if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] != "nobody":
            spec, name = one["spec"], one["metadata"]["name"]
            assert all(rule["from"] for rule in spec.get("ingress", [])), name
            assert all(rule["to"] for rule in spec.get("egress", [])), name


def test_no_pod_reaches_the_internet_unless_hub_is_added(built: Built):
    for components, expected in ([], []), (["own-model", "hub"], ["hub"]):
        policies = [x for x in built("base", *components) if x["kind"] == "NetworkPolicy"]
        reach = [x["metadata"]["name"] for x in policies if "0.0.0.0/0" in json.dumps(x)]
        assert reach == expected


def test_learner_ends_for_good_if_done_or_set_wrongly(built: Built):
    spec = found(built(), "Job", "learner")["spec"]
    stop, drained = spec["podFailurePolicy"]["rules"]
    assert stop["action"] == "FailJob" and stop["onExitCodes"]["values"] == [2]
    assert drained == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["podReplacementPolicy"] == "Failed"


def test_workers_behind_relays_speak_to_that_of_their_node(built: Built):
    objects = built("base", "relay")
    said = set(container(objects, "rollout")["args"])
    assert {"--announce=tcp://relay:5561", "--fetch=tcp://relay:5562"} <= said
    service = found(objects, "Service", "relay")["spec"]
    assert service["internalTrafficPolicy"] == "Local"
    ports = {p["name"]: p["port"] for p in service["ports"]}
    relay = container(objects, "relay")["args"]
    assert f"--announce=tcp://0.0.0.0:{ports['announce']}" in relay
    upstream = {p["name"]: p["port"] for p in found(objects, "Service", "learner")["spec"]["ports"]}
    assert f"--from-fetch=tcp://learner:{upstream['fetch']}" in relay
    ingress = found(objects, "NetworkPolicy", "learner")["spec"]["ingress"][0]["from"]
    assert [x["podSelector"]["matchLabels"]["app"] for x in ingress] == ["rollout", "relay"]
    egress = json.dumps(found(objects, "NetworkPolicy", "rollout")["spec"]["egress"])
    assert str(ports["announce"]) in egress and str(ports["fetch"]) in egress


def test_a_worker_has_no_secret_key_but_its_own(built: Built):
    objects = built("gpu", "relay", "curve")
    assert "broadcast.keys=/keys" in container(objects, "learner")["args"]
    assert "--keys=/keys" in container(objects, "relay")["args"]
    assert "--keys=/keys" in container(objects, "rollout")["args"]
    volumes = {
        name: volume["secret"]
        for name, spec in pods(objects)
        for volume in spec["volumes"]
        if volume["name"] == "keys"
    }
    assert {name: x["secretName"] for name, x in volumes.items()} == {
        "learner": "keys-server",
        "relay": "keys-server",
        "rollout": "keys-worker",
    }
    paths = {item["path"] for item in volumes["learner"]["items"]}
    assert paths == {"server.key", "server.key_secret", "worker.key_secret", "clients/worker.key"}


def test_the_overlay_for_gpus_asks_for_one_each_and_for_vllm(built: Built):
    objects = built("gpu")
    for name, image in (("learner", "learner"), ("rollout", "rollout-vllm")):
        one = container(objects, name)
        assert one["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert one["image"] == f"registry.example/areal-q/{image}:latest"
    assert "learner.device=cuda" in container(objects, "learner")["args"]
    engine = load(ROOT / settings(objects)["CONFIG"]).rollout.engine
    assert type(engine).__struct_config__.tag == "vllm"
    strategy = found(objects, "Deployment", "rollout")["spec"]["strategy"]["rollingUpdate"]
    assert strategy == {"maxSurge": 0, "maxUnavailable": 1}


def test_own_settings_model_and_data_are_where_they_are_named(built: Built, tmp_path: Path):
    objects = built("base", "own-model")
    assert settings(objects)["CONFIG"] == "/settings/own.toml"
    for name, places in (("learner", {"/own", "/settings"}), ("rollout", {"/own"})):
        mounts = container(objects, name)["volumeMounts"]
        assert places <= {m["mountPath"] for m in mounts if m.get("readOnly")}
    (tmp_path / "own.toml").write_text(own_settings(objects)["own.toml"])
    run = load(tmp_path / "own.toml")
    assert str(getattr(run.model, "path", "")).startswith("/own/")
    assert str(getattr(run.task, "path", "")).startswith("/own/")


def own_settings(objects: Objects) -> dict[str, str]:
    """Returns the files that the learner sees at /settings."""
    volumes = dict(pods(objects))["learner"]["volumes"]
    (name,) = [v["configMap"]["name"] for v in volumes if v["name"] == "settings"]
    return found(objects, "ConfigMap", name)["data"]


def user_settings() -> dict[str, str]:
    """Returns a value of one's own for HUB_MODEL, and for each setting that a file here gives a value to."""
    files = [yaml.safe_load(path.read_text()) for path in KUBERNETES.rglob("kustomization.yaml")]
    maps = [one for file in files for one in file.get("configMapGenerator", [])]
    given = {line.split("=")[0] for one in maps for line in one.get("literals", [])} | {"HUB_MODEL"}
    numbers = {"LEARNER_PODS": "4", "RANKS_PER_POD": "8"}
    return {name: numbers.get(name, f"my-{name.lower()}") for name in given}


@pytest.mark.parametrize(("overlay", "components"), COMBINATIONS)
def test_what_the_user_sets_is_what_comes_out(built: Built, overlay: str, components: list[str]):
    mine = user_settings()
    assert {"CONFIG", "RUN", "LEARNER_PODS", "HF_HOME"} <= mine.keys()
    assert settings(built(overlay, *components, settings=mine)).items() >= mine.items()


PAGE = [text for text in blocks_of_the_page("yaml") if "kind: Pod" not in text]


@pytest.mark.parametrize("text", PAGE, ids=range(len(PAGE)))
def test_what_the_page_shows_is_what_comes_out(text: str, tmp_path: Path):
    shown = {"namespace": "areal-q", "resources": ["../docker/kubernetes/gpu"]}
    shown |= yaml.safe_load(text)
    objects = build(written(tmp_path, shown))
    for one in shown.get("configMapGenerator", []):
        for line in one.get("literals", []):
            name, value = line.split("=", 1)
            assert settings(objects)[name] == value
        for file in one.get("files", []):
            assert own_settings(objects)[file] == (tmp_path / "own" / file).read_text()
    images = {c["image"] for _, spec in pods(objects) for c in spec["containers"]}
    for one in shown.get("images", []):
        assert f"{one['newName']}@{one['digest']}" in images
    for one in shown.get("patches", []):
        for target in targets(objects, **one["target"]):
            for change in yaml.safe_load(one["patch"]):
                assert at(target, change["path"]) == change["value"]


def targets(objects: Objects, kind: str, name: str = ".*") -> Objects:
    """Returns the objects that a patch of kustomize is for."""
    named = [x for x in objects if re.fullmatch(kind, x["kind"])]
    matching = [x for x in named if re.fullmatch(name, x["metadata"]["name"])]
    assert matching
    return matching


def at(value: Any, path: str) -> Any:
    """Returns what lies at a JSON pointer."""
    for step in path.strip("/").split("/"):
        value = value[int(step)] if isinstance(value, list) else value[step.replace("~1", "/")]
    return value


FAKE_HF = """#!/bin/sh
echo "$@" >> {log}
mkdir -p "$4" && touch "$4/config.json"
"""


def fetched(objects: Objects, name: str, root: Path, **environment: str) -> tuple[int, list[str]]:
    """Runs a service's init container below `root`; returns its exit code and the Hub's requests so far."""
    (init,) = dict(pods(objects))[name]["initContainers"]
    script = init["command"][2].replace("/own", f"{root}/own").replace("/runs", f"{root}/runs")
    (root / "own").mkdir(exist_ok=True)
    (root / "hf").write_text(FAKE_HF.format(log=root / "asked"))
    (root / "hf").chmod(0o755)
    told = {"PATH": f"{root}:{os.environ['PATH']}", **environment}
    code = subprocess.run([*init["command"][:2], script], env=told).returncode
    asked = root / "asked"
    return code, asked.read_text().splitlines() if asked.exists() else []


def test_the_learner_alone_fetches_the_weights_and_once(built: Built, tmp_path: Path):
    """Ranks wait for the first one, which keeps the model beside the runs."""
    objects = built("base", "own-model", "hub")
    claims = [x["metadata"]["name"] for x in objects if x["kind"] == "PersistentVolumeClaim"]
    assert "own" not in claims
    model = {"HUB_MODEL": "someone/x-7b"}
    assert fetched(objects, "learner", tmp_path) == (2, [])
    code, asked = fetched(objects, "learner", tmp_path, **model, JOB_COMPLETION_INDEX="0")
    assert code == 0 and ".safetensors" not in asked[0]
    assert asked[0].startswith(
        f"download someone/x-7b --local-dir {tmp_path}/runs/.hub/someone/x-7b "
    )
    code, asked = fetched(objects, "learner", tmp_path, **model, JOB_COMPLETION_INDEX="1")
    assert code == 0 and len(asked) == 1
    assert (tmp_path / "own" / "model" / "config.json").exists()
    (tmp_path / "own" / "model").unlink()
    code, asked = fetched(objects, "rollout", tmp_path, **model)
    assert code == 0 and "--exclude *.safetensors" in asked[1]
    assert (tmp_path / "own" / "model" / "config.json").exists()


def test_a_token_for_the_hub_is_a_file_that_need_not_exist(built: Built):
    objects = built("base", "own-model", "hub")
    path = Path(settings(objects)["HF_TOKEN_PATH"])
    for name in ("learner", "rollout"):
        spec = dict(pods(objects))[name]
        (volume,) = [v for v in spec["volumes"] if v["name"] == "hub"]
        assert volume["secret"]["optional"] is True
        (init,) = spec["initContainers"]
        assert str(path.parent) in {m["mountPath"] for m in init["volumeMounts"]}
        for one in spec["containers"]:
            assert "hub" not in {m["name"] for m in one["volumeMounts"]}


def test_workers_fill_the_gpus_beside_the_learners(built: Built):
    """There are (max_lag + 1) · groups open tickets, and eight GPUs."""
    objects = built("gpu")
    run = load(ROOT / settings(objects)["CONFIG"])
    tickets = (run.learner.max_lag + 1) * run.learner.groups
    scaled = found(objects, "ScaledObject", "rollout")["spec"]
    wanted = tickets / int(scaled["advanced"]["scalingModifiers"]["target"])
    learners = int(container(objects, "learner")["resources"]["limits"]["nvidia.com/gpu"])
    assert min(wanted, scaled["maxReplicaCount"]) + learners == 8


def test_the_volume_of_runs_holds_the_checkpoints_of_7b(built: Built, tmp_path: Path):
    """Overlay gpu has memory for a model of that size."""
    (tmp_path / "model.safetensors").write_bytes(HEADER_OF_7B)
    pretrained = ["model.type=pretrained", f"model.path={tmp_path}"]
    use = disk_use(load(None, pretrained))
    claim = found(built("gpu"), "PersistentVolumeClaim", "runs")["spec"]["resources"]["requests"]
    copy = 2 * 7_600_000_000  # of the Hub
    assert use.at_once == 4 and use.one == 12 * 7_600_000_000
    assert use.checkpoints + 2 * copy < int(claim["storage"].removesuffix("Gi")) * 2**30


def test_ranks_find_the_first_one_and_only_it_serves(built: Built):
    objects = built("gpu", "ranks", settings={"LEARNER_PODS": "4", "RANKS_PER_POD": "8"})
    spec = found(objects, "Job", "learner")["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert container(objects, "learner")["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    command = container(objects, "learner")["command"][2]
    ranks = found(objects, "Service", "ranks")["spec"]
    subdomain = spec["template"]["spec"]["subdomain"]
    assert (
        f"--master-addr=learner-0.{subdomain} --master-port={ranks['ports'][0]['port']}" in command
    )
    assert ranks["clusterIP"] == "None" and ranks["publishNotReadyAddresses"] is True
    selector = found(objects, "Service", "learner")["spec"]["selector"]
    assert selector["batch.kubernetes.io/job-completion-index"] == "0"


def test_the_operators_rules_are_those_of_prometheus(built: Built):
    objects = built("base", "monitoring")
    rules = found(objects, "PrometheusRule", "areal-q")["spec"]
    assert rules == yaml.safe_load((DOCKER / "prometheus" / "alerts.yml").read_text())
    (board,) = [x["data"] for x in objects if "areal-q.json" in x.get("data", {})]
    dashboard = DOCKER / "grafana" / "dashboards" / "areal-q.json"
    assert json.loads(board["areal-q.json"]) == json.loads(dashboard.read_text())
    jobs = [x["spec"] for x in objects if x["kind"] == "PodMonitor"]
    assert [x["jobLabel"] for x in jobs] == ["app", "app"]
    for name in ("learner", "rollout"):
        assert "metrics" in {port["name"] for port in container(objects, name)["ports"]}
