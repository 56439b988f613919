"""A supervised step: the learner's own policy update, on samples that nobody drew.

With advantages of 1 and one update a batch, CISPO's objective is sg(R) · log π_θ with R = π_θ/π_prox = 1: its
loss is the mean cross-entropy of the tokens that count, and its gradient that of it. Packing, micro-batches,
clipping, schedule, backends and checkpoints are those of RL.
"""

from collections.abc import Sequence

import torch
from msgspec.structs import replace

from areal_q.config import Cispo, Grpo, LearnerConfig, Run, TokenMean
from learner.backends.single_device import TorchPolicy
from learner.data.packing import PackedBatch, Sample, microbatches, pack_samples
from learner.policy_update import PolicyUpdater

KEPT = ("train/", "policy/entropy", "routing/", "loss/router")
"""Beginnings of the metrics of a policy update that say something where nothing was drawn"""


def supervised(run: Run) -> Run:
    """Returns `run` with what a supervised step needs in place of what RL alone does."""
    rollout = replace(
        run.rollout,
        smoothing="off",
        sticky_scales=0.0,
        aqn=None,
        kv_scales=None,
        sampling=replace(run.rollout.sampling, temperature=1.0),
    )
    warmstart = replace(run.warmstart, steps=0)
    return replace(
        run, learner=supervised_learner(run.learner), rollout=rollout, warmstart=warmstart
    )


def supervised_learner(cfg: LearnerConfig) -> LearnerConfig:
    """Returns these settings for a learner of demonstrations."""
    return replace(
        cfg,
        objective=Cispo(),
        advantage=Grpo(),
        aggregation=TokenMean(),
        epochs=1,
        minibatches=1,
        proximal="exact",
        critic=None,
        reference_kl=None,
        teacher=None,
        entropy_coef=0.0,
        routing_replay=False,
        uaq=1.0,
    )


def learn(updater: PolicyUpdater, samples: Sequence[Sample]) -> dict[str, float]:
    """Learns from `samples`, and returns the metrics by name; `train/loss` is the mean cross-entropy, in nats,
    of the tokens that count. Raises what `update_policy` does."""
    values = updater.update(samples)
    kept = {name: value for name, value in values.items() if name.startswith(KEPT)}
    return kept | {"train/tokens": values["mismatch/tokens"]}


def held_out_loss(policy: TorchPolicy, samples: Sequence[Sample]) -> float:
    """Returns the mean cross-entropy of the tokens of `samples` that count, in nats."""
    nats, tokens = 0.0, 0
    for batch in _batches(policy, samples):
        (scores,) = policy.scores([batch])
        nats -= float(scores["logprobs"][batch.mask].double().sum())
        tokens += int(batch.mask.sum())
    return nats / tokens


@torch.no_grad()
def share_right(policy: TorchPolicy, samples: Sequence[Sample]) -> float:
    """Returns the share of `samples` that greedy decoding gets right, as each token that counts is the most
    probable one."""
    right = 0
    for batch in _batches(policy, samples):
        hidden = policy.model(batch.token_ids, batch.layout)[batch.predict]
        hits = (policy.model.logits(hidden).argmax(-1) == batch.targets) | ~batch.mask
        missed = batch.sequence_ids[~hits].unique()
        right += batch.num_sequences - len(missed)
    return right / len(samples)


def _batches(policy: TorchPolicy, samples: Sequence[Sample]) -> list[PackedBatch]:
    cuts = microbatches(samples, policy.cfg.microbatch_tokens)
    return [pack_samples(cut, policy.cfg.device) for cut in cuts]
