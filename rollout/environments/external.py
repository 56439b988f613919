"""Episodes that the user's own agents play: each is one response of a ticket that the worker has claimed.

    worker ─ticket─▶ Episodes ─begin─▶ agent ─turns, token-exact─▶ Response ─reward─▶ group ─commit─▶ Redis
                        ▲                            │
                        └── silent for too long: begins again, with whoever asks next

| wait          | for                                    | unblocked by                                |
|---------------|----------------------------------------|---------------------------------------------|
| `__call__`    | an end of each of the G episodes       | `end`, `fail`, agents that stay silent;     |
|               |                                        | cancelled when the ticket is lost           |
| `begin`       | an episode that nobody plays           | a new ticket; a silent agent; its timeout   |
| `turn`        | tokens of `max_tokens` that may be     | the end of another turn of the episode that |
|               | drawn                                  | may still draw them                         |
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from areal_q.config import External, Run
from areal_q.errors import ContextExceeded, RecordError
from areal_q.messages import MOST_BRANCHES, FailureCause, Ticket, mean_of_turns
from areal_q.tasks import Score, unscored
from areal_q.tasks.base import Message, Tool
from rollout.engines.base import Completion, TokenCallback
from rollout.environments.base import Environment, Response
from rollout.environments.engine_client import EngineClient
from rollout.environments.episode_tree import TurnState, give_reward, path_of, record

EPISODE = "ep-"
"""Beginning of every episode's id, which tells it from other keys"""
SILENCE_POLL_S = 1.0
"""Seconds between two checks for agents that have fallen silent"""


class Talk(NamedTuple):
    """A conversation, and the tools that the model may call in it."""

    messages: list[Message]
    tools: list[Tool]


Said = str | Talk | None
"""What an agent has sent of an episode, from its beginning to the turn that it asks for: a text, or a
conversation; None for ids"""


@dataclass(eq=False)
class Episode:
    """One response that an agent plays, as a tree of what its requests drew."""

    ticket: Ticket
    index: int
    done: "asyncio.Future[Response]"
    id: str = ""
    response: Response = field(default_factory=Response)
    """What the learner trains on"""
    states: list[TurnState] = field(default_factory=list)
    """The same content as the agent has sent and received it: one state for each turn, in the order of their
    ends"""
    begun: int = 0
    """Number of turns that have begun; each draws from its own stream of random numbers."""
    reserved: dict[int, int] = field(default_factory=dict)
    """Tokens that each turn under way may draw, by its number"""
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set as a turn ends, which may leave some of them to others"""
    attempt: int = 1
    """Number of agents that have begun the episode, the present one included. An agent that gave it back does
    not count."""
    seen_s: float = 0.0

    @property
    def prompt(self) -> list[int]:
        """The ticket's"""
        return self.ticket.prompt_ids.numpy().tolist()

    def ids(self, state: TurnState) -> list[int]:
        """Returns all tokens up to the end of a state's turn."""
        return path_of(self.response, self.prompt, state.path)[: state.length]

    @property
    def busy(self) -> bool:
        """True while a turn is under way"""
        return bool(self.reserved)

    @property
    def left(self) -> int:
        """Number of the ticket's `max_tokens` that may still be drawn, by turns that have not begun."""
        drawn = self.response.drawn + sum(self.reserved.values())
        return self.ticket.sampling.max_tokens - drawn


class Episodes(Environment):
    """An environment whose turns are requested by agents outside this process."""

    at_endpoint = True

    def __init__(self, run: Run, client: EngineClient, cfg: External) -> None:
        """Begins without episodes. The learner's settings say how many tokens one may have, prompt included."""
        self._client, self._cfg, self._learner = client, cfg, run.learner
        self._failed = partial(unscored, cfg=run.reward)
        self._free: list[Episode] = []
        self._played: dict[str, Episode] = {}
        self._changed = asyncio.Event()

    def begin_playing(self, url: str, model: str, token: str) -> None:
        """Starts who plays at this endpoint, if that is for this process to do. Raises ConfigError if it
        cannot."""

    async def end_playing(self) -> None:
        """Ends who plays, and what that has started."""

    @property
    def open(self) -> int:
        return len(self._played)

    @property
    def unfinished(self) -> int:
        return len(self._free) + len(self._played)

    async def __call__(self, ticket: Ticket, responses: list[Response]) -> None:
        """Offers an episode for each response to agents, and fills `responses` once all are rewarded. Nothing
        is kept of unfinished episodes: another worker begins them again."""
        loop = asyncio.get_running_loop()
        mine = [Episode(ticket, i, loop.create_future()) for i in range(ticket.group_size)]
        self._offer(mine)
        open_ones = {episode.done for episode in mine}
        try:
            while open_ones:
                _, open_ones = await asyncio.wait(open_ones, timeout=SILENCE_POLL_S)
                self._take_back()
            responses[:] = [episode.done.result() for episode in mine]
            for index, response in enumerate(responses):
                if not response.drawn:  # a record has a token at least
                    stops = self._client.stop_ids
                    await self._client.generate_turn(ticket, index, response, stops, 1)
        finally:
            for future in open_ones:
                future.cancel()
            # Those that were begun again, too.
            self._free = [e for e in self._free if not e.done.done()]
            self._played = {i: e for i, e in self._played.items() if not e.done.done()}

    async def begin(self, timeout_s: float) -> Episode | None:
        """Returns an episode that nobody plays, under a new id; None if there was none within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._take_back()
            if self._free:
                episode = self._free.pop(0)
                episode.id = EPISODE + secrets.token_urlsafe(16)
                episode.seen_s = time.monotonic()
                self._played[episode.id] = episode
                return episode
            self._changed.clear()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            try:
                async with asyncio.timeout(min(left_s, 1.0)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def plays(self, id: str) -> bool:
        """Returns True if an agent plays the episode `id`."""
        return id in self._played

    def find(self, id: str) -> Episode:
        """Returns the episode `id`. Raises RecordError if it is unknown, has ended, or its agent was silent for
        too long."""
        episode = self._played.get(id)
        if episode is None:
            raise RecordError("no such episode: unknown, ended, or silent for too long")
        episode.seen_s = time.monotonic()
        return episode

    async def turn(
        self, episode: Episode, said: Said, context: list[int], stop_ids: frozenset[int],
        max_tokens: int | None, stop: tuple[str, ...] = (), on_token: TokenCallback | None = None,
        view: Callable[[Completion], Message] | None = None, id: str = "",
    ) -> Completion:  # fmt: skip
        """Draws a turn after the tokens `context`, which are all that is before it, and records it; what of
        them was not recorded yet has loss mask 0. With it `said` is all that the agent has sent, and `view`
        returns the turn as the message that the agent receives, whose reply has this `id`.

        Tokens, and text or messages, change together once the turn has ended, whether or not the agent still
        waits for it. A turn that fails or is cancelled leaves the episode as it was. Turns may be drawn at the
        same time, each of what the others may not draw. Raises RecordError if no token budget is left, the
        episode has ended meanwhile or has too many branches, or `context` begins otherwise than the ticket's
        prompt: a group's prompts share at least their first token.
        """
        room = self._room(episode, context)
        number = await self._reserved(episode, min(max_tokens or room, room))
        try:
            # Looked at only now, as the turn may have waited for others.
            if self._played.get(episode.id) is not episode:
                raise RecordError("the episode has ended while the turn waited for others")
            if len(episode.response.branches) + len(episode.reserved) > MOST_BRANCHES:
                raise RecordError(f"the episode would have more than {MOST_BRANCHES} branches")
            before, most = Response(prompt=context, turns=number), episode.reserved[number]
            done = await self._client.generate_turn(
                episode.ticket, episode.index, before, stop_ids, most, stop=stop, on_token=on_token
            )
        finally:
            del episode.reserved[number]
            episode.freed.set()
            episode.seen_s = time.monotonic()
        told = self._told(said, context, done, view)
        state = record(episode.response, episode.prompt, context, done)
        episode.states.append(state._replace(id=id, **told))
        return done

    def _room(self, episode: Episode, context: list[int]) -> int:
        """Returns how many tokens may follow `context`. Raises RecordError if there are none, or if it begins
        with another token than the ticket's prompt."""
        if context[0] != episode.prompt[0]:
            raise RecordError(
                "the prompt does not begin with the first token of the ticket's prompt"
            )
        room = self._learner.pass_tokens - len(context)
        if room <= 0:
            raise ContextExceeded(
                "the episode's maximum context length is exceeded: it would have more tokens than "
                f"{self._learner.pass_limit}"
            )
        return room

    async def _reserved(self, episode: Episode, most: int) -> int:
        """Returns the number of a new turn, for which at most so many of the tokens are reserved that may still
        be drawn. While other turns may draw them all, it waits. Raises RecordError if none is left."""
        while episode.left <= 0:
            if not episode.busy:
                raise RecordError("the episode's budget of tokens is spent")
            episode.freed.clear()
            await episode.freed.wait()
        number, episode.begun = episode.begun, episode.begun + 1
        episode.reserved[number] = min(most, episode.left)
        return number

    def _told(
        self,
        said: Said,
        context: list[int],
        done: Completion,
        view: Callable[[Completion], Message] | None,
    ) -> dict[str, Any]:
        """Returns what the agent has sent and received once it has the turn, as fields of a TurnState."""
        tokenizer = self._client.tokenizer
        drawn = done.response_ids.tolist()
        reply = tokenizer.decode([i for i in drawn if i not in tokenizer.special_ids])
        if isinstance(said, Talk):
            answer = view(done) if view else {"role": "assistant", "content": reply}
            return {"messages": [*said.messages, answer], "tools": said.tools}
        before = tokenizer.decode(context) if said is None else said
        return {"text": before + reply}

    def reward_turn(self, episode: Episode, turn: int | str, reward: float) -> None:
        """Gives a turn that has ended a reward, in place of an earlier one. `turn` is the id of its reply, or
        its number in the order of their ends, -1 for the newest. Raises RecordError if there is none."""
        try:
            if isinstance(turn, str):
                state = next(state for state in episode.states if state.id == turn)
            else:
                state = episode.states[turn]
        except (StopIteration, IndexError):
            ended = len(episode.states)
            raise RecordError(f"no turn {turn!r} in this episode, of which {ended} ended") from None
        give_reward(episode.response, episode.prompt, state, reward)

    def end(self, episode: Episode, reward: float, parts: dict[str, float]) -> None:
        """Ends the episode with its own reward, to which those of its turns are added; the group is committed
        once all of its episodes have ended. Raises RecordError while a turn is under way, or if none has
        finished."""
        response = self._idle(episode).response
        if not response.drawn:
            raise RecordError(
                "the episode has no finished turn to reward: none was asked for, or it failed; DELETE "
                "/v1/episodes/ID gives the episode up"
            )
        correct = bool(parts.get("correct", reward >= 1))
        others = {name: value for name, value in parts.items() if name != "correct"}
        score = Score(reward, correct, others)
        if any(path.turn_rewards for path in response.paths):
            prompt = len(path_of(response, episode.prompt, 0)) - len(response.ids)
            of_turns = mean_of_turns(prompt, response.trajectory(episode.index, score))
            score = replace(score, reward=reward + of_turns)
        self._settle(episode, score)

    def fail(self, episode: Episode, cause: FailureCause, why: str = "") -> None:
        """Ends an episode that failed through no fault of the model: it has no reward and stays out of the
        loss. An episode without a finished turn begins again instead, unless this was its last attempt. `why`
        is for a reader. Raises RecordError while a turn is under way."""
        self._idle(episode)
        self.failure = f"{cause}: {why}" if why else cause
        if episode.response.drawn or not self._next_attempt(episode):
            for path in episode.response.paths:  # its reward is the failure's
                path.turn_rewards.clear()
            self._settle(episode, self._failed(cause))

    def _idle(self, episode: Episode) -> Episode:
        """Returns the episode. Raises RecordError while a turn is under way."""
        if episode.busy:
            raise RecordError("a turn of this episode is under way")
        return episode

    def _settle(self, episode: Episode, score: Score) -> None:
        episode.response.score, episode.response.ended = score, True
        del self._played[episode.id]
        if not episode.done.done():
            episode.done.set_result(episode.response)

    def drop(self, episode: Episode) -> None:
        """Gives the episode back, so that it begins again with the next agent."""
        self._begin_again(episode, episode.attempt)

    def _next_attempt(self, episode: Episode) -> bool:
        """Begins the episode again; returns False if this was its last attempt."""
        if episode.attempt >= self._cfg.episode_attempts:
            return False
        self._begin_again(episode, episode.attempt + 1)
        return True

    def _begin_again(self, episode: Episode, attempt: int) -> None:
        self._played.pop(episode.id, None)
        self._offer([Episode(episode.ticket, episode.index, episode.done, attempt=attempt)])

    def _take_back(self) -> None:
        limit = time.monotonic() - self._cfg.episode_timeout_s
        for episode in [e for e in self._played.values() if not e.busy and e.seen_s < limit]:
            if not self._next_attempt(episode):
                self.fail(episode, "timeout")

    def _offer(self, episodes: list[Episode]) -> None:
        self._free += [e for e in episodes if not e.done.done()]
        self._changed.set()
