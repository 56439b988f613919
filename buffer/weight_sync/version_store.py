"""What workers may fetch: a few versions in full, and the deltas between the last of them."""

import math
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

import xxhash

from areal_q.errors import WeightVersionError
from areal_q.messages import Delta, Manifest
from areal_q.weights import delta
from areal_q.weights.version import WeightVersion


@dataclass
class StoredVersion:
    version: WeightVersion
    memory: memoryview
    """The payload's bytes"""
    used_s: float = -math.inf
    """When a worker last asked for any of it (monotonic)"""

    @property
    def manifest(self) -> Manifest:
        return self.version.manifest


class VersionStore:
    """At most `limit` versions, the newest among them.

    Versions that nobody fetched from for `lease_s` go first, then the younger ones. So the oldest
    fetch under way always finishes, however fast versions follow each other
    (test_the_oldest_fetch_under_way_keeps_its_version).
    """

    def __init__(self, limit: int, lease_s: float) -> None:
        self._limit, self._lease_s = limit, lease_s
        self._versions: list[StoredVersion] = []

    @property
    def newest(self) -> StoredVersion | None:
        return self._versions[-1] if self._versions else None

    def add(self, version: WeightVersion) -> None:
        self._versions.append(StoredVersion(version, version.payload.numpy().data))
        leased_from_s = time.monotonic() - self._lease_s
        while len(self._versions) > self._limit:
            older = self._versions[:-1]
            idle = [h for h in older if h.used_s < leased_from_s]
            self._versions.remove((idle or older[-1:])[0])

    def use_newest(self) -> StoredVersion | None:
        """`newest`, which counts as fetched from."""
        if self.newest is not None:
            self.newest.used_s = time.monotonic()
        return self.newest

    def use(self, digest: str) -> StoredVersion | None:
        """The version whose bytes hash to `digest`, if it is still there; it counts as fetched from."""
        held = next((h for h in reversed(self._versions) if h.manifest.digest == digest), None)
        if held is not None:
            held.used_s = time.monotonic()
        return held

    def has(self, digest: str) -> bool:
        return any(h.manifest.digest == digest for h in self._versions)

    def clear(self) -> None:
        self._versions.clear()


@dataclass(frozen=True)
class DeltaLink:
    """A delta between two versions that were announced one after the other."""

    base: Manifest
    new: Manifest
    nbytes: int
    """As it was sent"""
    plain: Future[bytes]
    """In the form that can be added up without its base (areal_q/weights/delta.py)"""

    @property
    def header(self) -> Delta:
        return delta_header(self.base, self.new)


def delta_header(base: Manifest, new: Manifest) -> Delta:
    return Delta(
        run=new.run,
        epoch=new.epoch,
        version=new.version,
        digest=new.digest,
        base=base.version,
        base_digest=base.digest,
    )


class DeltaChain:
    """The unbroken chain of deltas up to the newest version: at most `limit`, `limit_bytes` together as they
    were sent. In memory they may be half as large again: BF16 and FP8 are (areal_q/weights/delta_codec.py)."""

    def __init__(self, limit: int, limit_bytes: int) -> None:
        self._limit, self._limit_bytes = limit, limit_bytes
        self._chain: deque[DeltaLink] = deque()
        self._nbytes = 0

    def add(self, link: DeltaLink | None) -> None:
        """`link` leads to the newest version; None breaks the chain."""
        if link is None:
            self._chain.clear()
            self._nbytes = 0
            return
        self._chain.append(link)
        self._nbytes += link.nbytes
        while len(self._chain) > self._limit or self._nbytes > self._limit_bytes:
            self._nbytes -= self._chain.popleft().nbytes

    def since(self, epoch: str, version: int, digest: str) -> list[DeltaLink]:
        """What leads from that version to the newest; empty if it is not known."""
        links: list[DeltaLink] = []
        for link in reversed(self._chain):
            links.insert(0, link)
            base = link.base
            if (base.epoch, base.version, base.digest) == (epoch, version, digest):
                return links
        return []

    def into(self, epoch: str, version: int) -> DeltaLink | None:
        """The delta that made that version."""
        return next(
            (k for k in self._chain if (k.new.epoch, k.new.version) == (epoch, version)), None
        )


@dataclass(frozen=True)
class CatchUp:
    """Deltas to apply one after the other, ready to be sent."""

    headers: list[Delta]
    sizes: list[int]
    body: bytes
    digest: str


def build_catch_up(links: list[DeltaLink]) -> CatchUp:
    """The chain as it is, or one delta that does the same: whichever is smaller.

    One delta saves a code that moves back and forth, and the worker a pass over its weights for each.
    """
    bodies = [link.plain.result() for link in links]
    headers = [link.header for link in links]
    if len(links) > 1:
        try:
            one = delta.compose([links[0].base, *(link.new for link in links)], bodies)
        except WeightVersionError:  # a relay passes on what it did not make
            one = None
        if one is not None and len(one) <= sum(map(len, bodies)):
            headers, bodies = [delta_header(links[0].base, links[-1].new)], [one]
    body = b"".join(bodies)
    return CatchUp(headers, [len(b) for b in bodies], body, xxhash.xxh3_128_hexdigest(body))
