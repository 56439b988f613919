"""Harbor's agent for terminals, Terminus 2, unmodified: it knows the episode by its URL, and the tokens that it
collects are those that were drawn. The container is this machine, in a directory of the test's."""

import asyncio
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.openai_server.scripted import World
from msgspec import json

from areal_q.messages import Ticket

PYTHON = os.environ.get("HARBOR_PYTHON", "")
PLAY = """
import asyncio, json, sys
from pathlib import Path
from harbor.agents.terminus_2.terminus_2 import Terminus2
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.agent.context import AgentContext
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths

class Here(BaseEnvironment):
    capabilities = EnvironmentCapabilities()
    type = staticmethod(lambda: "here")

    def _validate_definition(self):
        pass

    async def none(self, *args, **others):
        pass

    start = stop = upload_file = upload_dir = download_file = download_dir = none

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        ran = await asyncio.create_subprocess_exec("bash", "-c", command, cwd=cwd, stdout=-1, stderr=-1)
        out, err = await ran.communicate()
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=ran.returncode)

async def main(url, root):
    environment = Here(root, "task", "session", TrialPaths(root), EnvironmentConfig())
    agent = Terminus2(
        logs_dir=root, model_name="openai/run", api_base=url, temperature=1.0, enable_summarize=False,
        collect_rollout_details=True, record_terminal_session=False,
        model_info={"max_input_tokens": 30000, "max_output_tokens": 2000},
    )
    context = AgentContext()
    await agent.setup(environment)
    await agent.run("Write hi into a file.", environment, context)
    await environment.exec("tmux kill-server")
    (root / "told.json").write_text(json.dumps([dict(one) for one in context.rollout_details]))

asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
"""


def says(keys: str, ends: bool) -> str:
    commands = [{"keystrokes": keys, "duration": 0.5}] if keys else []
    told = {"analysis": "-", "plan": "-", "commands": commands, "task_complete": ends}
    return json.encode(told).decode()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not PYTHON, reason="needs Harbor: make test-gyms")
async def test_harbor_collects_the_tokens_that_were_drawn(
    short_dir: Path, make_ticket: Callable[..., Ticket]
) -> None:
    """Three turns, each of which goes on from the one before; a shifted id is found."""
    root = short_dir / "trial"
    root.mkdir()
    here = World(
        short_dir, make_ticket, [says(f"echo hi > {root}/out\n", False), *2 * [says("", True)]]
    )
    here.engine.max_positions = 40_000
    async with here.served():
        id = (await here.post("/episodes"))["id"]
        command = [PYTHON, "-P", "-c", PLAY, f"{here.url}/episodes/{id}", str(root)]
        own = {"TMUX_TMPDIR": str(root), "LITELLM_LOCAL_MODEL_COST_MAP": "true"}
        environment = os.environ | own | {"OPENAI_API_KEY": "none"}
        harbor = await asyncio.create_subprocess_exec(*command, env=environment)
        assert await harbor.wait() == 0
        await here.post(f"/episodes/{id}/reward", {"reward": 1.0})
    assert (root / "out").read_text() == "hi\n"
    (told,) = json.decode((root / "told.json").read_bytes())
    turns = [*zip(told["prompt_token_ids"], told["completion_token_ids"], strict=True)]
    assert turns == here.engine.drawn and len(turns) == 3
    for (asked, drawn), (next, _) in pairwise(turns):
        assert next[: len(asked) + len(drawn)] == [*asked, *drawn]
    turns[1][1][0] += 1
    assert turns != here.engine.drawn
