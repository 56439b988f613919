"""Tools that the model calls in episodes of verifiers: those of a taskset, and those of NeMo Gym's servers. The
loop of areal_q/tasks/environments/verifiers_player.py is beside the worker's record, token by token."""

import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from helpers.commands import wait_until
from helpers.openai_server.verifiers_place import PYTHON, Place, with_verifiers

from areal_q.messages import Ticket

SUMS = """
import verifiers.v1 as vf
__all__ = ["Sums"]

class Adder(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        return str(a + b)

class Sum(vf.Task):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == "5")

class Config(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()

class Sums(vf.Taskset[Sum, Config]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(config.tools)]

    def load(self):
        for n in range(4):
            yield Sum(vf.TaskData(prompt=f"{n}: 2+3"))

if __name__ == "__main__":
    Adder.run()
"""
GYM = """
from verifiers.v1.tasksets.nemo_gym import NeMoGymEnv, NeMoGymTaskset
__all__ = ["NeMoGymEnv", "NeMoGymTaskset"]
"""
NUMBERS = {"type": "array", "items": {"type": "integer"}}
TOOLS: dict[str, dict[str, Any]] = {
    "get_synonym_value": {"synonym": {"type": "string"}},
    "extract_synonym_values": {"synonym_values": NUMBERS},
}
"""Those of NeMo Gym's example_multi_step"""
ROW: dict[str, Any] = {
    "responses_create_params": {
        "input": [{"role": "developer", "content": "Say."}, {"role": "user", "content": "hot?"}],
        "tools": [
            {"type": "function", "name": name, "strict": True,
             "parameters": {"type": "object", "properties": given}}
            for name, given in TOOLS.items()
        ],
    },
    "expected_synonyms": ["Warm"],
    "expected_synonym_values": [sum(map(ord, "Warm"))],
    "minefield_label": "Hot",
    "minefield_label_value": 299,
}  # fmt: skip


def call(name: str, arguments: object) -> str:
    """Returns a call as the template writes it, which a renderer that has no format of its own writes again."""
    told = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{told}\n</tool_call>"


def with_tools(*args: Any, **others: Any) -> Place:
    """Returns a place whose model writes calls as Hermes does."""
    renderer = {"name": "default", "tool_parser": "qwen3"}
    return Place(*args, special=("<tool_call>", "</tool_call>"), renderer=renderer, **others)


@with_verifiers
@pytest.mark.slow
async def test_tools_of_a_taskset_are_called(
    tmp_path: Path, make_ticket: Callable[..., Ticket], dead_proxy: None
) -> None:
    """What is wrong with a call is told to the model, as a tool's result."""
    wrong = [call("sub", {}), call("adder_add", [2, 3]), call("adder_add", {"a": "two"})]
    script = [call("adder_add", {"a": 2, "b": 3}), "5", *wrong, "6"]
    place = with_tools(tmp_path, make_ticket, script, SUMS)
    async with place.played() as playing:
        responses = await playing
    found = [(r.turns, r.score.reward, r.score.valid) for r in responses if r.score]
    assert found == [(2, 1.0, True), (4, 0.0, True)]
    said = [place.engine.tokenizer.decode(r.context(place.ticket)) for r in responses]
    assert "<|im_start|>tool\n5<|im_end|>" in said[0]
    results = [part.partition("<|im_end|>")[0] for part in said[1].split("<|im_start|>tool\n")[1:]]
    assert results[:2] == [
        "error: there is no tool 'sub'",
        "error: the arguments are no JSON object",
    ]
    assert "two" in results[2] and len(results) == 3
    assert place.differences(responses) == []


@with_verifiers
@pytest.mark.slow
@pytest.mark.parametrize("served", ["stand-in", "NeMo Gym"])
async def test_servers_of_nemo_gym_are_played(
    tmp_path: Path, make_ticket: Callable[..., Ticket], served: str
) -> None:
    """By verifiers' own adapter: it seeds a session, serves the tools, and asks the server for the reward."""
    rows = [json.dumps(ROW | {"id": n}) for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    values = ROW["expected_synonym_values"]
    begin, end = TOOLS
    script = [call(begin, {"synonym": "Warm"}), call(end, {"synonym_values": values}), "done", "no"]
    async with stand_in() if served == "stand-in" else nemo_gym(tmp_path) as url:
        taskset = {"id": "two", "dataset": f"{tmp_path}/rows.jsonl", "task": {"resources_url": url}}
        place = with_tools(tmp_path, make_ticket, script, GYM, env={"taskset": taskset})
        async with place.played() as playing:
            responses = await playing
    found = [(r.turns, r.score.reward, r.score.valid) for r in responses if r.score]
    assert found == [(3, 1.0, True), (1, 0.0, True)]
    assert place.differences(responses) == []
    said = place.engine.tokenizer.decode(responses[0].context(place.ticket))
    assert f'"synonym_value":{values[0]}' in said.replace(" ", "")


@asynccontextmanager
async def stand_in() -> AsyncIterator[str]:
    """Yields the URL of a server that judges as the example of NeMo Gym does."""

    async def answer(request: web.Request) -> web.Response:
        told, said = await request.json(), {}
        if request.path == "/get_synonym_value":
            said = {"synonym_value": sum(map(ord, told["synonym"]))}
        if request.path == "/verify":
            calls = [one for one in told["response"]["output"] if one["type"] == "function_call"]
            given = [json.loads(one["arguments"]) for one in calls]
            right = {"synonym_values": told["expected_synonym_values"]} in given[-1:]
            said = told | {"reward": float(right)}
        return web.json_response(said)

    app = web.Application()
    app.router.add_post("/{any}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def nemo_gym(here: Path) -> AsyncIterator[str]:
    """Yields the URL of the example itself, which wants a Python of its own, by the adapter's program."""
    python = os.environ.get("NEMO_GYM_PYTHON")
    if python is None:
        pytest.skip("needs NeMo Gym: make test-gyms")
    (program,) = (
        Path(PYTHON).parents[1].glob("lib/*/site-packages/verifiers/v1/tasksets/nemo_gym/server.py")
    )
    name = "resources_servers.example_multi_step.app:ExampleMultiStepResourcesServer"
    environment = os.environ | {"NEMO_GYM_RESOURCE_SERVER": name}
    with subprocess.Popen([python, str(program)], cwd=here, env=environment) as process:
        try:
            (port := here / "nemo_gym.port").touch()
            wait_until(port.read_text, lambda: "no port", process)
            yield f"http://127.0.0.1:{port.read_text()}"
        finally:
            process.kill()
