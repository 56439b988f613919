"""Why vLLM did not start. Its processes log the reason and end; their parent raises an error that points at the
log. `report_first` makes such a process write the reason to a file as well, which `reported` reads."""

import logging
import os
from pathlib import Path

from msgspec import DecodeError, Struct, json

FILE = "AREAL_Q_VLLM_START_ERROR"
"""Environment variable that names the file to vLLM's processes"""
_REPEATS = (ValueError, TypeError, LookupError, AssertionError, NotImplementedError, ImportError)
"""Errors about settings, shapes and code, unlike those about memory or a device, which are RuntimeErrors"""


class StartError(Struct, frozen=True):
    says: str
    """Example: "ValueError: No available memory for the cache blocks." """
    repeats: bool
    """True if a further start would meet it again"""


def report_first() -> None:
    """Makes this process, one of vLLM's, report the first exception that it logs, if another has not."""
    if file := os.environ.get(FILE):
        logging.getLogger("vllm").addHandler(_Reporter(Path(file)))


def reported(file: Path) -> StartError | None:
    """Returns what the processes reported; None if they did not."""
    try:
        return json.decode(file.read_bytes(), type=StartError)
    except (OSError, DecodeError):
        return None


class _Reporter(logging.Handler):
    def __init__(self, file: Path) -> None:
        super().__init__(logging.ERROR)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return
        says = f"{type(error).__name__}: {' '.join(str(error).split())}"
        try:
            with self._file.open("xb") as new:
                new.write(json.encode(StartError(says, isinstance(error, _REPEATS))))
        except (
            OSError
        ):  # another has reported, or vLLM has started and the file's directory is gone
            pass
