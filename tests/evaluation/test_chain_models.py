"""What ends a response, and what of it rewards judge: `areal-q eval` on models whose text is known."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.chain_models import CHATML, END_OF_TEXT, END_OF_TURN, byte_tokenizer, write_chain
from helpers.commands import refused, run_here

from areal_q.tasks import load_tokenizer
from rollout.evaluation import evaluate


def evaluated(
    model: Path, *settings: str, answer: str = "42", max_tokens: int = 40
) -> dict[str, Any]:
    """Returns the greedy reply to one problem, as `areal-q eval --out` writes it."""
    data, out = model.parent / "data.jsonl", model.parent / "answers.jsonl"
    data.write_text(json.dumps({"prompt": "which?", "answer": answer}) + "\n")
    told = run_here(
        "eval", evaluate.main, str(model), "--task", "jsonl", "--data", str(data), "--format", "bf16",
        "--out", str(out), "--max-tokens", str(max_tokens), *settings,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    return json.loads(out.read_text())["greedy"]


def test_answers_are_not_written_where_the_summary_goes(tmp_path: Path) -> None:
    model = write_chain(tmp_path / "m", "42<|im_end|>xyz", byte_tokenizer())
    (tmp_path / "d.jsonl").write_text('{"prompt": "which?", "answer": "42"}\n')
    asked = [
        "eval",
        evaluate.main,
        str(model),
        "--task",
        "jsonl",
        "--data",
        str(tmp_path / "d.jsonl"),
    ]
    refused(run_here(*asked, "--out", str(tmp_path / "a.json")), "--out", "a.json: the summary")
    many = run_here(*asked, "--samples", "600", "--temperature", "1")
    refused(many, "--samples 600: the engine draws 512 responses at once")


CHAT = "task.template=chat"
TWO_ENDS = {"eos_token_id": [258, 256]}


@pytest.mark.parametrize(
    ("text", "tokenizer", "files"),
    [
        ("42<|im_end|>xyz", {}, {}),
        ("42<|endoftext|>xyz", {}, {"eos": [258, 256]}),
        ("42<|endoftext|>xyz", {}, {"generation_config": TWO_ENDS}),
        ("42<|im_end|>xyz", {"eos": END_OF_TEXT}, {}),
        ("42<|endoftext|>xyz", {}, {"generation_config": {"text_config": TWO_ENDS}}),
    ],
    ids=[
        "the tokenizer's",
        "config.json's",
        "generation_config.json's",
        "the template's",
        "a part's",
    ],
)
def test_a_reply_ends_at_each_end_that_a_file_names(
    tmp_path: Path, text: str, tokenizer: dict[str, Any], files: dict[str, Any]
) -> None:
    reply = evaluated(write_chain(tmp_path / "m", text, byte_tokenizer(**tokenizer), **files), CHAT)
    assert (reply["response"], reply["tokens"]) == ("42", 3)
    assert reply["finished"] and reply["correct"]


def test_a_template_that_is_not_used_ends_nothing(tmp_path: Path) -> None:
    model = write_chain(tmp_path / "m", "42<|im_end|>xyz", byte_tokenizer(eos=END_OF_TEXT))
    reply = evaluated(model, "task.template=plain", max_tokens=5)
    assert (reply["response"], reply["finished"]) == ("42<|im_end|>xy", False)


def test_a_stop_string_may_be_a_special_token(tmp_path: Path) -> None:
    model = write_chain(tmp_path / "m", "42<|im_end|>xyz", byte_tokenizer(eos=END_OF_TEXT))
    reply = evaluated(model, f'rollout.sampling.stop=["{END_OF_TURN}"]')
    assert (reply["tokens"], reply["finished"], reply["correct"]) == (3, True, True)


def test_an_end_that_the_tokenizer_appends_is_not_in_a_prompt(tmp_path: Path) -> None:
    byte_tokenizer(eos="</s>", wrapped=True).save_pretrained(tmp_path)
    ids = load_tokenizer(tmp_path).encode_prompt("hi")
    assert ids == [259, *load_tokenizer(tmp_path).encode("hi")]


THINK = ("<think>", "</think>")


def test_rewards_see_special_tokens_but_not_the_end(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(special=THINK)
    model = write_chain(tmp_path / "m", "<think>why</think>42<|im_end|>", tokenizer)
    reply = evaluated(model, CHAT, answer="<think>why</think>42")
    assert reply["response"] == "<think>why</think>42"
    assert reply["correct"]


def test_a_prefilled_thought_is_part_of_what_is_judged(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(
        template=CHATML.replace("assistant\n'", "assistant\n<think>\n'"), special=THINK
    )
    model = write_chain(tmp_path / "m", "why</think>42<|im_end|>", tokenizer)
    reply = evaluated(model, CHAT, answer="<think>\nwhy</think>42")
    assert reply["response"] == "<think>\nwhy</think>42"
    assert reply["correct"]


def test_the_stop_string_is_judged_but_not_compared(tmp_path: Path) -> None:
    model = write_chain(tmp_path / "m", "42</a>xyz")
    reply = evaluated(model, 'rollout.sampling.stop=["</a>"]')
    assert reply["response"] == "42</a>"
    assert reply["correct"] and reply["given"] == "42"
