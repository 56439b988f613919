"""Tasksets of docs/verifiers.md that stand on other packages, a game of TextArena and reasoning-gym's problems,
beside the worker's record: what verifiers has traced is what was drawn, token by token."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.openai_server.verifiers_place import Place, with_verifiers
from msgspec import json

from areal_q.messages import Ticket
from rollout.environments.base import Response

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS / "examples" / "tasksets"
PAGE = (DOCS / "verifiers.md").read_text("utf-8")


@pytest.mark.parametrize("name", ["games.py", "puzzles.py"])
def test_the_page_shows_the_tasksets(name: str) -> None:
    text = (EXAMPLES / name).read_text("utf-8")
    assert f"```python\n# {name}\n{text}```" in PAGE and len(text.splitlines()) <= 30


@with_verifiers
@pytest.mark.slow
async def test_a_game_of_textarena_is_played(
    tmp_path: Path, make_ticket: Callable[..., Ticket]
) -> None:
    """Guess a number: one episode is told to go higher or lower and wins, the other makes two invalid moves. No
    request leaves the machine, so no corpus is there."""
    place = Place(tmp_path, make_ticket, [], (EXAMPLES / "games.py").read_text("utf-8"))
    number = random.Random(json.decode(place.ticket.columns)["index"]).randint(1, 20)
    wrong = 1 if number > 1 else 20
    place.engine.script = [f"[{wrong}]", f"so [{number}]", "five", "six"]
    responses = await _played(place)
    assert [(r.turns, r.score.reward, r.score.correct) for r in responses if r.score] == [
        (2, 1.0, True),
        (2, 0.0, False),
    ]
    said = [place.engine.tokenizer.decode(r.context(place.ticket)) for r in responses]
    hint = "higher" if wrong < number else "lower"
    assert f"The target number is {hint}" in said[0] and "Invalid move format" in said[1]


@with_verifiers
@pytest.mark.slow
async def test_problems_of_reasoning_gym_are_scored_by_its_own_scorer(
    tmp_path: Path, make_ticket: Callable[..., Ticket]
) -> None:
    """Which gives an answer among other words a part of the reward."""
    place = Place(
        tmp_path, make_ticket, [], (EXAMPLES / "puzzles.py").read_text("utf-8"), group_size=3
    )
    asked, answer = place.ticket.prompt.rpartition(": ")[2].removesuffix(" ="), place.ticket.answer
    assert _sum(asked) == int(answer)
    place.engine.script = [answer, f"it is {answer}", str(int(answer) + 1)]
    responses = await _played(place)
    first, among, wrong = (r.score.reward for r in responses if r.score)
    assert first == 1.0 > among > wrong >= 0.0


async def _played(place: Place) -> list[Response]:
    """Returns the responses, which verifiers has traced as the worker has recorded them."""
    async with place.played() as playing:
        responses = await playing
    assert place.differences(responses) == []
    responses[-1].ids[-2] += 1
    assert place.differences(responses) == [f"{len(responses) - 1}: ids"]
    responses[-1].ids[-2] -= 1
    return responses


def _sum(terms: str) -> int:
    """Returns what these numbers with plus and minus between them make."""
    return sum(int(term) for term in terms.replace("- ", "-").replace("+ ", "").split())
