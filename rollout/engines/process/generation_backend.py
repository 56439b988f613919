"""The Protocol of a backend that generates in processes of its own, as StreamingEngine sees it."""

from collections.abc import AsyncGenerator
from typing import Protocol

import numpy as np
from msgspec import Struct

from areal_q.messages import VersionSpan
from areal_q.weights.version import WeightVersion
from rollout.engines.base import Capabilities, Request


class CompletionDelta(Struct, frozen=True, kw_only=True):
    """The next tokens of one response's stream."""

    ids: list[int]
    logprobs: list[float]
    """Log-prob of each id, in nats"""
    spans: list[VersionSpan] | None = None
    """Version spans of all tokens of the stream. A backend that stamps tokens itself gives them with the last
    delta; otherwise this is None."""
    routes: np.ndarray | None = None
    """Experts of the tokens of prompt and stream, as in Completion.routes, with the last delta of a backend
    that records them"""
    sampling_mask: list[np.ndarray] = []
    """What each id was drawn from, as in Completion.sampling_mask; empty unless the request asks for it"""


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
    """True if cached keys and values are kept when the weights they were computed with are replaced."""
    max_positions: int
    """Most tokens of prompt and response together; 0 before the first launch."""

    async def prepare(self) -> None:
        """Does everything that needs no weights, such as slow imports. Raises ConfigError if the engine cannot
        run here."""
        ...

    def check_weights(self, weights: WeightVersion) -> None:
        """Raises WeightVersionError for weights that cannot replace those that are loaded."""
        ...

    def check_request(self, request: Request) -> None:
        """Raises RecordError if the request can never be served. It is called only after the first launch."""
        ...

    async def launch(self, weights: WeightVersion) -> None: ...
    async def stage(self, weights: WeightVersion) -> None:
        """Transfers `weights` to the engine's processes while generation goes on."""
        ...

    async def pause(self) -> None:
        """Stops generation. Returns once every token drawn before has reached its stream."""
        ...

    async def push(self, weights: WeightVersion) -> None:
        """Replaces all of the weights by the staged ones, or none if that fails."""
        ...

    async def resume(self) -> None: ...
    def stream(self, request: Request, seed: int) -> AsyncGenerator[CompletionDelta, None]:
        """Yields the deltas of one response, up to its stop token or its budget. Closing the iterator cancels
        the response."""
        ...

    async def ended(self) -> None:
        """Returns once a process that was launched has ended. It never returns if no process can be watched."""
        ...

    async def kill(self) -> None:
        """Ends the processes at once; their streams raise EngineDied soon after."""
        ...

    async def close(self) -> None: ...
