"""Kustomizations as a user writes them, over a copy of docker/kubernetes, and what kustomize makes of them."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.paths import DOCKER

NAMESPACE = "areal-q"
COMBINATIONS = [
    ("base", []),
    ("gpu", []),
    ("base", ["relay"]),
    ("base", ["curve"]),
    ("base", ["monitoring"]),
    ("base", ["own-model"]),
    ("base", ["own-model", "hub"]),
    ("base", ["ranks"]),
    ("gpu", ["relay", "curve"]),
    ("gpu", ["relay", "curve", "monitoring", "own-model", "hub", "ranks"]),
]


def kustomization(
    directory: Path,
    overlay: str,
    *components: str,
    namespace: str = NAMESPACE,
    settings: dict[str, str] | None = None,
) -> Path:
    """Returns the folder of a kustomization of one's own, with `settings` for the ConfigMap `run`."""
    shutil.copytree(DOCKER, directory / "docker", dirs_exist_ok=True)
    own: dict[str, Any] = {
        "namespace": namespace,
        "resources": [f"../docker/kubernetes/{overlay}".rstrip("/")],
        "components": [f"../docker/kubernetes/{name}" for name in components],
    }
    if settings:
        lines = [f"{name}={value}" for name, value in settings.items()]
        changed = {"name": "run", "namespace": NAMESPACE, "behavior": "merge", "literals": lines}
        own["configMapGenerator"] = [changed]
    (directory / "own").mkdir(exist_ok=True)
    (directory / "own" / "kustomization.yaml").write_text(yaml.safe_dump(own))
    return directory / "own"


def build(own: Path) -> list[dict[str, Any]]:
    """Returns the objects that kustomize makes; skips where there is no kubectl."""
    kubectl = shutil.which("kubectl")
    if not kubectl:
        pytest.skip("no kubectl on PATH")
    result = subprocess.run([kubectl, "kustomize", str(own)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return list(yaml.safe_load_all(result.stdout))
