"""Files: tensors that others may read, as far as the user's umask lets them, and names that hold numbers."""

import re
from collections.abc import Iterable, Mapping
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


def by_number(paths: Iterable[Path]) -> list[Path]:
    """`paths` in the order of their names, in which a run of digits counts as one number.

    Example: step-999950 stands before step-1000000, which as text it does not.
    """
    return sorted(paths, key=lambda path: _words_and_numbers(path.name))


def _words_and_numbers(name: str) -> list[tuple[int, str]]:
    """Digits as their value, then all as text, so that any two names compare."""
    found = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(int(one), one) if one.isdecimal() and one.isascii() else (-1, one) for one in found]
