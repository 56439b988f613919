"""A worker's endpoint with a scripted engine, and verifiers in a process beside it."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.chain_models import byte_tokenizer
from helpers.engines import responses
from helpers.openai_server.scripted import TEMPLATE, Scripted

from areal_q.config import (
    Chat,
    PretrainedModel,
    RolloutConfig,
    Run,
    Sampling,
    VerifiersEnvironment,
    VerifiersTask,
)
from areal_q.messages import Array, Ticket
from areal_q.tasks import build_task, load_tokenizer
from rollout.environments.base import Response
from rollout.environments.engine_client import EngineClient
from rollout.environments.played_episodes import PlayedEpisodes
from rollout.openai_server.app import Endpoint

PYTHON = os.environ.get("VERIFIERS_PYTHON", "")
_skips = pytest.mark.skipif(not PYTHON, reason="needs verifiers: make test-verifiers")
TASKSET = """
import verifiers.v1 as vf
__all__ = ["Two", "Twice"]

class Two(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        for n in range(4):
            yield vf.Task(vf.TaskData(prompt=f"{n}?", system_prompt="Say."))

class TwiceConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()

class Twice(vf.Env[TwiceConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            first = (await talk.turn()).last_reply
            if first == "bad":
                raise ValueError("the taskset is at fault")
            second = (await talk.turn("again")).last_reply
        talk.trace.record_reward("right", 0.5 * (first == "one") + 0.5 * (second == "two"))
        talk.trace.record_metric("turns_of_it", 2)
"""
RECORD = """
import json
import verifiers.v1 as vf

async def record(self, task, episode):
    (branch,) = episode.traces[0].branches
    told = {"ids": branch.token_ids, "mask": branch.sampled_mask, "logprobs": branch.logprobs}
    with open("TRACES", "a") as lines:
        lines.write(json.dumps(told) + "\\n")

vf.Env.finalize = record
"""
"""Follows a taskset: its traces are written down"""

STAND_IN = """
import json, os, signal, socket, subprocess, sys
told = json.loads(sys.stdin.readline())
if "endpoint" in told:
    there = socket.socket(socket.AF_UNIX)
    there.connect(told["path"] + "/there")
    subprocess.Popen(["sleep", "600"], start_new_session=True, pass_fds=[there.fileno()])
    there.sendall(json.dumps([told, dict(os.environ)]).encode() + b"\\n")
    signal.pause()
rows = [dict(key=str(n), name=str(n), messages=[], answer="") for n in range(4)]
print(json.dumps({"rows": rows}))
"""
"""A player that plays nothing, and a program of its own beside it; the socket is open as long as one lives"""


@asynccontextmanager
async def stand_in(root: Path) -> AsyncIterator["asyncio.Queue[bytes]"]:
    """Makes `root`/player, which stands in for the Python that has verifiers; yields what each of its processes
    sends: a line of what it was told and its environment, then b"" when nothing of it is left."""
    (root / "player").write_text(f"#!{sys.executable}\n{STAND_IN}")
    (root / "player").chmod(0o755)
    heard = asyncio.Queue[bytes]()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            heard.put_nowait(line)
        heard.put_nowait(b"")
        writer.close()

    async with await asyncio.start_unix_server(hear, root / "there"):
        yield heard


def with_verifiers(test: Callable[..., object]) -> Callable[..., object]:
    """Marks a test that needs verifiers."""
    return pytest.mark.verifiers(pytest.mark.timeout(300)(_skips(test)))


class Place:
    """A worker's endpoint with an engine that draws what a test has written, and verifiers beside it."""

    def __init__(
        self,
        root: Path,
        make_ticket: Callable[..., Ticket],
        script: list[str],
        taskset: str = TASKSET,
        sampling: Sampling | None = None,
        env: dict[str, Any] | None = None,
        python: str = PYTHON,
        group_size: int = 2,
        special: tuple[str, ...] = (),
        **settings: Any,
    ) -> None:
        """`settings` are further ones of the task, `special` further tokens of the model."""
        record = RECORD.replace("TRACES", str(root / "traces"))
        (root / "two.py").write_text(taskset + record)
        byte_tokenizer(template=TEMPLATE, special=special).save_pretrained(root / "model")
        self.root, tokenizer = root, load_tokenizer(root / "model", Chat())
        env = env or {"taskset": {"id": "two"}}
        self.task = VerifiersTask(
            env=env, directory=str(root), python=python, heldout=0.5, **settings
        )
        cfg = VerifiersEnvironment(episodes=1, episode_attempts=2)
        run = Run(
            name="run",
            model=PretrainedModel(path=str(root / "model")),
            task=self.task,
            rollout=RolloutConfig(environment=cfg, sampling=Sampling(max_tokens=200)),
        )
        self.engine: Any = Scripted(tokenizer, script)
        self.episodes = PlayedEpisodes(run, EngineClient(self.engine, tokenizer), cfg)
        problem = build_task(self.task).train[-1]
        self.ticket = make_ticket(
            group_size=group_size,
            prompt=problem.prompt,
            messages=problem.messages,
            answer=problem.answer,
            columns=problem.columns,
            prompt_ids=Array.of(tokenizer.encode_prompt(problem.asked), "int32"),
            sampling=sampling or run.rollout.sampling,
        )
        self.endpoint = Endpoint(
            self.engine, tokenizer, "run", self.episodes, run.rollout.sampling, "0", None
        )

    @asynccontextmanager
    async def played(self) -> AsyncIterator["asyncio.Task[list[Response]]"]:
        """Yields what becomes the responses to the ticket."""
        playing = asyncio.create_task(responses(self.episodes, self.ticket))
        await self.endpoint.start()
        try:
            yield playing
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
            await self.endpoint.close()

    def differences(self, responses: list[Response]) -> list[str]:
        """Returns where verifiers' traces and the worker's records are not the same tokens."""
        traces = [json.loads(line) for line in (self.root / "traces").read_text().splitlines()]
        found = []
        for number, (trace, response) in enumerate(zip(traces, responses, strict=True)):
            context = response.context(self.ticket)
            before = len(context) - len(response.ids)
            ours = {
                "ids": context,
                "mask": [False] * before + [bool(drawn) for drawn in response.mask],
                "logprobs": [0.0] * before + response.logprobs,
            }
            found += [f"{number}: {name}" for name in ours if ours[name] != trace[name]]
        return found
