"""The Protocol of an engine, as a rollout worker sees it, and the records that cross it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from msgspec import Struct

from areal_q.config import RolloutConfig, Sampling
from areal_q.config.run import LARGEST_MASK
from areal_q.errors import ContextExceeded, EngineDied, RecordError
from areal_q.messages import FinishReason, VersionSpan

if TYPE_CHECKING:  # its module needs torch
    from areal_q.weights.version import WeightVersion

_LARGEST = 2**31
"""Exclusive upper bound on token ids and on numbers of tokens in a request"""
_MOST_STOP_IDS = 512
"""Most stop ids of a request, since each token drawn is compared with all of them"""


class Capabilities(Struct, frozen=True):
    """What an engine can do, which is compared with the settings when the worker starts."""

    formats: frozenset[str]
    """Number formats that it computes."""
    kv_on_update: frozenset[str]
    kv_cache: frozenset[str] = frozenset({"auto"})
    kv_scales: bool = False
    """True if the engine takes the scales of an FP8 cache from the learner."""
    routes: bool = False
    """True if the engine records the experts that tokens were sent to."""
    sampling_mask: bool = False
    """True if the engine tells which tokens each one was drawn from, where sampling is truncated."""
    of_experts: frozenset[str] | None = None
    """Those of `formats` that it computes a mixture of experts in; None: all of them."""

    def lacks(
        self, asked: RolloutConfig, routes: bool = False, experts: bool = False
    ) -> str | None:
        """Returns one line that names what the settings ask for and the engine cannot do, or None if it can do
        everything. `routes` is True if the learner needs the experts that tokens were sent to, `experts` if the
        model is a mixture."""
        if asked.format not in self.formats:
            return f"rollout.format: {asked.format} is not among {', '.join(sorted(self.formats))}"
        if experts and self.of_experts is not None and asked.format not in self.of_experts:
            able = ", ".join(sorted(self.of_experts))
            return f"rollout.format: of a mixture of experts {asked.format} is not among {able}"
        kv = getattr(asked.engine, "kv_on_update", None)
        if kv is not None and kv not in self.kv_on_update:
            able = ", ".join(sorted(self.kv_on_update))
            return f"rollout.engine.kv_on_update: {kv} is not among {able}"
        cache = getattr(asked.engine, "kv_cache", "auto")
        if cache not in self.kv_cache:
            able = ", ".join(sorted(self.kv_cache))
            return f"rollout.engine.kv_cache: {cache} is not among {able}"
        if asked.kv_scales and not self.kv_scales:
            return "rollout.kv_scales: it measures the scales of its KV cache itself"
        if routes and not self.routes:
            return "learner.routing_replay: it does not tell which experts tokens were sent to"
        if asked.sampling.truncated and not self.sampling_mask:
            return (
                "rollout.sampling.top_p, top_k, min_p: it does not tell what tokens were drawn from"
            )
        return None


class Request(Struct, frozen=True, kw_only=True):
    """A request for `num_samples` responses to one prompt, which is computed only once. Response i draws with
    the seed `seed + i`."""

    prompt_ids: np.ndarray
    """Token ids of the prompt, int32 [P]"""
    num_samples: int
    sampling: Sampling
    seed: int
    stop_ids: frozenset[int]
    """Token ids that end a response, in addition to the stops of `sampling`. The id that ends it is part of the
    response."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Decoder of the tokenizer, needed where `sampling.stop` has strings"""
    drawn: int = 0
    """Number of ids at the end of the prompt that an earlier request drew as the beginning of the response.
    With the same seed this request goes on as the earlier one would have done."""
    timeout_s: float = 0.0
    """Seconds after which a response ends with the tokens that it has, at least one; 0 means no limit."""
    masked: bool = False
    """True if what each token was drawn from is to be told, of a `sampling` with a top_k"""


class Completion(Struct, frozen=True, kw_only=True):
    response_ids: np.ndarray
    """Token ids of the response, int32 [T]"""
    logprobs: np.ndarray
    """Log-probs in nats, float32 [T], under the distribution that drew the tokens: after temperature, top-k,
    top-p and min-p."""
    spans: list[VersionSpan]
    finish_reason: FinishReason | None
    """Why the response ended; None if its request was cancelled before it ended."""
    routes: np.ndarray | None = None
    """Experts to which each of the L sparse layers sent each of the N tokens of prompt and response, K of them,
    uint8 or uint16 [N, L, K]. N leaves out the last token drawn, which was not computed. None if they were not
    recorded, or no layer is sparse."""
    sampling_mask: list[np.ndarray] | None = None
    """The ids that each token was drawn from, ascending, int32; None unless the request asks for them"""


TokenCallback = Callable[[int, int, float], None]
"""Called with (index in the group, token id, log-prob in nats) for every token as it is drawn"""
ResponseCallback = Callable[[int, Completion], None]
"""Called with (index in the group, response) for every response as it ends. If the request is cancelled, it is
also called for each response that has tokens but has not ended. It must not raise."""


class Engine(Protocol):
    r"""The engine as the worker, the environments and the endpoint know it.

    An engine is always on: `load_weights` takes effect between two decoding steps of the requests in flight.
    Cancelling the task that awaits `generate` cancels its request and frees its slots. Requests wait for the
    first `load_weights`.

    Nobody implements this Protocol directly. To add an engine that computes in this process, write a Stepper
    (rollout/engines/reference/async_engine.py) and wrap it in AsyncEngine; for one in processes of its own,
    write a GenerationBackend (rollout/engines/process/generation_backend.py) and wrap it in StreamingEngine.
    docs/engines.md, "Add an engine", says more.
    """

    name: str
    capabilities: Capabilities

    @property
    def version(self) -> int:
        """Version of the weights in use; -1 before the first version."""
        ...

    @property
    def max_positions(self) -> int:
        """Most tokens of prompt and response together; 0 before the first weights."""
        ...

    @property
    def active(self) -> int:
        """Number of responses that are being generated now."""
        ...

    @property
    def tokens_drawn(self) -> int:
        """Number of response tokens drawn since the start."""
        ...

    @property
    def busy_s(self) -> float:
        """Seconds since the start in which the engine had something to generate."""
        ...

    async def start(self) -> None: ...
    async def generate(
        self,
        request: Request,
        on_token: TokenCallback | None = None,
        on_response: ResponseCallback | None = None,
    ) -> list[Completion]: ...
    async def load_weights(self, weights: "WeightVersion") -> float:
        """Generates with `weights` from now on. Returns for how many seconds generation paused."""
        ...

    async def close(self) -> None: ...


class EngineBase:
    """The state that both kinds of engine have: name, abilities, running task and number of tokens drawn."""

    def __init__(self, name: str, capabilities: Capabilities, slots: int) -> None:
        self.name, self.capabilities = name, capabilities
        self.tokens_drawn = 0
        """Number of response tokens drawn since the start"""
        self._max_samples = slots
        self._task: asyncio.Future[None] | None = None
        """Done when the engine has ended; None before the start."""

    def _check_running(self, request: Request) -> None:
        """Raises EngineDied if the engine is not running, and RecordError for a request that no engine can
        serve."""
        self._check_alive()
        _check_shape(request, self._max_samples)

    def _check_alive(self) -> None:
        if self._task is None or self._task.done():
            raise EngineDied(f"engine {self.name} is not running")


def finish_reason(
    request: Request, ids: Sequence[int], *, stopped: bool, late: bool
) -> FinishReason | None:
    """Returns why the response with tokens `ids` has ended, or None if it has not.

    `stopped` is True if it completed one of the stops of `request.sampling`, `late` if its time is up. A
    response is never cut off before its first token.
    """
    if stopped or (len(ids) and int(ids[-1]) in request.stop_ids):
        return "stop"
    if len(ids) >= request.sampling.max_tokens:
        return "length"
    return "timeout" if late and len(ids) else None


def check_fits(request: Request, max_positions: int, vocab_size: int) -> None:
    """Raises ContextExceeded for a request of more than `max_positions` tokens, and RecordError for one with
    a token outside of the vocabulary."""
    prompt, sampling = np.asarray(request.prompt_ids), request.sampling
    total = len(prompt) + sampling.max_tokens
    if total > max_positions:
        raise ContextExceeded(
            f"This model's maximum context length is {max_positions} tokens (max_positions): "
            f"the prompt has {len(prompt)}, and max_tokens is {sampling.max_tokens}"
        )
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        raise RecordError(f"a prompt token is outside the vocabulary of {vocab_size}")


def not_finite(version: int) -> RecordError:
    """Returns the error of a response that weights `version` drew with log-probs that are no numbers."""
    return RecordError(f"version {version}: a log-prob is not finite: the policy has diverged")


def _check_shape(request: Request, slots: int) -> None:
    """Raises RecordError for a request that no engine can serve, whatever its weights."""
    if request.num_samples < 1 or np.ndim(request.prompt_ids) != 1 or not len(request.prompt_ids):
        raise RecordError("a request needs a prompt of at least one token and one response")
    if request.num_samples > slots:
        raise RecordError(
            f"{request.num_samples} responses at once exceed the engine's {slots} slots"
        )
    ids = request.stop_ids
    if len(ids) > _MOST_STOP_IDS or not all(0 <= i < _LARGEST for i in ids):
        raise RecordError(f"stop ids are more than {_MOST_STOP_IDS}, or one is no id of a token")
    if (
        not 0 <= request.sampling.top_k < _LARGEST
        or not 1 <= request.sampling.max_tokens < _LARGEST
    ):
        raise RecordError(f"top_k is negative, max_tokens below 1, or one not below {_LARGEST}")
    bounded = request.sampling.temperature and 0 < request.sampling.top_k <= LARGEST_MASK
    if request.masked and not bounded:
        raise RecordError(
            f"a sampling mask needs a temperature, and a top_k from 1 to {LARGEST_MASK}"
        )
    if request.decode is None and any(isinstance(s, str) for s in request.sampling.stop):
        raise RecordError("stop strings need a tokenizer, which this request has not")
