"""Tensors in a file that others may read, as far as the user's umask lets them."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Writes `path` with the permissions that `open` would give it: safetensors renames a temporary file of its
    own, which nobody else may read. Raises OSError and SafetensorError."""
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata)
    path.chmod(mode)
