"""The replay buffer in Redis: the learner's side (blocking) and a worker's side (asyncio).

    LearnerBuffer.admit ─▶ tickets ─claim▶ WorkerBuffer ─commit▶ groups ─▶ LearnerBuffer.take
                              ▲               │ release, or silent for claim_timeout_s
                              └───────────────┘

A ticket is delivered at least once; its commit is one script that checks the owner, so it becomes a group
exactly once (test_a_group_commits_once_however_many_workers_race).
"""

from buffer.interface import START, Claim
from buffer.redis_store.learner_side import LearnerBuffer
from buffer.redis_store.worker_side import WorkerBuffer

__all__ = ["START", "Claim", "LearnerBuffer", "WorkerBuffer"]
