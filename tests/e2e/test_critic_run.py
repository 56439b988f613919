"""PPO with a critic and a reference policy through real processes: it learns, resumes and is replayed."""

from pathlib import Path

import pytest
from helpers.commands import areal_q
from helpers.paths import QUICKSTART
from safetensors import safe_open

from areal_q.models import load_decoder
from areal_q.observability.metrics_log import read_metrics
from learner import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SETTINGS = [
    *("name=gae", "task.digits=1", "task.heldout=20", "rollout.sampling.max_tokens=4"),
    *("model.layers=2", "model.width=64", "model.mlp=128", "learner.optimizer.lr=1e-3"),
    *("warmstart.steps=60", "warmstart.until_accuracy=0.3", "eval.problems=20", "eval.every=1000"),
    *("learner.groups=128", "learner.group_size=1", "learner.advantage.type=gae"),
    "learner.critic={optimizer={lr=2e-3}}",
    "learner.reference_kl={place='reward', coef=1e-3, estimator='k1', reset_every=20}",
    *("learner.entropy_coef=1e-4", "checkpoint.every=15"),
]
FORK, STEPS = 12, 30


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was resumed at FORK."""
    cwd = tmp_path_factory.mktemp("gae")
    areal_q(cwd, "run", str(QUICKSTART), *SETTINGS, f"steps={FORK}")
    areal_q(cwd, "run", "runs/gae", "--resume", f"steps={STEPS}")
    return cwd / "runs" / "gae"


def test_ppo_with_a_critic_raises_the_reward_of_single_responses(finished: Path):
    steps = [r for r in read_metrics(finished / "metrics.jsonl") if r["kind"] == "step"]
    assert [r["step"] for r in steps] == list(range(1, STEPS + 1))
    first, last = steps[:4], steps[-8:]
    reward = [sum(r["reward/mean"] for r in part) / len(part) for part in (first, last)]
    assert reward[1] > reward[0] + 0.2
    assert sum(r["value/explained_variance"] for r in last) / len(last) > 0
    assert steps[0]["value/mean"] == 0 < steps[-1]["value/mean"]
    # The reference moved to the policy before step 20.
    assert abs(steps[20]["reference/kl_k3"]) < 0.5 * steps[19]["reference/kl_k3"]


def test_steps_with_critic_and_reference_replay_bit_for_bit(finished: Path):
    said = areal_q(finished.parent.parent, "replay", "runs/gae")
    assert f"steps 0–{STEPS - 1}:" in said and "weights bit for bit" in said
    assert f"step-{STEPS:06d}: weights and optimizer equal, tensor by tensor" in said


def test_what_is_exported_has_no_value_head_and_what_is_kept_has(finished: Path):
    names = load_decoder(finished / "hf").state_dict().keys()
    assert not [name for name in names if "head.weight" in name and name != "lm_head.weight"]
    newest = checkpoint.steps(finished / "checkpoints")[-1]
    with safe_open(newest / checkpoint.TENSORS, framework="pt") as tensors:
        parts = {name.partition(".")[0] for name in tensors.keys()}  # noqa: SIM118
    assert {"model", "critic", "critic_optimizer", "reference", "optimizer"} <= parts


def test_a_replay_may_ask_what_another_critic_would_have_done(finished: Path):
    settings = ("learner.critic.trunk=shared", "learner.reference_kl.place=loss")
    options = [word for setting in settings for word in ("--set", setting)]
    said = areal_q(finished.parent.parent, "replay", "runs/gae", "--to", "3", *options)
    assert "another history, on the samples that were logged" in said
