"""The two Protocols of the replay buffer, the learner's and a worker's."""

from collections import Counter
from typing import NamedTuple, Protocol

from msgspec import Struct

from areal_q.messages import Group, PartialGroup, Ticket, WorkerStatus

START = "0-0"
"""Position in the groups stream before its first entry"""


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


class LearnerSide(Protocol):
    """The learner's side of the buffer. A run has one learner, and only one thread may use its side at a
    time."""

    run_id: str
    """Id of the run; "" if it has none"""

    @property
    def position(self) -> str:
        """Id of the last entry that was read from the groups stream. A resumed learner sets it to the position
        in its checkpoint."""
        ...

    @position.setter
    def position(self, position: str) -> None: ...

    @property
    def quarantined(self) -> int:
        """Number of records that this learner moved to the quarantine"""
        ...

    def publish_run(self, config_toml: str, endpoints: dict[str, str], settings: str = "") -> None:
        """Publishes the run's settings and the endpoints of the weight server to the workers. `settings` is a
        hash of all that workers are set up from."""
        ...

    def admit(self, tickets: list[Ticket], cursor: int) -> None:
        """Adds tickets and sets the cursor, the number of the next ticket, both or neither. Raises BufferFull
        if there is no room for them."""
        ...

    def readmit(self, version: int) -> int:
        """Replaces all open training tickets of steps after `version` by equal ones of step `version`, and
        returns their number. A worker that has claimed one of them loses it, so that it becomes at most one
        group."""
        ...

    def drop_eval(self) -> int:
        """Withdraws the open evaluation tickets and returns their number."""
        ...

    def open_eval(self) -> Counter[int]:
        """Returns how many evaluation tickets of each version can still become a group."""
        ...

    def cursor(self) -> int | None:
        """Returns the cursor that the last admission set; None if nothing of this run was ever admitted."""
        ...

    def open_tickets(self) -> set[int]:
        """Returns the numbers of the training tickets that have no committed group yet."""
        ...

    def read(self, count: int, timeout_s: float) -> list[Entry]:
        """Returns the next groups after `position`, in order, and moves `position` behind them: `count` of
        them, or fewer if no more come within `timeout_s`."""
        ...

    def take(self, count: int, timeout_s: float) -> list[Group]:
        """Returns the same groups as `read`, without their entries."""
        ...

    def unread(self) -> list[int]:
        """Returns the ticket numbers of the committed groups after `position`."""
        ...

    def trim(self, position: str) -> None:
        """Deletes the groups up to and including `position`, which must be in a checkpoint and in the
        trajectory log by then."""
        ...

    def admit_eval(self, tickets: list[Ticket]) -> None: ...

    def take_eval(self) -> list[Group]:
        """Returns the evaluation groups that were committed since the last call, without waiting."""
        ...

    def memory(self) -> Memory: ...

    def claims(self) -> Claims: ...

    def starves(self, sentence: str) -> None:
        """Publishes a sentence on why the learner gets no groups, for `areal-q status`. "" withdraws it."""
        ...

    def now_s(self) -> float:
        """Returns the Unix time by the clock that gives entries their ids, for comparison with
        `committed_s`."""
        ...

    def rewind(self) -> bool:
        """Sets `position` to START and returns True if the newest group is older than `position`. The buffer
        has then come back without its last entries and with a clock that is behind, so that new entries get ids
        before those that were read."""
        ...

    def set_aside(self) -> int:
        """Returns how many records have been moved to the quarantine since the run began, by anybody."""
        ...

    def workers(self) -> list[WorkerStatus]:
        """Returns the workers that sent a heartbeat lately, in the order of their names."""
        ...

    def close(self) -> None: ...


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


class WorkerSide(Protocol):
    max_deliveries: int
    """Number of workers that may fall silent over a ticket before it goes to the quarantine"""

    async def run_info(self) -> RunInfo:
        """Returns what the learner published, and waits until it has."""
        ...

    async def claim(
        self, count: int, block_s: float, *, training_first: bool = False
    ) -> list[Claim]:
        """Claims up to `count` tickets: evaluation tickets first, unless `training_first`, and abandoned ones
        before new ones. Waits up to `block_s` seconds for the first."""
        ...

    async def commit(self, claim: Claim, group: Group) -> bool:
        """Replaces the ticket by the group. Does nothing and returns False if the claim was lost. Raises
        RecordError for a group that is not valid, or is larger than a learner would read."""
        ...

    async def renew(self, claims: list[Claim]) -> list[Claim]:
        """Renews claims, so that no other worker takes them over. Returns those that another worker already
        has."""
        ...

    async def release(self, claims: list[Claim]) -> None:
        """Gives tickets back with the responses drawn so far. Others can claim them at once."""
        ...

    async def set_aside(self, claim: Claim, reason: str) -> None:
        """Moves a ticket that cannot become a group to the quarantine, so that no worker gets it again. Does
        nothing if the claim was lost."""
        ...

    async def heartbeat(self, status: WorkerStatus) -> None: ...

    async def close(self) -> None: ...
