"""One learner step, which depends on weights, groups and version history alone, so that a replay can repeat
it."""

from collections.abc import Sequence

import numpy as np

from areal_q.messages import Group
from buffer.sampling.replay_pool import SampledGroups
from learner.data.invalid_rewards import failure_metrics
from learner.data.packing import Sample, samples_of
from learner.data.staleness import VersionHistory
from learner.data.turn_rewards import is_uniform
from learner.measure.token_recorder import TokenRecorder
from learner.policy_update import PolicyUpdater


def train_step(
    updater: PolicyUpdater,
    batch: SampledGroups,
    history: VersionHistory,
    step: int,
    recorder: TokenRecorder | None = None,
) -> dict[str, float]:
    """Learns from `batch` in step `step`, after which the policy of `updater` has the new weights.

    The order of its groups matters. `recorder` collects the step's tokens for the token log. Returns the step's
    metrics by name, in the units of docs/metrics.md; none of them depends on time. Raises ConfigError for a
    response that no micro-batch has room for, RecordError if an input of the loss is not finite, and
    DivergedError after too many gradients in a row that were not finite.
    """
    policy = updater.policy
    cfg, kl = policy.cfg, policy.cfg.reference_kl
    if kl and kl.reset_every and step and step % kl.reset_every == 0:
        updater.reset_reference()
    samples = samples_of(batch, cfg.advantage, history, step, cfg.mask)
    rewards = [s.trajectory.reward for s in samples if not s.branch]
    mean = sum(rewards) / len(rewards)
    values = updater.update(samples, recorder)
    policy.calibrate_smoothing(samples, step)
    policy.calibrate_kv_scales(samples)
    return values | {
        **lag_metrics(samples),
        **part_metrics(samples),
        **failure_metrics(batch.groups),
        **response_metrics(batch.groups),
        **source_metrics(batch.groups),
        "reward/mean": mean,
        "reward/std": (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5,
    }


def response_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Returns the mean length of the valid responses, the share of those that were cut off before their end,
    and the share of uniform groups."""
    valid = [t for group in groups for t in group.valid_trajectories]
    return {
        "response/tokens_mean": sum(t.all_tokens for t in valid) / len(valid),
        "response/cut_off_share": sum(t.finish_reason != "stop" for t in valid) / len(valid),
        **_uniform_share("reward", groups),
    }


def source_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Returns for each task of a mixture its share of the groups, the mean reward of its responses, and the
    share of uniform groups; nothing for a run of one task."""
    values: dict[str, float] = {}
    for source in sorted({group.ticket.source for group in groups} - {""}):
        its = [group for group in groups if group.ticket.source == source]
        rewards = [t.reward for group in its for t in group.valid_trajectories]
        values[f"source/{source}/share"] = len(its) / len(groups)
        if rewards:
            values[f"source/{source}/reward_mean"] = sum(rewards) / len(rewards)
        values |= _uniform_share(f"source/{source}", its)
    return values


def _uniform_share(name: str, groups: Sequence[Group]) -> dict[str, float]:
    """Returns the share of the groups with several valid responses whose rewards are all equal, if there are
    any."""
    several = [group for group in groups if len(group.valid_trajectories) > 1]
    if not several:
        return {}
    return {f"{name}/uniform_share": sum(map(is_uniform, several)) / len(several)}


def lag_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns the mean over tokens, and the largest, of the versions by which tokens lag behind the learner."""
    lags = np.concatenate([sample.lag for sample in samples])
    return {"lag/mean": float(lags.mean()), "lag/max": int(lags.max())}


def part_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns `reward/part_NAME`: the mean over responses of each part of the reward; a missing part is 0."""
    sums: dict[str, float] = {}
    samples = [sample for sample in samples if not sample.branch]
    for sample in samples:
        for name, value in sample.trajectory.reward_parts.items():
            sums[name] = sums.get(name, 0.0) + value
    return {f"reward/part_{name}": total / len(samples) for name, total in sorted(sums.items())}
