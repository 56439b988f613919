"""Paths that tests start from."""

import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The repository's root."""
DOCKER = ROOT / "docker"
QUICKSTART = ROOT / "configs" / "quickstart.toml"
REAL_MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
"""A pretrained model; `make real-model` fetches it."""
EXECUTABLE = Path(sysconfig.get_path("scripts")) / "areal-q"
"""The installed command."""
