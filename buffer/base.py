"""The replay buffer as the learner and as a worker see it: two Protocols, kept by Redis and by memory."""

from typing import Protocol

from msgspec import Struct

from areal_q.messages import Group, Ticket, WorkerStatus

START = "0-0"
"""The position before the first group."""


class Claim(Struct, frozen=True):
    """A ticket that is this worker's until it commits, releases, or falls silent for the claim timeout."""

    stream: str
    entry: str
    """Id in the stream"""
    ticket: Ticket


class LearnerSide(Protocol):
    """One learner per run. Not for several threads at once."""

    position: str
    """Everything up to here was taken. A resumed learner sets it to its checkpoint's."""
    quarantined: int
    """Poison records that this learner has set aside"""

    def publish_run(self, config_toml: str, endpoints: dict[str, str]) -> None:
        """Tells workers what to run and where the weights come from."""
        ...

    def admit(self, tickets: list[Ticket], cursor: int) -> None:
        """Adds tickets and sets the cursor, as a whole."""
        ...

    def cursor(self) -> int | None:
        """As last admitted; None in a buffer that never saw this run."""
        ...

    def open_tickets(self) -> set[int]:
        """Numbers of training tickets that have no committed group yet."""
        ...

    def take(self, count: int, timeout_s: float) -> list[Group]:
        """The next groups after `position`, in order, which moves behind them. Returns when there are
        `count`, or after `timeout_s` with fewer."""
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

    def workers(self) -> list[WorkerStatus]:
        """The workers that sent a heartbeat lately, by name."""
        ...

    def close(self) -> None: ...


class WorkerSide(Protocol):
    async def run_info(self) -> tuple[str, dict[str, str]]:
        """Configuration and endpoints; waits until a learner has published them."""
        ...

    async def claim(self, count: int, block_s: float) -> list[Claim]:
        """Up to `count` tickets: evaluation first, abandoned before new. Waits up to `block_s` for
        the first."""
        ...

    async def commit(self, claim: Claim, group: Group) -> bool:
        """Exchanges the ticket for the group. False, and nothing happens, if the claim was lost meanwhile.
        Raises RecordError for a group that breaks its contract."""
        ...

    async def renew(self, claims: list[Claim]) -> list[Claim]:
        """Keeps claims from being taken over; returns those that were."""
        ...

    async def release(self, claims: list[Claim]) -> None:
        """Hands tickets back: others can claim them at once."""
        ...

    async def heartbeat(self, status: WorkerStatus) -> None: ...

    async def close(self) -> None: ...
