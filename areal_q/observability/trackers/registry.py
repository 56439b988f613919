"""The trackers that there are, by the settings that choose them.

To add one: a Struct in areal_q/config/trackers.py, a class with the three methods of Tracker, a line here, an
extra in pyproject.toml, a row in docs/trackers.md.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

from areal_q.config import Mlflow, PythonTracker, TrackerConfig, Trackio, Wandb
from areal_q.errors import ConfigError, installing
from areal_q.observability.trackers.described import TrackedRun
from areal_q.observability.trackers.feed import Tracker
from areal_q.observability.trackers.own_tracker import OwnTracker
from areal_q.observability.trackers.to_mlflow import MlflowTracker
from areal_q.observability.trackers.to_trackio import TrackioTracker
from areal_q.observability.trackers.to_wandb import WandbTracker

TRACKERS: dict[type, Callable[[Any, TrackedRun], Tracker]] = {
    Wandb: WandbTracker,
    Mlflow: MlflowTracker,
    Trackio: TrackioTracker,
    PythonTracker: OwnTracker,
}


def open_tracker(settings: TrackerConfig, run: TrackedRun) -> Tracker:
    """Begins the run with its tracker, or goes on with it. Raises ConfigError if its package is missing."""
    check_tracker_package(settings)
    return TRACKERS[type(settings)](settings, run)


def check_tracker_package(settings: TrackerConfig) -> None:
    """Raises ConfigError, which names the extra, unless the package of the tracker is installed."""
    kind = str(settings.__struct_config__.tag)
    if isinstance(settings, PythonTracker):
        return
    found = importlib.util.find_spec(kind)
    # A directory of that name, as wandb makes one, is found as well, and has no origin.
    if found is None or found.origin is None:
        raise ConfigError(f"trackers: type = '{kind}' needs {kind}: {installing(kind)}")
