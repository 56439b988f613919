"""A turn changes all that is recorded of an episode at once: tokens, text, messages and experts."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from msgspec.structs import replace

from areal_q.config import External, Sampling, load
from areal_q.errors import RecordError
from areal_q.messages import Ticket, VersionSpan
from areal_q.tasks import CharTokenizer
from rollout.engines.base import Completion, Request, ResponseCallback, TokenCallback
from rollout.environments.base import Response
from rollout.environments.engine_client import EngineClient
from rollout.environments.external import Episodes, Talk
from rollout.openai_server.app import Endpoint

MANY = 20_000
"""Tokens of a turn, whose events are more than the buffers of a connection hold"""
TOKEN = CharTokenizer().encode("7")[0]


class AtOnce:
    """An engine that draws whole turns between two moments of the event loop. It says that turn n went through
    expert n alone."""

    version = 0

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.turns, self.token = 0, TOKEN

    async def generate(
        self,
        request: Request,
        on_token: TokenCallback | None = None,
        on_response: ResponseCallback | None = None,
    ) -> list[Completion]:
        self.turns += 1
        self.asked.append(request.prompt_ids.tolist())
        count = request.sampling.max_tokens
        for _ in range(count if on_token else 0):
            on_token(0, self.token, -1.0)  # pyright: ignore[reportOptionalCall]
        computed = len(request.prompt_ids) + count - 1
        completion = Completion(
            response_ids=np.full(count, self.token, np.int32),
            logprobs=np.full(count, -1.0, np.float32),
            spans=[VersionSpan(0, count, "ab")],
            finish_reason="length",
            routes=np.full((computed, 1, 1), self.turns, np.uint8),
        )
        if on_response:
            on_response(0, completion)
        return [completion]


@pytest.fixture
def ticket(make_ticket: Callable[..., Ticket]) -> Ticket:
    return make_ticket(group_size=1, prompt="1+2=", sampling=Sampling(max_tokens=4 * MANY))


@asynccontextmanager
async def offered(ticket: Ticket, engine: Any) -> AsyncIterator[tuple[Episodes, list[Response]]]:
    run = load(None, [f"learner.microbatch_tokens={8 * MANY}"])
    episodes = Episodes(run, EngineClient(engine, CharTokenizer()), External())
    responses = [Response()]
    task = asyncio.create_task(episodes(ticket, responses))
    try:
        yield episodes, responses
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def asking(
    ticket: Ticket, engine: Any
) -> AsyncIterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """A function that posts a turn of one episode, and the episode."""
    async with offered(ticket, engine) as (episodes, _), aiohttp.ClientSession() as http:
        endpoint = Endpoint(engine, CharTokenizer(), "run", episodes, Sampling(), "0", None)
        url = f"http://127.0.0.1:{await endpoint.start()}/v1"
        try:
            async with http.post(f"{url}/episodes") as reply:
                episode = await reply.json()

            def post(turn: dict[str, Any], path: str = "", **more: Any) -> Any:
                if path:
                    return http.post(f"{url}/episodes/{episode['id']}/{path}", json={"reward": 1.0})
                path = "chat/completions" if "messages" in turn else "completions"
                body = turn | more
                return http.post(f"{url}/{path}", json=body, headers={"X-Episode": episode["id"]})

            yield post, episode
        finally:
            await endpoint.close()


def beginnings(episode: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The first turn in each of the ways to ask for it."""
    return {
        "text": {"prompt": episode["prompt"]},
        "ids": {"prompt": episode["prompt_token_ids"]},
        "messages": {"messages": [{"role": "user", "content": episode["prompt"]}]},
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["text", "ids", "messages"])
async def test_a_turn_that_was_lost_is_drawn_anew(ticket: Ticket, way: str, stream: bool):
    """A stream is left after its first line, a whole reply unread. What was drawn for it stays recorded."""
    engine = AtOnce()
    async with asking(ticket, engine) as (post, episode):
        turn = beginnings(episode)[way]
        async with post(turn, max_tokens=MANY, stream=stream) as reply:
            assert reply.status == 200
            await reply.content.readline() if stream else None
            reply.close()
        async with post(turn, max_tokens=2) as again:
            assert again.status == 200, await again.text()
        async with post({}, path="reward") as ended:
            assert (await ended.json())["tokens"] == MANY + 2
    assert engine.asked == [episode["prompt_token_ids"]] * 2


@pytest.mark.parametrize("first", ["text", "ids", "messages"])
@pytest.mark.parametrize("second", ["text", "ids", "messages"])
async def test_any_kind_of_prompt_may_ask_for_a_turn_of_another_again(
    ticket: Ticket, first: str, second: str
):
    engine = AtOnce()
    async with asking(ticket, engine) as (post, episode):
        for way in (first, second):
            async with post(beginnings(episode)[way], max_tokens=2) as reply:
                assert reply.status == 200
    assert engine.asked == [episode["prompt_token_ids"]] * 2


async def test_a_lost_turn_of_no_text_is_drawn_anew(ticket: Ticket):
    """Nothing tells the text that asks for it again from one that follows it: it ended at once."""
    engine, tokenizer = AtOnce(), CharTokenizer()
    async with asking(ticket, engine) as (post, episode):

        async def turn(prompt: str, token: int) -> None:
            engine.token = token
            async with post({"prompt": prompt}, max_tokens=1) as reply:
                assert reply.status == 200, await reply.text()

        for token in (tokenizer.eos_id, tokenizer.eos_id, TOKEN):
            await turn(episode["prompt"], token)
        for token in (tokenizer.eos_id, TOKEN):
            await turn(episode["prompt"] + "7", token)
        await turn(episode["prompt"] + "77", TOKEN)
        await turn(episode["prompt"] + "77+", TOKEN)
    prompt = episode["prompt_token_ids"]
    assert engine.asked[:3] == [prompt] * 3
    assert engine.asked[3:5] == [[*prompt, TOKEN]] * 2
    assert engine.asked[5] == [*prompt, TOKEN, TOKEN]
    assert engine.asked[6] == [*prompt, TOKEN, TOKEN, *tokenizer.encode("+")]


class Slow(AtOnce):
    """An engine whose turns have a single token, each drawn once it is `let`."""

    def __init__(self) -> None:
        super().__init__()
        self.let = asyncio.Event()

    async def generate(self, request: Request, *args: Any, **kwargs: Any) -> list[Completion]:
        await self.let.wait()
        short = replace(request, sampling=replace(request.sampling, max_tokens=1))
        return await super().generate(short, *args, **kwargs)


async def test_a_turn_that_waited_finds_its_episode_ended(ticket: Ticket):
    """The first leaves almost all of the budget, and the agent ends the episode before the second draws."""
    engine = Slow()
    async with offered(ticket, engine) as (episodes, _):
        episode = await episodes.begin(60.0)
        assert episode is not None

        async def turn() -> None:
            await episodes.turn(episode, None, episode.prompt, frozenset(), None)

        async def last() -> None:
            await turn()
            episodes.end(episode, 1.0, {})

        first, second = asyncio.ensure_future(last()), asyncio.ensure_future(turn())
        await asyncio.sleep(0)
        engine.let.set()
        await first
        with pytest.raises(RecordError, match="has ended while the turn waited"):
            await second
    assert engine.turns == 1 and not episode.reserved and episode.response.drawn == 1


async def test_a_turn_that_cannot_be_told_is_not_recorded(ticket: Ticket):
    """Its tokens alone would have no state, and no later turn could extend them."""

    def view(done: Completion) -> Any:
        raise RecordError("this cannot be told")

    async with offered(ticket, AtOnce()) as (episodes, _):
        episode = await episodes.begin(60.0)
        assert episode is not None
        asked = (episode, Talk([], []), episode.prompt, frozenset[int](), 2)
        with pytest.raises(RecordError, match="cannot be told"):
            await episodes.turn(*asked, view=view)
        assert not episode.response.ids and not episode.states and not episode.reserved


@pytest.mark.parametrize("turns", range(5))
async def test_a_cancellation_beside_an_offer_is_not_lost(ticket: Ticket, turns: int):
    """The one who waits for an episode went on waiting, where both came in one turn of the loop."""
    async with offered(ticket, AtOnce()) as (episodes, _):
        assert await episodes.begin(60.0)
        waits = asyncio.create_task(episodes.begin(60.0))
        for _ in range(5):
            await asyncio.sleep(0)
        episodes._changed.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        waits.cancel()
        await asyncio.wait([waits])
        assert waits.cancelled()


@pytest.mark.parametrize("cause", ["environment", "timeout"])
async def test_an_episode_of_which_nothing_is_drawn_ends(ticket: Ticket, cause: Any):
    """Each of its agents fails, or falls silent, before a turn: there is no endless one."""
    async with offered(ticket, AtOnce()) as (episodes, responses):
        for _ in range(External().episode_attempts):
            episode = await episodes.begin(60.0)
            assert episode is not None
            episode.seen_s -= External().episode_timeout_s
            if cause != "timeout":
                episodes.fail(episode, cause)
        assert await episodes.begin(0.0) is None
        while not responses[0].drawn:  # a record has a token
            await asyncio.sleep(0.01)
    score = responses[0].score
    assert score is not None and (score.failure, score.valid) == (cause, False)


async def test_the_bound_on_branches_counts_turns_at_the_same_time(
    ticket: Ticket, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rollout.environments.external.MOST_BRANCHES", 2)
    engine = Slow()
    async with offered(ticket, engine) as (episodes, _):
        episode = await episodes.begin(60.0)
        assert episode is not None
        engine.let.set()
        turns = [episodes.turn(episode, None, episode.prompt, frozenset(), None) for _ in range(5)]
        found = await asyncio.gather(*turns, return_exceptions=True)
    refused = [error for error in found if isinstance(error, RecordError)]
    assert len(refused) == 2 and "more than 2 branches" in str(refused[0])
    assert len(episode.response.branches) == 2 and not episode.reserved


@pytest.mark.parametrize(
    ("address", "url"),
    [("9", "http://127.0.0.1:9/v1"), ("[::1]:9", "http://[::1]:9/v1"), ("a:9", "http://a:9/v1")],
)
def test_a_url_has_an_ipv6_host_in_brackets(address: str, url: str, tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("secret")
    engine: Any = AtOnce()
    endpoint = Endpoint(engine, CharTokenizer(), "run", None, Sampling(), address, str(token))
    assert endpoint.url(9) == url


async def test_the_experts_of_earlier_turns_are_kept(ticket: Ticket):
    """The oracle is one Response to which the same completions are added, as other environments do it."""
    engine, oracle = AtOnce(), Response()
    async with offered(ticket, engine) as (episodes, responses):
        episode = await episodes.begin(60.0)
        assert episode is not None
        for given in ([], [4, 5]):
            oracle.add_given(given, VersionSpan(0, 0, "ab"))
            context = oracle.context(ticket)
            oracle.add_drawn(await episodes.turn(episode, None, context, frozenset(), 2))
        episodes.end(episode, 1.0, {})
        await asyncio.sleep(0)
        played = episode.response
    assert responses[0] in (played, Response())
    assert oracle.routes is not None and played.routes is not None
    assert played.routes.ravel().tolist() == oracle.routes.ravel().tolist()
    assert played.routes.ravel().tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
    assert (played.ids, played.mask, played.turns) == (oracle.ids, oracle.mask, 2)
