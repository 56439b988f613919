"""Staleness of tokens: the distance, in published versions, to the weights that now learn.

    0 ── 1 ── 2 ── 3 ── 4 ✗            the learner crashed after publishing 4; its checkpoint holds 2
              └─── 3' ─ 4' ─ 5'        it resumed at 2 and published other weights as 3', 4', 5'

A version number alone is ambiguous after such a fork, so a token's lag is counted along the tree, by the
digest of the weights that drew it: one drawn by 4' is 1 behind 5', one drawn by the abandoned 4 is
(4 − 2) + (5 − 2) = 5 steps away from it. That is what the staleness bound is compared with.
"""

from areal_q.messages import VersionSpan


class VersionHistory:
    """The digests of this history's newest versions, and the version at which it forked off an abandoned
    one."""

    def __init__(
        self,
        keep: int,
        digests: dict[int, str] | None = None,
        fork: int = 0,
        *,
        resumed: bool = True,
    ) -> None:
        self.keep = keep
        """Number of versions that are remembered (LearnerConfig.versions_kept); older ones are never within the
        staleness bound."""
        self.digests = dict(digests or {})
        """Digest of each version that is remembered."""
        self.fork = fork
        """The version up to which this history and the abandoned ones are surely the same."""
        self.resumed = resumed
        """False for a run that never resumed: it has no abandoned history, so weights that it does not know are
        not its own. Workers refuse those of an earlier run of its name by the run's id, but have none to go by
        where that one's learner was of an older program."""

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
        if span.version <= now - self.keep:  # forgotten: too old, of whichever history
            return now - span.version
        if self.resumed and span.version > self.fork:
            return (span.version - self.fork) + (now - self.fork)
        return max(now - span.version, self.keep)


def forks_at(start: int, before: list[int], keep: int) -> list[int]:
    """Returns the forks that still matter after a resumption at `start`; `before` are those until then.

    After crashes close to each other nothing tells which history an abandoned version is of: lags are counted
    over the oldest of these forks, the longest way, so that no token passes for newer than it is.
    Example: keep 4, checkpoints at 2 and at 4 → [2, 4]; at 2 and at 50 → [50].
    """
    return [fork for fork in before if start - fork < keep] + [start]
