"""A pretrained model from `areal-q run` to what transformers makes of its export."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.commands import areal_q
from helpers.paths import REAL_MODEL, ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_q.observability.metrics_log import read_metrics
from areal_q.system.run_dir import METRICS_FILE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not REAL_MODEL.is_dir(), reason=f"no models/{REAL_MODEL.name}: make real-model"
    ),
]
REWARD = """
def reward(prompt, response, answer):
    return sum(c.isdigit() for c in response) / max(1, len(response))
"""
"""The share of digits tells after a few steps whether a model learns; a sum's answer takes some thirty."""
SETTINGS = [
    *("name=real", "checkpoint.every=2", "eval.problems=8", "eval.every=100"),
    *("learner.group_size=4", "learner.optimizer.lr=3e-5", "learner.optimizer.warmup_steps=0"),
    *("rollout.sampling.max_tokens=6", "rollout.format=bf16"),  # transformers has no other
    # Another test has a core. Soon all answers have as many digits, and their groups would be drawn for ever.
    *("rollout.threads=1", "learner.threads=1", "learner.drop_uniform=false"),
]
FIRST, STEPS = 4, 7


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="aq-real-"))
    (directory / "digits.py").write_text(REWARD)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def finished(place: Path) -> Path:
    """Returns the directory of a run that was resumed after its first steps."""
    config = str(ROOT / "configs" / "smollm2-sums.toml")
    settings = [f'model.path="{REAL_MODEL}"', "reward.path=digits.py", *SETTINGS]
    areal_q(place, "run", config, *settings, f"steps={FIRST}")
    areal_q(place, "run", "runs/real", "--resume", f"steps={STEPS}")
    return place / "runs" / "real"


def test_a_pretrained_model_learns_over_a_resumption(finished: Path):
    steps = [r for r in read_metrics(finished / METRICS_FILE) if r["kind"] == "step"]
    assert [r["step"] for r in steps] == list(range(1, STEPS + 1))
    rewards = [r["reward/mean"] for r in steps]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.2, rewards
    assert max(r["lag/max"] for r in steps) <= 2
    assert max(r.get("fidelity/gap_mean_nats", 0.0) for r in steps) < 0.03


def test_steps_of_a_pretrained_model_replay_bit_for_bit(finished: Path, place: Path):
    said = areal_q(place, "replay", "runs/real")
    assert "bit for bit" in said


def test_transformers_continues_greedily_as_the_engine(finished: Path, place: Path):
    areal_q(place, "eval", "runs/real", "--problems", "6", "--out", "answers.jsonl")
    answers = [json.loads(line) for line in (place / "answers.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(finished / "hf")
    model = AutoModelForCausalLM.from_pretrained(finished / "hf", dtype=torch.float32)
    for answer in answers:
        asked = [{"role": "user", "content": answer["prompt"]}]
        prompt = tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        text = answer["greedy"]["response"]
        given = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.inference_mode():
            logits = model(torch.cat((prompt, given), 1)).logits[0, prompt.shape[1] - 1 : -1]
        behind = logits.max(-1).values - logits.gather(1, given.T).squeeze(1)
        assert len(given[0]) and behind.max() < 0.1, text  # a tie may be rounded either way
