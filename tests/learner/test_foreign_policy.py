"""A policy that transformers computes learns as ours does, and goes on from a checkpoint bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fixture_types import MakeRun, MakeSamples
from helpers.kinds import (
    FAMILIES,
    VARIANTS,
    by_our_names,
    config_of,
    foreign_config,
    foreign_model,
    write_foreign,
)
from helpers.policies import save_at
from msgspec import structs
from transformers.pytorch_utils import Conv1D

from areal_q.config import HfModel, ModelConfig, PretrainedModel, Run
from areal_q.models import load_model
from areal_q.models.variants import STATEFUL
from learner import checkpoint
from learner.backends.single_device import TorchPolicy, token_logprobs
from learner.build_policy import build_reference
from learner.data.packing import pack_samples
from learner.policy_update import prepare_minibatches, update_policy

SHAPE: dict[str, Any] = {
    "vocab_size": 24, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
SMOOTH = ("learner.uaq=1", "learner.optimizer.eps=1e-2", "learner.optimizer.lr=0.01")
"""A large eps makes AdamW's step smooth in the gradient; at 1e-8 rounding alone could turn its sign."""


def policy_of(run: Run, kind: type[PretrainedModel], path: Path) -> TorchPolicy:
    model: ModelConfig = kind(path=str(path))  # type: ignore[assignment]
    return TorchPolicy(load_model(model, path), run.learner, 1.0)


SETTINGS = {
    "plain": (),
    "recompute": ("learner.recompute=true",),
    "critic": ("learner.advantage.type=gae", "learner.critic={optimizer={eps=1e-2, lr=0.01}}"),
    "shared critic": ("learner.advantage.type=gae", "learner.critic={trunk='shared'}"),
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("variant", [v for v in VARIANTS if "," not in v and v not in STATEFUL])
def test_both_have_the_same_log_probs_loss_and_gradient(
    variant: str, settings: str, make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path
) -> None:
    """Twice, since a critic's values are all 0 before its first step."""
    foreign_model(config_of(variant, SHAPE)).save_pretrained(tmp_path)
    run = make_run(*SMOOTH, *SETTINGS[settings])
    ours, theirs = (policy_of(run, kind, tmp_path) for kind in (PretrainedModel, HfModel))
    for seed in range(2):
        told = [update_policy(policy, make_samples(9, seed)) for policy in (ours, theirs)]
        for key in ("train/loss", "train/grad_norm", "mismatch/kl", "policy/entropy", "value/mean"):
            if key in told[0]:
                assert told[1][key] == pytest.approx(told[0][key], rel=1e-4, abs=1e-6), key
    other = by_our_names(theirs.model.state_dict(), ours.model.config)
    for name, weight in ours.model.state_dict().items():
        torch.testing.assert_close(other[name], weight, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("settings", ["critic", "shared critic"])
def test_a_critic_reads_what_a_model_gives_its_head(
    settings: str, make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path
) -> None:
    """OPT's smallest but one projects what comes out of its layers to half as many channels."""
    net = write_foreign(tmp_path, "opt", word_embed_proj_dim=16)
    policy = policy_of(make_run(*SMOOTH, *SETTINGS[settings]), HfModel, tmp_path)
    critic = policy.critic
    assert critic is not None and critic.head.in_features == 16
    samples = [
        replace(s, trajectory=structs.replace(s.trajectory, reward=1.0)) for s in make_samples(9)
    ]
    for _ in range(2):
        update_policy(policy, samples)
    net.load_state_dict((critic.trunk or policy.model).state_dict(), strict=False)
    sample = samples[0]
    ids = torch.tensor([*sample.prompt_ids, *sample.trajectory.response_ids.numpy()])
    with torch.no_grad():
        (scores,) = policy.scores([pack_samples([sample])])
        hidden = net.base_model(ids[None, :-1]).last_hidden_state[0, len(sample.prompt_ids) - 1 :]
        wanted = critic.head(hidden).squeeze(1)
    assert wanted.abs().min() > 1e-4, "it has learnt"
    torch.testing.assert_close(scores["values"], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["gpt_neox", "phi", "gpt2", "starcoder2"])
def test_muon_moves_each_linear_of_the_layers(
    family: str, make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path
) -> None:
    """And nothing else: all numbers that AdamW moves are moved alike by its first step."""
    net = write_foreign(tmp_path / "model", family)
    head = net.get_output_embeddings()
    linears = {
        f"{name}.weight"
        for name, module in net.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head
    }
    policy = policy_of(
        make_run(
            "learner.uaq=1",
            "learner.minibatches=1",
            "learner.optimizer={type='muon', lr=1e-3, warmup_steps=0}",
        ),
        HfModel,
        tmp_path / "model",
    )
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    update_policy(policy, make_samples(9))
    turned = set()
    for name, p in policy.model.named_parameters():
        moved = (before[name] - p.detach()).abs()
        if p.ndim == 2 and (moved[moved > 0] / 1e-3 - 1).abs().median() > 0.01:
            turned.add(name)
    assert turned == linears


def test_a_reference_is_the_model_at_its_path(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path
) -> None:
    write_foreign(tmp_path / "model", "gpt_neox")
    foreign_model(foreign_config("gpt_neox"), seed=1).save_pretrained(tmp_path / "other")
    kind = HfModel(path=str(tmp_path / "model"))
    policy = policy_of(make_run(*SMOOTH, "learner.reference_kl={}"), HfModel, tmp_path / "model")
    policy.reference = build_reference(str(tmp_path / "other"), kind, policy.model)
    ((batch, inputs), *_), *_ = prepare_minibatches(policy, make_samples(4))
    with torch.no_grad():
        expected, _ = token_logprobs(load_model(kind, tmp_path / "other"), batch, 1.0)
    assert inputs.reference_logprobs is not None
    assert torch.equal(inputs.reference_logprobs, expected)
    assert (expected - inputs.proximal_logprobs).abs().mean() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_restored_policy_goes_on_bit_for_bit(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path, family: str
) -> None:
    write_foreign(tmp_path / "model", family)
    more = ["learner.advantage.type=gae", "learner.critic={}"] if family == "gemma2" else []
    run = make_run(*SMOOTH, "learner.reference_kl.coef=0.1", *more)
    first = policy_of(run, HfModel, tmp_path / "model")
    update_policy(first, make_samples(6, 1))
    save_at(1, tmp_path / "checkpoints", first)
    again = policy_of(run, HfModel, tmp_path / "model")
    checkpoint.restore(tmp_path / "checkpoints", again)
    told = [update_policy(policy, make_samples(6, 2)) for policy in (first, again)]
    assert told[0] == told[1]
    states = [checkpoint.tensors_of(policy) for policy in (first, again)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(t, states[1][name]) for name, t in states[0].items() if name != "rng")
