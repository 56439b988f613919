"""A policy that goes on with other settings computes what one does that resumes with them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.fixture_types import MakeRun, MakeSamples
from helpers.policies import build_policy, save_at
from msgspec import structs

from areal_q.config import override
from learner import checkpoint
from learner.data.packing import pack_samples
from learner.policy_update import update_policy
from learner.replay.replay_steps import with_settings

SETTINGS = (
    "learner.reference_kl.coef=0.1",
    "learner.advantage.type=gae",
    "learner.critic={}",
    "rollout.format=fp8",
    "rollout.unquantized=bf16",
)
PLAIN = ("learner.precision=full", "learner.dtype=float32")


@pytest.mark.parametrize(
    "setting", ["learner.precision=qarl", "learner.precision=jet", "learner.dtype=bfloat16"]
)
def test_every_model_of_a_policy_takes_other_settings_up(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path, setting: str
):
    """There and back; the reference stayed in the precision and the dtype of before."""
    plain = make_run(*SETTINGS, *PLAIN)
    policy, samples = build_policy(plain), make_samples(9)
    update_policy(
        policy, [replace(s, trajectory=structs.replace(s.trajectory, reward=1.0)) for s in samples]
    )
    save_at(1, tmp_path, policy)
    batches, found = [pack_samples(samples)], []
    for run in (override(plain, setting), plain):
        policy, resumed = with_settings(policy, run), build_policy(run)
        checkpoint.restore(tmp_path, resumed)
        for one in (policy, resumed):
            (scores,), (reference,) = one.scores(batches), one.reference_logprobs(batches)
            assert reference is not None
            found.append([reference, scores["logprobs"], scores["values"]])
    other, as_other, same, as_same = found
    for one, wanted in ((other, as_other), (same, as_same)):
        assert all(map(torch.equal, one, wanted))
    assert not torch.equal(other[0], same[0]) and same[2].abs().min() > 0
