"""Episodes that agents of the user's own play: each is one response of a ticket that the worker holds.

    worker ─ticket─▶ Episodes ─begin─▶ agent ─turns, token-exact─▶ Response ─reward─▶ group ─commit─▶ Redis
                        ▲                            │
                        └── silent for too long: begins again, with whoever asks next

| wait          | for                                    | unblocked by                                |
|---------------|----------------------------------------|---------------------------------------------|
| `__call__`    | an end of each of the G episodes       | `end`, `fail`, agents that stay silent;     |
|               |                                        | cancelled when the ticket is lost           |
| `begin`       | an episode that nobody plays           | a new ticket; a silent agent; its timeout   |
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from areal_q.config import External
from areal_q.errors import RecordError
from areal_q.messages import FailureCause, Ticket, VersionSpan
from areal_q.tasks import Score
from rollout.engines.base import Completion, TokenCallback
from rollout.environments.base import Response
from rollout.environments.engine_client import EngineClient

SILENCE_POLL_S = 1.0
"""Seconds between two looks for agents that have fallen silent"""
UNDRAWN = VersionSpan(-1, 0, "")
"""Span of tokens that were given before the model drew its first one; replaced by the version that draws it"""


@dataclass(eq=False)
class Episode:
    """One response being played. `ids` are the truth; `text` and `messages` are how its agent knows them."""

    ticket: Ticket
    index: int
    done: "asyncio.Future[Response]"
    id: str = ""
    response: Response = field(default_factory=Response)
    text: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    busy: bool = False
    attempt: int = 1
    """Number of agents that have had the episode, the present one included; those that gave it up themselves do
    not count."""
    seen_s: float = 0.0

    @property
    def ids(self) -> list[int]:
        return [*self.ticket.prompt_ids.numpy().tolist(), *self.response.ids]

    @property
    def left(self) -> int:
        """Tokens that may still be drawn, of the ticket's `max_tokens`."""
        return self.ticket.sampling.max_tokens - self.response.drawn


class Episodes:
    """An Environment (rollout/environments/base.py) whose turns agents outside of this process ask for."""

    def __init__(
        self,
        client: EngineClient,
        cfg: External,
        longest: int,
        failed: Callable[[FailureCause], Score] = Score.failed,
    ) -> None:
        """`longest` is the most tokens of an episode, its prompt included, that the learner has room for;
        `failed` gives the score of an episode that failed."""
        self._client, self._cfg, self._longest = client, cfg, longest
        self._failed = failed
        self._free: list[Episode] = []
        self._played: dict[str, Episode] = {}
        self._changed = asyncio.Event()

    @property
    def open(self) -> int:
        """Episodes that an agent plays now."""
        return len(self._played)

    @property
    def unfinished(self) -> int:
        """Episodes that have not ended, played or not."""
        return len(self._free) + len(self._played)

    async def __call__(self, ticket: Ticket, responses: list[Response]) -> None:
        """Puts each response in its place when its episode is rewarded; half an episode is not kept."""
        loop = asyncio.get_running_loop()
        mine = [Episode(ticket, i, loop.create_future()) for i in range(ticket.group_size)]
        self._offer(mine)
        open_ones = {episode.done for episode in mine}
        try:
            while open_ones:
                _, open_ones = await asyncio.wait(open_ones, timeout=SILENCE_POLL_S)
                self._take_back()
            responses[:] = [episode.done.result() for episode in mine]
        finally:
            for future in open_ones:
                future.cancel()
            self._free = [e for e in self._free if e not in mine]
            self._played = {i: e for i, e in self._played.items() if e not in mine}

    async def begin(self, timeout_s: float) -> Episode | None:
        """Returns an episode that nobody plays, under a new id; None when there was none within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._take_back()
            if self._free:
                episode = self._free.pop(0)
                episode.id, episode.seen_s = secrets.token_urlsafe(16), time.monotonic()
                episode.text = episode.ticket.prompt
                self._played[episode.id] = episode
                return episode
            self._changed.clear()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            try:
                await asyncio.wait_for(self._changed.wait(), min(left_s, 1.0))
            except TimeoutError:
                continue

    def find(self, id: str) -> Episode:
        """Returns the episode `id`. Raises RecordError if it is unknown, has ended, or was taken back."""
        episode = self._played.get(id)
        if episode is None:
            raise RecordError("no such episode: unknown, ended, or silent for too long")
        episode.seen_s = time.monotonic()
        return episode

    async def turn(
        self,
        episode: Episode,
        given: list[int],
        stop_ids: frozenset[int],
        max_tokens: int | None,
        stop: tuple[str, ...] = (),
        on_token: TokenCallback | None = None,
    ) -> Completion:
        """Appends `given`, tokens that nobody drew, and draws on. A turn that fails or is cancelled leaves the
        episode as it was. Raises RecordError where there is no budget left, or a turn is under way."""
        if episode.busy:
            raise RecordError("a turn of this episode is under way")
        if episode.left <= 0:
            raise RecordError("the episode's budget of tokens is spent")
        room = self._longest - len(episode.ids) - len(given)
        if room <= 0:
            raise RecordError(
                f"the episode would have more than learner.microbatch_tokens = {self._longest} tokens"
            )
        before = episode.response
        response = Response(
            [*before.ids], [*before.logprobs], [*before.mask], [*before.spans], turns=before.turns
        )
        response.add_given(given, response.spans[-1] if response.spans else UNDRAWN)
        episode.busy = True
        try:
            budget = min(max_tokens or episode.left, episode.left, room)
            done = await self._client.generate_turn(
                episode.ticket,
                episode.index,
                response,
                stop_ids,
                budget,
                stop=stop,
                on_token=on_token,
            )
        finally:
            episode.busy, episode.seen_s = False, time.monotonic()
        if (
            response.spans[0].version == UNDRAWN.version
        ):  # now it is known which version they came before
            first = done.spans[0]
            tokens = len(given) + first.tokens
            response.spans = [VersionSpan(first.version, tokens, first.digest), *done.spans[1:]]
        episode.response = response
        return done

    def end(self, episode: Episode, reward: float, parts: dict[str, float]) -> None:
        """Ends the episode with its reward; the last one of a group commits the group. Raises RecordError if no
        turn of it is finished."""
        if episode.busy or not episode.response.drawn:
            raise RecordError("the episode has no finished turn")
        correct = bool(parts.get("correct", reward >= 1))
        others = {name: value for name, value in parts.items() if name != "correct"}
        self._settle(episode, Score(reward, correct, others))

    def fail(self, episode: Episode, cause: FailureCause) -> None:
        """Ends an episode that failed through no fault of the model: it has no reward. One without a turn
        begins again instead, with the agent that asks next, since there is nothing yet to leave out of the
        loss."""
        if episode.busy:
            raise RecordError("a turn of this episode is under way")
        if episode.response.drawn:
            self._settle(episode, self._failed(cause))
        else:
            self.drop(episode)

    def _settle(self, episode: Episode, score: Score) -> None:
        episode.response.score, episode.response.ended = score, True
        del self._played[episode.id]
        if not episode.done.done():
            episode.done.set_result(episode.response)

    def drop(self, episode: Episode) -> None:
        """Gives the episode back: it begins again, with the agent that asks next."""
        self._begin_again(episode, episode.attempt)

    def _begin_again(self, episode: Episode, attempt: int) -> None:
        self._played.pop(episode.id, None)
        self._offer([Episode(episode.ticket, episode.index, episode.done, attempt=attempt)])

    def _take_back(self) -> None:
        limit = time.monotonic() - self._cfg.episode_timeout_s
        for episode in [e for e in self._played.values() if not e.busy and e.seen_s < limit]:
            if episode.attempt < self._cfg.episode_attempts:
                self._begin_again(episode, episode.attempt + 1)
            else:
                self.fail(episode, "timeout")

    def _offer(self, episodes: list[Episode]) -> None:
        self._free += [e for e in episodes if not e.done.done()]
        self._changed.set()
