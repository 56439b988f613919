"""A run goes on with the problems, and with what encodes them, that it began with, or says what is another."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.chain_models import CHATML, byte_tokenizer

from areal_q.config import Arithmetic, Chat, Gsm8k, Jsonl, PretrainedModel, Python
from areal_q.errors import ConfigError, TaskError
from areal_q.tasks import CharTokenizer, build_task, load_tokenizer
from areal_q.tasks.base import Stop
from areal_q.tasks.prompt_lengths import without_long
from areal_q.tasks.stops import read_stops, write_stops
from learner.data.validation import check_data, check_encoding, check_kept

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


def other_vocabulary(model: Path) -> None:
    hf = byte_tokenizer(special=("<other>",))
    hf.save_pretrained(model)


def other_template(model: Path) -> None:
    (model / "chat_template.jinja").write_text(CHATML + " ")


def other_ends(model: Path) -> None:
    (model / "generation_config.json").write_text('{"eos_token_id": 256}')


def other_special_tokens(model: Path) -> None:
    file = model / "tokenizer_config.json"
    table = json.loads(file.read_text()) | {"pad_token": "<|endoftext|>"}
    file.write_text(json.dumps(table))


def encoded(directory: Path, model: Path, chat: Chat | None = None) -> None:
    tokenizer = load_tokenizer(model, chat or Chat())
    check_encoding(directory, PretrainedModel(path=str(model)), tokenizer)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (other_vocabulary, "tokenizer"),
        (other_template, "chat template"),
        (other_ends, "ends of a response"),
        (other_special_tokens, "special tokens"),
    ],
)
def test_a_resumption_with_another_encoding_is_refused(
    tmp_path: Path, change: Callable[[Path], None], name: str
):
    """It went on without a word, and its tickets and logs stood for other text."""
    model, run = tmp_path / "model", tmp_path / "run"
    run.mkdir()
    byte_tokenizer().save_pretrained(model)
    encoded(run, model)
    encoded(run, model)
    change(model)
    record = run / "problems-digest"
    line = rf"not what the run began with.*: {name}; put .* or remove {record} to go on"
    with pytest.raises(ConfigError, match=line):
        encoded(run, model)
    record.unlink()
    encoded(run, model)


def test_one_file_holds_the_digests_of_problems_and_encoding(tmp_path: Path):
    """A run that began before the latter were recorded goes on, and has them from then on."""
    data, model = tmp_path / "rows.jsonl", tmp_path / "model"
    data.write_text("".join(ROW.format(n) for n in range(20)))
    cfg = Jsonl(path=str(data))
    byte_tokenizer().save_pretrained(model)
    check(tmp_path, cfg)
    check_kept(tmp_path, build_task(cfg))
    before = (tmp_path / "problems-digest").read_text()
    for _ in range(2):
        encoded(tmp_path, model)
        check(tmp_path, cfg)
        check_kept(tmp_path, build_task(cfg))
    assert (tmp_path / "problems-digest").read_text().startswith(before)
    other_template(model)
    with pytest.raises(ConfigError, match="chat template"):
        encoded(tmp_path, model)
    data.write_text("".join(ROW.format(n) for n in range(21)))
    with pytest.raises(TaskError, match="not those that the run began with"):
        check(tmp_path, cfg)


def test_the_stops_of_earlier_steps_stay_recorded(tmp_path: Path):
    earlier, later = {1: Stop("<a>", ("tokenizer",))}, {2: Stop("<b>", ("chat template",))}
    write_stops(tmp_path, earlier)
    write_stops(tmp_path, later)
    assert read_stops(tmp_path) == earlier | later
