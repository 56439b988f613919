"""Why a start of vLLM failed. Its core raises in a process of its own, which says why on the output that it
shares with this worker, and hands on only that it failed."""

import re
from pathlib import Path

_NAMED = re.compile(r"\b(\w*(?:Error|Exception)): (.+)")
_TOLD_ON = "initialization failed"
"""What the processes above the one that failed say of it"""
_NOT_AGAIN = {"RuntimeError", "OSError", "MemoryError", "TimeoutError", "ConnectionError"}
"""Errors that a further start may not meet: the machine's, not the settings'"""
_MOST_BYTES = 1 << 20


class SharedOutput:
    """What is written to this process's outputs from now on, where they are files, as of a launcher's child."""

    def __init__(self) -> None:
        outputs = {(path := Path(f"/proc/self/fd/{fd}")).resolve(): path for fd in (1, 2)}
        self._files = {path: path.stat().st_size for path in outputs.values() if path.is_file()}

    def newest_error(self) -> tuple[str, bool] | None:
        """Returns the sentence of the newest error that a process of vLLM named, and whether every further
        start would meet it; None if there is none."""
        found = [error for path, start in self._files.items() for error in _errors(path, start)]
        if not found:
            return None
        kind, sentence = found[-1]
        return f"{kind}: {sentence.strip()}", kind not in _NOT_AGAIN


def _errors(path: Path, start: int) -> list[tuple[str, str]]:
    with path.open("rb") as file:
        file.seek(max(start, path.stat().st_size - _MOST_BYTES))
        said = file.read().decode(errors="replace")
    return [(kind, what) for kind, what in _NAMED.findall(said) if _TOLD_ON not in what]
