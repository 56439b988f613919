"""Models of the Hugging Face Hub, named by their ids: `model.path = "ORG/NAME"`.

An id stands for a directory of Hugging Face's own cache, ~/.cache/huggingface/hub or $HF_HUB_CACHE, which is
filled once. Its path names model and commit, so that config.toml, which has the path, has the revision; a host
that lacks the directory fetches that very commit.
"""

import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from areal_q.config import ModelTeacher, PretrainedModel, Run
from areal_q.errors import ConfigError

_ID = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*?)(?:@([\w./-]+))?")
"""An id, with a commit, branch or tag behind it or none"""
_CACHED = re.compile(r".*/models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})/?")
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
    for place, there in places.items():
        path = attrgetter(place)(run).path if there else None
        if path and (found := directory_of(path, f"{place}.path")) != path:
            run = _with_path(run, place.split("."), found)
    return run


def _with_path(settings: Any, place: list[str], path: str) -> Any:
    if not place:
        return msgspec.structs.replace(settings, path=path)
    inner = _with_path(getattr(settings, place[0]), place[1:], path)
    return msgspec.structs.replace(settings, **{place[0]: inner})


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


def _snapshot(id: str, revision: str | None, setting: str) -> str:
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise ConfigError(f"{setting}: {id} needs pip install 'areal-q[hf]'") from error
    try:
        return str(huggingface_hub.snapshot_download(id, revision=revision, allow_patterns=_READ))
    except (HfHubHTTPError, OSError, ValueError) as error:  # OSError: no network, or a full disk
        why = " ".join(str(error).split())
        raise ConfigError(
            f"{setting}: {id} is no directory here, and cannot be fetched as a model of the Hub: {why}; where "
            "there is a network: hf download ID --local-dir DIR"
        ) from error
