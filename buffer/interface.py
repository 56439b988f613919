"""The replay buffer as the learner and as a worker see it: two Protocols, kept by Redis and by memory."""

from collections import Counter
from typing import NamedTuple, Protocol

from msgspec import Struct

from areal_q.messages import Group, PartialGroup, Ticket, WorkerStatus

START = "0-0"
"""The position before the first group."""


class Claim(Struct, frozen=True):
    """A ticket that is this worker's until it commits, releases, or falls silent for the claim timeout."""

    stream: str
    entry: str
    """Id of the ticket in its stream"""
    ticket: Ticket
    partial: PartialGroup | None = None
    """Responses that a worker before this one had begun; `release` hands them on."""


class Entry(NamedTuple):
    """A group and where it stands in the stream."""

    id: str
    group: Group
    nbytes: int
    """Bytes of the group's record"""


class Claims(NamedTuple):
    """The training tickets."""

    open: int
    by_worker: dict[str, int]
    """Number of tickets that each worker holds, by its name"""


def committed_s(entry: str) -> float:
    """Returns when the entry was added, as Unix time by the clock of the buffer: a stream's ids begin with
    its milliseconds."""
    return int(entry.partition("-")[0]) / 1000


class Memory(NamedTuple):
    """Memory of the Redis server, in bytes."""

    used: int
    limit: int
    """Bytes at which Redis refuses writes; 0 means that there is no limit."""

    @property
    def full(self) -> bool:
        """Commits are refused, or the next ones will be."""
        return 0 < 0.97 * self.limit <= self.used


class LearnerSide(Protocol):
    """One learner per run. Not for several threads at once."""

    position: str
    """Everything up to here was taken. A resumed learner sets it to its checkpoint's."""
    quarantined: int
    """Number of records set aside by this learner"""
    run_id: str
    """Id of the run; "" where it has none."""

    def publish_run(self, config_toml: str, endpoints: dict[str, str], settings: str = "") -> None:
        """Tells workers what to run and where the weights come from; `settings` changes with whatever they are
        set up from."""
        ...

    def admit(self, tickets: list[Ticket], cursor: int) -> None:
        """Adds tickets and sets the cursor, as a whole. Raises BufferFull where there is no room for them."""
        ...

    def readmit(self, version: int) -> int:
        """Admits the open training tickets of steps after `version` again, under `version`, as a whole; returns
        their number. Whoever holds one of them loses it, so that it still becomes one group at most."""
        ...

    def drop_eval(self) -> int:
        """Takes back the open evaluation tickets; returns their number."""
        ...

    def open_eval(self) -> Counter[int]:
        """Returns how many evaluation tickets of each version can still become a group."""
        ...

    def cursor(self) -> int | None:
        """Returns the cursor as last admitted; None in a buffer that never saw this run."""
        ...

    def open_tickets(self) -> set[int]:
        """Numbers of training tickets that have no committed group yet."""
        ...

    def read(self, count: int, timeout_s: float) -> list[Entry]:
        """The next groups after `position`, in order, which moves behind them. Returns when there are
        `count`, or after `timeout_s` with fewer."""
        ...

    def take(self, count: int, timeout_s: float) -> list[Group]:
        """`read`, for whom the groups are enough."""
        ...

    def unread(self) -> list[int]:
        """Ticket numbers of the committed groups after `position`."""
        ...

    def trim(self, position: str) -> None:
        """Forgets the groups up to and including `position`. Only once a checkpoint and the log hold them."""
        ...

    def admit_eval(self, tickets: list[Ticket]) -> None: ...

    def take_eval(self) -> list[Group]:
        """The evaluation groups that have come in since; never waits."""
        ...

    def memory(self) -> Memory: ...

    def claims(self) -> Claims: ...

    def starves(self, sentence: str) -> None:
        """Tells whoever looks from outside that the learner waits; "": no longer."""
        ...

    def now_s(self) -> float:
        """The clock that gives entries their ids; compare with `committed_s`."""
        ...

    def rewind(self) -> bool:
        """True where the newest group is older than `position`, which then is START: the buffer came back
        without its last entries, under a clock that is behind, and gives out ids that were read past."""
        ...

    def set_aside(self) -> int:
        """Records that anybody has put into the quarantine since the run began."""
        ...

    def workers(self) -> list[WorkerStatus]:
        """The workers that sent a heartbeat lately, by name."""
        ...

    def close(self) -> None: ...


class RunInfo(NamedTuple):
    """The facts that a learner tells the workers of its run."""

    config: str
    """Settings of the run as TOML"""
    endpoints: dict[str, str]
    run_id: str = ""
    settings: str = ""
    """Hash of the settings that workers are set up from: it changes when one of them does."""
    finished: bool = False
    """True once the last step is done, until a learner takes the run up again."""


class WorkerSide(Protocol):
    max_deliveries: int
    """Number of workers that may fall silent over a ticket before it goes to the quarantine"""

    async def run_info(self) -> RunInfo:
        """Waits until a learner has published it."""
        ...

    async def claim(self, count: int, block_s: float) -> list[Claim]:
        """Returns up to `count` tickets: evaluation first, abandoned before new. Waits up to `block_s` for
        the first."""
        ...

    async def commit(self, claim: Claim, group: Group) -> bool:
        """Exchanges the ticket for the group. False, and nothing happens, if the claim was lost meanwhile.
        Raises RecordError for a group that breaks its contract, or is larger than a learner would read."""
        ...

    async def renew(self, claims: list[Claim]) -> list[Claim]:
        """Keeps claims from being taken over; returns those that were."""
        ...

    async def release(self, claims: list[Claim]) -> None:
        """Hands tickets back, with what has been drawn of them: others can claim them at once."""
        ...

    async def set_aside(self, claim: Claim, reason: str) -> None:
        """Puts a ticket that cannot become a group into the quarantine; nobody is given it again. Nothing
        happens if the claim was lost meanwhile."""
        ...

    async def heartbeat(self, status: WorkerStatus) -> None: ...

    async def close(self) -> None: ...
