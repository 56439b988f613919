"""Rewards whose computation failed: their counts by cause over all responses read, and another treatment of
them in a replay."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from msgspec.structs import replace

from areal_q.errors import ConfigError, TaskError
from areal_q.messages import FailureCause, Group, WorkerStatus
from buffer.sampling.replay_pool import SampledGroups

CAUSES: tuple[FailureCause, ...] = get_args(FailureCause)
FEWEST = 256
"""The least number of responses that must fail, without exception, before the reward counts as broken."""


class NeverScored(TaskError):
    """No reward has ever worked."""


class Failures:
    """Counts of failed rewards since the process started. The learner ends if none of the first `hopeless`
    responses that were added could be scored."""

    def __init__(self, hopeless: int) -> None:
        self._hopeless = max(hopeless, FEWEST)
        self._added = 0
        """Number of responses that were added, of all that were counted."""
        self.responses = 0
        """Number of responses read."""
        self.errors = 0
        """Number of rewards that failed, including those that count as 0."""
        self.invalid: Counter[str] = Counter()
        """Number of responses left out of training, by the cause of the failure."""

    def add(self, group: Group) -> None:
        """Counts the responses of a group. Raises NeverScored if no reward ever worked."""
        self.count(group)
        self._added += len(group.trajectories)
        total = self.invalid.total()
        if total == self.responses and self._added >= self._hopeless:
            causes = ", ".join(f"{count} {cause}" for cause, count in self.invalid.most_common())
            raise NeverScored(
                f"the reward failed for all of the first {total} responses ({causes})"
            )

    def count(self, group: Group) -> None:
        """Counts the responses of a group, whatever its rewards are."""
        failed = [t for t in group.trajectories if not t.valid]
        self.responses += len(group.trajectories)
        self.errors += len(failed)
        self.errors += sum(
            t.valid and t.reward_parts.get("error", 0) > 0 for t in group.trajectories
        )
        self.invalid.update(str(t.failure) for t in failed)

    def metrics(self) -> dict[str, float]:
        by_cause = {f"buffer/invalid/{cause}": float(self.invalid[cause]) for cause in CAUSES}
        return {"buffer/responses": self.responses, "buffer/reward_errors": self.errors, **by_cause}


def failure_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Returns `reward/invalid`, the number of responses that are left out because their reward failed, the same
    by cause, and `reward/errors`, the number of rewards that failed, including those that count as 0."""
    found = Failures(0)
    for group in groups:
        found.count(group)
    by_cause = {f"reward/invalid/{cause}": float(found.invalid[cause]) for cause in CAUSES}
    invalid = float(found.invalid.total())
    return {"reward/errors": float(found.errors), "reward/invalid": invalid, **by_cause}


def and_how(
    error: NeverScored, heartbeats: Callable[[], Sequence[WorkerStatus]], wait_s: float
) -> TaskError:
    """Returns `error` with how a reward failed, which a worker's heartbeat tells: a reward that fails at once
    fails that often before the next one. After `wait_s` without it the logs have to do."""
    until_s, told = time.monotonic() + wait_s, list[str]()
    while not told and time.monotonic() < until_s:
        told = [f"{beat.failure} ({beat.worker})" for beat in heartbeats() if beat.failure]
        if not told:
            time.sleep(0.1)
    how = told[0] if told else "the workers' logs say how"
    return TaskError(f"{error}: {how}; mend it, and continue with --resume")


def judged(
    batch: SampledGroups, on_error: Literal["drop", "retry", "zero"], fewest: int
) -> SampledGroups:
    """Returns `batch` as it would have been with another `reward.on_error`, without groups of fewer than
    `fewest` valid responses. Raises ConfigError if no group remains."""
    zero = on_error == "zero"
    changed = [
        replace(
            group,
            trajectories=[replace(t, valid=zero) if t.failure else t for t in group.trajectories],
        )
        for group in batch.groups
    ]
    kept = [i for i, group in enumerate(changed) if len(group.valid_trajectories) >= fewest]
    if not kept:
        raise ConfigError(f"reward.on_error = {on_error!r} leaves nothing to learn from in a step")
    weights = [batch.weights[i] for i in kept] if batch.weights else []
    return SampledGroups([changed[i] for i in kept], weights)
