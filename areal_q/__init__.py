"""AReaL-Q: asynchronous off-policy RL for language models with quantized rollouts.

The functions are those of areal_q/api, which is imported when one of them is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_q.api import Trained, evaluate, opened, replay, report, train

__version__ = "0.1.0"
__all__ = ["Trained", "__version__", "evaluate", "opened", "replay", "report", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'areal_q' has no attribute {name!r}")
    return getattr(import_module("areal_q.api"), name)
