"""What workers can fetch of a weight server: a few whole versions, and the deltas between the last of them."""

import math
import time
from collections import deque
from dataclasses import dataclass
from functools import cached_property

import xxhash

from areal_q import messages
from areal_q.messages import Delta, Manifest, ManifestReply
from areal_q.weights import shared_memory
from areal_q.weights.version import WeightVersion


@dataclass
class StoredVersion:
    """A version that can be fetched, and when it last was."""

    version: WeightVersion
    memory: memoryview
    """The payload's bytes."""
    used_s: float = -math.inf
    """Monotonic time at which a worker last asked for any of it."""

    @property
    def manifest(self) -> Manifest:
        return self.version.manifest

    @cached_property
    def reply(self) -> bytes:
        """The answer to whoever asks for the manifest: one buffer, however many wait for it without reading."""
        encoded = messages.encode(self.manifest)
        checksum = xxhash.xxh3_128_hexdigest(encoded)
        file = shared_memory.file_of(self.version.payload)
        return messages.encode(ManifestReply(manifest=encoded, checksum=checksum, shared=file))


class VersionStore:
    """Holds at most `limit` versions, the newest among them.

    When one must go, it is the oldest that nobody fetched from for `lease_s`, else the second newest. So the
    oldest fetch under way always finishes, however fast versions follow each other
    (test_the_oldest_fetch_under_way_keeps_its_version).
    """

    def __init__(self, limit: int, lease_s: float) -> None:
        self._limit, self._lease_s = limit, lease_s
        self._versions: list[StoredVersion] = []

    @property
    def newest(self) -> StoredVersion | None:
        """The version added last; None before the first."""
        return self._versions[-1] if self._versions else None

    def add(self, version: WeightVersion) -> None:
        """Adds a version as the newest, and drops others until the limit is kept."""
        self._versions.append(StoredVersion(version, version.payload.numpy().data))
        leased_from_s = time.monotonic() - self._lease_s
        while len(self._versions) > self._limit:
            older = self._versions[:-1]
            idle = [h for h in older if h.used_s < leased_from_s]
            self._versions.remove((idle or older[-1:])[0])

    def use_newest(self) -> StoredVersion | None:
        """Returns `newest` and notes that it was fetched from."""
        if self.newest is not None:
            self.newest.used_s = time.monotonic()
        return self.newest

    def use(self, digest: str) -> StoredVersion | None:
        """Returns the version that hashes to `digest`, if it is still held, and notes that it was fetched
        from."""
        held = next((h for h in reversed(self._versions) if h.manifest.digest == digest), None)
        if held is not None:
            held.used_s = time.monotonic()
        return held

    def has(self, digest: str) -> bool:
        """Returns whether the version that hashes to `digest` is still held."""
        return any(h.manifest.digest == digest for h in self._versions)

    def clear(self) -> None:
        """Drops all versions."""
        self._versions.clear()


@dataclass(frozen=True)
class DeltaLink:
    """A delta between two versions that were announced one after the other."""

    base: Manifest
    new: Manifest
    body: bytes
    """The delta as it was sent."""

    @property
    def header(self) -> Delta:
        """The message that announces this delta."""
        base, new = self.base, self.new
        return Delta(
            run=new.run,
            run_id=new.run_id,
            epoch=new.epoch,
            version=new.version,
            digest=new.digest,
            base=base.version,
            base_digest=base.digest,
        )


class DeltaChain:
    """The unbroken chain of deltas that ends at the newest version.

    It has at most `limit` deltas, of at most `limit_bytes` together.
    """

    def __init__(self, limit: int, limit_bytes: int) -> None:
        self._limit, self._limit_bytes = limit, limit_bytes
        self._chain: deque[DeltaLink] = deque()
        self._nbytes = 0

    def add(self, link: DeltaLink | None) -> None:
        """Appends the delta to the newest version; None says that there is none, and breaks the chain."""
        if link is None:
            self._chain.clear()
            self._nbytes = 0
            return
        self._chain.append(link)
        self._nbytes += len(link.body)
        while len(self._chain) > self._limit or self._nbytes > self._limit_bytes:
            self._nbytes -= len(self._chain.popleft().body)

    def since(self, epoch: str, version: int, digest: str) -> list[DeltaLink]:
        """Returns the deltas that lead from that version to the newest; none if the chain begins later."""
        links: list[DeltaLink] = []
        for link in reversed(self._chain):
            links.insert(0, link)
            base = link.base
            if (base.epoch, base.version, base.digest) == (epoch, version, digest):
                return links
        return []

    def into(self, epoch: str, version: int) -> DeltaLink | None:
        """Returns the delta that leads to that version, or None."""
        return next(
            (k for k in self._chain if (k.new.epoch, k.new.version) == (epoch, version)), None
        )


@dataclass(frozen=True)
class CatchUp:
    """The deltas that bring a worker to the newest version, ready to be sent."""

    headers: list[Delta]
    """What each delta leads from and to, in the order to apply them."""
    sizes: list[int]
    """Bytes of each delta."""
    body: bytes
    """The deltas' bytes, one after the other."""
    digest: str
    """xxh3-128 of `body`, hexadecimal."""


def catch_up(links: list[DeltaLink]) -> CatchUp:
    """Returns the deltas of the chain, one after the other."""
    body = b"".join(link.body for link in links)
    headers, sizes = [link.header for link in links], [len(link.body) for link in links]
    return CatchUp(headers, sizes, body, xxhash.xxh3_128_hexdigest(body))
