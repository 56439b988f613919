"""How a ticket becomes responses: one turn, turns with a tool, or an agent of the user's own."""

from typing import Annotated

from msgspec import Meta

from areal_q.config.struct_types import Count, Seconds, TaggedSettings


class SingleTurn(TaggedSettings, frozen=True, kw_only=True, tag="single"):
    """The model answers the prompt, once."""


class CalculatorTool(TaggedSettings, frozen=True, kw_only=True, tag="calculator"):
    """What the model writes between `open` and `close` is worked out and put behind, and it goes on. The
    inserted tokens have loss mask 0."""

    open: Annotated[str, Meta(min_length=1)] = "<<"
    """Text that begins a call."""
    close: Annotated[str, Meta(min_length=1)] = ">>"
    """One token of the tokenizer."""
    after: str = ""
    """Follows the result."""
    max_calls: Count = 4
    """Calls in one response; later ones are not answered."""
    max_result_tokens: Count = 12
    """A longer result is an error, as a malformed expression is."""


class External(TaggedSettings, frozen=True, kw_only=True, tag="external"):
    """Agents of the user's own roll out against the worker's OpenAI-compatible endpoint (docs/endpoint.md).
    Evaluation stays with the worker: one turn."""

    episode_timeout_s: Seconds = 600.0
    """An episode whose agent was silent for so long begins again, with another one."""
    episode_attempts: Annotated[int, Meta(ge=1, le=1000)] = 3
    """Agents that may fall silent over an episode. With the last of them it has failed, and is no reward of 0:
    see `reward.on_error`. One of which nothing was drawn yet begins again all the same."""


EnvironmentConfig = SingleTurn | CalculatorTool | External
