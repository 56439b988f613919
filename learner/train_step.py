"""One learner step, which depends on weights, groups and version history alone, so that a replay can repeat
it."""

from buffer.sampling.replay_pool import SampledGroups
from learner.data.packing import (
    failure_metrics,
    lag_metrics,
    part_metrics,
    response_metrics,
    samples_of,
    source_metrics,
)
from learner.data.staleness import VersionHistory
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
    policy.calibrate_kv_scales(samples)
    policy.calibrate_smoothing(samples, step)
    return values | {
        **lag_metrics(samples),
        **part_metrics(samples),
        **failure_metrics(batch.groups),
        **response_metrics(batch.groups),
        **source_metrics(batch.groups),
        "reward/mean": mean,
        "reward/std": (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5,
    }
