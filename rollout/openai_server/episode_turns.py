"""The rules for a request of an episode: what it repeats of recorded turns stays as it was drawn, token for
token; only what is new is tokenised. It draws with the ticket's settings; others draw with the request's."""

from collections.abc import Iterable, Sequence, Set

import msgspec

from areal_q.config import Sampling
from areal_q.decode_errors import fitted
from areal_q.errors import RecordError
from areal_q.tasks import Tokenizer
from areal_q.tasks.base import Message, Variables
from rollout.environments.episode_tree import TurnState
from rollout.environments.external import Episode, Talk
from rollout.openai_server.schema import ChatBody, CompletionBody

KNOBS = ("temperature", "top_k", "top_p", "min_p")


def context_of_prompt(tokenizer: Tokenizer, episode: Episode, prompt: str | list[int]) -> list[int]:
    """Returns the tokens after which a turn is drawn that is asked for by ids or a text. Of a text only what
    follows the longest recorded one, or the ticket's prompt, is tokenised. A turn of no text is not in what
    asks for it again."""
    if isinstance(prompt, str):
        before, known = episode.prompt, episode.ticket.prompt
        if prompt == known:
            return before
        begins = [s for s in episode.states if s.text is not None and prompt.startswith(s.text)]
        again = [s for s in reversed(begins) if s.text == prompt]
        if found := min(again, key=lambda s: s.length, default=_longest(begins)):
            before, known = episode.ids(found), found.text or ""
        if prompt.startswith(known):
            return [*before, *tokenizer.encode(prompt[len(known) :])]
        return tokenizer.encode_prompt(prompt)
    return prompt


def context_of_messages(
    tokenizer: Tokenizer,
    episode: Episode,
    talk: Talk,
    variables: Variables,
    ends: Set[int],
) -> list[int]:
    """Returns the tokens after which a turn is drawn that is asked for by messages. Only those are rendered
    that follow the longest recorded conversation with these tools; all of them where they begin otherwise than
    every recorded one. `ends` are tokens that end a reply beside the tokenizer's stops."""
    messages = talk.messages
    said = (s for s in episode.states if s.messages and s.tools == talk.tools)
    if found := _longest(s for s in said if _are_said_again(s.messages or [], messages)):
        known, before = found.messages or [], episode.ids(found)
        ended = before[-1] in tokenizer.stops or before[-1] in ends
        calls = known[-1].get("tool_calls", ())
        rest = messages[len(known) :]
        return [*before, *tokenizer.encode_turn(rest, ended, variables, calls)]
    asked = [{"role": "user", "content": episode.ticket.prompt}]
    if messages == asked and not talk.tools and not variables:
        return episode.prompt
    return tokenizer.encode_messages(tokenizer.opened(messages), variables, talk.tools)


def _longest(states: Iterable[TurnState]) -> TurnState | None:
    """Returns the state that says the most, the newest of several."""
    found = [*states][::-1]
    return max(found, key=lambda s: len(s.text or s.messages or ""), default=None)


def _are_said_again(known: Sequence[Message], messages: Sequence[Message]) -> bool:
    pairs = zip(known, messages, strict=False)
    return len(known) <= len(messages) and all(_is_said_again(*pair) for pair in pairs)


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
    return fitted(table, Sampling, RecordError)


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
