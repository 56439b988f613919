"""Staleness of tokens: the distance, in published versions, to the weights that now learn.

    0 ── 1 ── 2 ── 3 ── 4 ✗            the learner crashed after publishing 4; its checkpoint is of 2
              └─── 3' ─ 4' ─ 5'        it resumed at 2 and published other weights as 3', 4', 5'

After such a fork a version number alone is ambiguous, so a token's lag is counted along the tree, by the digest
of the weights that drew it. At version 5', a token drawn by 4' has lag 1, and one drawn by the abandoned 4 has
lag (4 − 2) + (5 − 2) = 5. The staleness bound is compared with this lag.
"""

from collections.abc import Sequence

from areal_q.messages import VersionSpan


class VersionHistory:
    """The digests of this history's newest versions, and the versions at which it forked off abandoned ones."""

    def __init__(
        self, keep: int, digests: dict[int, str] | None = None, forks: Sequence[int] = ()
    ) -> None:
        self.keep = keep
        """Number of versions that are remembered (LearnerConfig.versions_kept); older ones are never within the
        staleness bound."""
        self.digests = dict(digests or {})
        """Digest of each version that is remembered."""
        self.forks = list(forks)
        """The versions at which abandoned histories ended that still matter for lags (`forks_at`)."""

    @property
    def fork(self) -> int:
        """The version up to which this history and the abandoned ones are known to be the same."""
        return min(self.forks, default=0)

    def add(self, version: int, digest: str) -> None:
        """Remembers a version of this history, and forgets those that are too old."""
        self.digests[version] = digest
        for old in [v for v in self.digests if v <= version - self.keep]:
            del self.digests[old]

    def lag(self, span: VersionSpan, now: int) -> int:
        """Returns the number of versions between the weights that drew `span` and version `now`.

        Example: digests {1: a, 2: b}, fork 1, now 2: (1, a) → 1; an abandoned (3, x) → 3.
        """
        if self.digests.get(span.version) == span.digest:
            return now - span.version
        if span.version <= now - self.keep:  # no longer remembered, and too old in any history
            return now - span.version
        if span.version > self.fork:
            return (span.version - self.fork) + (now - self.fork)
        return max(now - span.version, self.keep)


def forks_at(start: int, before: list[int], keep: int) -> list[int]:
    """Returns the forks that still matter after a resumption at `start`, from the earlier forks `before`.

    After crashes in quick succession the history of an abandoned version is unknown. Lags are then counted over
    the oldest of these forks, the longest way, so that no token counts as newer than it is.
    Example: keep 4, checkpoints at 2 and at 4 → [2, 4]; at 2 and at 50 → [50].
    """
    return [fork for fork in before if start - fork < keep] + [start]
