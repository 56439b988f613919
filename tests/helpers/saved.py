"""A checkpoint of a trainer that is part of no run."""

from pathlib import Path

from learner import checkpoint
from learner.backends.single_device import Trainer


def save_at(step: int, directory: Path, trainer: Trainer, keep: int = 1) -> None:
    """With nothing admitted and nothing published."""
    state = checkpoint.State(
        step=step,
        position="0-1",
        cursor=1,
        outstanding=[],
        digests={},
        updates=trainer.updates,
        skipped=trainer.skipped,
    )
    checkpoint.save(directory, state, trainer, keep)
