"""docker/kubernetes on a real API server with Kubernetes' own controllers: what is accepted, what a changed
setting asks for, and what becomes of the learner however it ends."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.kubernetes.api_server import Cluster, api_server, until
from helpers.kubernetes.overlays import COMBINATIONS, NAMESPACE, build, kustomization

pytestmark = pytest.mark.slow
Namespace = Callable[..., str]
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with api_server(tmp_path_factory.mktemp("api-server")) as cluster:
        cluster.kubectl("create", "namespace", NAMESPACE)
        yield cluster


@pytest.fixture
def deployed(cluster: Cluster, tmp_path: Path) -> Namespace:
    """Applies an overlay with components in a namespace of its own, and returns its name."""

    def deploy(overlay: str, *components: str, settings: dict[str, str] | None = None) -> str:
        namespace = f"test-{next(NUMBERS)}"
        own = kustomization(tmp_path, overlay, *components, namespace=namespace, settings=settings)
        cluster.kubectl("create", "namespace", namespace)
        text = yaml.safe_dump_all(known(build(own)))
        cluster.kubectl("apply", "-f", "-", text=text)
        return namespace

    return deploy


def known(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the objects of Kubernetes' own kinds."""
    foreign = ("keda.sh/", "monitoring.coreos.com/")
    return [one for one in objects if not one["apiVersion"].startswith(foreign)]


@pytest.mark.parametrize(("overlay", "components"), COMBINATIONS)
def test_api_server_accepts_every_combination(cluster, tmp_path, overlay, components):
    objects = known(build(kustomization(tmp_path, overlay, *components)))
    said = cluster.kubectl(
        *("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"),
        text=yaml.safe_dump_all(objects),
    )
    assert said.count("serverside-applied") == len(objects)


def test_learner_comes_back_from_a_drain_without_a_failure(cluster, deployed):
    space = deployed("base")
    first, _ = cluster.pod(space, "learner"), cluster.pod(space, "redis")
    may_evict(cluster, space)
    cluster.evict(space, first)
    cluster.end(space, first, "learner", 143)
    cluster.remove(space, first)
    assert cluster.pod(space, "learner", other_than=first) != first
    assert cluster.get(space, "job", "learner")["status"].get("failed", 0) == 0


def test_learner_that_crashed_comes_back_and_is_counted(cluster, deployed):
    space = deployed("base")
    first = cluster.pod(space, "learner")
    cluster.end(space, first, "learner", 1)
    cluster.pod(space, "learner", other_than=first)
    assert cluster.get(space, "job", "learner")["status"]["failed"] == 1


@pytest.mark.parametrize(("code", "condition"), [(0, "Complete"), (2, "Failed")])
def test_finished_run_or_wrong_setting_is_not_begun_again(cluster, deployed, code, condition):
    space = deployed("base")
    cluster.end(space, cluster.pod(space, "learner"), "learner", code)
    status = until(lambda: conditions(cluster, space).get(condition))
    assert status == "True" and cluster.pods(space, "learner") == []


def may_evict(cluster: Cluster, space: str) -> None:
    """Waits until the budget lets one of the two go."""
    budget = ("pdb", "one-of-two")
    until(lambda: cluster.get(space, *budget)["status"].get("disruptionsAllowed") == 1)


def conditions(cluster: Cluster, space: str) -> dict[str, str]:
    found = cluster.get(space, "job", "learner")["status"].get("conditions", [])
    return {one["type"]: one["status"] for one in found}


def test_drain_takes_learner_or_redis_but_never_both(cluster, deployed):
    space = deployed("base")
    learner, redis = cluster.pod(space, "learner"), cluster.pod(space, "redis")
    may_evict(cluster, space)
    cluster.evict(space, learner)
    assert "disruption budget" in cluster.evict(space, redis, fails=True)


def test_changed_setting_is_applied_after_the_job_is_deleted(cluster, deployed, tmp_path):
    """The documented command: docs/kubernetes.md, Change a setting or an image."""
    space = deployed("base")
    pod = cluster.pod(space, "learner")
    own = kustomization(tmp_path, "base", namespace=space, settings={"ARGS": "steps=7"})
    text = yaml.safe_dump_all(known(build(own)))
    refused = cluster.kubectl("apply", "-f", "-", text=text, fails=True)
    assert "field is immutable" in refused
    cluster.kubectl("-n", space, "delete", "job", "learner", "--cascade=foreground", "--wait=false")
    until(lambda: "deletionTimestamp" in cluster.get(space, "pod", pod)["metadata"])
    cluster.end(space, pod, "learner", 143)
    cluster.remove(space, pod)
    until(lambda: not cluster.kubectl("-n", space, "get", "job", "--ignore-not-found"))
    cluster.kubectl("apply", "-f", "-", text=text)
    cluster.pod(space, "learner", other_than=pod)
    spec = cluster.get(space, "job", "learner")["spec"]["template"]["spec"]
    source = spec["containers"][0]["envFrom"][-1]
    settings = cluster.get(space, "configmap", source["configMapRef"]["name"])["data"]
    assert settings["ARGS"] == "steps=7" and settings["RUN"] == "quickstart"


def test_several_ranks_end_with_the_first_one(cluster, deployed):
    space = deployed("base", "ranks", settings={"LEARNER_PODS": "2"})
    names = until(lambda: len(found := cluster.pods(space, "learner")) == 2 and found)
    first, second = sorted(pod["metadata"]["name"] for pod in names)
    cluster.end(space, second, "learner", 143)
    again = until(lambda: len(found := cluster.pods(space, "learner")) == 2 and found)
    assert cluster.get(space, "job", "learner")["status"].get("failed", 0) == 0
    assert {first, second} != {pod["metadata"]["name"] for pod in again}
    cluster.end(space, first, "learner", 0)
    until(lambda: conditions(cluster, space).get("SuccessCriteriaMet"))


def test_workers_are_replaced_without_one_more_on_gpus(cluster, deployed):
    space = deployed("gpu")
    spec = cluster.get(space, "deployment", "rollout")["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
