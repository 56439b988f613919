"""Paths that tests start from."""

import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The repository's root."""
DOCKER = ROOT / "docker"
QUICKSTART = ROOT / "configs" / "quickstart.toml"
EXECUTABLE = Path(sysconfig.get_path("scripts")) / "areal-q"
"""The installed command."""
