"""`areal-q run` with a family that is not ours, or whose files are not laid out as ours are: it steps, replays,
and transformers loads its export."""

from pathlib import Path

import pytest
import torch
from helpers.commands import areal_q, run_here
from helpers.kinds import by_our_names, foreign_config, foreign_model, write_foreign
from transformers import AutoModelForCausalLM

from areal_q.models import DecoderConfig
from areal_q.observability.metrics_log import read_metrics
from areal_q.quant import is_quantized
from learner import checkpoint
from learner.replay import cli
from rollout.evaluation import evaluate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = """
name = "foreign"
steps = 3
model = { type = "pretrained", path = "model" }
task = { type = "arithmetic", digits = 1, heldout = 20 }
reward = { path = "own.py" }
warmstart = { steps = 30 }
rollout = { sampling = { max_tokens = 4 } }
learner = { groups = 8, group_size = 4, max_lag = 0, uaq = 1.0 }
eval = { problems = 20, every = 10 }
checkpoint = { every = 2 }
"""
OURS = ("gpt_oss", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
REWARD = "def reward(completion_ids):\n    return sum(completion_ids) % 2\n"
"""Differs within a group, whatever so short a warm start has taught"""


def run_replayed_and_resumed(at: Path, family: str, *settings: str) -> tuple[Path, list[dict]]:
    """Runs it in directory `at`, and replays and resumes it. Returns its directory and its steps' metrics."""
    write_foreign(at / "model", family)
    (at / "run.toml").write_text(CONFIG)
    (at / "own.py").write_text(REWARD)
    said = areal_q(at, "run", "run.toml", *settings)
    assert (f"{family} by transformers" in said) == (family not in OURS)
    directory = at / "runs" / "foreign"
    records = read_metrics(directory / "metrics.jsonl")
    steps = [r for r in records if r["kind"] == "step"]
    assert [r["step"] for r in steps] == [1, 2, 3]
    assert all(r["reward/std"] > 0 and r["train/grad_norm"] > 0 for r in steps)
    replayed = run_here("replay", cli.main, str(directory))
    assert "bit for bit" in " ".join(replayed.stdout.split()), replayed.stderr
    areal_q(at, "run", "runs/foreign", "--resume", "steps=4")
    assert "accuracy" in run_here("eval", evaluate.main, str(directory)).stdout
    return directory, steps


@pytest.mark.parametrize(
    ("family", "format"),
    [
        ("gpt_neox", "int8"),
        ("gemma2", "bf16"),
        ("gpt_oss", "int8"),
        ("qwen3_5_text", "int8"),
        ("qwen3_5_moe_text", "int8"),
        ("qwen3_next", "int8"),
    ],
)
def test_a_run_of_another_family_is_whole(family: str, format: str, tmp_path: Path) -> None:
    settings = [f"rollout.format={format}"]
    if family in ("qwen3_5_moe_text", "qwen3_next"):
        settings.append("learner.routing_replay=true")
    if family == "gpt_neox":  # whose own smoothing has to be taken from the reference as well
        foreign_model(foreign_config(family), seed=1).save_pretrained(tmp_path / "other")
        settings.append("learner.reference_kl={coef=0.01, path='other'}")
    if family == "gemma2":
        settings += [
            "learner.advantage.type=gae",
            "learner.critic={}",
            "learner.optimizer.type=muon",
        ]
    directory, steps = run_replayed_and_resumed(tmp_path, family, *settings)
    smoothed = "[rollout.smoothing]" in (directory / "config.toml").read_text()
    assert smoothed == (family == "gpt_neox")  # by default
    assert family != "gpt_neox" or steps[0]["reference/kl_k3"] > 0.1
    # Of rounding the weights alone; a wrong position, mask or temperature is off by tenths.
    assert all(r["mismatch/lag_0/kl_k3"] < 0.01 for r in steps)
    newest = checkpoint.steps(directory / "checkpoints")[-1]
    state = checkpoint.read_state(newest)
    saved = checkpoint.read_tensors(newest, state)
    model = AutoModelForCausalLM.from_pretrained(directory / "hf", dtype=torch.float32)
    read = by_our_names(dict(model.named_parameters()), DecoderConfig.from_hf(state.model))
    for name, weight in read.items():
        assert torch.equal(weight, saved[f"model.{name}"]), name


def test_a_run_on_the_engine_s_numbers_has_no_mismatch(tmp_path: Path) -> None:
    """With adapters on a packed base; the export is that base and what was learnt."""
    settings = "learner.lora.rank=4", "rollout.format=nf4", "learner.optimizer.lr=0.01"
    directory, steps = run_replayed_and_resumed(tmp_path, "gpt_neox", *settings)
    assert all(abs(r["mismatch/lag_0/kl_k3"]) < 1e-6 for r in steps)
    merged, base = (
        AutoModelForCausalLM.from_pretrained(directory / name, dtype=torch.float32).state_dict()
        for name in ("hf", "base")
    )
    moved = {name for name, weight in merged.items() if not torch.equal(weight, base[name])}
    assert moved == {name for name in merged if is_quantized(name)} != set()
