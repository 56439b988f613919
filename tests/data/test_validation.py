"""A run goes on with the problems that it began with, or says that they are others."""

from pathlib import Path

import pytest

from areal_q.config import Arithmetic, Jsonl, Python
from areal_q.errors import TaskError
from areal_q.tasks import build_task
from learner.data.validation import check_data

ROW = '{{"prompt": "{0}+1=", "answer": "2"}}\n'
CODE = """
def problems(): return [(f"{{n}}+1=", "2") for n in range({rows})]
def reward(prompt, response, answer): return {reward}
"""


def check(directory: Path, cfg: Jsonl | Python) -> None:
    check_data(directory, cfg, build_task(cfg))


def test_other_problems_in_the_same_file_are_refused(tmp_path: Path):
    data = tmp_path / "rows.jsonl"
    cfg = Jsonl(path=str(data))
    data.write_text("".join(ROW.format(n) for n in range(20)))
    check(tmp_path, cfg)
    check(tmp_path, cfg)

    data.write_text("".join(ROW.format(n) for n in range(21)))
    with pytest.raises(TaskError, match="not those that the run began with"):
        check(tmp_path, cfg)

    (tmp_path / "problems-digest").unlink()
    check(tmp_path, cfg)


def test_the_reward_of_a_task_may_change_its_problems_may_not(tmp_path: Path):
    code = tmp_path / "mine.py"
    cfg = Python(path=str(code))
    for reward in ("0.0", "1.0"):
        code.write_text(CODE.format(rows=20, reward=reward))
        check(tmp_path, cfg)

    code.write_text(CODE.format(rows=21, reward="1.0"))
    with pytest.raises(TaskError, match="not those"):
        check(tmp_path, cfg)


def test_generated_problems_leave_no_digest(tmp_path: Path):
    check_data(tmp_path, Arithmetic(), build_task(Arithmetic()))
    assert not list(tmp_path.iterdir())
