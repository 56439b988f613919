"""Loops of other libraries' agents, unmodified, against the endpoint: what they play is what is learnt."""

# pyright: reportMissingImports=false

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from helpers.openai_server.scripted import World

from areal_q.messages import Ticket

pytestmark = [pytest.mark.agents, pytest.mark.timeout(60)]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": %d}}\n</tool_call>'


def script_of_calls() -> list[str]:
    return [f"<think>\nhm\n</think>\n\n{CALL % (1, 2)}\n{CALL % (3, 4)}", "3 and 7"]


def check_tokens(here: World, instructions: str) -> None:
    """Two turns were drawn: the second extends the first, token by token, by the results of the calls."""
    (first, drawn), (second, answer) = here.engine.drawn
    assert second[: len(first) + len(drawn)] == [*first, *drawn]
    between = here.tokenizer.decode(second[len(first) + len(drawn) :])
    results = "".join(f"<|im_start|>tool\n{n}<|im_end|>\n" for n in (3, 7))
    assert between == f"\n{results}<|im_start|>assistant\n"
    asked = here.tokenizer.decode(first)
    assert f"<|im_start|>system\n{instructions}<|im_end|>" in asked
    assert asked.endswith("<|im_start|>user\n1+2 and 3+4?<|im_end|>\n<|im_start|>assistant\n")
    assert here.tokenizer.decode(answer) == "3 and 7<|im_end|>"


@pytest.mark.parametrize("api", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_openai_s_agents_play_an_episode(
    tmp_path: Path, make_ticket: Callable[..., Ticket], streamed: bool, api: str
) -> None:
    """Instructions, two calls at once whose results come back, then an answer. The program knows only a URL."""
    agents: Any = pytest.importorskip("agents", reason="needs openai-agents: make test-agents")
    added: list[int] = []

    @agents.function_tool
    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        added.append(a + b)
        return str(a + b)

    here = World(tmp_path, make_ticket, script_of_calls())
    agents.set_tracing_disabled(True)
    async with here.served():
        id = (await here.post("/episodes"))["id"]
        client = openai.AsyncOpenAI(
            base_url=f"{here.url}/episodes/{id}", api_key="none", max_retries=0
        )
        model = getattr(agents, api)(model="run", openai_client=client)
        agent = agents.Agent(
            name="adder", instructions="Add with the tool.", model=model, tools=[add]
        )
        if streamed:
            result = agents.Runner.run_streamed(agent, "1+2 and 3+4?")
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, "1+2 and 3+4?")
        assert result.final_output == "3 and 7" and added == [3, 7]
        await here.post(f"/episodes/{id}/reward", {"reward": 1.0})
        await client.close()
        await asyncio.sleep(0)
    check_tokens(here, "Add with the tool.")


@pytest.mark.parametrize("by_url", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
async def test_anthropic_s_tool_runner_plays_an_episode(
    tmp_path: Path, make_ticket: Callable[..., Ticket], streamed: bool, by_url: bool
) -> None:
    """The episode is the client's key, or in its URL. Its own loop calls the tools and sends their results."""
    anthropic: Any = pytest.importorskip("anthropic", reason="needs anthropic: make test-agents")
    added: list[int] = []

    @anthropic.beta_async_tool
    async def add(a: int, b: int) -> str:
        """Adds two numbers."""
        added.append(a + b)
        return str(a + b)

    here = World(tmp_path, make_ticket, script_of_calls())
    async with here.served():
        id = (await here.post("/episodes"))["id"]
        url, key = here.url.removesuffix("/v1"), id
        if by_url:
            url, key = f"{here.url}/episodes/{id}", "none"
        async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
            runner = client.beta.messages.tool_runner(
                model="run",
                max_tokens=1000,
                system="Add with the tool.",
                messages=[{"role": "user", "content": "1+2 and 3+4?"}],
                tools=[add],
                **({"stream": True} if streamed else {}),
            )
            last = await runner.until_done()
        assert last.content[-1].text == "3 and 7" and added == [3, 7]
        assert last.stop_reason == "end_turn"
        await here.post(f"/episodes/{id}/reward", {"reward": 1.0})
    check_tokens(here, "Add with the tool.")


@pytest.mark.parametrize("api", ["OpenAIChatModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_pydantic_ai_s_agent_plays_an_episode(
    tmp_path: Path, make_ticket: Callable[..., Ticket], streamed: bool, api: str
) -> None:
    pytest.importorskip("pydantic_ai", reason="needs pydantic-ai: make test-agents")
    from pydantic_ai import Agent
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    added: list[int] = []

    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        added.append(a + b)
        return str(a + b)

    here = World(tmp_path, make_ticket, script_of_calls())
    async with here.served():
        id = (await here.post("/episodes"))["id"]
        url = f"{here.url}/episodes/{id}"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            model = getattr(models, api)("run", provider=OpenAIProvider(openai_client=client))
            agent = Agent(model, instructions="Add with the tool.", tools=[add])
            if streamed:
                async with agent.run_stream("1+2 and 3+4?") as running:
                    output = await running.get_output()
            else:
                output = (await agent.run("1+2 and 3+4?")).output
        await here.post(f"/episodes/{id}/reward", {"reward": 1.0})
    assert output == "3 and 7" and sorted(added) == [3, 7]
    check_tokens(here, "Add with the tool.")


@pytest.mark.parametrize("responses", [False, True])
async def test_langchain_s_agent_plays_an_episode(
    tmp_path: Path, make_ticket: Callable[..., Ticket], responses: bool
) -> None:
    pytest.importorskip("langchain_openai", reason="needs langchain-openai: make test-agents")
    import httpx
    from langchain.agents import create_agent
    from langchain.tools import tool
    from langchain_openai import ChatOpenAI

    added: list[int] = []

    @tool
    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        added.append(a + b)
        return str(a + b)

    here = World(tmp_path, make_ticket, script_of_calls())
    async with here.served():
        id = (await here.post("/episodes"))["id"]
        async with httpx.AsyncClient() as client:
            model = ChatOpenAI(
                model="run",
                base_url=f"{here.url}/episodes/{id}",
                api_key="none",
                max_retries=0,
                use_responses_api=responses,
                http_async_client=client,
            )
            agent = create_agent(model, tools=[add], system_prompt="Add with the tool.")
            asked = {"messages": [{"role": "user", "content": "1+2 and 3+4?"}]}
            said = (await agent.ainvoke(asked))["messages"][-1]
        await here.post(f"/episodes/{id}/reward", {"reward": 1.0})
    assert said.text == "3 and 7" and sorted(added) == [3, 7]
    check_tokens(here, "Add with the tool.")


@pytest.mark.parametrize("api", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
async def test_a_cut_reply_ends_openai_s_agents_over_responses(
    tmp_path: Path, make_ticket: Callable[..., Ticket], api: str
) -> None:
    """Over chats they take what there is of it. The turn is recorded both times, and can be rewarded."""
    agents: Any = pytest.importorskip("agents", reason="needs openai-agents: make test-agents")
    here = World(tmp_path, make_ticket, ["3 and 7"])
    agents.set_tracing_disabled(True)
    async with here.served():
        id = (await here.post("/episodes"))["id"]
        url = f"{here.url}/episodes/{id}"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            model = getattr(agents, api)(model="run", openai_client=client)
            few = agents.ModelSettings(max_tokens=5)
            agent = agents.Agent(name="adder", model=model, model_settings=few)
            (done,) = await asyncio.gather(
                agents.Runner.run(agent, "1+2 and 3+4?"), return_exceptions=True
            )
        if api == "OpenAIResponsesModel":
            assert isinstance(done, agents.ModelBehaviorError) and "max_output_tokens" in str(done)
        else:
            assert done.final_output == "3 and"
        assert (await here.post(f"/episodes/{id}/reward", {"reward": 0.0}))["tokens"] == 5


@pytest.mark.parametrize("responses", [False, True])
async def test_langchain_s_structured_output_is_refused_by_name(
    tmp_path: Path, make_ticket: Callable[..., Ticket], responses: bool
) -> None:
    """It requires a call, or a schema, which no engine here enforces."""
    pytest.importorskip("langchain_openai", reason="needs langchain-openai: make test-agents")
    import httpx
    from langchain_openai import ChatOpenAI

    here = World(tmp_path, make_ticket, [])
    schema = {"title": "Sum", "description": "A sum.", "type": "object", "properties": {}}
    named = {
        "function_calling": "tool_choice",
        "json_mode": "text" if responses else "response_format",
    }
    async with here.served(), httpx.AsyncClient() as client:
        model = ChatOpenAI(
            model="run",
            base_url=here.url,
            api_key="none",
            max_retries=0,
            use_responses_api=responses,
            http_async_client=client,
        )
        for method, field in named.items():
            structured = model.with_structured_output(schema, method=method)
            with pytest.raises(openai.BadRequestError, match=f"`{field}` is not implemented"):
                await structured.ainvoke("1+2?")


@pytest.mark.parametrize("responses", [False, True])
async def test_output_types_of_other_agents_are_refused_by_name(
    tmp_path: Path, make_ticket: Callable[..., Ticket], responses: bool
) -> None:
    agents: Any = pytest.importorskip("agents", reason="needs openai-agents: make test-agents")
    pytest.importorskip("pydantic_ai", reason="needs pydantic-ai: make test-agents")
    from pydantic_ai import Agent, ModelHTTPError
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    here = World(tmp_path, make_ticket, [])
    agents.set_tracing_disabled(True)
    async with (
        here.served(),
        openai.AsyncOpenAI(base_url=here.url, api_key="none", max_retries=0) as client,
    ):
        theirs = OpenAIResponsesModel if responses else OpenAIChatModel
        model = theirs("run", provider=OpenAIProvider(openai_client=client))
        with pytest.raises(ModelHTTPError, match="`tool_choice` is not implemented"):
            await Agent(model, output_type=list[int]).run("1+2?")
        api = "OpenAIResponsesModel" if responses else "OpenAIChatCompletionsModel"
        model = getattr(agents, api)(model="run", openai_client=client)
        agent = agents.Agent(name="adder", model=model, output_type=list[int])
        field = "text" if responses else "response_format"
        with pytest.raises(openai.BadRequestError, match=f"`{field}` is not implemented"):
            await agents.Runner.run(agent, "1+2?")
