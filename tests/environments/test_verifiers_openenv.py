"""An environment of OpenEnv, by its own server, played by verifiers' own adapter."""

import random
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.commands import wait_until
from helpers.openai_server.verifiers_place import PYTHON, Place, with_verifiers

from areal_q.messages import Ticket
from areal_q.system.ports import free_ports

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
A, B = random.Random(1).sample(range(10, 100), 2)
"""The sum that the tickets ask for"""
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
    script = ["one", str(A + B), '{"text": "one"}', "two"]
    with _served() as server:
        place = Place(tmp_path, make_ticket, script, env=server.env)
        async with place.played() as playing:
            responses = await playing
    assert [(r.score.reward, r.score.parts) for r in responses if r.score] == [
        (1.0, {"openenv_reward": 1.0}),
        (0.0, {"openenv_reward": 0.0}),
    ]
    tokenizer = place.episodes._client.tokenizer
    for response, said in zip(responses, ("one", '{"text": "one"}'), strict=True):
        text = tokenizer.decode(response.context(place.ticket))
        assert [part in text for part in (f"{A}+{B}", said, '"text": "again"')] == [True] * 3
        drawn = [i for i, mask in zip(response.ids, response.mask, strict=True) if mask]
        assert tokenizer.decode(drawn).startswith(said)


@with_verifiers
@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_server_killed_within_an_episode_loses_that_one_alone(
    tmp_path: Path, make_ticket: Callable[..., Ticket], comes_back: bool
) -> None:
    """By kill -9, in the second turn of the second of three: it has a cause and no reward. The one before keeps
    its own, the next finds the new server, or says that there is none."""
    script = ["one", str(A + B), "one", str(A + B), "one", str(A + B)]
    with _served() as server:
        place = Place(tmp_path, make_ticket, script, env=server.env, group_size=3)
        turns = 0

        async def wait() -> None:
            nonlocal turns
            turns += 1
            if turns == 4:
                server.end()
                if comes_back:
                    server.start()

        place.engine.wait = wait
        async with place.played() as playing:
            responses = await playing
    found = [(r.score.valid, r.score.failure, r.score.reward) for r in responses if r.score]
    lost = (False, "environment", 0.0)
    assert found == [(True, None, 1.0), lost, (True, None, 1.0) if comes_back else lost]
    assert comes_back or "Connect call failed" in place.episodes.failure


class _Server:
    """The page's server, at one port whenever it is started."""

    def __init__(self) -> None:
        (self._port,) = free_ports(1)
        url = f"http://127.0.0.1:{self._port}"
        resets = [{"seed": 1}, {"seed": 2}]
        self.env = {"taskset": {"id": "openenv", "base_url": url, "resets": resets}}
        self._schema = f"{url}/schema"
        self.start()

    def start(self) -> None:
        command = [PYTHON, "-m", "uvicorn", "sums_server:app", "--log-level=warning"]
        self._process = subprocess.Popen([*command, f"--port={self._port}"], cwd=EXAMPLES)
        wait_until(self._answers, lambda: "no answer", self._process)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self._schema) as reply:
                return reply.status == 200
        except OSError:
            return False


@contextmanager
def _served() -> Iterator[_Server]:
    server = _Server()
    try:
        yield server
    finally:
        server.end()
