"""Kustomizations as a user writes them, over a copy of docker/kubernetes, and what kustomize makes of them."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.paths import DOCKER, ROOT

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
    """Returns the folder of a kustomization of one's own, with `settings` for the ConfigMap `run`, and with
    own-model/ the settings that docs/kubernetes.md shows."""
    own: dict[str, Any] = {
        "namespace": namespace,
        "resources": [f"../docker/kubernetes/{overlay}".rstrip("/")],
        "components": [f"../docker/kubernetes/{name}" for name in components],
        "configMapGenerator": [],
    }
    if settings:
        lines = [f"{name}={value}" for name, value in settings.items()]
        changed = {"name": "run", "namespace": NAMESPACE, "behavior": "merge", "literals": lines}
        own["configMapGenerator"].append(changed)
    if "own-model" in components:
        own["configMapGenerator"].append({"name": "own", "files": ["own.toml"]})
    return written(directory, own)


def written(directory: Path, own: dict[str, Any]) -> Path:
    """Returns the folder of the kustomization `own`, beside which are own.toml and a copy of docker/."""
    shutil.copytree(DOCKER, directory / "docker", dirs_exist_ok=True)
    (directory / "own").mkdir(exist_ok=True)
    (directory / "own" / "kustomization.yaml").write_text(yaml.safe_dump(own))
    (toml,) = blocks_of_the_page("toml")
    (directory / "own" / "own.toml").write_text(toml)
    return directory / "own"


def blocks_of_the_page(language: str) -> list[str]:
    """Returns the blocks of docs/kubernetes.md that are written in `language`."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def build(own: Path) -> list[dict[str, Any]]:
    """Returns the objects that kustomize makes; skips where there is no kubectl."""
    kubectl = shutil.which("kubectl")
    if not kubectl:
        pytest.skip("no kubectl on PATH")
    result = subprocess.run([kubectl, "kustomize", str(own)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return list(yaml.safe_load_all(result.stdout))
