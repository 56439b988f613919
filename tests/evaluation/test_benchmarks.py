"""Every public benchmark's rows, through `areal-q eval` under a paper's preset, to accuracies and files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import rollout.engines
from areal_q.config import Chat, Run, ScriptedEngine, load
from areal_q.evaluation.benchmarks import BENCHMARKS, PRESETS
from areal_q.models import Decoder, DecoderConfig, init_weights, save_decoder
from areal_q.tasks import all_problems, load_tokenizer
from rollout.engines.scripted import scripted_engine
from rollout.evaluation import evaluate

CHOICES = {f"Incorrect Answer {i}": f"no {i}" for i in (1, 2, 3)}
ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "gsm8k": ({"question": "?", "answer": "1 + 1 = 2\n#### 2"}, "#### {}", "qurl-gsm8k"),
    "math-500": ({"problem": "?", "answer": "\\frac{1}{2}"}, "\\boxed{{{}}}", "qarl"),
    "aime": ({"problem": "?", "answer": 33}, "\\boxed{{{}}}", "qurl-aime"),
    "amc": ({"question": "?", "answer": 27.0}, "\\boxed{{{}}}", "qerl"),
    "minerva": (
        {"problem": "?", "solution": "\\boxed{4.5e33}"},
        "\\boxed{{{}}}",
        "qurl-deepscaler",
    ),
    "olympiad": ({"question": "?", "final_answer": ["$5$"]}, "\\boxed{{{}}}", "fp8-rl"),
    "gpqa": ({"Question": "?", "Correct Answer": "yes", **CHOICES}, "Answer: {}", "jet-rl"),
    "arc-c": (
        {"question": "?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"},
        "Answer: {}",
        "qarl",
    ),
    "mmlu-pro": (
        {"question": "?", "options": ["a", "b", "c"], "answer": "C"},
        "Answer: {}",
        "qarl",
    ),
}
"""A row, how its answer is given, and a preset"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Path) -> Path:
    tokenizer = load_tokenizer(byte_tokenizer, Chat())
    config = DecoderConfig(
        family="qwen2", vocab_size=tokenizer.vocab_size, width=16, layers=1, heads=2, kv_heads=1,
        head_dim=8, mlp=16, max_positions=512, qkv_bias=True, eos_ids=(tokenizer.eos_id,),
    )  # fmt: skip
    decoder = Decoder(config)
    init_weights(decoder, seed=0)
    path = tmp_path_factory.mktemp("model") / "hf"
    save_decoder(decoder, path, tokenizer)
    return path


def test_every_benchmark_has_a_row_and_every_preset_is_used():
    assert ROWS.keys() == BENCHMARKS.keys()
    assert {preset for _, _, preset in ROWS.values()} == PRESETS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_benchmark_is_asked_scored_and_saved_under_a_preset(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    row, form, preset = ROWS[name]
    field = next(key for key in row if key.lower() in ("question", "problem"))
    data, out = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    data.write_text("".join(json.dumps(row | {field: f"Question {i}?"}) + "\n" for i in range(3)))
    settings = [f"task.type={BENCHMARKS[name]}", f"task.path={json.dumps(str(data))}"]
    run: Run = load(
        None, [*settings, "model.type=pretrained", f"model.path={json.dumps(str(model))}"]
    )
    tokenizer = load_tokenizer(model, Chat())
    problems = all_problems(run.task)
    known = {tuple(tokenizer.encode_prompt(p.prompt)): p.answer for p in problems}
    right_until = list(known)[:2]

    def say(prompt: Sequence[int]) -> Sequence[int]:
        answer = form.format(known[tuple(prompt)] if tuple(prompt) in right_until else "none")
        return [*tokenizer.encode(answer), tokenizer.eos_id]

    def sure(version: int) -> float:
        return 1 - 1e-9

    monkeypatch.setattr(
        rollout.engines, "build_engine", lambda _: scripted_engine(ScriptedEngine(), say, sure)
    )
    evaluate.main(
        model, [], task=name, data=data, preset=preset, problems=None, samples=None, greedy=True,
        temperature=None, top_p=None, max_tokens=128, format="bf16", show=0, out=out,
    )  # fmt: skip
    said = capsys.readouterr().out
    assert "accuracy 0.667 [" in said and "(3 problems" in said
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["greedy"]["correct"] for r in rows] == [True, True, False]
    k = PRESETS[preset].samples
    assert [sum(s["correct"] for s in r["samples"]) for r in rows] == [k, k, 0]
    if k:
        assert f"avg@{k} 0.667" in said
    saved = json.loads(out.with_suffix(".json").read_text())
    assert (saved["task"], saved["preset"], saved["samples"]) == (name, preset, k)
    sampling = saved["sampling"]
    assert (sampling["temperature"], sampling["top_p"]) == (
        PRESETS[preset].temperature,
        PRESETS[preset].top_p,
    )
