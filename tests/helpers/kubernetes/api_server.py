"""A real Kubernetes API server for a test: etcd, kube-apiserver and kube-controller-manager, without nodes.

What a kubelet would tell of a pod is told by the test (`pod`, `end`, `remove`). The programs are those of
KUBEBUILDER_ASSETS, as controller-runtime's envtest names that folder, or on PATH.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from areal_q.system.ports import free_ports
from areal_q.system.processes import die_with_parent

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
CONTROLLERS = (
    "job-controller,statefulset-controller,deployment-controller,replicaset-controller,"
    "disruption-controller,garbage-collector-controller,namespace-controller"
)
NODE = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node"}}


def programs() -> dict[str, str]:
    """Returns where the programs are; skips where one of them is not."""
    path = os.pathsep.join([os.environ.get("KUBEBUILDER_ASSETS", ""), os.environ.get("PATH", "")])
    found = {name: shutil.which(name, path=path) for name in PROGRAMS}
    lacking = [name for name, place in found.items() if not place]
    if lacking:
        pytest.skip(f"no {', '.join(lacking)} on PATH or in KUBEBUILDER_ASSETS")
    return {name: str(place) for name, place in found.items()}


class Cluster:
    """What a person does with kubectl, and what a kubelet tells."""

    def __init__(self, kubectl: str, config: Path) -> None:
        self._command, self.config = [kubectl, f"--kubeconfig={config}"], config

    def kubectl(self, *arguments: str, text: str = "", fails: bool = False) -> str:
        """Runs kubectl with `text` on its standard input; returns what it said, on stderr where it `fails`."""
        done = subprocess.run(
            [*self._command, *arguments], input=text, capture_output=True, text=True
        )
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stderr if fails else done.stdout

    def apply(self, one: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", text=json.dumps(one))

    def get(self, namespace: str, *what: str) -> dict[str, Any]:
        return json.loads(self.kubectl("-n", namespace, "get", *what, "-o", "json"))

    def pods(self, namespace: str, app: str) -> list[dict[str, Any]]:
        """Returns the pods that are neither over nor on their way out."""
        found = self.get(namespace, "pods", "-l", f"app={app}")["items"]
        return [
            pod
            for pod in found
            if "deletionTimestamp" not in pod["metadata"]
            and pod["status"].get("phase") in ("Pending", "Running")
        ]

    def pod(self, namespace: str, app: str, other_than: str = "") -> str:
        """Waits for one pod that is there and returns its name, on the node and running."""
        found = until(
            lambda: [
                pod["metadata"]["name"]
                for pod in self.pods(namespace, app)
                if pod["metadata"]["name"] != other_than
            ]
        )
        (name,) = found
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name, "namespace": namespace},
            "target": {"apiVersion": "v1", "kind": "Node", "name": "node"},
        }
        self._raw("create", f"/api/v1/namespaces/{namespace}/pods/{name}/binding", binding)
        ready = {"type": "Ready", "status": "True"}
        self.tell(namespace, name, {"phase": "Running", "conditions": [ready]})
        return name

    def tell(self, namespace: str, pod: str, status: dict[str, Any]) -> None:
        """Tells `status` of a pod, as its kubelet would."""
        patch = json.dumps({"status": status})
        self.kubectl("-n", namespace, "patch", "pod", pod, "--subresource=status", "-p", patch)

    def end(self, namespace: str, pod: str, container: str, code: int) -> None:
        """Tells that the container of a pod ended with `code`."""
        ended = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}
        state = {"name": container, "state": ended, "image": "", "imageID": ""}
        state |= {"ready": False, "restartCount": 0}
        phase = "Failed" if code else "Succeeded"
        self.tell(namespace, pod, {"phase": phase, "containerStatuses": [state]})

    def evict(self, namespace: str, pod: str, fails: bool = False) -> str:
        """Asks for an eviction, as `kubectl drain` does."""
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": namespace},
        }
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
        return self._raw("create", path, eviction, fails)

    def remove(self, namespace: str, pod: str) -> None:
        """Removes a pod that was told to go, as its kubelet does at last."""
        self.kubectl("-n", namespace, "delete", "pod", pod, "--grace-period=0", "--force")

    def _raw(self, verb: str, path: str, one: dict[str, Any], fails: bool = False) -> str:
        return self.kubectl(verb, "--raw", path, "-f", "-", text=json.dumps(one), fails=fails)


def until(found: Callable[[], Any]) -> Any:
    """Waits until `found` returns something."""
    while not (value := found()):
        time.sleep(0.1)
    return value


@contextmanager
def api_server(directory: Path) -> Iterator[Cluster]:
    """Runs the three servers on loopback, with their data in `directory`."""
    found = programs()
    client, peer, port, manager = free_ports(4)
    (directory / "tokens.csv").write_text('token,admin,admin,"system:masters"\n')
    key = directory / "sa.key"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    config = directory / "kubeconfig"
    config.write_text(json.dumps(_kubeconfig(port)))
    with ExitStack() as stack:
        start = lambda name, *flags: stack.enter_context(  # noqa: E731
            _running(found[name], directory, *flags)
        )
        start(
            "etcd",
            f"--data-dir={directory}/etcd",
            f"--listen-client-urls=http://127.0.0.1:{client}",
            f"--advertise-client-urls=http://127.0.0.1:{client}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            "--unsafe-no-fsync",
        )
        start(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{client}",
            f"--service-account-signing-key-file={key}",
            f"--service-account-key-file={key}",
            "--service-account-issuer=https://kubernetes.default",
            "--authorization-mode=RBAC",
            f"--token-auth-file={directory}/tokens.csv",
            f"--cert-dir={directory}/certs",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--disable-admission-plugins=ServiceAccount",
        )
        cluster = Cluster(found["kubectl"], config)
        ready = [*cluster._command, "get", "--raw", "/readyz"]
        until(lambda: subprocess.run(ready, capture_output=True).returncode == 0)
        start(
            "kube-controller-manager",
            f"--kubeconfig={config}",
            f"--controllers={CONTROLLERS}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={manager}",
            f"--cert-dir={directory}/manager",
        )
        cluster.apply(NODE)
        yield cluster


@contextmanager
def _running(program: str, directory: Path, *flags: str) -> Iterator[None]:
    with (directory / f"{Path(program).name}.log").open("wb") as log:
        process = subprocess.Popen(
            [program, *flags], stdout=log, stderr=log, preexec_fn=die_with_parent()
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _kubeconfig(port: int) -> dict[str, Any]:
    where = {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": where}],
        "users": [{"name": "test", "user": {"token": "token"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
