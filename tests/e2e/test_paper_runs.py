"""Every paper's settings take two real steps, on a tiny random model of the paper's family.

Real learner, Redis, sockets, worker and engine, in one process: sizes, device, learning rate and reward are
changed, what makes the algorithm is not.
"""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines import worker_beside
from helpers.paths import ROOT

from areal_q.config import Chat, Gae, PretrainedModel, Run, load
from areal_q.models import Decoder, DecoderConfig, init_weights, load_decoder, save_decoder
from areal_q.observability.metrics_log import read_metrics
from areal_q.system.run_dir import claimed
from areal_q.tasks import load_tokenizer
from buffer.logs.trajectory_log import iter_log
from learner.build import build_learner
from learner.final_export import finish

PAPERS = sorted((ROOT / "configs" / "papers").glob("*.toml"))
FAMILIES = {"fp8-rl": "qwen3", "qarl-tbpo": "qwen3"}
"""Of the model in the file; the others' are Qwen2.5"""
REWARD = "def reward(prompt, response, answer): return sum(response.encode()) % 2"
UNEVEN = f"{REWARD} if int(answer) % 2 else -9.0"
"""Every other problem gives all of its responses the same reward"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Path) -> Path:
    """Model directories by family, with a tokenizer of bytes; problems and a reward that varies."""
    root = tmp_path_factory.mktemp("tiny")
    tokenizer = load_tokenizer(byte_tokenizer, Chat())
    for family in ("qwen2", "qwen3"):
        config = DecoderConfig(
            family=family, vocab_size=tokenizer.vocab_size, width=128, layers=1, heads=2, kv_heads=1,
            head_dim=64, mlp=128, max_positions=1024, qkv_bias=family == "qwen2",
            eos_ids=(tokenizer.eos_id,),
        )  # fmt: skip
        model = Decoder(config)
        init_weights(model, seed=0)
        save_decoder(model, root / family, tokenizer)
    rows = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(50)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "reward.py").write_text(REWARD)
    (root / "uneven.py").write_text(UNEVEN)
    return root


def tiny_settings(path: Path, tiny: Path, root: Path) -> list[str]:
    """After a step of Muon at 1e-3 all responses were of one kind, and the second step had no gradient."""
    run = load(path)
    cfg = run.learner
    settings = {
        "root": root, "model.path": tiny / FAMILIES.get(path.stem, "qwen2"),
        "task.path": tiny / "rows.jsonl", "task.heldout": 0.1, "steps": 2, "eval.problems": 2,
        "reward.path": tiny / ("uneven.py" if cfg.drop_uniform else "reward.py"),
        "reward.processes": 1, "rollout.engine.slots": 16, "rollout.engine.device": "cpu",
        "rollout.sampling.max_tokens": 12, "learner.device": "cpu",
        "learner.groups": 4, "learner.group_size": min(cfg.group_size, 4),
        "learner.minibatches": min(cfg.minibatches, 2), "learner.microbatch_tokens": 300,
        "learner.optimizer.lr": 1e-4, "learner.optimizer.warmup_steps": 0,
    }  # fmt: skip
    if run.reward.overlong:
        settings |= {"reward.overlong.max_tokens": 12, "reward.overlong.cache_tokens": 4}
    return [f"{k}={json.dumps(str(v) if isinstance(v, Path) else v)}" for k, v in settings.items()]


def kept(run: Run) -> dict[str, Any]:
    """What makes the paper's algorithm, which nothing may have changed."""
    cfg = run.learner
    parts = (
        "objective",
        "advantage",
        "aggregation",
        "critic",
        "reference_kl",
        "uaq",
        "drop_uniform",
        "lora",
    )
    rollout = {"format": run.rollout.format, "aqn": run.rollout.aqn}
    return {name: getattr(cfg, name) for name in parts} | rollout


@pytest.mark.timeout(60)
@pytest.mark.parametrize("path", PAPERS, ids=lambda p: p.stem)
def test_a_papers_settings_take_two_real_steps(
    path: Path, tiny: Path, tmp_path: Path, short_dir: Path, redis_url: str
):
    run = load(path, tiny_settings(path, tiny, tmp_path))
    assert kept(run) == kept(load(path, [f"steps={run.steps}"]))  # noise has the run's length
    stop = threading.Event()
    with claimed(run, resume=False) as (directory, _):
        announce, fetch = (f"ipc://{short_dir}/{name}" for name in ("announce", "fetch"))
        learner = build_learner(run, directory, redis_url, announce, fetch, False, stop)
        before = {k: v.detach().clone() for k, v in learner.policy.model.state_dict().items()}
        try:
            with worker_beside(redis_url, run.name):
                assert learner.train(stop) == 2
            finish(learner, directory, 2)
        finally:
            learner.close()
    steps = [r for r in read_metrics(directory / "metrics.jsonl") if r["kind"] == "step"]
    assert len(steps) == 2
    parts = learner.policy.model.state_dict()
    assert any(not torch.equal(before[k], v) for k, v in parts.items())
    for values in steps:
        assert values["train/skipped_steps"] == 0
        assert values["train/grad_norm"] > 0
        assert values["mismatch/tokens"] > 0
    last = steps[-1]
    if run.learner.drop_uniform:
        learnt_from = iter_log(directory / "trajectories")
        rewards = [
            {t.reward for t in group.trajectories} for _, groups in learnt_from for group in groups
        ]
        assert len(rewards) == 2 * run.learner.groups and min(map(len, rewards)) > 1
        assert run.reward.overlong or last["buffer/dropped_uniform"] > 0
    else:
        assert last["buffer/dropped_uniform"] == 0
    assert ("reference/kl" in last) == (run.learner.reference_kl is not None)
    assert ("value/mean" in last) == isinstance(run.learner.advantage, Gae)
    exported = load_decoder(directory / "hf").state_dict()
    assert isinstance(run.model, PretrainedModel)
    start = load_decoder(run.model.path).state_dict()
    assert exported.keys() == start.keys()
    assert any(not torch.equal(start[k], v) for k, v in exported.items())
