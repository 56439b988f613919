"""The OpenAI-compatible endpoint, asked by OpenAI's own client over HTTP; episodes through a real Redis."""

import asyncio
import io
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from helpers import engines
from helpers.chain_models import byte_tokenizer
from helpers.engines import initial_version, responses
from helpers.fixture_types import MakeRun
from helpers.paths import ROOT

from areal_q.config import Chat, External, Run, TorchEngine, dump_toml
from areal_q.errors import ConfigError
from areal_q.messages import Group, Ticket, VersionSpan
from areal_q.tasks import (
    CharTokenizer,
    build_task,
    build_tokenizer,
    load_tokenizer,
)
from areal_q.tasks.encoding.tokenizer import HFTokenizer
from buffer.redis_store import LearnerBuffer, WorkerBuffer
from buffer.weight_sync import WeightServer, WeightSubscriber
from learner.data.admission import Admission
from learner.heldout_eval import set_metrics
from learner.measure.fidelity import FidelityMeter
from rollout.engines import build_engine
from rollout.engines.base import Completion, Engine, Request
from rollout.environments.engine_client import EngineClient
from rollout.environments.external import Episodes
from rollout.environments.registry import build_environment
from rollout.openai_server.app import MAX_BODY_BYTES, Endpoint
from rollout.openai_server.request_fields import NEUTRAL, WITHOUT_EFFECT
from rollout.worker import Worker

EXTERNAL = "rollout.environment.type=external"


@asynccontextmanager
async def serving(
    run: Run, engine: Engine, episodes: Episodes | None = None, token: str | None = None
) -> AsyncIterator[str]:
    """The URL of an endpoint for `engine`, which is somebody else's to start."""
    tokenizer = build_tokenizer(run.model, run.task)
    sampling = run.rollout.sampling
    endpoint = Endpoint(engine, tokenizer, run.name, episodes, sampling, "0", token)
    port = await endpoint.start()
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        await endpoint.close()


@asynccontextmanager
async def asking(run: Run, token: str | None = None) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of an endpoint with weights, and no worker."""
    async with (
        engines.serving(build_engine(TorchEngine(slots=32)), initial_version(run, 3)) as engine,
        serving(run, engine, None, token) as url,
        openai.AsyncOpenAI(base_url=url, api_key="sesame", max_retries=0) as client,
    ):
        yield client


async def test_completions_have_log_probs_ids_and_versions(make_run: MakeRun):
    async with asking(make_run()) as client:
        (model,) = (await client.models.list()).data
        reply: Any = await client.completions.create(
            model=model.id, prompt="1+2=", n=3, max_tokens=6, seed=5, logprobs=0
        )
        assert model.id == "run" and len(reply.choices) == 3
        for choice in reply.choices:
            assert len(choice.logprobs.token_logprobs) == len(choice.token_ids) >= 1
            assert choice.versions == [3] * len(choice.token_ids)
            assert "".join(choice.logprobs.tokens) == choice.text
            lengths = [len(piece) for piece in choice.logprobs.tokens]
            assert choice.logprobs.text_offset == [0, *accumulate(lengths[:-1])]
        assert reply.usage.prompt_tokens == 4
        by_ids: Any = await client.completions.create(
            model="run", prompt=reply.prompt_token_ids, n=3, max_tokens=6, seed=5
        )
        found = [c.token_ids for c in by_ids.choices]
        assert found == [c.token_ids for c in reply.choices]


async def test_a_request_beyond_the_context_is_told_as_openai_does(make_run: MakeRun):
    """Clients compact the conversation by the code, or by the words; vLLM's name tells how long it may be."""
    async with asking(make_run()) as client:
        model: Any = (await client.models.list()).data[0]
        most: int = model.max_model_len
        asked: dict[str, Any] = {"model": "run", "max_tokens": 8}
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
                await client.completions.create(**asked, prompt=[1] * (most - 7), stream=stream)
            assert refused.value.code == "context_length_exceeded"
        reply: Any = await client.completions.create(**asked, prompt=[1] * (most - 8))
        assert reply.usage.prompt_tokens == most - 8


async def test_stop_strings_are_not_said_but_their_tokens_are_kept(make_run: MakeRun):
    async with asking(make_run()) as client:
        create: Any = client.completions.create
        asked: dict[str, Any] = {"model": "run", "prompt": "1+2=", "max_tokens": 24}
        found = [(await create(**asked, seed=seed)).choices[0] for seed in range(30)]
        seed, free = next((s, c) for s, c in enumerate(found) if len(c.text) == 24)
        asked["seed"] = seed
        asked["stop"] = [free.text[7:10], free.text[3:6]]
        cut = (await create(**asked)).choices[0]
        assert len(free.text) == 24 and free.text.index(free.text[3:6]) == 3
        assert (cut.text, cut.finish_reason) == (free.text[:3], "stop")
        assert cut.token_ids == free.token_ids[:6]
        shown = {"include_stop_str_in_output": True}
        kept = (await create(**asked, extra_body=shown)).choices[0]
        assert (kept.text, kept.token_ids) == (free.text[:6], free.token_ids[:6])
        text, ids = "", []
        async for chunk in await create(**asked, stream=True):
            text, ids = text + chunk.choices[0].text, ids + chunk.choices[0].token_ids
        assert (text, ids) == (cut.text, cut.token_ids)


async def test_min_p_near_1_leaves_the_most_likely_token(make_run: MakeRun):
    async with asking(make_run()) as client:
        asked: dict[str, Any] = {"model": "run", "prompt": "1+2=", "max_tokens": 9, "seed": 4}
        greedy: Any = await client.completions.create(**asked, temperature=0)
        drawn: Any = await client.completions.create(
            **asked, extra_body={"min_p": 0.999}, logprobs=0
        )
        assert drawn.choices[0].token_ids == greedy.choices[0].token_ids
        assert drawn.choices[0].logprobs.token_logprobs == [0.0] * len(drawn.choices[0].token_ids)


@pytest.mark.parametrize("chat", [False, True])
async def test_a_stream_says_what_the_whole_reply_says(make_run: MakeRun, chat: bool):
    async with asking(make_run()) as client:
        asked: dict[str, Any] = {"model": "run", "max_tokens": 8, "seed": 1}
        if chat:
            asked["messages"] = [{"role": "user", "content": "1+2="}]
            create: Any = client.chat.completions.create
        else:
            create = client.completions.create
            asked["prompt"] = "1+2="
        reply = await create(**asked)
        whole = reply.choices[0]
        text, ids, last, prompts = "", [], whole, []
        async for chunk in await create(**asked, stream=True):
            (last,) = chunk.choices
            prompts.append(getattr(chunk, "prompt_token_ids", None))
            text += last.delta.content if chat else last.text
            ids += last.token_ids
        assert text == (whole.message.content if chat else whole.text)
        assert ids == whole.token_ids
        assert prompts == [reply.prompt_token_ids, *[None] * (len(prompts) - 1)]
        assert last.finish_reason == whole.finish_reason
        assert last.versions == whole.versions


async def test_nobody_gets_in_without_the_token(make_run: MakeRun, tmp_path: Path):
    (tmp_path / "token").write_text("sesame\n")
    (tmp_path / "other").write_text("open\n")
    async with asking(make_run(), str(tmp_path / "token")) as client:
        assert (await client.models.list()).data
    async with asking(make_run(), str(tmp_path / "other")) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


@pytest.mark.parametrize(
    "address, token, reason",
    [
        ("0.0.0.0:0", None, "serve-token\\) must name"),
        ("127.0.0.1", None, "is not \\[HOST:\\]PORT"),
        ("0", "/nowhere", "No such file"),
    ],
)
def test_an_endpoint_that_is_not_safe_or_not_possible_is_refused(
    make_run: MakeRun, address: str, token: str | None, reason: str
):
    run = make_run()
    engine, tokenizer = build_engine(TorchEngine()), build_tokenizer(run.model, run.task)
    with pytest.raises(ConfigError, match=reason):
        Endpoint(engine, tokenizer, "run", None, run.rollout.sampling, address, token)


async def test_what_a_request_gets_wrong_is_told(make_run: MakeRun):
    async with asking(make_run()) as client:
        refused: list[dict[str, Any]] = [
            {"prompt": "1+2=", "max_tokens": 10_000},
            {"prompt": ""},
            {"prompt": [10_000]},
            {"prompt": [2**40]},
            {"prompt": [-1]},
            {"prompt": "è"},
            {"prompt": "1+2=", "n": 1000},
            {"prompt": "1+2=", "logprobs": 2},
            {"prompt": "1+2=", "extra_headers": {"X-Episode": "none"}},
        ]
        for wrong in refused:
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(model="run", **wrong)
        with pytest.raises(openai.NotFoundError, match="no model 'other' here, but 'run'"):
            await client.completions.create(model="other", prompt="1+2=")
        assert (await client.completions.create(model="run", prompt="1+2=")).choices


FUNCTION = {"name": "f", "parameters": {}}
NOT_IMPLEMENTED: dict[str, list[Any]] = {
    "add_generation_prompt": [False],
    "allowed_token_ids": [[3, 4]],
    "bad_words": [["4"]],
    "best_of": [2],
    "chat_template": ["{{ messages }}"],
    "continue_final_message": [True],
    "echo": [True],
    "frequency_penalty": [0.5, -0.5, "0"],
    "function_call": ["auto"],
    "functions": [[FUNCTION]],
    "guided_choice": [["3", "4"]],
    "guided_json": [{}, {"type": "object"}],
    "guided_regex": ["[0-9]+"],
    "ignore_eos": [True],
    "logit_bias": [{"3": 5}],
    "logits_processors": [["f"]],
    "min_tokens": [1],
    "presence_penalty": [0.5],
    "reasoning_effort": ["none", "high"],
    "regex": ["[0-9]+"],
    "repetition_penalty": [1.1],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}],
    "structured_outputs": [{"choice": ["3"]}],
    "suffix": ["="],
    "top_logprobs": [5],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
    "truncate_prompt_tokens": [2],
    "use_beam_search": [True],
    "a_field_that_nobody_knows": [True, False, 0],
}
"""Values that would change what is drawn, by field of OpenAI's API, vLLM's or SGLang's"""


def first_of(neutral: Any) -> Any:
    """Returns a value that asks for nothing, as a client would send it."""
    if isinstance(neutral, tuple):
        return neutral[0]
    return {name: first_of(values) for name, values in neutral.items()}


@pytest.mark.parametrize("chat", [False, True])
async def test_fields_that_would_change_the_draw_are_refused(make_run: MakeRun, chat: bool):
    async with asking(make_run()) as client:
        said: Any = (
            {"messages": [{"role": "user", "content": "1+2="}]} if chat else {"prompt": "1+2="}
        )
        create: Any = client.chat.completions.create if chat else client.completions.create
        for name, values in NOT_IMPLEMENTED.items():
            for value in values:
                with pytest.raises(openai.BadRequestError, match=f"`{name}` is not implemented"):
                    await create(model="run", **said, extra_body={name: value})
        neutral = {name: first_of(values) for name, values in NEUTRAL.items()}
        silent = dict.fromkeys(NOT_IMPLEMENTED) | dict.fromkeys(WITHOUT_EFFECT, 1)
        asked = {"model": "run", "seed": 5, "max_tokens": 6, **said}
        first = (await create(**asked)).choices[0].token_ids
        assert first
        for extra in (neutral, silent):
            assert (await create(**asked, extra_body=extra)).choices[0].token_ids == first


async def test_fields_of_a_message_do_not_vanish(make_run: MakeRun):
    """What a client sends back of a reply that had nothing in them is taken."""
    async with asking(make_run()) as client:
        create: Any = client.chat.completions.create
        asked = {"model": "run", "max_tokens": 4, "seed": 2}
        user, reply = {"role": "user", "content": "1+2="}, {"role": "assistant", "content": None}
        for field, value in {
            "function_call": FUNCTION,
            "refusal": "no",
            "audio": {"id": "1"},
            "prefix": True,
        }.items():
            with pytest.raises(
                openai.BadRequestError,
                match=rf"`{field}` is not implemented in messages\[1\]",
            ):
                await create(**asked, messages=[user, {**reply, field: value}, user])
        first = await create(**asked, messages=[user])
        back = first.choices[0].message.model_dump()
        assert {"tool_calls", "function_call", "refusal"} <= back.keys()
        again = await create(**asked, messages=[user, back, user])
        plain = {"role": "assistant", "content": back["content"]}
        assert again.choices[0] == (await create(**asked, messages=[user, plain, user])).choices[0]


@asynccontextmanager
async def asking_chat(
    make_run: MakeRun, path: Path, template: str
) -> AsyncIterator[Callable[..., Any]]:
    """A function that asks an endpoint whose tokenizer has `template`, and returns the prompt that was read."""
    hf = byte_tokenizer(template=template)
    run = make_run()
    hf.save_pretrained(path)
    tokenizer = load_tokenizer(path, Chat())

    class Echo:
        """An engine that draws the end at once."""

        version = 0

        async def generate(self, request: Request, on_token: object = None) -> list[Completion]:
            ids, logprobs = np.array([tokenizer.eos_id], np.int32), np.zeros(1, np.float32)
            spans = [VersionSpan(0, 1, "")]
            done = Completion(
                response_ids=ids, logprobs=logprobs, spans=spans, finish_reason="stop"
            )
            return [done]

    endpoint = Endpoint(Echo(), tokenizer, "run", None, run.rollout.sampling, "0", None)  # type: ignore[arg-type]
    url = f"http://127.0.0.1:{await endpoint.start()}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def ask(*messages: tuple[str, str], **extra: Any) -> str:
            create: Any = client.chat.completions.create
            said = [{"role": role, "content": content} for role, content in messages]
            reply = await create(model="run", messages=said, extra_body=extra)
            return tokenizer.decode(reply.prompt_token_ids)

        yield ask
    await endpoint.close()


ROLE = "{% for m in messages if m.role in ROLES %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
TALK = (("developer", "be brief"), ("user", "hi"))


@pytest.mark.parametrize(
    ("roles", "prompt"),
    [
        (["system", "user", "developer"], "[developer:be brief][user:hi]"),
        (["system", "user"], "[system:be brief][user:hi]"),
        (["user"], None),
    ],
)
async def test_a_developer_is_heard_as_the_template_lets_him(
    make_run: MakeRun, tmp_path: Path, roles: list[str], prompt: str | None
):
    async with asking_chat(
        make_run, tmp_path, ROLE.replace("ROLES", f"{[*roles, 'assistant']}")
    ) as ask:
        if prompt:
            assert await ask(*TALK) == prompt
        else:
            with pytest.raises(openai.BadRequestError, match=r"leaves out .* role 'developer'"):
                await ask(*TALK)
        with pytest.raises(openai.BadRequestError, match=r"leaves out .* role 'tool'"):
            await ask(("user", "hi"), ("assistant", "f()"), ("tool", "4"))


async def test_what_a_template_refuses_is_told_in_its_words(make_run: MakeRun, tmp_path: Path):
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system, please') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    async with asking_chat(make_run, tmp_path, template) as ask:
        for role in ("system", "developer"):
            if role == "developer":
                assert await ask(("developer", "be brief"), ("user", "hi")) == "be briefhi"
                continue
            with pytest.raises(openai.BadRequestError, match="no system, please"):
                await ask((role, "be brief"), ("user", "hi"))


async def test_template_variables_of_a_request_reach_it(make_run: MakeRun, tmp_path: Path):
    template = "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}"
    async with asking_chat(make_run, tmp_path, template) as ask:
        assert await ask(("user", "hi")) == "hi"
        on = {"enable_thinking": True}
        assert await ask(("user", "hi"), chat_template_kwargs=on) == "hi<think>"
        for name in (
            "messages",
            "chat_template",
            "add_generation_prompt",
            "continue_final_message",
        ):
            with pytest.raises(openai.BadRequestError, match="refuses"):
                await ask(("user", "hi"), chat_template_kwargs={name: "x"})
    async with asking(make_run()) as client:
        with pytest.raises(openai.BadRequestError, match="no chat template here to take x"):
            await client.chat.completions.create(
                model="run",
                messages=[{"role": "user", "content": "1+2="}],
                extra_body={"chat_template_kwargs": {"x": 1}},
            )


@pytest.mark.parametrize(
    "method, path, data, status",
    [
        ("POST", "completions", b'{"prompt": ', 400),
        ("POST", "completions", b'{"prompt": "\xff"}', 400),
        ("POST", "completions", b'{"x": ' + b"[" * 100_000, 400),
        ("GET", "completions", b"", 405),
        ("GET", "nothing", b"", 404),
        ("POST", "completions", b" " * (MAX_BODY_BYTES + 1), 413),
    ],
    ids=["half", "no utf-8", "deep", "method", "path", "large"],
)
async def test_what_is_no_request_is_told_in_openais_form(
    make_run: MakeRun, method: str, path: str, data: bytes, status: int
):
    async with (
        serving(make_run(), build_engine(TorchEngine(slots=1))) as url,
        aiohttp.ClientSession() as session,
        session.request(method, f"{url}/{path}", data=io.BytesIO(data)) as reply,
    ):
        error = (await reply.json())["error"]
        assert (reply.status, error["type"]) == (status, "invalid_request_error")
        assert error["message"]


class Full:
    """An engine whose slots are never free."""

    version = 0

    def __init__(self) -> None:
        self.asked, self.left = asyncio.Event(), asyncio.Event()

    async def generate(self, request: object, on_token: object = None) -> None:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_early_leaves_the_engine_empty(make_run: MakeRun, stream: bool):
    engine: Any = Full()
    async with serving(make_run(), engine) as url, aiohttp.ClientSession() as session:
        body = {"prompt": "1+2=", "stream": stream}
        asking = asyncio.create_task(session.post(f"{url}/completions", json=body).__aenter__())
        await engine.asked.wait()
        asking.cancel()
        await engine.left.wait()


async def test_a_client_that_leaves_a_stream_logs_no_error(
    make_run: MakeRun, caplog: pytest.LogCaptureFixture
):
    """Each step draws 16 tokens, so that several events are written to a connection that is gone."""
    run = make_run("model.max_positions=8192")
    engine: Any = build_engine(TorchEngine(slots=16))
    await engine.start()
    await engine.load_weights(initial_version(run))
    body = {"prompt": "1+2=", "stream": True, "n": 16, "max_tokens": 8000}
    async with serving(run, engine) as url, aiohttp.ClientSession() as session:
        async with session.post(f"{url}/completions", json=body) as reply:
            assert (await reply.content.readline()).startswith(b"data: ")
            reply.close()
        while engine.active:
            await asyncio.sleep(0.01)
    await engine.close()
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_is_closed_is_told_in_openais_form(make_run: MakeRun, stream: bool):
    engine = build_engine(TorchEngine(slots=4))
    await engine.start()
    await engine.close()
    async with serving(make_run(), engine) as url, aiohttp.ClientSession() as session:
        body = {"prompt": "1+2=", "stream": stream}
        async with session.post(f"{url}/completions", json=body) as reply:
            assert reply.status == 503
            error = (await reply.json())["error"]
            assert (error["type"], error["message"]) == (
                "unavailable",
                "engine torch is not running",
            )


async def test_a_message_may_come_in_parts_and_a_stream_can_count(make_run: MakeRun):
    async with asking(make_run()) as client:
        create: Any = client.chat.completions.create
        asked: dict[str, Any] = {"model": "run", "max_tokens": 6, "seed": 3}
        whole = await create(**asked, messages=[{"role": "user", "content": "1+2="}])
        parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "2="}]
        said = [{"role": "assistant", "content": None}, {"role": "user", "content": parts}]
        counting = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await create(**asked, messages=said, **counting)]
        text = "".join(chunk.choices[0].delta.content for chunk in chunks[:-1])
        assert text == whole.choices[0].message.content
        assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)


@asynccontextmanager
async def playing(
    run: Run, redis_url: str, sockets: Path, evaluates: bool = False
) -> AsyncIterator[tuple[str, LearnerBuffer, Any]]:
    """A worker whose tickets, of training or of an evaluation, are played from outside: its URL, the learner's
    buffer, and version 0."""
    tokenizer = build_tokenizer(run.model, run.task)
    buffer = LearnerBuffer(redis_url, run.name)
    weight_server = WeightServer(f"ipc://{sockets}/announce", f"ipc://{sockets}/fetch")
    ends = weight_server.endpoints
    buffer.publish_run(dump_toml(run), ends._asdict())
    version = initial_version(run)
    weight_server.publish(version)
    admission = Admission(run, build_task(run.task), tokenizer, buffer, 0, set())
    admission.evaluate(0) if evaluates else admission.admit(0)
    engine = build_engine(run.rollout.engine)
    assert isinstance(run.rollout.environment, External)
    episodes = Episodes(run, EngineClient(engine, tokenizer), run.rollout.environment)
    subscriber = WeightSubscriber(ends.announce, ends.fetch, run=run.name)
    mine = WorkerBuffer(redis_url, run.name, "w")
    worker = Worker(
        name="w",
        engine=engine,
        buffer=mine,
        subscriber=subscriber,
        tokenizer=tokenizer,
        environment=episodes,
        run=run,
    )
    task = asyncio.create_task(worker.run())
    try:
        async with serving(run, engine, episodes) as url:
            yield url, buffer, version
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        subscriber.close()
        await mine.close()
        weight_server.close()
        buffer.close()


async def post(url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    async with aiohttp.ClientSession() as http, http.post(f"{url}{path}", json=body) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


async def play(url: str, turns: list[str]) -> tuple[dict[str, Any], list[Any]]:
    """An agent that says `turns` after each of the model's, and is rewarded with 0.5."""
    episode = await post(url, "/episodes")
    heads = {"X-Episode": episode["id"]}
    found: list[Any] = []
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
        prompt = episode["prompt"]
        for said in ["", *turns]:
            prompt += said
            reply = await client.completions.create(
                model="run", prompt=prompt, max_tokens=3, extra_headers=heads
            )
            found.append(reply)
            prompt += reply.choices[0].text
        with pytest.raises(openai.BadRequestError, match="first token of the ticket"):
            await client.completions.create(model="run", prompt="9", extra_headers=heads)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.completions.create(
                model="run", prompt=prompt, temperature=0.3, extra_headers=heads
            )
    await post(url, f"/episodes/{episode['id']}/reward", {"reward": 0.5, "parts": {"style": 2.0}})
    return episode, found


async def test_episodes_played_from_outside_become_a_token_exact_group(
    make_run: MakeRun, redis_url: str, short_dir: Path
):
    run = make_run(EXTERNAL, "learner.fidelity.share=1", "rollout.sampling.max_tokens=9")
    async with playing(run, redis_url, short_dir) as (url, buffer, version):
        played = [await play(url, ["(5)", "+1="]) for _ in range(run.learner.group_size)]
        (group,) = await asyncio.to_thread(buffer.take, 1, 20.0)
        check_group(group, played)
        meter = FidelityMeter(run.learner, run.rollout.format)
        meter.remember(version)
        assert meter.measure([group])["fidelity/gap_mean_nats"] < 1e-3


async def test_the_agent_of_the_docs_plays_a_group(
    make_run: MakeRun, redis_url: str, short_dir: Path
):
    run = make_run(EXTERNAL, "rollout.sampling.max_tokens=9")
    script = ROOT / "docs" / "examples" / "agent.py"
    async with playing(run, redis_url, short_dir) as (url, buffer, _):
        size = str(run.learner.group_size)
        child = await asyncio.create_subprocess_exec(
            sys.executable, str(script), url, size, stdout=subprocess.PIPE
        )
        (group,) = await asyncio.to_thread(buffer.take, 1, 60.0)
        said, _ = await child.communicate()
        assert child.returncode == 0 and said.decode() == f"{size} episodes played\n"
        for trajectory in group.trajectories:
            inserted = trajectory.loss_mask.numpy() == 0
            ids = trajectory.response_ids.numpy()[inserted]
            assert ids.tolist() == CharTokenizer().encode("+")


def check_group(group: Group, played: list[tuple[dict[str, Any], list[Any]]]) -> None:
    """What was committed is what the replies said, and in between what the agent did, with mask 0."""
    for trajectory, (episode, replies) in zip(group.trajectories, played, strict=True):
        assert (episode["ticket"], episode["index"]) == (group.ticket.number, trajectory.index)
        drawn = [r.choices[0].token_ids for r in replies]
        turns = list(zip([[], *map(CharTokenizer().encode, ["(5)", "+1="])], drawn, strict=True))
        encoded = [i for given, new in turns for i in [*given, *new]]
        mask = [m for given, new in turns for m in [0] * len(given) + [1] * len(new)]
        assert trajectory.response_ids.numpy().tolist() == encoded
        assert trajectory.loss_mask.numpy().tolist() == mask
        assert trajectory.reward == 0.5 and trajectory.reward_parts["style"] == 2.0
        assert not trajectory.behavior_logprobs.numpy()[np.array(mask) == 0].any()
        last = [*episode["prompt_token_ids"], *encoded[: -len(drawn[-1])]]
        assert replies[-1].prompt_token_ids == last, "the model saw exactly what is recorded"


async def test_agents_play_evaluations_as_the_tickets_say(
    make_run: MakeRun, redis_url: str, short_dir: Path
):
    """Greedy, whatever the agent asks for: the oracle is a request without an episode. One episode fails."""
    run = make_run(EXTERNAL, "eval.problems=2", "rollout.sampling.max_tokens=9")
    async with (
        playing(run, redis_url, short_dir, evaluates=True) as (url, buffer, _),
        openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client,
    ):
        create: Any = client.completions.create
        for end in ({"reward": 0.5}, {"failed": "environment"}):
            episode = await post(url, "/episodes", {"timeout_s": 30.0})
            assert episode["purpose"] == "eval"
            heads, prompt = {"X-Episode": episode["id"]}, episode["prompt"]
            for said in ("", "+"):
                asked = {"model": "run", "prompt": prompt + said, "max_tokens": 3}
                likely = await create(**asked, temperature=0.0)
                reply = await create(**asked, temperature=1.7, top_p=0.5, extra_headers=heads)
                assert reply.choices[0].token_ids == likely.choices[0].token_ids
                prompt += said + reply.choices[0].text
            await post(url, f"/episodes/{episode['id']}/reward", end)
        groups: list[Group] = []
        while len(groups) < 2:
            groups += buffer.take_eval()
            await asyncio.sleep(0.05)
        assert set_metrics(groups, episodes=True) == {
            **{"problems": 2.0, "invalid": 1.0, "invalid/environment": 1.0},
            **{"accuracy": 0.0, "late_by": 0.0, "turns": 2.0, "reward": 0.5},
        }


async def test_an_episode_ends_where_the_learner_has_no_more_room(
    make_run: MakeRun, redis_url: str, short_dir: Path
):
    """What an agent's tools say has no bound of its own; a group that is too long would be set aside."""
    run = make_run(EXTERNAL, "rollout.sampling.max_tokens=9", "learner.microbatch_tokens=20")
    async with playing(run, redis_url, short_dir) as (url, _, _):
        episode = await post(url, "/episodes")
        heads = {"X-Episode": episode["id"]}
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
            create: Any = client.completions.create
            with pytest.raises(
                openai.BadRequestError, match=r"more tokens than .*microbatch_tokens = 20"
            ) as refused:
                prompt = episode["prompt"] + "1" * 30
                await create(model="run", prompt=prompt, extra_headers=heads)
            assert refused.value.code == "context_length_exceeded"
            given = 18 - len(episode["prompt_token_ids"])
            reply = await create(
                model="run", prompt=episode["prompt"] + "1" * given, extra_headers=heads
            )
            assert len(reply.choices[0].token_ids) <= 2


async def test_an_episode_given_up_begins_again_with_whoever_asks_next(
    make_run: MakeRun, make_ticket: Callable[..., Ticket]
):
    run = make_run(EXTERNAL)
    engine = build_engine(TorchEngine(slots=8))
    await engine.start()
    await engine.load_weights(initial_version(run))
    client = EngineClient(engine, build_tokenizer(run.model, run.task))
    episodes = Episodes(run, client, External(episode_timeout_s=600))
    ticket = make_ticket(group_size=1, sampling=run.rollout.sampling)
    task = asyncio.create_task(responses(episodes, ticket))
    first = await episodes.begin(5.0)
    assert first is not None
    await episodes.turn(first, None, first.prompt, frozenset(), 2)
    assert await episodes.begin(0.0) is None
    first.seen_s -= 601  # its agent has been silent
    second = await episodes.begin(0.0)
    assert second is not None and second.id != first.id and not second.response.ids
    await episodes.turn(second, None, [*second.prompt, 5], frozenset(), 2)
    assert [second.response.mask, second.response.spans[0].tokens] == [[0, 1, 1], 3]
    episodes.end(second, 1.0, {})
    (response,) = await task
    assert response.ids == second.response.ids and response.ended
    await engine.close()


async def test_an_episode_that_began_again_goes_with_its_ticket(
    make_run: MakeRun, make_ticket: Callable[..., Ticket]
):
    """It was played on, took a reward, and was thrown away."""
    run = make_run(EXTERNAL)
    client = EngineClient(build_engine(TorchEngine()), build_tokenizer(run.model, run.task))
    episodes = Episodes(run, client, External())
    task = asyncio.create_task(responses(episodes, make_ticket(group_size=2)))
    first = await episodes.begin(5.0)
    assert first is not None
    episodes.drop(first)
    assert await episodes.begin(5.0)
    task.cancel()
    await asyncio.wait([task])
    assert episodes.unfinished == 0 and await episodes.begin(0.0) is None


async def test_a_failed_episode_is_committed_without_a_reward(
    make_run: MakeRun, redis_url: str, short_dir: Path
):
    """The first episode ends as failed, the others have a reward; neither, both and a story are refused. Why it
    failed is in the worker's heartbeat, as one line."""
    run = make_run(EXTERNAL, "rollout.sampling.max_tokens=9")
    async with playing(run, redis_url, short_dir) as (url, buffer, _):
        episode = await post(url, "/episodes", {"timeout_s": 10.0})
        prompt, heads = episode["prompt"], {"X-Episode": episode["id"]}
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
            await client.completions.create(model="run", prompt=prompt, extra_headers=heads)
        end = f"/episodes/{episode['id']}/reward"
        long = {"failed": "environment", "why": "x" * 513}
        both = {"reward": 0.0, "failed": "environment"}
        for body in ({}, both, {"failed": "bad luck"}, long):
            with pytest.raises(AssertionError, match="invalid_request_error"):
                await post(url, end, body)
        await post(url, end, {"failed": "environment", "why": "no\n  gam\x1be"})
        for _ in range(run.learner.group_size - 1):
            await play(url, [])
        (group,) = await asyncio.to_thread(buffer.take, 1, 20.0)
        told = "environment: no gam\\x1be"
        while [worker.failure for worker in buffer.workers()] != [told]:
            await asyncio.sleep(0.05)
        causes = [t.failure for t in group.trajectories if not t.valid]
        assert causes == ["environment"]
        assert len(group.valid_trajectories) == run.learner.group_size - 1


@pytest.mark.parametrize(("on_error", "valid"), [("drop", False), ("zero", True)])
async def test_an_episode_left_too_often_has_no_reward(
    make_run: MakeRun, make_ticket: Callable[..., Ticket], on_error: str, valid: bool
):
    """Two agents fall silent over it: the first leaves it to the second, which is the last."""
    environment = {"episode_timeout_s": 0.05, "episode_attempts": 2}
    external = [f"rollout.environment.{name}={value}" for name, value in environment.items()]
    run = make_run(EXTERNAL, f"reward.on_error={on_error}", *external)
    engine = build_engine(TorchEngine(slots=8))
    await engine.start()
    await engine.load_weights(initial_version(run))
    client = EngineClient(engine, build_tokenizer(run.model, run.task))
    episodes = build_environment(run, client)
    assert isinstance(episodes, Episodes)
    ticket = make_ticket(group_size=1, sampling=run.rollout.sampling)
    task = asyncio.create_task(responses(episodes, ticket))
    for _ in range(2):
        episode = await episodes.begin(30.0)
        assert episode is not None
        await episodes.turn(episode, None, episode.prompt, frozenset(), 2)
    (response,) = await task
    score = response.score
    assert score is not None and (score.valid, score.failure) == (valid, "timeout")
    await engine.close()


def test_chat_turns_render_as_the_whole_conversation_does(byte_tokenizer: Path, tmp_path: Path):
    """The oracle is the template itself, on the whole conversation."""
    (tmp_path / "template").write_text(
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>"
        "{% endif %};{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = HFTokenizer(byte_tokenizer, Chat(template_file=str(tmp_path / "template")))
    talk = [{"role": "user", "content": "hello"}]
    said = [{"role": "assistant", "content": "hi"}]
    more = [{"role": "tool", "content": "4"}, {"role": "user", "content": "so?"}]
    whole = tokenizer.encode_messages([*talk, *said, *more])
    start = [*tokenizer.encode_messages(talk), *tokenizer.encode("hi")]
    assert [*start, *tokenizer.encode_turn(more, ended=False)] == whole
    assert [*start, tokenizer.eos_id, *tokenizer.encode_turn(more, ended=True)] == whole
    assert load_tokenizer(byte_tokenizer, Chat()).encode_prompt("a")
