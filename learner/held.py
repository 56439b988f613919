"""The versions that workers may fetch: a few, so that a slow fetch finishes while newer ones appear."""

import math
import time
from dataclasses import dataclass

from areal_q.messages import Manifest
from areal_q.weights import WeightVersion


@dataclass
class Held:
    version: WeightVersion
    memory: memoryview
    """The payload's bytes"""
    used_s: float = -math.inf
    """When a worker last asked for any of it (monotonic)"""

    @property
    def manifest(self) -> Manifest:
        return self.version.manifest


class HeldVersions:
    """At most `limit` versions, the newest among them.

    Versions that nobody fetched from for `lease_s` go first, then the younger ones. So the oldest
    fetch under way always finishes, however fast versions follow each other.
    """

    def __init__(self, limit: int, lease_s: float) -> None:
        self._limit, self._lease_s = limit, lease_s
        self._versions: list[Held] = []

    @property
    def newest(self) -> Held | None:
        return self._versions[-1] if self._versions else None

    def add(self, version: WeightVersion) -> None:
        self._versions.append(Held(version, version.payload.numpy().data))
        leased_from_s = time.monotonic() - self._lease_s
        while len(self._versions) > self._limit:
            older = self._versions[:-1]
            idle = [h for h in older if h.used_s < leased_from_s]
            self._versions.remove(idle[0] if idle else older[-1])

    def use_newest(self) -> Held | None:
        """`newest`, which counts as fetched from."""
        if self.newest is not None:
            self.newest.used_s = time.monotonic()
        return self.newest

    def use(self, digest: str) -> Held | None:
        """The version whose bytes hash to `digest`, if it is still there; it counts as fetched from."""
        held = next((h for h in reversed(self._versions) if h.manifest.digest == digest), None)
        if held is not None:
            held.used_s = time.monotonic()
        return held

    def clear(self) -> None:
        self._versions.clear()
