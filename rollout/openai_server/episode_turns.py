"""The rules for a request that continues an episode: it extends the recorded turns token for token, only what
is new is tokenised, and it draws with the ticket's settings; others draw with the request's."""

from collections.abc import Set

import msgspec

from areal_q.config import Sampling
from areal_q.decode_errors import in_words
from areal_q.errors import RecordError
from areal_q.tasks import Tokenizer
from areal_q.tasks.base import Message, Variables
from rollout.environments.external import Episode, Given, Talk
from rollout.openai_server.schema import ChatBody, CompletionBody

_LONGEST = 120
"""Characters of a message that an error repeats"""
KNOBS = ("temperature", "top_k", "top_p", "min_p")


def new_of_prompt(tokenizer: Tokenizer, episode: Episode, prompt: str | list[int]) -> Given:
    """Returns the tokens of the prompt after those that are recorded or, before the first draw, a prompt of the
    agent's own. Raises RecordError if the prompt does not begin with the recorded tokens or text."""
    known = episode.text if isinstance(prompt, str) else episode.ids
    if known is None or prompt[: len(known)] != known:
        if not episode.response.drawn:
            return _own(tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt)
        raise RecordError("the prompt does not extend what is recorded of the episode")
    new = prompt[len(known) :]
    return Given(tokenizer.encode(new) if isinstance(new, str) else list(new))


def new_of_messages(
    tokenizer: Tokenizer,
    episode: Episode,
    talk: Talk,
    variables: Variables,
    ends: Set[int],
) -> Given:
    """Returns the tokens of the messages after those that are recorded or, before the first draw, a prompt of
    the agent's own. `ends` are tokens that end a reply beside the tokenizer's stops. Raises RecordError if the
    messages do not begin with those recorded, or the tools are others than those of the first draw."""
    known, messages = episode.messages, talk.messages
    drawn = episode.response.ids
    if not drawn:
        if messages == known and not talk.tools and not variables:
            return Given([])
        return _own(tokenizer.encode_messages(tokenizer.opened(messages), variables, talk.tools))
    if talk.tools != episode.tools:
        raise RecordError(
            "`tools` are not those of the episode's first turn, which the model has read"
        )
    if known is None:
        raise RecordError(
            "the messages do not extend what is recorded of the episode, ids or a text"
        )
    for i, recorded in enumerate(known):
        if i >= len(messages) or not _is_said_again(recorded, messages[i]):
            sent = repr(messages[i])[:_LONGEST] if i < len(messages) else "nothing"
            raise RecordError(
                f"the messages do not extend those recorded of the episode: messages[{i}] is {sent}, and "
                f"was {repr(recorded)[:_LONGEST]}"
            )
    ended = drawn[-1] in tokenizer.stops or drawn[-1] in ends
    calls = known[-1].get("tool_calls", ())
    return Given(tokenizer.encode_turn(messages[len(known) :], ended, variables, calls))


def _own(prompt: list[int]) -> Given:
    if not prompt:
        raise RecordError("the prompt is empty")
    return Given([], prompt)


def _is_said_again(recorded: Message, sent: Message) -> bool:
    """Returns True if a client has sent the message back. Clients leave out thoughts, which stay in the record,
    and some give calls other ids."""
    if "reasoning_content" not in sent:
        recorded = {name: value for name, value in recorded.items() if name != "reasoning_content"}
    return _without_ids(recorded) == _without_ids(sent)


def _without_ids(message: Message) -> Message:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls}


def asked_sampling(body: CompletionBody | ChatBody, settings: Sampling) -> Sampling:
    """Returns the run's sampling settings, or the request's where it names any. Raises RecordError for values
    that do not fit together."""
    asked = {name: getattr(body, name) for name in KNOBS}
    asked |= {"max_tokens": body.limit, "stop": body.stops or None}
    given = {k: v for k, v in asked.items() if v is not None}
    table = msgspec.structs.asdict(settings) | given
    try:
        return msgspec.convert(table, Sampling)
    except msgspec.ValidationError as error:
        raise RecordError(in_words(error, Sampling, table)) from error


def fixed_sampling(body: CompletionBody | ChatBody, episode: Episode) -> Sampling:
    """Returns the sampling settings of the episode's ticket. Raises RecordError if the request asks for
    others in training: an evaluation draws with its own, whatever the agent's program says elsewhere."""
    fixed, trains = episode.ticket.sampling, episode.ticket.purpose == "train"
    for name in KNOBS:
        value = getattr(body, name)
        if trains and value is not None and value != getattr(fixed, name):
            raise RecordError(f"{name} = {value}: an episode draws with {getattr(fixed, name)}")
    if body.n != 1:
        raise RecordError("n must be 1 in an episode")
    return fixed
