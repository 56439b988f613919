"""Tools over the endpoint: OpenAI's own client, an engine with a script, and what the learner gets of it."""

import asyncio
import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from helpers.openai_server.scripted import World

from areal_q.messages import Ticket, VersionSpan
from rollout.engines.base import Completion
from rollout.environments.base import with_shared_prompt
from rollout.openai_server.replies import Reply
from rollout.openai_server.request_fields import decoded_request
from rollout.openai_server.schema import ChatBody
from rollout.reply_formats.table import FORMATS

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        "strict": True,
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %s}}\n</tool_call>'
BOTH = f"<think>\nhm é\n</think>\n\nso\n{CALL % 1}\n{CALL % 2}"


@pytest.fixture
def world(tmp_path: Path, make_ticket: Callable[..., Ticket]) -> Callable[..., World]:
    return lambda *script: World(tmp_path, make_ticket, list(script))


ASKED: dict[str, Any] = {"model": "run", "messages": [{"role": "user", "content": "?"}]}


async def test_calls_and_thoughts_are_a_view_of_the_drawn_tokens(world: Callable[..., World]):
    here = world(BOTH)
    async with here.served() as create:
        reply: Any = await create(**ASKED, tools=[ADD])
    choice = reply.choices[0]
    message = choice.message
    assert (message.content, message.reasoning_content) == ("so", "hm é")
    found = [
        (call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls
    ]
    assert found == [("add", {"a": 1}), ("add", {"a": 2})]
    assert choice.finish_reason == "tool_calls"
    assert len({call.id for call in message.tool_calls}) == 2
    assert (reply.prompt_token_ids, choice.token_ids) == here.engine.drawn[0]
    assert here.tokenizer.decode(choice.token_ids) == BOTH + "<|im_end|>"
    assert '"name": "add"' in here.tokenizer.decode(reply.prompt_token_ids)
    assert "strict" not in here.tokenizer.decode(reply.prompt_token_ids)


async def test_a_streamed_call_is_the_whole_one(world: Callable[..., World]):
    """Token by token, which for é are two, of one byte each."""
    here = world(BOTH, BOTH)
    async with here.served() as create:
        whole = (await create(**ASKED, tools=[ADD])).choices[0]
        said, thought, calls, ids, last = "", "", {}, [], None
        async for chunk in await create(**ASKED, tools=[ADD], stream=True):
            (last,) = chunk.choices
            said += last.delta.content or ""
            thought += getattr(last.delta, "reasoning_content", "")
            ids += last.token_ids
            for call in last.delta.tool_calls or []:
                calls[call.index] = (call.id, call.function.name, call.function.arguments)
    assert last is not None
    assert (said, thought) == (whole.message.content, whole.message.reasoning_content)
    assert ids == whole.token_ids and last.finish_reason == whole.finish_reason
    told = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert [calls[i][1:] for i in range(len(calls))] == told
    assert len({call[0] for call in calls.values()}) == 2


async def test_what_openai_s_client_adds_up_goes_back(world: Callable[..., World]):
    """It joins the texts of all chunks, the role among them, and adds fields of its own."""
    here = world(BOTH, "so")
    async with here.served():
        id = (await here.post("/episodes"))["id"]
        url = f"{here.url}/episodes/{id}"
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
            async with client.chat.completions.stream(**ASKED, tools=[ADD]) as chunks:
                done: Any = await chunks.get_final_completion()
            message = done.choices[0].message
            assert done.prompt_token_ids == here.engine.drawn[0][0]
            assert (message.role, message.content) == ("assistant", "so")
            calls = message.tool_calls or []
            assert [call.function.arguments for call in calls] == ['{"a": 1}', '{"a": 2}']
            back: list[Any] = [*ASKED["messages"], message.to_dict()]
            back += [{"role": "tool", "tool_call_id": call.id, "content": "4"} for call in calls]
            asked = {**ASKED, "messages": back}
            async with client.chat.completions.stream(**asked, tools=[ADD]) as chunks:
                assert (await chunks.get_final_completion()).choices[0].message.content == "so"
    (prompt, drawn), (again, _) = here.engine.drawn
    assert again[: len(prompt) + len(drawn)] == [*prompt, *drawn]


@pytest.mark.parametrize(
    ("line", "extra", "reason"),
    [
        (CALL % "1,", {}, "stop"),
        (CALL % "NaN", {}, "stop"),
        (CALL % 1, {"max_tokens": 20}, "length"),
        (CALL % 1, {"tool_choice": "none"}, "stop"),
    ],
)
async def test_what_is_no_call_stays_text(
    world: Callable[..., World], line: str, extra: dict[str, Any], reason: str
):
    """One that cannot be read, one cut off, and one where the client wants none."""
    here = world(line)
    async with here.served() as create:
        choice = (await create(**ASKED, tools=[ADD], **extra)).choices[0]
    assert choice.message.tool_calls is None and choice.finish_reason == reason
    assert line.startswith(choice.message.content) and choice.message.content


async def test_tools_whose_calls_nothing_reads_are_refused(world: Callable[..., World]):
    """Thoughts are read all the same, and who names a format gets calls as that has them."""
    here = world("<think>hm</think>so", "so", CALL % 1, CALL % 1)
    here.tokenizer.template = "<think>{{ tools }}[calls begin]"
    async with here.served() as create:
        with pytest.raises(openai.BadRequestError, match="reply_format must name one"):
            await create(**ASKED, tools=[ADD])
        assert (await create(**ASKED)).choices[0].message.reasoning_content == "hm"
        await create(**ASKED, tools=[ADD], tool_choice="none")
    for name in ("text", "hermes"):
        async with here.served(reply_format=name) as create:
            message = (await create(**ASKED, tools=[ADD])).choices[0].message
            assert bool(message.tool_calls) == (name == "hermes") != bool(message.content)


def test_ids_of_calls_differ_in_long_episodes(world: Callable[..., World]):
    """They have nine letters and digits, as Mistral's template asks for."""
    tokenizer = world().tokenizer
    body = decoded_request(json.dumps(ASKED | {"tools": [ADD]}).encode(), ChatBody)
    ids = np.array(tokenizer.encode(BOTH), np.int32)
    done = Completion(
        response_ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        spans=[VersionSpan(3, len(ids), "ab")],
        finish_reason="stop",
    )
    read = FORMATS["hermes"]
    replies = [Reply(body, [1], "run", tokenizer, (), read, frozenset()) for _ in range(1000)]
    calls = [call["id"] for one in replies for call in one.told(done, 0).tool_calls()]
    assert len({*calls}) == len(calls) == 2000
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", id) for id in calls)


async def test_what_binds_a_call_is_refused(world: Callable[..., World]):
    here = world()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tool_choice": "required"}, "`tool_choice` is not implemented"),
        ({"parallel_tool_calls": False}, "`parallel_tool_calls` is not implemented"),
        ({"tools": [{"type": "custom", "custom": {"name": "c"}}]}, "custom"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
    ]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "[1]"}}
    talk: list[tuple[list[Any], str]] = [
        ([{"role": "assistant", "tool_calls": [call]}], "'add' are no JSON object"),
        ([{"role": "user", "content": "", "tool_calls": [call]}], "the assistant's alone"),
    ]
    async with here.served() as create:
        for extra, reason in wrong:
            with pytest.raises(openai.BadRequestError, match=reason):
                await create(**{**ASKED, "tools": [ADD], **extra})
        for messages, reason in talk:
            with pytest.raises(openai.BadRequestError, match=reason):
                await create(model="run", messages=messages)
    assert not here.engine.drawn


async def play(here: World, create: Any, system: str, episode: dict[str, Any]) -> list[Any]:
    """A tool loop of two turns, with instructions of its own, that forgets the model's thoughts."""
    heads = {"X-Episode": episode["id"]}
    talk: list[Any] = [{"role": "system", "content": system}]
    talk.append({"role": "user", "content": episode["prompt"]})
    replies = []
    while not replies or replies[-1].choices[0].message.tool_calls:
        reply = await create(model="run", messages=talk, tools=[ADD], extra_headers=heads)
        replies.append(reply)
        message = reply.choices[0].message
        back = message.model_dump(exclude_none=True)
        back.pop("reasoning_content", None)
        talk.append(back)
        for call in message.tool_calls or []:
            talk.append({"role": "tool", "tool_call_id": call.id, "content": "4"})
    await here.post(f"/episodes/{episode['id']}/reward", {"reward": 1.0})
    return replies


async def test_an_agent_with_instructions_and_tools_is_learnt_exactly(world: Callable[..., World]):
    """Double entry: what the client was told is what the group holds, token by token, and the model saw the
    template's own rendering of the whole conversation, thoughts apart."""
    here = world(BOTH, "4 and 4", BOTH, "done")
    async with here.served() as create:
        played = []
        for system in ("be brief", "be very brief"):
            episode = await here.post("/episodes")
            played.append(await play(here, create, system, episode))
        while not all(response.ended for response in here.responses):
            await asyncio.sleep(0.01)
    ticket, rows = with_shared_prompt(here.ticket, here.responses)
    prompts = [replies[0].prompt_token_ids for replies in played]
    shared = here.tokenizer.decode(ticket.prompt_ids.numpy().tolist())
    assert shared.endswith("<|im_start|>system\nbe ")
    for row, replies, prompt in zip(rows, played, prompts, strict=True):
        whole = [*ticket.prompt_ids.numpy().tolist(), *row.ids]
        first, last = (reply.choices[0].token_ids for reply in replies)
        assert whole == [*replies[1].prompt_token_ids, *last]
        assert whole[: len(prompt) + len(first)] == [*prompt, *first]
        masked = [i for i, m in zip(row.ids, row.mask, strict=True) if m]
        assert masked == [*first, *last]
        assert [p for p, m in zip(row.logprobs, row.mask, strict=True) if m] == [-0.5] * len(masked)
        assert sum(span.tokens for span in row.spans) == len(row.ids) == len(row.logprobs)
        between = here.tokenizer.decode(whole[len(prompt) + len(first) : -len(last)])
        result = "<|im_start|>tool\n4<|im_end|>\n"
        assert between == f"\n{result * 2}<|im_start|>assistant\n"


@pytest.mark.parametrize("way", ["header", "URL", "key"])
async def test_an_episode_has_three_names(world: Callable[..., World], way: str):
    here = world("so", "and so", "no")
    async with here.served():
        id = (await here.post("/episodes"))["id"]
        url = f"{here.url}/episodes/{id}" if way == "URL" else here.url
        heads = {"X-Episode": id} if way == "header" else {}
        key = id if way == "key" else "none"
        async with openai.AsyncOpenAI(
            base_url=url, api_key=key, default_headers=heads, max_retries=0
        ) as client:
            assert (await client.models.list()).data[0].id == "run"
            talk: list[Any] = [{"role": "user", "content": "?"}]
            for _ in range(2):
                reply = await client.chat.completions.create(model="run", messages=talk)
                talk += [reply.choices[0].message.model_dump(), *talk[:1]]
            other = (await here.post("/episodes"))["id"]
            with pytest.raises(openai.BadRequestError, match="name several episodes"):
                both = {"X-Episode": other if way == "URL" else id + "x"}
                named = both if way != "header" else {"Authorization": f"Bearer {other}"}
                await client.chat.completions.create(
                    model="run", messages=talk, extra_headers=named
                )
            ended = await here.post(f"/episodes/{id}/reward", {"reward": 1.0})
            assert ended["tokens"] > 0
            with pytest.raises(openai.BadRequestError, match="no such episode"):
                await client.chat.completions.create(model="run", messages=talk)
    assert len(here.engine.script) == 1


async def test_an_episode_s_id_opens_that_episode_alone(
    world: Callable[..., World], tmp_path: Path
):
    (tmp_path / "token").write_text("sesame")
    here = world("so")
    async with here.served(str(tmp_path / "token")):
        await here.post("/episodes", key="none", status=401)
        mine, theirs = [(await here.post("/episodes", key="sesame"))["id"] for _ in range(2)]
        await here.post("/episodes", key=mine, status=401)
        await here.post(f"/episodes/{theirs}/completions", {"prompt": "?"}, mine, 401)
        await here.post(f"/episodes/{theirs}/reward", {"reward": 1.0}, mine, 401)
        await here.post("/completions", {"prompt": "?"}, "ep-none", 401)
        await here.post("/completions", {"prompt": "what?"}, mine)
        await here.post(f"/episodes/{mine}/reward", {"reward": 1.0}, mine)
        await here.post("/completions", {"prompt": "what?"}, mine, 401)
    assert [response.drawn for response in here.responses] == [0, 0] and not here.engine.script


@pytest.mark.parametrize("start", [None, 0, 2])
async def test_the_experts_of_tokens_are_told(world: Callable[..., World], start: int | None):
    """As verifiers' trainer reads them, which asks for those of a later turn's new tokens alone."""
    here = world("so")
    here.engine.routes = np.arange(100 * 2 * 3, dtype=np.uint16).reshape(100, 2, 3)
    asked = {} if start is None else {"routed_experts_prompt_start": start}
    async with here.served():
        here.url = here.url.removesuffix("/v1")
        body = {"token_ids": [5, 6, 7], "sampling_params": asked}
        (choice,) = (await here.post("/inference/v1/generate", body))["choices"]
    told, first = choice["routed_experts"], start or 0
    found = np.frombuffer(base64.b64decode(told["data"]), told["dtype"]).reshape(told["shape"])
    computed = 3 + len(choice["token_ids"]) - 1
    assert found.tolist() == here.engine.routes[first:computed].tolist() and told["start"] == first


@pytest.mark.parametrize("asks", [False, True])
async def test_what_tokens_were_drawn_from_is_told_if_asked(
    world: Callable[..., World], asks: bool
):
    here = world("so")
    async with here.served():
        here.url = here.url.removesuffix("/v1")
        asked = {"top_p": 0.9, "top_k": 5} | ({"return_sampling_mask": True} if asks else {})
        body = {"token_ids": [5, 6, 7], "sampling_params": asked}
        (choice,) = (await here.post("/inference/v1/generate", body))["choices"]
    told = [[i, i + 1] for i in choice["token_ids"]] if asks else None
    assert choice.get("sampling_mask") == told


async def test_token_ids_go_in_and_out(world: Callable[..., World]):
    """Double entry again, over two turns of an episode and one request without."""
    here = world("so", "and so", "x")
    async with here.served():
        here.url = here.url.removesuffix("/v1")
        episode = (await here.post("/v1/episodes"))["id"]
        ids = here.tokenizer.encode_prompt("my own prompt")
        asked = {
            "stop_token_ids": [7],
            "logprobs": 1,
            "skip_special_tokens": False,
            "max_tokens": 9,
        }
        for path in (f"/v1/episodes/{episode}",) * 2 + ("",):
            body = {"token_ids": ids, "sampling_params": asked, "cache_salt": "s", "stream": False}
            reply = await here.post(f"{path}/inference/v1/generate", body)
            (choice,) = reply["choices"]
            assert (reply["prompt_token_ids"], choice["token_ids"]) == here.engine.drawn[-1]
            assert reply["prompt_token_ids"] == ids and choice["finish_reason"] == "stop"
            content = choice["logprobs"]["content"]
            assert [one["token"] for one in content] == [
                f"token_id:{i}" for i in choice["token_ids"]
            ]
            assert {one["logprob"] for one in content} == {-0.5}
            assert choice["versions"] == [3] * len(choice["token_ids"])
            ids = [*ids, *choice["token_ids"], *here.tokenizer.encode("more")]
        for wrong, reason in {
            "features": "`features` is not implemented",
            "min_tokens": "`min_tokens` is not implemented",
            "prompt": "`prompt` is not implemented in sampling_params",
        }.items():
            body = {"token_ids": [5], "sampling_params": {} if wrong == "features" else {wrong: 3}}
            body |= {wrong: {"x": 1}} if wrong == "features" else {}
            told = await here.post("/inference/v1/generate", body, status=400)
            assert told["error"]["message"] == reason
