"""The replay buffer in Redis: the learner's side (blocking) and a worker's side (asyncio).

    LearnerBuffer.admit ─▶ tickets ─claim▶ WorkerBuffer ─commit▶ groups ─▶ LearnerBuffer.take
                              ▲               │ release, or silent for claim_timeout_s
                              └───────────────┘

A ticket is delivered at least once; its commit is one script that checks the owner, so it becomes a group
exactly once (test_a_group_commits_once_however_many_workers_race).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from buffer.interface import START, Claim

if TYPE_CHECKING:
    from buffer.redis_store.learner_side import LearnerBuffer
    from buffer.redis_store.worker_side import WorkerBuffer

__all__ = ["START", "Claim", "LearnerBuffer", "WorkerBuffer"]
_NEED_REDIS = {"LearnerBuffer": "learner_side", "WorkerBuffer": "worker_side"}


def __getattr__(name: str) -> Any:
    """Imports a side when it is first used: its client of Redis takes a fifth of a second."""
    if name not in _NEED_REDIS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEED_REDIS[name]}"), name)
