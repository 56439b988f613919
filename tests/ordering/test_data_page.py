"""docs/data.md: its settings are taken as they stand, and do what the page says."""

import re
from pathlib import Path

import pytest
from helpers.paths import ROOT

from areal_q.config import BySource, Mix, PassRate, ReinforcePlusPlus, Rloo, Run, load
from areal_q.tasks import asked_of, build_task, columns_for

BLOCKS = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/data.md").read_text("utf-8"), re.DOTALL)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The settings of each block of the page, in a directory with the files that they name."""
    monkeypatch.chdir(tmp_path)
    for name in ("train", "test", "hard"):
        rows = (f'{{"prompt": "{name} {n}=", "answer": "{name}"}}\n' for n in range(20))
        Path(f"{name}.jsonl").write_text("".join(rows))
    Path("doubling.py").write_text(
        "def problems():\n    return [(str(n), '1') for n in range(9)]\n"
    )
    Path("judge.py").write_text("def reward(response):\n    return 1.0\n")
    found = []
    for number, text in enumerate(BLOCKS):
        Path(f"{number}.toml").write_text(text)
        found.append(load(f"{number}.toml"))
    return found


def test_the_settings_of_the_page_are_what_it_says(runs: list[Run]):
    second, sampled, mixture, curriculum, best = runs

    assert {problem.answer for problem in build_task(second.task).heldout} == {"test"}
    assert [problem.answer for problem in asked_of(second.of("hard").task)] == ["hard"] * 20
    assert set(sampled.eval.sets) == {"sampled", "sums"} and sampled.sources == ("", "sums")
    assert isinstance(mixture.task, Mix) and mixture.sources == ("doubling", "judged", "sums")
    assert len(build_task(mixture.task, columns_for(mixture)).heldout) > 3
    assert mixture.learner.advantage == BySource(
        sources={"judged": ReinforcePlusPlus(baseline="group")}, otherwise=Rloo()
    )
    order = curriculum.learner.order
    assert isinstance(order, PassRate)
    assert (order.medium, order.new, order.hard, order.easy) == (4, 4, 1, 1)
    assert (best.eval.best, best.eval.patience) == ("eval/accuracy", 5)
