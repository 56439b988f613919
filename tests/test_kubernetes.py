"""docker/kubernetes: valid for Kubernetes' own schemas, locked down, and in step with the code."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from areal_q.config import load
from buffer.keys import Keys

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = ROOT / "docker" / "kubernetes"
KUBERNETES = "1.32"
FILES = [path for path in sorted(DIRECTORY.glob("*.yaml")) if path.stem != "kustomization"]
OBJECTS: list[dict[str, Any]] = [x for path in FILES for x in yaml.safe_load_all(path.read_text())]
KUSTOMIZATION = yaml.safe_load((DIRECTORY / "kustomization.yaml").read_text())
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
        kubernetes_validate.validate(one, KUBERNETES, strict=True)


def test_the_schema_check_can_fail():
    broken = found("Deployment", "rollout") | {"spec": {"selectors": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


def test_every_file_is_in_the_kustomization():
    assert sorted(KUSTOMIZATION["resources"]) == [path.name for path in FILES]


def test_no_pod_has_more_rights_than_it_needs():
    assert {name for name, _ in pods()} == {"redis", "learner", "rollout"}
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


def test_kustomize_builds_it():
    kubectl = shutil.which("kubectl")
    if not kubectl:
        pytest.skip("no kubectl on PATH")
    built = subprocess.run([kubectl, "kustomize", DIRECTORY], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    objects = list(yaml.safe_load_all(built.stdout))
    assert len(objects) == len(OBJECTS) + 1  # the configuration
    for one in objects:
        assert one["metadata"]["namespace"] == KUSTOMIZATION["namespace"]
        if not one["apiVersion"].startswith("keda.sh/"):
            kubernetes_validate.validate(one, KUBERNETES, strict=True)
