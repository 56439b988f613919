"""Generation from Python, with token ids, log-probs and the versions of the weights that drew each token."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

from areal_q.config import Sampling
from areal_q.messages import FinishReason
from areal_q.system.run_dir import as_pairs

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""A text, a conversation of messages, or token ids"""


@dataclass(frozen=True)
class Completion:
    """A response as it was drawn."""

    prompt_ids: list[int]
    ids: list[int]
    """Tokens of the response, the end token included"""
    logprobs: list[float]
    """Log-prob of each token in nats, of the distribution that drew it"""
    versions: list[int]
    """Version of the weights that drew each token"""
    text: str
    """Text of the response, without the end token"""
    finish_reason: FinishReason
    sampling: Sampling = field(default_factory=Sampling)
    """How it was drawn"""
    sampling_mask: Sequence[Any] = ()
    """The ids that each token was drawn from where `sampling` leaves some out; an endpoint tells none"""
    mask: Sequence[int] = ()
    """1 for each token that is learnt, 0 for one that the model did not draw; empty if it drew all"""


class HasWeights(Protocol):
    """A Learner, or what else has weights."""

    @property
    def version(self) -> int: ...
    @property
    def model(self) -> Any: ...


class Rollout:
    """Generates while it is open.

        async with areal_q.Rollout("runs/demo") as rollout:
            (completions,) = await rollout.generate(["12+34="], n=4, temperature=0.7)

    `source` is a run, a model's directory in Hugging Face layout, whose weights are put into the run's number
    format and run by the torch engine of this process; or the URL of a worker's endpoint, such as
    "http://127.0.0.1:8000/v1".
    """

    def __init__(
        self,
        source: Any,
        *,
        settings: Mapping[str, Any] | None = None,
        token: str | None = None,
    ) -> None:
        """`token` is the endpoint's, if it asks for one. Raises UserError for what is neither."""
        client = import_module("rollout.api.client")
        if str(source).startswith(("http://", "https://")):
            self._side = client.Remote(str(source), token)
        else:
            directory = Path(getattr(source, "directory", source))
            self._side = client.Local(directory, as_pairs(settings))

    async def __aenter__(self) -> "Rollout":
        await self._side.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._side.close()

    async def generate(
        self,
        prompts: Sequence[Prompt] | Prompt,
        *,
        n: int = 1,
        seed: int | None = None,
        **sampling: Any,
    ) -> list[list[Completion]]:
        """Returns `n` completions of each prompt; one prompt by itself is a list of one. All are drawn
        together; response i of a prompt draws with `seed + i`, None being a random one. `sampling` has names
        of `rollout.sampling`, such as `temperature` and `max_tokens`, which else are the run's. Raises
        ConfigError for a name or value that does not fit and RecordError for a prompt that does not."""
        alone = isinstance(prompts, str) or any(
            isinstance(part, Mapping | Integral) for part in prompts
        )
        several: Any = [prompts] if alone else prompts
        asked = (self._side.complete(prompt, n, seed, sampling) for prompt in several)
        found = await asyncio.gather(*asked)
        return [[Completion(**one) for one in some] for some in found]

    async def load(self, learner: HasWeights) -> None:
        """Generates with a learner's present weights from the next token on. Raises ConfigError of an
        endpoint."""
        await self._side.load(learner.model, learner.version)
