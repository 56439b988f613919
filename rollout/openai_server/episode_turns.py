"""The rules for a request that continues an episode: it extends the recorded turns token for token, only what
is new is tokenised, and it draws with the ticket's settings."""

from areal_q.config import Sampling
from areal_q.errors import RecordError
from areal_q.tasks import Tokenizer
from areal_q.tasks.base import Variables
from rollout.environments.external import Episode
from rollout.openai_server.schema import ChatBody, CompletionBody

KNOBS = ("temperature", "top_k", "top_p", "min_p")


def new_of_prompt(tokenizer: Tokenizer, episode: Episode, prompt: str | list[int]) -> list[int]:
    """Returns the tokens of the prompt after those that are recorded. Raises RecordError if the prompt does not
    begin with the recorded tokens or text."""
    known = episode.text if isinstance(prompt, str) else episode.ids
    if known is None or prompt[: len(known)] != known:
        raise RecordError("the prompt does not extend what is recorded of the episode")
    new = prompt[len(known) :]
    return tokenizer.encode(new) if isinstance(new, str) else list(new)


def new_of_messages(
    tokenizer: Tokenizer, episode: Episode, messages: list[dict[str, str]], variables: Variables
) -> list[int]:
    """Returns the tokens of the messages after those that are recorded. Raises RecordError if the messages do
    not begin with those."""
    known = episode.messages
    if known is None or messages[: len(known)] != known:
        raise RecordError("the messages do not extend those recorded of the episode")
    new = messages[len(known) :]
    drawn = episode.response.ids
    if not drawn and not new:
        return []
    ended = bool(drawn) and drawn[-1] in tokenizer.stops
    return tokenizer.encode_turn(new, ended, variables)


def fixed_sampling(body: CompletionBody | ChatBody, episode: Episode) -> Sampling:
    """Returns the sampling settings of the episode's ticket. Raises RecordError if the request asks for
    others."""
    fixed = episode.ticket.sampling
    for name in KNOBS:
        value = getattr(body, name)
        if value is not None and value != getattr(fixed, name):
            raise RecordError(f"{name} = {value}: an episode draws with {getattr(fixed, name)}")
    if body.n != 1:
        raise RecordError("n must be 1 in an episode")
    return fixed
