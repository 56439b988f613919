"""An environment of OpenEnv, by its own server, played by verifiers' own adapter."""

import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import wait_until
from helpers.openai_server.verifiers_place import PYTHON, Place, with_verifiers

from areal_q.messages import Ticket
from areal_q.system.ports import free_ports

SERVER = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Say(Action):
    text: str

class Heard(Observation):
    text: str = ""

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, episode_id=None, **others):
        self.state = State(step_count=0)
        return Heard(text=f"seed {seed}")

    def step(self, action, timeout_s=None, **others):
        right = action.text == ("one", "two")[self.state.step_count]
        self.state.step_count += 1
        return Heard(text=action.text, done=self.state.step_count == 2, reward=0.5 * right)

app = create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=2)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@with_verifiers
@pytest.mark.slow
async def test_an_environment_of_openenv_is_played(
    tmp_path: Path, make_ticket: Callable[..., Ticket]
) -> None:
    """Replies are JSON, or the action's only field; observations are the user's turns, with loss mask 0."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    resets = [{"seed": 1}, {"seed": 2}]
    env = {"taskset": {"id": "openenv", "base_url": url, "resets": resets}}
    with subprocess.Popen([PYTHON, "-c", SERVER, str(port)]) as server:
        try:
            wait_until(lambda: _answers(url), lambda: "no answer", server)
            script = ["one", "two", '{"text": "one"}', "three"]
            place = Place(tmp_path, make_ticket, script, env=env)
            async with place.played() as playing:
                responses = await playing
        finally:
            server.kill()
    assert [(r.score.reward, r.score.parts) for r in responses if r.score] == [
        (1.0, {"openenv_reward": 1.0}),
        (0.5, {"openenv_reward": 0.5}),
    ]
    tokenizer = place.episodes._client.tokenizer
    for response, said in zip(responses, ("one", '{"text": "one"}'), strict=True):
        text = tokenizer.decode(response.context(place.ticket))
        assert [part in text for part in ("seed 1", said, '"text": "one"')] == [True] * 3
        drawn = [i for i, mask in zip(response.ids, response.mask, strict=True) if mask]
        assert tokenizer.decode(drawn).startswith(said)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/schema") as reply:
            return reply.status == 200
    except OSError:
        return False
