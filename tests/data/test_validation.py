"""A run goes on with the problems that it began with, or says that they are others."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_q.config import Arithmetic, Gsm8k, Jsonl, Python
from areal_q.errors import ConfigError, TaskError
from areal_q.tasks import CharTokenizer, build_task
from areal_q.tasks.prompt_lengths import without_long
from learner.data.validation import check_data, check_kept

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


@pytest.mark.parametrize(
    "cfg", [Gsm8k(path="openai/gsm8k"), Jsonl(path="openai/gsm8k", prompt="question")]
)
def test_other_problems_of_a_data_set_of_the_hub_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cfg: Gsm8k | Jsonl
):
    """Its name is the same; one answer of a later revision is another."""
    answers = [str(n) for n in range(10)]

    def load_dataset(name: str, config: str, split: str) -> list[dict[str, str]]:
        return [{"question": f"{n}?", "answer": f"#### {a}"} for n, a in enumerate(answers)]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    check_data(tmp_path, cfg, build_task(cfg))
    check_data(tmp_path, cfg, build_task(cfg))
    answers[3] = "4"
    with pytest.raises(TaskError, match="openai/gsm8k: its problems are not those"):
        check_data(tmp_path, cfg, build_task(cfg))


def test_the_reward_of_a_task_may_change_its_problems_may_not(tmp_path: Path):
    code = tmp_path / "mine.py"
    cfg = Python(path=str(code))
    for reward in ("0.0", "1.0"):
        code.write_text(CODE.format(rows=20, reward=reward))
        check(tmp_path, cfg)

    code.write_text(CODE.format(rows=21, reward="1.0"))
    with pytest.raises(TaskError, match="not those"):
        check(tmp_path, cfg)


def test_a_resumption_that_leaves_out_other_problems_is_refused(tmp_path: Path):
    """With half of the micro-batch the long ones had no room: every later number stood for another problem."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(ROW.format("1+" * (n % 20) + str(n + 10)) for n in range(40)))
    cfg = Jsonl(path=str(data), heldout=0.5)
    task, tokenizer = build_task(cfg), CharTokenizer()
    for longest in (33, 34):  # both leave out the same, as lengths are odd
        check(tmp_path, cfg)
        check_kept(tmp_path, without_long(task, tokenizer, longest))
    check(tmp_path, cfg)
    with pytest.raises(ConfigError, match=r"\d+ problems leave room .*, and \d+ did"):
        check_kept(tmp_path, without_long(task, tokenizer, 25))


def test_generated_problems_leave_no_digest(tmp_path: Path):
    check_data(tmp_path, Arithmetic(), build_task(Arithmetic()))
    check_kept(tmp_path, build_task(Arithmetic()))
    assert not list(tmp_path.iterdir())
