"""Checkpoints in the background, of the weights and moments themselves: nothing on the host is copied for them.

    Learner ─save(state)─▶ thread: written ─▶ hashed, synced, renamed ─▶ returned by `settle`
                             │ reads weights and moments
    TorchPolicy ─wait_until_read()┘ before the optimizer writes to them

| wait            | for                                                  | unblocked by |
|-----------------|------------------------------------------------------|--------------|
| save            | the checkpoint before this                           | the thread   |
| wait_until_read | weights and moments in the system's cache, unhashed  | the thread   |
| finish          | the one that is being written                        | the thread   |

Checkpoints are written one at a time, so that a crash leaves the one before whole
(learner/checkpoint/files.py). An error in the thread is raised by the next call of `settle` or `finish`. What
lies on a GPU is copied to the host first, and the optimizer does not wait.
"""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from areal_q.config import CheckpointConfig
from learner import checkpoint
from learner.checkpoint.files import State
from learner.policy_update import PolicyUpdater


class CheckpointWriter:
    """Writes checkpoints to `directory`, where it keeps the one of the start, the newest `keep`, and one every
    `keep_every` steps (0: none of these), as `cfg` says."""

    def __init__(self, directory: Path, cfg: CheckpointConfig) -> None:
        self._directory, self._cfg = directory, cfg
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[tuple[State, Path]] | None = None
        self._read = threading.Event()
        self._read.set()

    def save(
        self, state: State, updater: PolicyUpdater, spared: frozenset[int] = frozenset()
    ) -> None:
        """Begins to write the present policy, and returns. Call `finish` before. Earlier checkpoints of the
        steps `spared` stay.

        Until `wait_until_read` has returned, weights and moments may be read but not written to."""
        assert self._pending is None, "one at a time"
        shares = updater.shares
        staged = checkpoint.stage(self._directory, state.step) if shares else None
        tensors = checkpoint.tensors_of(updater.policy, updater.collect(staged))
        files = [staged / checkpoint.SHARE.format(i + 1) for i in range(shares)] if staged else []
        if updater.policy.cfg.device == "cpu":
            self._read.clear()
        self._pending = self._thread.submit(self._write, state, tensors, files, spared)

    def wait_until_read(self) -> None:
        """Waits until no checkpoint reads weights and moments, so that the optimizer may write to them."""
        self._read.wait()

    def _write(
        self,
        state: State,
        tensors: checkpoint.Tensors,
        shares: list[Path],
        spared: frozenset[int],
    ) -> tuple[State, Path]:
        keep = self._cfg.keep, self._cfg.keep_every
        try:
            path = checkpoint.write(
                self._directory, state, tensors, *keep, shares, self._read.set, spared
            )
        finally:
            # This is set after a failure, too, or the learner would wait for ever; `finish` raises it.
            self._read.set()
        return state, path

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
