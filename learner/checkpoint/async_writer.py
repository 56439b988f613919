"""Checkpoints in the background: the learner waits for a copy in memory, not for the disk.

    Learner ─save(state)─▶ copies on the host ─thread─▶ written, hashed, synced, renamed ─▶ returned by `settle`

| wait    | for                           | unblocked by               |
|---------|-------------------------------|----------------------------|
| save    | the checkpoint before this    | the thread                 |
| finish  | the one that is being written | the thread                 |

Checkpoints are written one at a time, so that a crash leaves the one before whole
(learner/checkpoint/files.py). An error in the thread is raised by the next call of `settle` or `finish`. The
copy takes as much host memory as weights and moments.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from learner import checkpoint
from learner.checkpoint.files import State
from learner.policy_update import PolicyUpdater


class CheckpointWriter:
    """Writes checkpoints to `directory`, where it keeps the one of the start, the newest `keep`, and one every
    `keep_every` steps (0: none of these)."""

    def __init__(self, directory: Path, keep: int, keep_every: int = 0) -> None:
        self._directory, self._keep, self._keep_every = directory, keep, keep_every
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[tuple[State, Path]] | None = None

    def save(self, state: State, updater: PolicyUpdater) -> None:
        """Copies the present policy and returns; the thread writes the copy. Call `finish` before."""
        assert self._pending is None, "one at a time"
        shares = updater.shares
        staged = checkpoint.stage(self._directory, state.step) if shares else None
        present = checkpoint.tensors_of(updater.policy, updater.collect(staged))
        tensors = {name: t.clone() for name, t in present.items()}
        files = [staged / checkpoint.SHARE.format(i + 1) for i in range(shares)] if staged else []
        self._pending = self._thread.submit(self._write, state, tensors, files)

    def _write(
        self, state: State, tensors: checkpoint.Tensors, shares: list[Path]
    ) -> tuple[State, Path]:
        keep = self._keep, self._keep_every
        return state, checkpoint.write(self._directory, state, tensors, *keep, shares)

    def settle(self) -> tuple[State, Path] | None:
        """Returns the checkpoint that was completed since the last call, or None. Raises CheckpointError if
        writing it failed."""
        return self.finish() if self._pending and self._pending.done() else None

    def finish(self) -> tuple[State, Path] | None:
        """Does the same as `settle` after waiting for a checkpoint that is being written."""
        pending, self._pending = self._pending, None
        return pending.result() if pending else None

    def close(self) -> None:
        """Waits for the thread and ends it."""
        self._thread.shutdown()
