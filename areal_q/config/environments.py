"""How a ticket becomes responses: one turn, turns with a tool, an environment or an agent of the user's own."""

from typing import Annotated

from msgspec import Meta

from areal_q.config.struct_types import (
    Count,
    PythonCode,
    Seconds,
    TaggedSettings,
    Thousands,
    WholeNumber,
)


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
    """Agents of the user's own roll out against the worker's OpenAI-compatible endpoint (docs/endpoint.md), in
    evaluation too."""

    episode_timeout_s: Seconds = 600.0
    """An episode whose agent was silent for so long begins again, with another one."""
    episode_attempts: Annotated[int, Meta(ge=1, le=1000)] = 3
    """Attempts at an episode, each of which begins it anew. An attempt is over when its agent has been silent
    for `episode_timeout_s`; that of verifiers also when its process ends, or by an error before the first
    token. After the last one the episode has failed, and is no reward of 0: see `reward.on_error`. One that
    an agent of the user's own has drawn nothing of is offered again all the same."""

    @property
    def longest_silence_s(self) -> float:
        """Seconds until an episode over which all agents fall silent has failed."""
        return self.episode_timeout_s * self.episode_attempts


class VerifiersEnvironment(External, frozen=True, kw_only=True, tag="verifiers"):
    """Verifiers plays the episodes of `task.type = "verifiers"`, by a process of its own beside each worker
    (docs/verifiers.md). If it ends, the episodes under way begin again, with the next one."""

    episodes: Thousands = 64
    """Episodes at once of each worker's process."""


class PythonEnvironment(PythonCode, frozen=True, kw_only=True, tag="python"):
    """An environment of the user's own: a class with tools, or with `step` (docs/environments.md). Each episode
    has an object of it, made with `settings`, in a process of its own beside the worker."""

    digest: str = ""
    """Hash of the file and of those beside it that it imports, which a run fills in whenever it starts."""
    max_turns: Thousands = 8
    """Turns of the model in one response; the tools that the last one calls are not asked."""
    max_given_tokens: Count = 512
    """Tokens that are not the model's own: descriptions of tools, what `reset` gives, results and observations.
    A response without room for the next of them ends."""
    timeout_s: Seconds = 30.0
    """A call of the environment's code that takes longer has failed, and its process is killed."""
    processes: Thousands = 64
    """Episodes at once in each worker; others wait."""
    memory_mib: WholeNumber = 4096
    """Address space that an episode may take in its process, beyond what loading the file took. 0: no bound"""


EnvironmentConfig = (
    SingleTurn | CalculatorTool | External | VerifiersEnvironment | PythonEnvironment
)
