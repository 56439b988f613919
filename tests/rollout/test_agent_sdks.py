"""Loops of other libraries' agents, unmodified, against the endpoint: what they play is what is learnt."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from helpers.openai_server.scripted import World

from areal_q.messages import Ticket

agents: Any = pytest.importorskip("agents", reason="needs openai-agents: make test-agents")
pytestmark = [pytest.mark.agents, pytest.mark.timeout(60)]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": %d}}\n</tool_call>'


@pytest.mark.parametrize("streamed", [False, True])
async def test_openai_s_agents_play_an_episode(
    tmp_path: Path, make_ticket: Callable[..., Ticket], streamed: bool
) -> None:
    """Instructions, two calls at once whose results come back, then an answer. The program knows only a URL."""
    added: list[int] = []

    @agents.function_tool
    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        added.append(a + b)
        return str(a + b)

    script = [f"<think>\nhm\n</think>\n\n{CALL % (1, 2)}\n{CALL % (3, 4)}", "3 and 7"]
    here = World(tmp_path, make_ticket, script)
    agents.set_tracing_disabled(True)
    async with here.served():
        id = (await here.post("/episodes"))["id"]
        client = openai.AsyncOpenAI(
            base_url=f"{here.url}/episodes/{id}", api_key="none", max_retries=0
        )
        model = agents.OpenAIChatCompletionsModel(model="run", openai_client=client)
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
        (first, drawn), (second, answer) = here.engine.drawn
        assert second[: len(first) + len(drawn)] == [*first, *drawn], (
            "the second turn extends the first"
        )
        between = here.tokenizer.decode(second[len(first) + len(drawn) :])
        assert (
            between
            == "\n"
            + "".join(f"<|im_start|>tool\n{n}<|im_end|>\n" for n in added)
            + "<|im_start|>assistant\n"
        )
        asked = here.tokenizer.decode(first)
        assert "<|im_start|>system\nAdd with the tool.<|im_end|>" in asked
        assert asked.endswith("<|im_start|>user\n1+2 and 3+4?<|im_end|>\n<|im_start|>assistant\n")
        await asyncio.sleep(0)
    assert here.tokenizer.decode(answer) == "3 and 7<|im_end|>"
