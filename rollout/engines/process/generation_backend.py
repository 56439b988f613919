"""The Protocol of a backend that generates in processes of its own, as StreamingEngine sees it."""

from collections.abc import AsyncGenerator
from typing import Protocol

from msgspec import Struct

from areal_q.messages import VersionSpan
from areal_q.weights.version import WeightVersion
from rollout.engines.base import Capabilities, Request


class CompletionDelta(Struct, frozen=True, kw_only=True):
    """The next tokens of a stream."""

    ids: list[int]
    logprobs: list[float]
    """Log-probs in nats, one for each id"""
    spans: list[VersionSpan] | None = None
    """Spans of all tokens of the stream, with its last delta, if the backend stamps tokens itself"""


class GenerationBackend(Protocol):
    r"""An engine that generates in processes of its own, as StreamingEngine drives it. An engine in this
    process is a Stepper instead.

    Any method may raise EngineDied; then `launch` begins anew, which ends what is left of the processes.
    """

    name: str
    capabilities: Capabilities
    slots: int
    timeout_s: float
    restarts: int
    keeps_cache: bool
    """True if keys and values outlive the weights that they were computed with."""

    async def prepare(self) -> None:
        """Does what needs no weights, such as slow imports. Raises ConfigError when the engine cannot run
        here."""
        ...

    def check_weights(self, weights: WeightVersion) -> None:
        """Raises WeightVersionError for weights that cannot follow those that are loaded."""
        ...

    def check_request(self, request: Request) -> None:
        """Raises RecordError when the request can never be served. After the first launch."""
        ...

    async def launch(self, weights: WeightVersion) -> None: ...
    async def stage(self, weights: WeightVersion) -> None:
        """Brings `weights` near while generation goes on."""
        ...

    async def pause(self) -> None:
        """Returns when no more tokens are drawn, and those drawn have been handed to their streams."""
        ...

    async def push(self, weights: WeightVersion) -> None:
        """Loads what was staged, all or nothing."""
        ...

    async def resume(self) -> None: ...
    def stream(self, request: Request, seed: int) -> AsyncGenerator[CompletionDelta, None]:
        """One response, to its stop token or its budget; closing the iterator cancels it."""
        ...

    async def ended(self) -> None:
        """Returns once a process that was launched has ended; never where none can be watched."""
        ...

    async def kill(self) -> None:
        """Ends the processes at once; their streams raise EngineDied soon."""
        ...

    async def close(self) -> None: ...
