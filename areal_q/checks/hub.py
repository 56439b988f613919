"""Models of the Hugging Face Hub, named by their ids: `model.path = "ORG/NAME"`.

An id stands for a directory of Hugging Face's own cache, ~/.cache/huggingface/hub or $HF_HUB_CACHE, which is
filled once. Its path names model and commit, so that config.toml, which has the path, has the revision; a host
that lacks the directory fetches that very commit.
"""

import re
from pathlib import Path
from textwrap import shorten

from areal_q.config import ModelTeacher, PretrainedModel, Run
from areal_q.errors import ConfigError, installing
from areal_q.system.run_dir import table_at, with_changes

_ID = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*?)(?:@([\w./-]+))?")
"""An id, with a commit, branch or tag behind it or none"""
_CACHED = re.compile(r".*/models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})/?")
REAL_MODEL = "models/SmolLM2-135M-Instruct"
"""The directory of configs/smollm2-sums.toml's model"""
_LONGEST = 160
"""Characters of what the Hub's client says that an error repeats"""
_READ = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
"""What is fetched of a repository; not the weights in other layouts."""


def fetched(run: Run) -> Run:
    """Returns `run` with directories in place of the ids of models, which are fetched if the cache lacks them.
    Raises ConfigError, naming the setting, for one that cannot be had."""
    places = {
        "model": isinstance(run.model, PretrainedModel),
        "learner.reference_kl": run.learner.reference_kl is not None,
        "learner.teacher": isinstance(run.learner.teacher, ModelTeacher),
    }
    for place in (name for name, there in places.items() if there):
        if path := table_at(run, place).path:
            run = with_changes(run, place, path=directory_of(path, f"{place}.path"))
    return run


def directory_of(path: str, setting: str) -> str:
    """Returns the directory of a model that `setting` names: `path` itself unless it is an id, such as
    "ORG/NAME" or "ORG/NAME@REVISION", or lies in a cache that lacks it. Raises ConfigError if it cannot be
    fetched."""
    if Path(path).exists():
        return path
    if cached := _CACHED.fullmatch(path):
        return _snapshot(f"{cached[1]}/{cached[2]}", cached[3], setting)
    named = _ID.fullmatch(path)
    return _snapshot(named[1], named[2], setting) if named else path


def not_there(path: str) -> str:
    """Returns that a directory is not there, and where a relative one was looked for."""
    here = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
    made = " (make real-model, in a checkout, fetches it)" if path == REAL_MODEL else ""
    return f"no such directory{here}{made}"


def is_cached(path: Path) -> bool:
    """Returns True for a directory in the Hub's cache, which another host fetches by its name."""
    return _CACHED.fullmatch(str(path)) is not None


def _snapshot(id: str, revision: str | None, setting: str) -> str:
    try:
        import huggingface_hub
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HTTPError,  # pyright: ignore[reportPrivateImportUsage] of whichever client it uses
            LocalEntryNotFoundError,
        )
    except ImportError as error:
        raise ConfigError(f"{setting}: {id} needs {installing('hf')}") from error
    try:
        return str(huggingface_hub.snapshot_download(id, revision=revision, allow_patterns=_READ))
    except (HTTPError, OSError, ValueError) as error:  # OSError: a full disk, among others
        # That the cache lacks it is said for whatever kept the client from asking, which is the cause.
        absent = isinstance(error, LocalEntryNotFoundError)
        cause = (absent and error.__cause__) or error
        unanswered = isinstance(cause, HTTPError) and not isinstance(cause, HfHubHTTPError)
        if unanswered or isinstance(cause, ConnectionError):
            raise ConfigError(
                f"{setting}: {id}: {not_there(id)}, the cache lacks this model, and no network reaches "
                "huggingface.co; where there is one: hf download ID --local-dir DIR"
            ) from error
        why = shorten(str(cause), _LONGEST, placeholder=" …")
        raise ConfigError(
            f"{setting}: {id}: {not_there(id)}, nor can it be fetched from the Hub: {why}"
        ) from error
