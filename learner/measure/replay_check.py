"""The check whether a resumed learner repeats, bit for bit, the steps that were made after its checkpoint."""

import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)


class ReplayCheck:
    """Compares the weights after each replayed step with those that were recorded under its number.

    Example: ReplayCheck(40, {41: "a", 42: "b"}); after compare(41, "a") and compare(42, "c") the log says
    that the replay is exact up to step 41 and differs at step 42.
    """

    def __init__(self, start: int, recorded: Mapping[int, str]) -> None:
        self._recorded = {v: digest for v, digest in recorded.items() if v > start and digest}
        self._last = max(self._recorded, default=start)
        self.exact_steps = 0
        """Number of replayed steps that gave the recorded weights."""
        self.differs_at: int | None = None
        """The first replayed step that gave other weights; None if there was none so far."""

    def compare(self, version: int, digest: str) -> None:
        """Compares the digest of the weights that are published as `version` with the recorded one. Logs the
        first difference, or that there was none."""
        recorded = self._recorded.pop(version, None)
        if recorded is None or self.differs_at is not None:
            return
        if recorded != digest:
            self.differs_at = version
            logger.warning(
                "replay differs at step %d: its weights are %s, recorded were %s (another processor, torch or "
                "backend?); groups that the earlier history drew later are dropped as too old",
                version, digest, recorded,
            )  # fmt: skip
            return
        self.exact_steps += 1
        if version == self._last:
            logger.info("replay is exact up to step %d", version)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics for a step's record; empty if nothing was compared."""
        if not self.exact_steps and self.differs_at is None:
            return {}
        values = {"learner/replay_exact_steps": float(self.exact_steps)}
        if self.differs_at is not None:
            values["learner/replay_differs_at"] = float(self.differs_at)
        return values
