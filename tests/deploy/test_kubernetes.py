"""docker/kubernetes: valid for Kubernetes' own schemas, locked down, and in step with the code."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helpers.paths import ROOT

from areal_q.config import load
from buffer.redis_store.keys import Keys

KUBERNETES = ROOT / "docker" / "kubernetes"
BASE = KUBERNETES / "base"
SCHEMA = "1.32"


def objects_of(*paths: Path) -> list[dict[str, Any]]:
    return [x for path in paths for x in yaml.safe_load_all(path.read_text())]


FILES = [path for path in sorted(BASE.glob("*.yaml")) if path.stem != "kustomization"]
RELAY = KUBERNETES / "relay" / "relay.yaml"
OBJECTS = objects_of(*FILES, RELAY)
KUSTOMIZATION = yaml.safe_load((BASE / "kustomization.yaml").read_text())
(GENERATED,) = KUSTOMIZATION["configMapGenerator"]
SETTINGS = dict(line.split("=", 1) for line in GENERATED["literals"])


def found(kind: str, name: str) -> dict[str, Any]:
    (one,) = [x for x in OBJECTS if (x["kind"], x["metadata"]["name"]) == (kind, name)]
    return one


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for one in OBJECTS:
        if "template" in one.get("spec", {}):
            yield one["metadata"]["name"], one["spec"]["template"]["spec"]


def test_every_object_of_kubernetes_fits_its_schema():
    own = [x for x in OBJECTS if not x["apiVersion"].startswith("keda.sh/")]
    assert len(own) >= 8
    for one in own:
        kubernetes_validate.validate(one, SCHEMA, strict=True)


def test_the_schema_check_can_fail():
    broken = found("Deployment", "rollout") | {"spec": {"selectors": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, SCHEMA, strict=True)


def test_every_file_is_in_the_kustomization():
    assert sorted(KUSTOMIZATION["resources"]) == [path.name for path in FILES]


def test_no_pod_has_more_rights_than_it_needs():
    assert {name for name, _ in pods()} == {"redis", "learner", "rollout", "relay"}
    for name, spec in pods():
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert "env" not in container, name  # secrets are files
            assert {"requests", "limits"} <= container["resources"].keys(), name
        assert all("hostPath" not in volume for volume in spec["volumes"]), name


def test_learner_and_workers_are_told_what_the_code_understands():
    def arguments(spec: dict[str, Any]) -> list[str]:
        (container,) = spec["containers"]
        said = container["args"]
        for name, value in SETTINGS.items():
            said = [text.replace(f"$({name})", value) for text in said]
        return said

    specs = dict(pods())
    learner = arguments(specs["learner"])
    run = load(ROOT / SETTINGS["CONFIG"], [text for text in learner if not text.startswith("--")])
    assert run.broadcast.host == found("Service", "learner")["metadata"]["name"]
    assert arguments(specs["rollout"])[0] == f"--run={run.name}"
    ports = {p["name"]: p["port"] for p in found("Service", "learner")["spec"]["ports"]}
    assert run.broadcast.announce == f"tcp://0.0.0.0:{ports['announce']}"
    assert run.broadcast.fetch == f"tcp://0.0.0.0:{ports['fetch']}"
    assert f"--metrics=0.0.0.0:{ports['metrics']}" in learner
    mounts = {m["mountPath"] for m in specs["learner"]["containers"][0]["volumeMounts"]}
    assert run.root in mounts
    assert str(Path(SETTINGS["REDIS_PASSWORD_FILE"]).parent) in mounts


def test_workers_are_scaled_on_the_stream_of_open_tickets():
    """KEDA's redis-streams scaler without a consumer group counts the entries of the stream."""
    scaled = found("ScaledObject", "rollout")["spec"]
    assert scaled["scaleTargetRef"] == {"name": "rollout"}
    assert "replicas" not in found("Deployment", "rollout")["spec"]
    (trigger,) = scaled["triggers"]
    assert trigger["type"] == "redis-streams"
    asked = trigger["metadata"]
    assert asked["stream"] == Keys(SETTINGS["RUN"]).tickets and "consumerGroup" not in asked
    assert int(asked["streamLength"]) > 0
    assert asked["address"] == f"redis.{KUSTOMIZATION['namespace']}.svc:6379"
    secret = found("TriggerAuthentication", "redis")["spec"]["secretTargetRef"]
    assert secret == [{"parameter": "password", "name": "redis", "key": "password"}]


def test_nobody_may_speak_to_a_pod_but_those_who_are_named():
    default = found("NetworkPolicy", "nobody")["spec"]
    assert default == {"podSelector": {}, "policyTypes": ["Ingress"]}
    for one in OBJECTS:
        if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] != "nobody":
            for rule in one["spec"]["ingress"]:
                assert rule["from"] and rule["ports"], one["metadata"]["name"]


@pytest.fixture
def built(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """What kustomize makes of an overlay with components, by a kustomization as a user writes it."""
    kubectl = shutil.which("kubectl")
    if not kubectl:
        pytest.skip("no kubectl on PATH")

    def build(overlay: str, *components: str) -> list[dict[str, Any]]:
        copy = tmp_path / "kubernetes"
        shutil.copytree(KUBERNETES, copy, dirs_exist_ok=True)
        (tmp_path / "own").mkdir(exist_ok=True)
        own = {
            "namespace": KUSTOMIZATION["namespace"],
            "resources": [f"../kubernetes/{overlay}".rstrip("/")],
            "components": [f"../kubernetes/{name}" for name in components],
        }
        (tmp_path / "own" / "kustomization.yaml").write_text(yaml.safe_dump(own))
        command = [kubectl, "kustomize", str(tmp_path / "own")]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return list(yaml.safe_load_all(result.stdout))

    return build


@pytest.mark.parametrize(
    ("overlay", "components", "count"),
    [
        ("", [], 13),
        ("gpu", [], 13),
        ("", ["relay"], 16),
        ("", ["curve"], 13),
        ("gpu", ["relay", "curve"], 16),
    ],
)
def test_kustomize_builds_every_combination(built, overlay, components, count):
    objects = built(overlay, *components)
    assert len(objects) == count
    (settings,) = [x["metadata"]["name"] for x in objects if x["kind"] == "ConfigMap"]
    for one in objects:
        assert one["metadata"]["namespace"] == KUSTOMIZATION["namespace"]
        if not one["apiVersion"].startswith("keda.sh/"):
            kubernetes_validate.validate(one, SCHEMA, strict=True)
        for container in containers_of(one):
            for source in container.get("envFrom", []):
                assert source["configMapRef"]["name"] == settings


def containers_of(one: dict[str, Any]) -> list[dict[str, Any]]:
    return one.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])


def container(objects: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (one,) = [c for x in objects for c in containers_of(x) if c["name"] == name]
    return one


def test_workers_behind_relays_speak_to_that_of_their_node(built):
    objects = built("", "relay")
    assert {"--announce=tcp://relay:5561", "--fetch=tcp://relay:5562"} <= set(
        container(objects, "rollout")["args"]
    )
    services = {x["metadata"]["name"]: x["spec"] for x in objects if x["kind"] == "Service"}
    assert services["relay"]["internalTrafficPolicy"] == "Local"
    ports = {p["name"]: p["port"] for p in services["relay"]["ports"]}
    said = container(objects, "relay")["args"]
    assert f"--announce=tcp://0.0.0.0:{ports['announce']}" in said
    upstream = {p["name"]: p["port"] for p in services["learner"]["ports"]}
    assert f"--from-fetch=tcp://learner:{upstream['fetch']}" in said
    (policy,) = [
        x["spec"]
        for x in objects
        if (x["kind"], x["metadata"]["name"]) == ("NetworkPolicy", "learner")
    ]
    admitted = [x["podSelector"]["matchLabels"]["app"] for x in policy["ingress"][0]["from"]]
    assert admitted == ["rollout", "relay"]


def test_a_worker_has_no_secret_key_but_its_own(built):
    objects = built("gpu", "relay", "curve")
    assert "broadcast.keys=/keys" in container(objects, "learner")["args"]
    assert "--keys=/keys" in container(objects, "relay")["args"]
    assert "--keys=/keys" in container(objects, "rollout")["args"]
    volumes = {
        x["metadata"]["name"]: volume["secret"]
        for x in objects
        if containers_of(x)
        for volume in x["spec"]["template"]["spec"].get("volumes", [])
        if volume["name"] == "keys"
    }
    assert {name: x["secretName"] for name, x in volumes.items()} == {
        "learner": "keys-server",
        "relay": "keys-server",
        "rollout": "keys-worker",
    }
    paths = {item["path"] for item in volumes["learner"]["items"]}
    assert paths == {"server.key", "server.key_secret", "worker.key_secret", "clients/worker.key"}


def test_the_overlay_for_gpus_asks_for_one_each_and_for_vllm(built):
    objects = built("gpu")
    for name, image in (("learner", "areal-q/learner"), ("rollout", "areal-q/rollout-vllm")):
        found = container(objects, name)
        assert found["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert found["image"].partition(":")[0] == image
    learner = container(objects, "learner")
    assert "learner.device=cuda" in learner["args"]
    assert learner["command"] == [
        "torchrun",
        "--standalone",
        "--nproc-per-node=gpu",
        "-m",
        "learner",
    ]
    (settings,) = [x["data"] for x in objects if x["kind"] == "ConfigMap"]
    assert type(load(ROOT / settings["CONFIG"]).rollout.engine).__struct_config__.tag == "vllm"
