"""AReaL-Q: asynchronous off-policy RL for language models with quantized rollouts.

The functions are those of areal_q/api, which is imported when one of them is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_q.api import Trained, evaluate, opened, replay, report, train
    from areal_q.api.rollout import Completion, Rollout
    from areal_q.api.steps import Learner, group, logged

__version__ = "0.1.0"
_HOMES = {
    "areal_q.api": ("Trained", "evaluate", "opened", "replay", "report", "train"),
    "areal_q.api.steps": ("Learner", "group", "logged"),
    "areal_q.api.rollout": ("Completion", "Rollout"),
}
__all__ = [
    "Completion",
    "Learner",
    "Rollout",
    "Trained",
    "__version__",
    "evaluate",
    "group",
    "logged",
    "opened",
    "replay",
    "report",
    "train",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'areal_q' has no attribute {name!r}")
