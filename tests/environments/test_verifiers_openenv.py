"""An environment of OpenEnv, by its own server, played by verifiers' own adapter."""

import random
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import wait_until
from helpers.openai_server.verifiers_place import PYTHON, Place, with_verifiers

from areal_q.messages import Ticket
from areal_q.system.ports import free_ports

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PAGE = (EXAMPLES.parent / "verifiers.md").read_text("utf-8")


def test_the_page_shows_the_server():
    text = (EXAMPLES / "sums_server.py").read_text("utf-8")
    assert f"```python\n# sums_server.py\n{text}```" in PAGE and len(text.splitlines()) <= 30


@with_verifiers
@pytest.mark.slow
async def test_an_environment_of_openenv_is_played(
    tmp_path: Path, make_ticket: Callable[..., Ticket]
) -> None:
    """That of the page. Replies are JSON, or the action's only field; observations are the user's turns, with
    loss mask 0."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    env = {"taskset": {"id": "openenv", "base_url": url, "resets": [{"seed": 1}, {"seed": 2}]}}
    a, b = random.Random(1).sample(range(10, 100), 2)
    served = [PYTHON, "-m", "uvicorn", "sums_server:app", "--log-level=warning"]
    with subprocess.Popen([*served, f"--port={port}"], cwd=EXAMPLES) as server:
        try:
            wait_until(lambda: _answers(url), lambda: "no answer", server)
            script = ["one", str(a + b), '{"text": "one"}', "two"]
            place = Place(tmp_path, make_ticket, script, env=env)
            async with place.played() as playing:
                responses = await playing
        finally:
            server.kill()
    assert [(r.score.reward, r.score.parts) for r in responses if r.score] == [
        (1.0, {"openenv_reward": 1.0}),
        (0.0, {"openenv_reward": 0.0}),
    ]
    tokenizer = place.episodes._client.tokenizer
    for response, said in zip(responses, ("one", '{"text": "one"}'), strict=True):
        text = tokenizer.decode(response.context(place.ticket))
        assert [part in text for part in (f"{a}+{b}", said, '"text": "again"')] == [True] * 3
        drawn = [i for i, mask in zip(response.ids, response.mask, strict=True) if mask]
        assert tokenizer.decode(drawn).startswith(said)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/schema") as reply:
            return reply.status == 200
    except OSError:
        return False
