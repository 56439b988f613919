"""A checkpoint of a policy that is part of no run."""

from pathlib import Path

from learner import checkpoint
from learner.backends.single_device import TorchPolicy


def save_at(step: int, directory: Path, policy: TorchPolicy, keep: int = 1) -> None:
    """With nothing admitted and nothing published."""
    state = checkpoint.State(
        step=step,
        position="0-1",
        cursor=1,
        outstanding=[],
        digests={},
        updates=policy.updates,
        skipped=policy.skipped,
    )
    checkpoint.save(directory, state, policy, keep)
