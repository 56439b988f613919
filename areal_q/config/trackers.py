"""Trackers of other projects, which get the metrics of a run: one Struct per choice, by `type`.

There are no keys among the settings: a tracker's own environment variables, or its login, have them.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta

from areal_q.config.struct_types import PythonCode, TaggedSettings

Name = Annotated[str, Meta(min_length=1)]


class _Online(TaggedSettings, frozen=True, kw_only=True):
    """What all trackers of other projects have."""

    name: Name | None = None
    """The run's name there; none: its name here."""
    samples: bool = True
    """The held-out samples of each evaluation, as a table."""
    report: bool = True
    """`areal-q report` as an artifact, at the end."""


class Wandb(_Online, frozen=True, kw_only=True, tag="wandb"):
    """Weights & Biases: `.venv/bin/pip install -e '.[wandb]'`. The key is WANDB_API_KEY, or `wandb login`."""

    project: Name = "areal-q"
    """The project, made if there is none."""
    entity: Name | None = None
    """The user or team; none: WANDB_ENTITY, or your own."""
    group: Name | None = None
    """The group of runs that belong together, such as seeds."""
    tags: tuple[Name, ...] = ()
    """Labels of the run."""
    mode: Literal["online", "offline"] | None = None
    """offline: files below RUN/trackers, for `wandb sync`. None: what WANDB_MODE says, or online."""


class Mlflow(_Online, frozen=True, kw_only=True, tag="mlflow"):
    """MLflow: `.venv/bin/pip install -e '.[mlflow]'`. User and password are MLFLOW_TRACKING_USERNAME and
    MLFLOW_TRACKING_PASSWORD, a token is MLFLOW_TRACKING_TOKEN."""

    uri: Name | None = None
    """The tracking server or store, such as http://HOST:5000 or sqlite:///mlflow.db, without a password; none:
    MLFLOW_TRACKING_URI, or MLflow's own default."""
    experiment: Name = "areal-q"
    """The experiment, made if there is none."""


class Trackio(_Online, frozen=True, kw_only=True, tag="trackio"):
    """Trackio: `.venv/bin/pip install -e '.[trackio]'`; `trackio show` draws what it holds. A Space needs
    HF_TOKEN, or `hf auth login`."""

    project: Name = "areal-q"
    """The project, made if there is none."""
    group: Name | None = None
    """The group of runs that belong together, such as seeds."""
    space: Name | None = None
    """The Space of Hugging Face that gets all of it; none: a file in TRACKIO_DIR, or in the cache."""


class PythonTracker(PythonCode, frozen=True, kw_only=True, tag="python"):
    """A function `tracker(run, …)` of one's own, called once, which returns what is called with every record of
    metrics.jsonl (docs/trackers.md)."""


TrackerConfig = Wandb | Mlflow | Trackio | PythonTracker


def labelled(trackers: Iterable[TrackerConfig]) -> dict[str, TrackerConfig]:
    """Returns the trackers by their type; the second of a type is "wandb-2"."""
    found: dict[str, TrackerConfig] = {}
    for tracker in trackers:
        label = kind = str(tracker.__struct_config__.tag)
        count = 1
        while label in found:
            count += 1
            label = f"{kind}-{count}"
        found[label] = tracker
    return found
