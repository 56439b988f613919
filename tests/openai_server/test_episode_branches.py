"""Requests that do not extend what is recorded of an episode branch. Double entry throughout: all that a client
was told it was drawn, and after what, is in the record once, token by token, and nothing else is."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from helpers.openai_server.scripted import World

from areal_q.messages import Ticket, Trajectory, parts
from areal_q.tasks import Score
from rollout.environments.base import with_shared_prompt

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture
def world(tmp_path: Path, make_ticket: Callable[..., Ticket]) -> Callable[..., World]:
    return lambda *script: World(tmp_path / "model", make_ticket, list(script))


def said(role: str, content: str) -> Any:
    return {"role": role, "content": content}


class Agent:
    """An agent of one episode, which keeps what it was told: prompt and drawn tokens of every request."""

    def __init__(self, here: World, create: Any, episode: dict[str, Any]) -> None:
        self.here, self._create, self.episode = here, create, episode
        self.told: list[tuple[list[int], list[int]]] = []

    async def ask(self, *messages: Any, **more: Any) -> Any:
        """The reply's message, as the client sends it back."""
        heads = {"X-Episode": self.episode["id"]}
        reply = await self._create(model="run", messages=messages, extra_headers=heads, **more)
        self.told.append((reply.prompt_token_ids, reply.choices[0].token_ids))
        return reply.choices[0].message.model_dump(exclude_none=True)

    async def end(self) -> None:
        await self.here.post(f"/episodes/{self.episode['id']}/reward", {"reward": 1.0})


async def played(here: World, play: Callable[[Agent], Any]) -> tuple[Trajectory, Agent]:
    """The record of an episode that `play` plays, beside a second one of one turn; both are checked."""
    agents: list[Agent] = []
    here.engine.script.append("last")
    async with here.served() as create:
        for number in range(2):
            agent = Agent(here, create, await here.post("/episodes"))
            await (agent.ask(said("user", "what?")) if number else play(agent))
            await agent.end()
            agents.append(agent)
        while not all(response.ended for response in here.responses):
            await asyncio.sleep(0.01)
    assert not here.engine.script
    ticket, rows = with_shared_prompt(here.ticket, here.responses)
    records = [row.trajectory(i, Score(1.0, True)) for i, row in enumerate(rows)]
    for record, agent in zip(records, agents, strict=True):
        check_entries(ticket, record, agent.told)
    return records[0], agents[0]


def check_entries(
    ticket: Ticket, t: Trajectory, told: Iterable[tuple[list[int], list[int]]]
) -> None:
    """Each entry of the client's trace is at a place of its own among the drawn tokens, which are no more."""
    free: set[tuple[int, int]] = set()
    paths: list[tuple[int, list[int]]] = []
    for number, (before, own) in enumerate(parts(ticket.prompt_ids.numpy(), t)):
        paths.append((len(before), [*before.tolist(), *own.response_ids.numpy().tolist()]))
        drawn = own.loss_mask.numpy().astype(bool)
        free |= {(number, len(before) + int(place)) for place in drawn.nonzero()[0]}
        assert (own.behavior_logprobs.numpy()[drawn] == -0.5).all()
        assert not own.behavior_logprobs.numpy()[~drawn].any()
        assert sum(span.tokens for span in own.spans) == own.num_tokens
    for prompt, ids in told:
        whole = prompt + ids
        places = [
            {(number, place) for place in range(len(prompt), len(whole))}
            for number, (_, path) in enumerate(paths)
            if path[: len(whole)] == whole
        ]
        here = next(p for p in places if p <= free)
        free -= here
    assert not free


def shape(t: Trajectory) -> list[int]:
    return [branch.parent for branch in t.branches]


async def test_a_history_in_short_branches(world: Callable[..., World]):
    async def play(agent: Agent) -> None:
        first = said("user", "what?")
        reply = await agent.ask(first)
        await agent.ask(first, reply, said("user", "and?"))
        summary = await agent.ask(said("system", "sum up"), said("user", "what? a long story"))
        await agent.ask(said("user", "so far: " + summary["content"]), said("user", "and?"))

    record, agent = await played(world("a long story", "goes on", "short", "the end"), play)
    assert shape(record) == [0, 0]
    whole = agent.here.tokenizer.decode([*agent.told[-1][0], *agent.told[-1][1]])
    assert "so far: short" in whole and "goes on" not in whole


async def test_what_is_left_out_of_an_earlier_reply_branches(world: Callable[..., World]):
    """Only from where it differs: the turns before are shared as they were drawn."""

    async def play(agent: Agent) -> None:
        talk = [said("user", "what?")]
        for question in ("and?", "so?"):
            talk += [await agent.ask(*talk), said("user", question)]
        await agent.ask(*talk)
        talk[3] = said("assistant", "yes")
        await agent.ask(*talk)

    record, agent = await played(world("hm", "let me think: yes", "a", "b"), play)
    assert shape(record) == [0]
    first, second = agent.told[1]
    start = record.branches[0].at
    assert agent.told[3][0][: len(first)] == first and start >= len(first)
    assert start < len(first) + len(second)


async def test_a_repetition_is_a_retry_drawn_anew(world: Callable[..., World]):
    """Also where it draws the same; and later turns go on from the newest of the same."""

    async def play(agent: Agent) -> None:
        first, more = said("user", "what?"), said("user", "and?")
        reply = await agent.ask(first)
        await agent.ask(first)
        await agent.ask(first, reply, more)
        await agent.ask(first, reply, more)
        other = await agent.ask(first)
        await agent.ask(first, other, more)

    record, agent = await played(world("so", "so", "x", "y", "or so", "z"), play)
    assert agent.told[0] == agent.told[1] and agent.told[2][0] == agent.told[3][0]
    assert shape(record) == [0, 1, 0]
    assert len(set(agent.here.engine.seeds[:6])) == 6, (
        "each turn has its own stream of random numbers"
    )


async def test_sub_agents_with_their_own_tools_and_instructions(world: Callable[..., World]):
    async def play(agent: Agent) -> None:
        main = [said("system", "you lead"), said("user", "what?")]
        main += [await agent.ask(*main), said("user", "asked two others")]
        for name in ("search", "read"):
            sub: list[Any] = [said("system", f"you {name}"), said("user", "do")]
            sub += [await agent.ask(*sub, tools=[ADD]), said("user", "and?")]
            await agent.ask(*sub, tools=[ADD])
        await agent.ask(*main)

    record, agent = await played(world("ask", "1", "2", "3", "4", "done"), play)
    assert shape(record) == [0, 1]
    prompts = [len(prompt) for prompt, _ in agent.told]
    assert record.branches[0].at < prompts[0], "within the prompt"
    assert agent.told[-1][0][: prompts[0]] == agent.told[0][0], "the main one goes on on its path"


async def test_requests_at_the_same_time_branch(world: Callable[..., World]):
    async def play(agent: Agent) -> None:
        first = said("user", "what?")
        agent.here.engine.wait = asyncio.Barrier(4).wait
        at_once = [agent.ask(said("system", f"{n}"), first, max_tokens=90) for n in range(4)]
        replies = await asyncio.gather(*at_once)
        again = [
            agent.ask(said("system", f"{n}"), first, reply, said("user", "and?"), max_tokens=90)
            for n, reply in enumerate(replies)
        ]
        await asyncio.gather(*again)
        agent.here.engine.wait = None

    record, _ = await played(world(*"abcdefgh"), play)
    assert len(record.branches) == 3


async def test_texts_and_ids_branch_too(world: Callable[..., World]):
    async def play(agent: Agent) -> None:
        url = f"/episodes/{agent.episode['id']}"
        ids = agent.here.tokenizer.encode_prompt("what? hm")

        async def ask(prompt: Any) -> Any:
            reply = await agent.here.post(f"{url}/completions", {"prompt": prompt})
            (choice,) = reply["choices"]
            agent.told.append((reply["prompt_token_ids"], choice["token_ids"]))
            return choice["text"]

        text = await ask("what?")
        await ask("what?" + text + "more")
        await ask("what?" + text + "less")
        await ask(ids)
        await ask([*ids, *agent.told[-1][1]])

    record, _ = await played(world("ab", "cd", "ef", "gh", "ij"), play)
    assert shape(record) == [0, 0]


async def test_the_budget_is_of_the_whole_tree(world: Callable[..., World]):
    """Turns at the same time share it: what one may draw no other draws, and none waits in vain."""

    async def play(agent: Agent) -> None:
        first = said("user", "what?")
        await asyncio.gather(*(agent.ask(first) for _ in range(3)))
        with pytest.raises(openai.BadRequestError, match="budget of tokens is spent"):
            await agent.ask(first)

    here = world("x" * 700, "y" * 700, "z" * 700)
    record, agent = await played(here, play)
    drawn = [len(ids) for _, ids in agent.told]
    assert sorted(drawn) == [2000 - 701 * 2, 701, 701]
    assert sum(drawn) == here.ticket.sampling.max_tokens == record.all_tokens


async def test_an_episode_whose_turn_failed_is_given_up(world: Callable[..., World]):
    """A reward has nothing to go to, and the refusal says how the episode ends without one."""
    here = world()
    async with here.served() as create:
        id = (await here.post("/episodes"))["id"]
        with pytest.raises(openai.BadRequestError, match="context length"):
            long = [said("user", "what?" * 2000)]
            await create(model="run", messages=long, extra_headers={"X-Episode": id})
        told = await here.post(f"/episodes/{id}/reward", {"reward": 1.0}, status=400)
        assert "or it failed; DELETE /v1/episodes/ID" in told["error"]["message"]
        assert here.episodes.open == 1
        async with aiohttp.ClientSession() as http, http.delete(f"{here.url}/episodes/{id}"):
            assert here.episodes.open == 0


async def test_an_end_is_refused_while_a_turn_is_under_way(world: Callable[..., World]):
    async def play(agent: Agent) -> None:
        await agent.ask(said("user", "what?"))
        engine, released = agent.here.engine, asyncio.Event()
        engine.wait = released.wait
        under_way = asyncio.create_task(agent.ask(said("user", "what?")))
        while len(engine.seeds) < 2:
            await asyncio.sleep(0.01)
        end = f"/episodes/{agent.episode['id']}/reward"
        told = await agent.here.post(end, {"reward": 1.0}, status=400)
        assert "a turn of this episode is under way" in told["error"]["message"]
        released.set()
        await under_way
        engine.wait = None

    await played(world("a", "b"), play)


ASKED: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [said("user", "what?")]},
    "completions": {"prompt": "what?"},
    "responses": {"input": "what?"},
    "messages": {"messages": [said("user", "what?")], "max_tokens": 90},
    "inference/v1/generate": {"sampling_params": {"max_tokens": 90}},
}


@pytest.mark.parametrize("route", ASKED)
async def test_a_reward_finds_its_turn_by_id_and_by_number(world: Callable[..., World], route: str):
    """Of two turns that are drawn after the same, the second on a branch, and one that follows the second. A
    later reward replaces an earlier one; those of a leaf count by their share of the paths."""
    here, ids = world("a", "bc", "def"), list[str]()

    async def play(agent: Agent) -> None:
        url = f"/episodes/{agent.episode['id']}"
        more = {"token_ids": agent.episode["prompt_token_ids"]} if "inference" in route else {}
        for _ in range(2):
            reply = await here.post(f"{url}/{route}", ASKED[route] | more)
            ids.append(reply.get("request_id") or reply["id"])
            agent.told.append(here.engine.drawn[-1])
        follow = {"prompt": [*agent.told[-1][0], *agent.told[-1][1]]}
        ids.append((await here.post(f"{url}/completions", follow))["id"])
        agent.told.append(here.engine.drawn[-1])
        for turn, reward in ((ids[0], 9), (ids[0], 0.5), (1, -1.0), (-1, 2)):
            await here.post(f"{url}/reward", {"reward": reward, "turn": turn})
        for wrong in (
            {"reward": 1, "turn": "of nobody"},
            {"reward": 1, "turn": 3},
            {"reward": 1, "turn": 10**30},
            {"reward": 1, "turn": True},
            {"reward": 1, "turn": 0, "parts": {"x": 1}},
            {"failed": "environment", "turn": 0},
        ):
            await here.post(f"{url}/reward", wrong, status=400)

    record, agent = await played(here, play)
    assert len({*ids}) == 3
    assert [(r.token, r.reward) for r in record.turn_rewards] == [(len(agent.told[0][1]) - 1, 0.5)]
    (branch,) = record.branches
    second = branch.at + branch.response_ids.shape[0] - len(agent.told[2][1])
    ends = [second - branch.at - 1, branch.response_ids.shape[0] - 1]
    assert [(r.token, r.reward) for r in branch.turn_rewards] == [
        *zip(ends, (-1.0, 2.0), strict=True)
    ]
    score = here.responses[0].score
    assert score is not None and score.reward == 1.0 + (0.5 + (-1 + 2)) / 2 and score.correct


async def test_a_failed_episode_has_no_rewards_of_turns(world: Callable[..., World]):
    here = world("a", "b")
    async with here.served() as create:
        for _ in range(2):
            agent = Agent(here, create, await here.post("/episodes"))
            await agent.ask(said("user", "what?"))
            url = f"/episodes/{agent.episode['id']}/reward"
            await here.post(url, {"reward": 1, "turn": 0})
            await here.post(url, {"failed": "environment"})
        while not all(response.ended for response in here.responses):
            await asyncio.sleep(0.01)
    assert not any(
        r.trajectory(0, Score.failed("environment")).turn_rewards for r in here.responses
    )
