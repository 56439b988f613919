"""Runs in the environment of verifiers, by its path: nothing of this project is imported here.

The first line of its input says what to do. With `endpoint` it plays episodes there (docs/endpoint.md) until
its supervisor ends it; without, it prints the tasks of the taskset, as JSON.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false

import asyncio
import itertools
import json
import logging
import math
import os
import re
import sys
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.env import EnvConfig, default_agent_harness
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.env import Env, RunSlot
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import environment_class

__all__ = ["Loop"]
logger = logging.getLogger(__name__)
LOOP = "areal_q_loop"
"""The id of the harness below"""
CAUSES = {"TimeoutError": "timeout", "TaskError": "exception", "ProviderError": "unavailable"}
"""Causes of failures by the names of verifiers' errors; others are the environment's"""
LONGEST_PAUSE_S = 30.0
LONGEST_WHY = 500


class Loop(vf.Harness[vf.HarnessConfig]):
    """Replies to the conversation so far, with calls of the task's tools between them, in this process:
    verifiers' own harnesses fetch programs from the network as they run."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        said = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            said.append({"role": "user", "content": prompt})
        else:
            said += [message_to_wire(message) for message in prompt or ()]
        spec = {"timeout": self.config.tool_timeout}
        servers = {"mcpServers": {name: {"url": url, **spec} for name, url in mcp_urls.items()}}
        async with AsyncExitStack() as opened:
            tools, names, clients = await connect_mcp(servers, opened)
            http = await opened.enter_async_context(httpx.AsyncClient(timeout=None))
            while True:
                reply = await http.post(
                    f"{endpoint}/chat/completions",
                    headers={"Authorization": f"Bearer {secret}"},
                    json={"model": ctx.model, "messages": said}
                    | ({"tools": tools} if tools else {}),
                )
                if not reply.is_success:
                    return ProgramResult(1, "", reply.text)
                said.append(reply.json()["choices"][0]["message"])
                calls = said[-1].get("tool_calls") or ()
                if not calls:
                    return ProgramResult(0, "", "")
                for call in calls:
                    result = await _result(call["function"], names, clients)
                    said.append({"role": "tool", "tool_call_id": call["id"], "content": result})


async def _result(call: dict[str, Any], names: dict[str, Any], clients: dict[str, Any]) -> Any:
    """Returns what a tool says to a call, or in words what is wrong with the call."""
    if call["name"] not in names:
        return f"error: there is no tool {call['name']!r}"
    try:
        arguments = json.loads(call["arguments"] or "{}")
    except ValueError as error:
        return f"error: the arguments are not JSON: {error}"
    if not isinstance(arguments, dict):
        return "error: the arguments are no JSON object"
    return await call_mcp(clients, names, call["name"], arguments)


def environment_of(env: dict[str, Any]) -> Any:
    """Returns the environment that these settings of verifiers describe. A role that names no harness, and
    whose taskset brings none, gets the one above, and one without a runtime this machine."""
    sys.modules[LOOP] = sys.modules[__name__]
    taskset = env["taskset"]["id"]
    made = environment_class(taskset, env.get("id", ""))
    kind = concrete_type(made, EnvConfig, origin=Env) or EnvConfig
    loop = default_agent_harness(taskset).id == "bash"
    for role, pinned in agent_config_fields(kind()).items():
        mine = env.setdefault(role, {})
        if loop and pinned.harness is None:
            mine.setdefault("harness", {"id": LOOP})
        mine.setdefault("runtime", {"type": "subprocess"})
    return made(kind.model_validate(env))


def row_of(task: Any) -> dict[str, Any]:
    """Returns what the other side asks of the model, as it stands in the task."""
    data, messages = task.data, []
    if data.system_prompt:
        messages.append({"role": "system", "content": data.system_prompt})
    if isinstance(data.prompt, str):
        messages.append({"role": "user", "content": data.prompt})
    else:
        messages += [message_to_wire(message) for message in data.prompt or ()]
    answer = getattr(data, "answer", "")
    return {"key": task.key, "name": data.name, "messages": messages, "answer": str(answer)}


def ending_of(episode: Any) -> dict[str, Any]:
    """Returns how an episode ends, as the worker's endpoint takes it: with a reward, or with the cause of a
    failure."""
    traces = episode.traces
    # A trace's comes first: that the environment saw its talk end is what follows from it.
    errors = [*(error for trace in traces for error in trace.errors), *episode.errors]
    late = episode.is_timeout or any(trace.is_timeout for trace in traces)
    if late or errors or not traces:
        why = f"{errors[0].type}: {errors[0].message}" if errors else "no trace"
        cause = CAUSES.get(errors[0].type, "environment") if errors else "environment"
        return {"failed": "timeout" if late else cause, "why": why[:LONGEST_WHY]}
    played = [trace for trace in traces if trace.agent is None or trace.agent.trainable] or traces
    parts = dict(played[0].metrics)
    parts |= {name: reward.value for name, reward in played[0].rewards.items() if reward}
    reward = sum(trace.reward for trace in played) / len(played)
    if not math.isfinite(reward):
        return {"failed": "exception", "why": f"the reward is {reward}"}
    return {"reward": reward, "parts": _told(parts)}


def _told(parts: dict[str, Any]) -> dict[str, float]:
    known = {name: value for name, value in parts.items() if value is not None}
    names = [name for name in known if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name)]
    return {name: float(known[name]) for name in names[:32] if math.isfinite(known[name])}


class Players:
    """Ask a worker for episodes, and play them."""

    def __init__(self, env: Any, tasks: list[Any], told: dict[str, Any]) -> None:
        self._env, self._tasks, self._told = env, tasks, told
        self._url = told["endpoint"]
        key = {"Authorization": f"Bearer {told['token']}"} if told["token"] else {}
        self._http = httpx.AsyncClient(timeout=90, headers=key)

    async def run(self) -> None:
        async with self._env.serving(), asyncio.TaskGroup() as players:
            for _ in range(self._told["episodes"]):
                players.create_task(self._player())

    async def _player(self) -> None:
        pause_s = 1.0
        while True:
            try:
                reply = await self._http.post(f"{self._url}/episodes", json={"timeout_s": 60})
                none_came = reply.status_code == 503  # it has waited for one
                if none_came or (reply.is_success and await self._played(reply.json())):
                    pause_s = 1.0
                    continue
            except httpx.HTTPError as error:
                logger.warning("%s", error or type(error).__name__)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _played(self, begun: dict[str, Any]) -> bool:
        """Plays an episode, and returns True if it has a reward."""
        at = f"{self._url}/episodes/{begun['id']}"
        client = vf.TrainClientConfig(
            base_url=f"{self._url.removesuffix('/v1')}/v1/episodes/{begun['id']}",
            headers={"Authorization": f"Bearer {begun['id']}"},
            renderer=self._told["renderer"],
            renderer_model_name=self._told["model_path"],
        )
        ctx = vf.ModelContext(client=client, model=self._told["model"])
        slot = RunSlot(self._tasks[begun["columns"]["index"]])
        ending = ending_of(await self._env.run_slot(slot, ctx))
        if "failed" in ending:
            logger.warning("%s", ending["why"])
        (await self._http.post(f"{at}/reward", json=ending)).raise_for_status()
        return "reward" in ending


def main() -> None:
    told, answers = json.loads(sys.stdin.buffer.readline()), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a taskset prints is no answer
    logging.basicConfig(level=logging.WARNING, format="verifiers: %(message)s")
    sys.path.insert(0, told["path"])
    # For the servers of its tools.
    paths = [told["path"], os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    try:
        env = environment_of(told["env"])
        tasks = list(itertools.islice(env.taskset, told["problems"]))
    except Exception as error:
        if "endpoint" in told:
            raise
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return
    if "endpoint" not in told:
        answers.write(json.dumps({"rows": [row_of(task) for task in tasks]}))
        return
    asyncio.run(Players(env, tasks, told).run())


if __name__ == "__main__":
    main()
