import asyncio
import sys

import agents
import openai

client = openai.AsyncOpenAI(base_url=sys.argv[1], api_key="-", max_retries=8)
model = agents.OpenAIChatCompletionsModel("adder", client)
agents.set_tracing_disabled(True)


@agents.function_tool
def add(a: int, b: int) -> str:
    return str(a + b)


async def player() -> None:
    while episode := await client.post("/episodes", cast_to=dict, body={"timeout_s": 60}):
        mine = agents.ModelSettings(extra_headers={"X-Episode": episode["id"]})
        who = agents.Agent("a", instructions="Add.", model=model, tools=[add], model_settings=mine)
        turns = agents.Runner.run(who, episode["prompt"], max_turns=3)
        (done,) = await asyncio.gather(turns, return_exceptions=True)
        end = {"reward": float(getattr(done, "final_output", done) == episode["answer"])}
        ended = client.post(f"/episodes/{episode['id']}/reward", cast_to=dict, body=end)
        await asyncio.gather(ended, return_exceptions=True)  # its worker may have died


loop = asyncio.new_event_loop()
ended, _ = loop.run_until_complete(asyncio.wait([loop.create_task(player()) for _ in range(16)]))
print(*filter(None, (agent.exception() for agent in ended)), sep="\n")
