"""OpenAI's responses and Anthropic's messages: the same draws as a chat's, in other words."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from helpers.openai_server.scripted import World
from openai.types import Completion, chat
from openai.types import responses as openai_responses
from pydantic import TypeAdapter

from areal_q.errors import RecordError
from areal_q.messages import Ticket
from rollout.openai_server.dialects import messages, responses

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %s}}\n</tool_call>'
BOTH = f"<think>\nhm é\n</think>\n\nso\n{CALL % 1}\n{CALL % 2}"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FLAT: Any = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA}
CLAUDE: Any = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
CHAT: Any = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA},
}
RESULTS = [
    {"type": "tool_result", "tool_use_id": "x", "content": "1"},
    {"type": "tool_result", "tool_use_id": "y", "content": [{"type": "text", "text": "2"}]},
]


@pytest.fixture
def world(tmp_path: Path, make_ticket: Callable[..., Ticket]) -> Callable[..., World]:
    return lambda *script: World(tmp_path, make_ticket, list(script))


@asynccontextmanager
async def client_of(here: World, episode: str = "") -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{here.url}/episodes/{episode}" if episode else here.url
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
        yield client


async def events_of(here: World, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the events of a stream, whose names are their types, if they have one."""
    found = []
    async with aiohttp.ClientSession() as http, http.post(here.url + path, json=body) as reply:
        assert reply.status == 200, await reply.text()
        for frame in (await reply.text()).strip().split("\n\n"):
            *names, data = frame.split("\n")
            if data == "data: [DONE]":
                break
            found.append(json.loads(data.removeprefix("data: ")))
            assert names == [f"event: {kind}" for kind in [found[-1].get("type")] if kind]
    return found


async def test_a_response_has_the_chat_s_tokens_as_items(world: Callable[..., World]):
    here = world(BOTH, BOTH)
    async with here.served() as create, client_of(here) as client:
        asked = [{"role": "system", "content": "be"}, {"role": "user", "content": "?"}]
        chat = (await create(model="run", messages=asked, tools=[CHAT])).choices[0]
        told: Any = await client.responses.create(
            model="run", instructions="be", input="?", tools=[FLAT], max_output_tokens=1000
        )
    assert here.engine.drawn[0] == here.engine.drawn[1] == (told.prompt_token_ids, told.token_ids)
    assert told.versions == chat.versions and told.status == "completed"
    thought, said, first, second = told.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm é")
    assert (said.type, told.output_text) == ("message", "so")
    wanted = [(call.function.name, call.function.arguments) for call in chat.message.tool_calls]
    assert [(call.name, call.arguments) for call in (first, second)] == wanted
    assert first.call_id != second.call_id
    assert told.usage.output_tokens == len(chat.token_ids)


async def test_the_events_of_a_response_add_up_to_it(world: Callable[..., World]):
    """OpenAI's client puts its own picture together from them, and the last event has the whole."""
    here = world(BOTH, BOTH)
    body: dict[str, Any] = {"model": "run", "input": "?", "tools": [FLAT]}
    async with here.served(), client_of(here) as client:
        async with client.responses.stream(**body) as events:
            seen = [event async for event in events]
            last: Any = await events.get_final_response()
        raw = await events_of(here, "/responses", {**body, "stream": True})
    assert [event.type for event in seen] == [event["type"] for event in raw]
    assert [event["sequence_number"] for event in raw] == [*range(len(raw))]
    joined = {"response.output_text.delta": "", "response.reasoning_text.delta": ""}
    for event in raw:
        if event["type"] in joined:
            joined[event["type"]] += event["delta"]
    assert [*joined.values()] == ["so", "hm é"]
    done = [event["item"] for event in raw if event["type"] == "response.output_item.done"]
    assert done == raw[-1]["response"]["output"] and len(done) == 4
    assert last.output_text == "so" and last.token_ids == here.engine.drawn[0][1]


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_episode_goes_on_from_items_sent_back(world: Callable[..., World], streamed: bool):
    here = world(BOTH, "3")
    async with here.served():
        id = (await here.post("/episodes"))["id"]
        async with client_of(here, id) as client:
            items: list[Any] = [{"role": "user", "content": "?"}]
            asked: Any = {"model": "run", "tools": [FLAT]}
            if streamed:
                async with client.responses.stream(**asked, input=items) as events:
                    first = await events.get_final_response()
            else:
                first = await client.responses.create(**asked, input=items)
            items += [item.to_dict() for item in first.output]
            calls = [item for item in first.output if item.type == "function_call"]
            outputs = zip(calls, "12", strict=True)
            items += [
                {"type": "function_call_output", "call_id": call.call_id, "output": n}
                for call, n in outputs
            ]
            second = await client.responses.create(**asked, input=items)
        assert second.output_text == "3"
    (prompt, drawn), (again, _) = here.engine.drawn
    assert again[: len(prompt) + len(drawn)] == [*prompt, *drawn]
    between = here.tokenizer.decode(again[len(prompt) + len(drawn) :])
    assert between.count("<|im_start|>tool\n") == 2 and between.endswith("assistant\n")


async def test_a_message_has_the_chat_s_tokens_as_blocks(world: Callable[..., World]):
    here = world(BOTH, BOTH)
    body = {"model": "run", "max_tokens": 1000, "system": "be", "tools": [CLAUDE]}
    body["messages"] = [{"role": "user", "content": [{"type": "text", "text": "?"}]}]
    async with here.served() as create:
        asked = [{"role": "system", "content": "be"}, {"role": "user", "content": "?"}]
        chat = (await create(model="run", messages=asked, tools=[CHAT])).choices[0]
        told = await here.post("/messages", body)
    assert here.engine.drawn[0] == (told["prompt_token_ids"], told["token_ids"])
    assert here.engine.drawn[0] == here.engine.drawn[1] and told["versions"] == chat.versions
    thought, said, *calls = told["content"]
    assert thought == {"type": "thinking", "thinking": "hm é", "signature": ""}
    assert said == {"type": "text", "text": "so"}
    assert [(c["type"], c["name"], c["input"]) for c in calls] == [
        ("tool_use", "add", {"a": 1}),
        ("tool_use", "add", {"a": 2}),
    ]
    assert (told["stop_reason"], told["stop_sequence"]) == ("tool_use", None)
    assert told["usage"]["output_tokens"] == len(chat.token_ids)


async def test_the_events_of_a_message_add_up_to_it(world: Callable[..., World]):
    here = world(BOTH, BOTH)
    body: dict[str, Any] = {"max_tokens": 1000, "tools": [CLAUDE]}
    body["messages"] = [{"role": "user", "content": "?"}]
    async with here.served():
        whole = await here.post("/messages", body)
        begun, *middle, delta, end = await events_of(here, "/messages", {**body, "stream": True})
    assert (begun["type"], end) == ("message_start", {"type": "message_stop"})
    assert begun["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    blocks: list[dict[str, Any]] = []
    for event in middle:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                fields = {"text_delta": "text", "thinking_delta": "thinking"}
                kind = event["delta"]["type"]
                if kind == "input_json_delta":
                    blocks[-1]["json"] += event["delta"]["partial_json"]
                else:
                    blocks[-1][fields[kind]] += event["delta"][fields[kind]]
            case other:
                assert other == "content_block_stop"
    for block in blocks:
        given = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(given)
    ids = [[block.pop("id", None) for block in part] for part in (blocks, whole["content"])]
    assert blocks == whole["content"] and [*map(bool, ids[0])] == [*map(bool, ids[1])]
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert (delta["token_ids"], delta["versions"]) == (whole["token_ids"], whole["versions"])


async def test_a_key_of_anthropic_s_names_an_episode_and_the_token(
    world: Callable[..., World], tmp_path: Path
):
    """Results of tools come back in a user's message, with a text behind them or none."""
    here = world(BOTH, "3")
    body: dict[str, Any] = {"max_tokens": 1000, "tools": [CLAUDE]}
    body["messages"] = [{"role": "user", "content": "?"}]
    (tmp_path / "token").write_text("secret")
    async with here.served(str(tmp_path / "token")), aiohttp.ClientSession() as http:

        async def post(key: str, path: str, status: int = 200) -> Any:
            heads = {"X-Api-Key": key}
            async with http.post(here.url + path, json=body, headers=heads) as reply:
                assert reply.status == status, await reply.text()
                return await reply.json()

        refused = await post("wrong", "/messages", 401)
        assert (refused["type"], refused["error"]["type"]) == ("error", "authentication_error")
        id = (await here.post("/episodes", key="secret"))["id"]
        first = await post(id, "/messages")
        body["messages"] += [
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": RESULTS},
        ]
        second = await post(id, "/messages")
    assert second["content"] == [{"type": "text", "text": "3"}]
    (prompt, drawn), (again, _) = here.engine.drawn
    assert again[: len(prompt) + len(drawn)] == [*prompt, *drawn]
    between = here.tokenizer.decode(again[len(prompt) + len(drawn) :])
    assert between == (
        "\n<|im_start|>tool\n1<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_an_episode_s_url_takes_the_path_of_anthropic_s_client(world: Callable[..., World]):
    here = world("so")
    async with here.served():
        id = (await here.post("/episodes"))["id"]
        await here.post(f"/episodes/{id}/v1/messages", SAID)
        assert (await here.post(f"/episodes/{id}/reward", {"reward": 1.0}))["tokens"] > 0


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("no such file", "Error: no such file"),
        (None, "Error: "),
        ("Error: none", "Error: none"),
        ([{"type": "text", "text": "no"}], "Error: no"),
    ],
)
def test_a_failed_tool_s_result_says_so(content: Any, told: str):
    """Anthropic's own loop marks it by a field that a chat does not have."""
    block = {"type": "tool_result", "tool_use_id": "x", "content": content, "is_error": True}
    body = {"messages": [{"role": "user", "content": [block]}], "max_tokens": 5}
    (message,) = messages.decoded_chat(json.dumps(body).encode()).messages
    assert (message.role, message.content) == ("tool", told)


async def test_tokens_are_counted_as_they_are_drawn_after(world: Callable[..., World]):
    here = world("so")
    body = {"messages": SAID["messages"], "system": "be", "tools": [CLAUDE]}
    async with here.served():
        counted = await here.post("/messages/count_tokens", body)
        await here.post("/messages", {**body, "max_tokens": 5})
        await here.post("/messages/count_tokens", {**body, "model": "other"}, status=404)
    assert counted == {"input_tokens": len(here.engine.drawn[0][0])} and len(here.engine.drawn) == 1


async def test_a_model_is_described_by_its_name(world: Callable[..., World]):
    here = world()
    async with here.served(), client_of(here) as client:
        listed = await client.models.list()
        assert await client.models.retrieve("run") == listed.data[0]
        with pytest.raises(openai.NotFoundError, match="no model 'other' here"):
            await client.models.retrieve("other")


@pytest.mark.parametrize("limit", [3, 1000])
async def test_openai_s_own_models_take_each_answer(world: Callable[..., World], limit: int):
    """Its client does not check what comes; programs that validate it, or write it down, do. Only the null of a
    completion that goes on is not in its types, though its own server sends it."""
    here = world(*[BOTH] * 6)
    said = {"max_tokens": limit, "stream_options": {"include_usage": True}, "logprobs": 1}
    asked: dict[str, tuple[dict[str, Any], Any, Any]] = {
        "/completions": ({**said, "prompt": "?"}, Completion, Completion),
        "/chat/completions": (
            {**SAID, **said, "logprobs": True, "tools": [CHAT]},
            chat.ChatCompletion,
            chat.ChatCompletionChunk,
        ),
        "/responses": (
            {**ASKED, "max_output_tokens": limit, "tools": [FLAT]},
            openai_responses.Response,
            openai_responses.ResponseStreamEvent,
        ),
    }
    async with here.served():
        for path, (body, whole, event) in asked.items():
            TypeAdapter(whole).validate_python(await here.post(path, body))
            for one in await events_of(here, path, {**body, "stream": True}):
                for choice in one["choices"] if path == "/completions" else ():
                    choice["finish_reason"] = choice["finish_reason"] or "stop"
                TypeAdapter(event).validate_python(one)


@pytest.mark.agents
@pytest.mark.parametrize("limit", [3, 1000])
async def test_anthropic_s_own_models_take_each_answer(world: Callable[..., World], limit: int):
    anthropic: Any = pytest.importorskip("anthropic", reason="needs anthropic: make test-agents")
    here = world(BOTH, BOTH)
    body = {**SAID, "max_tokens": limit, "tools": [CLAUDE]}
    async with here.served():
        anthropic.types.Message.model_validate(await here.post("/messages", body))
        adapter = TypeAdapter(anthropic.types.RawMessageStreamEvent)
        for one in await events_of(here, "/messages", {**body, "stream": True}):
            adapter.validate_python(one)
        counted = await here.post("/messages/count_tokens", {"messages": SAID["messages"]})
    anthropic.types.MessageTokensCount.model_validate(counted)


async def test_what_ends_a_reply_is_said_in_each_dialect(world: Callable[..., World]):
    here = world("one two", "one two")
    asked = {"messages": [{"role": "user", "content": "?"}], "stop_sequences": ["wo"]}
    async with here.served():
        cut = await here.post("/messages", {**asked, "max_tokens": 3})
        response = await here.post("/responses", {"input": "?", "max_output_tokens": 3})
    assert (cut["stop_reason"], cut["content"]) == ("max_tokens", [{"type": "text", "text": "one"}])
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["incomplete"]


@pytest.mark.parametrize("left", [0, 5])
async def test_a_cut_item_is_incomplete_and_a_call_is_whole(world: Callable[..., World], left: int):
    """The limit is behind the first call or in the second, which is a text then; in a stream, too."""
    here = world(BOTH, BOTH)
    limit = len(here.tokenizer.encode(BOTH.rpartition("\n<tool_call>")[0])) + left
    body = {"input": "?", "tools": [FLAT], "max_output_tokens": limit}
    wanted = [("reasoning", "completed"), ("message", "completed"), ("function_call", "completed")]
    wanted += [("message", "incomplete")] * bool(left)
    async with here.served():
        whole = await here.post("/responses", body)
        events = await events_of(here, "/responses", {**body, "stream": True})
    closed = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    for items in (whole["output"], closed, events[-1]["response"]["output"]):
        assert [(item["type"], item["status"]) for item in items] == wanted


USE = {"type": "tool_use", "id": "x", "name": "add", "input": {}}
CALLED = {"type": "function_call", "call_id": "x", "name": "add", "arguments": "{}"}


ASKED: dict[str, Any] = {"input": "?"}
SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 5}


def said_of(role: str, block: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [{**block, **fields}]}, *SAID["messages"]]}


TEXT = {"type": "text", "text": "?"}
INSIDE: list[tuple[dict[str, Any], str]] = [
    ({"tools": [CLAUDE | {"input_examples": [{"a": 1}]}]}, r"`input_examples` is .* tools\[0\]"),
    ({"tools": [CLAUDE | {"defer_loading": True}]}, "`defer_loading` is not"),
    (
        said_of("user", RESULTS[0], toolset_name="t"),
        r"`toolset_name` is .*messages\[0\].content\[0\]",
    ),
    (said_of("assistant", USE, toolset_name="t"), "`toolset_name` is not"),
    (said_of("user", TEXT, nobody="knows"), "`nobody` is not"),
    ({"system": [TEXT | {"nobody": "knows"}]}, r"`nobody` is .*system\[0\]"),
    ({"messages": [{"role": "user", "content": "?", "name": "me"}]}, "`name` is not"),
]
"""Fields inside of a message's request that are not implemented"""
INSIDE_ITEMS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [FLAT | {"defer_loading": True}]}, "`defer_loading` is not"),
    ({"input": [CALLED | {"namespace": "n"}]}, r"`namespace` is .*input\[0\]"),
    ({"input": [{"role": "user", "content": "?", "phase": "commentary"}]}, "`phase` is not"),
    ({"input": [{"type": "reasoning", "summary": [{"text": "hm"}]}]}, "`summary` is not"),
    ({"input": [{"role": "user", "content": [{**TEXT, "nobody": 1}]}]}, r"content\[0\]"),
]


@pytest.mark.parametrize(
    ("dialect", "extra", "complaint"),
    [
        (responses, {"previous_response_id": "r"}, "`previous_response_id` is not implemented"),
        (responses, {"text": {"format": {"type": "json_object"}}}, "`text` is not implemented"),
        (responses, {"text": {"verbosity": "low"}}, "`text` is not implemented"),
        (responses, {"text": "format"}, "`text` is not implemented"),
        (responses, {"text": ["format"]}, "`text` is not implemented"),
        (responses, {"text": {"nobody": "knows"}}, "`text` is not implemented"),
        (responses, {"reasoning": {"effort": "high"}}, "`reasoning` is not implemented"),
        (responses, {"tools": [{"type": "web_search"}]}, "tools"),
        (responses, {"tools": [FLAT], "tool_choice": "required"}, "`tool_choice` is not impl"),
        (responses, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        (responses, {"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\]"),
        (responses, {"include": ["message.output_text.logprobs"]}, "output_text.logprobs is not"),
        (responses, {"top_logprobs": 2}, "`top_logprobs` is not implemented"),
        (responses, {"frequency_penalty": 1}, "`frequency_penalty` is not implemented"),
        (messages, {"thinking": {"type": "enabled", "budget_tokens": 9}}, "`thinking` is not"),
        (messages, {"tools": [CLAUDE], "tool_choice": {"type": "any"}}, "`tool_choice` is not"),
        (messages, {"output_config": {"effort": "low"}}, "`output_config` is not implemented"),
        (messages, {"mcp_servers": [{"url": "x"}]}, "`mcp_servers` is not implemented"),
        (messages, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
        (messages, {"messages": [{"role": "assistant", "content": RESULTS}]}, r"messages\[0\]"),
        (messages, {"max_tokens": None}, "max_tokens"),
        (messages, {"messages": [{"role": "assistant", "content": "{"}]}, "the last, is not impl"),
        *((messages, *case) for case in INSIDE),
        *((responses, *case) for case in INSIDE_ITEMS),
    ],
)
def test_what_would_change_the_draw_is_refused_by_its_name(
    dialect: Any, extra: dict[str, Any], complaint: str
):
    body = {**(ASKED if dialect is responses else SAID), **extra}
    with pytest.raises(RecordError, match=complaint):
        dialect.decoded_chat(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("dialect", "extra"),
    [
        (responses, {"store": False, "include": ["reasoning.encrypted_content"], "user": "me"}),
        (responses, {"truncation": "disabled", "text": {"format": {"type": "text"}}}),
        (responses, {"text": {"verbosity": "medium"}, "reasoning": {"context": "auto"}}),
        (responses, {"text": {"format": {"type": "text"}, "verbosity": None}}),
        (responses, {"text": {"format": None}, "reasoning": {"effort": None, "summary": None}}),
        (responses, {"reasoning": {"summary": "auto", "effort": None, "mode": None}}),
        (responses, {"tools": [], "tool_choice": "auto", "previous_response_id": None}),
        (messages, {"output_config": {"effort": None, "format": None}, "container": {"id": None}}),
        (messages, {"context_management": {"edits": None}}),
        (messages, {"metadata": {"user_id": "me"}, "thinking": {"type": "disabled"}}),
        (messages, {"tools": [CLAUDE | {"cache_control": {"type": "ephemeral"}}]}),
        (messages, {"tools": [CLAUDE | {"defer_loading": False, "eager_input_streaming": True}]}),
        (messages, said_of("assistant", USE, toolset_name=None, caller={"type": "direct"})),
        (messages, said_of("user", TEXT, citations=None)),
        (responses, {"tools": [FLAT | {"defer_loading": False, "strict": None}]}),
        (responses, {"tools": [FLAT | {"output_schema": {"type": "object"}}]}),
    ],
)
def test_what_changes_no_draw_is_taken(dialect: Any, extra: dict[str, Any]):
    body = {**(ASKED if dialect is responses else SAID), **extra}
    assert dialect.decoded_chat(json.dumps(body).encode()).messages[-1].content == "?"
