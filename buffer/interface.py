"""What the two sides of the replay buffer give and take: claims, entries, counts."""

from typing import NamedTuple

from msgspec import Struct

from areal_q.messages import Group, PartialGroup, Ticket

START = "0-0"
"""Position in the groups stream before its first entry"""
END = f"{2**64 - 1}-{2**64 - 1}"
"""The largest id that an entry may have"""


class Claim(Struct, frozen=True):
    """A ticket that belongs to this worker until it commits or releases it, or does not renew the claim for the
    claim timeout."""

    stream: str
    entry: str
    """Id of the ticket in its stream"""
    ticket: Ticket
    partial: PartialGroup | None = None
    """Responses that an earlier worker began and `release` stored"""


class Entry(NamedTuple):
    """A group and its position in the stream."""

    id: str
    group: Group
    nbytes: int
    """Bytes of the group's record"""


class Claims(NamedTuple):
    """The training tickets by state."""

    open: int
    by_worker: dict[str, int]
    """Number of tickets that each worker has claimed, by its name"""


def committed_s(entry: str) -> float:
    """Returns the Unix time, in seconds of the buffer's clock, at which an entry was added. The ids of a stream
    begin with that time in milliseconds."""
    return int(entry.partition("-")[0]) / 1000


class Memory(NamedTuple):
    """Memory of the Redis server, in bytes."""

    used: int
    limit: int
    """Limit in bytes at which Redis refuses writes; 0 means that there is none."""
    policy: str = "noeviction"
    """What Redis does at the limit (`maxmemory-policy`)"""

    @property
    def evicts(self) -> bool:
        """True if Redis deletes groups and tickets at its limit, in place of refusing writes. The `volatile-`
        policies delete heartbeats alone, since nothing else expires."""
        return self.limit > 0 and self.policy.startswith("allkeys")

    @property
    def full(self) -> bool:
        """True if Redis refuses commits, or will refuse the next ones."""
        return 0 < 0.97 * self.limit <= self.used


class RunInfo(NamedTuple):
    """What a learner publishes to the workers of its run."""

    config: str
    """Settings of the run as TOML"""
    endpoints: dict[str, str]
    run_id: str = ""
    settings: str = ""
    """Hash of the settings that workers are set up from"""
    finished: bool = False
    """True after the last step, until a learner resumes the run"""
