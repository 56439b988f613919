"""Learner steps, one at a time, on groups that the caller brings: the loop's own `train_step`, without Redis.

settings, or a run's checkpoint ─▶ policy ◀─ train_step(s) ◀─ groups: of a log, or of one's own code
"""

import copy
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from areal_q.checks.automatic import settled
from areal_q.checks.hub import fetched
from areal_q.checks.model import check_format, check_shape
from areal_q.config import Run
from areal_q.config.load import Override
from areal_q.errors import CheckpointError, ConfigError, RecordError
from areal_q.messages import Group, VersionSpan
from areal_q.models import Decoder
from areal_q.models.shape import shape_of
from areal_q.system.run_dir import with_digests
from areal_q.tasks import build_task, build_tokenizer, columns_for
from buffer.sampling.replay_pool import SampledGroups
from learner.arithmetic import set_arithmetic
from learner.backends.single_device import TorchPolicy
from learner.build_policy import build_policy
from learner.data.staleness import VersionHistory
from learner.data.validation import fits
from learner.policy_update import SingleProcessUpdater
from learner.replay.export import write_plain
from learner.replay.replay_steps import Replay, with_settings
from learner.train_step import train_step


class _Unrecorded:
    """In place of a MetricsLog: what a warm start writes is not kept."""

    def write(self, *record: Any, **more: Any) -> None: ...


class Steps:
    """A policy at `step`, which learns from the groups that it is given."""

    def __init__(
        self,
        run: Run,
        policy: TorchPolicy,
        step: int = 0,
        digests: Mapping[int, str] | None = None,
        recorded: Mapping[int, tuple[str, int]] | None = None,
    ) -> None:
        """`digests` are those of the versions before; `recorded` has, of each step of a log, the digest of the
        version that it made and the version at which its history forked off abandoned ones."""
        self.run, self.policy, self.step = run, policy, step
        self._history = VersionHistory(run.learner.versions_kept, {**(digests or {})})
        self._recorded = recorded or {}
        self._updater = SingleProcessUpdater(policy)
        self._check = fits(policy.model.config, run.learner)

    @classmethod
    def begun(cls, run: Run) -> "Steps":
        """Returns the policy as a run with these settings begins, after its warm start. Raises UserError for
        settings that do not fit the model."""
        run = settled(with_digests(fetched(run), ("learner.objective", "learner.advantage")))
        set_arithmetic(run.learner.threads, run.learner.device)
        tokenizer = build_tokenizer(run.model, run.task)
        shape = shape_of(run.model, tokenizer)
        check_shape(run, shape, 0, rollouts=False)
        check_format(shape, run.rollout.format)
        task = build_task(run.task, columns_for(run))
        unrecorded: Any = _Unrecorded()
        never = threading.Event()
        policy, _ = build_policy(run, Path(), False, task, tokenizer, unrecorded, never)
        return cls(run, policy)

    @classmethod
    def of_run(cls, directory: Path, step: int | None, settings: list[Override]) -> "Steps":
        """Returns the policy in the checkpoint of `step`, None being the first, with settings that a replay
        could change. Raises CheckpointError if there is none, and what a replay raises."""
        replay = Replay(directory, settings, step)
        if replay.state.step != replay.first:
            raise CheckpointError(
                f"{directory / 'checkpoints'}: none of step {step}; the one before is of {replay.state.step}"
            )
        run, policy = replay.settings_at(replay.records[0]), replay.policy
        if replay.changes:
            old, policy = policy, with_settings(policy, run)
            policy.smoothing = old.smoothing
            policy.fold()
        recorded = {r.step: (r.digest, r.fork) for r in replay.records}
        return cls(run, policy, replay.first, replay.state.digests, recorded)

    def learn(self, groups: Sequence[Group], weights: Sequence[float] = ()) -> dict[str, float]:
        """Takes the next step on the groups, in their order, and returns its metrics. Raises RecordError for a
        group that breaks its contract or does not fit the model, and what `train_step` raises."""
        placed = [self._placed(group.validate()) for group in groups]
        temperature = self.run.rollout.sampling.temperature
        for group in placed:
            self._check(group)
            if (drawn := group.ticket.sampling.temperature) != temperature:
                raise RecordError(
                    f"ticket {group.ticket.number}: drawn at temperature {drawn:g}, and this learner's "
                    f"log-probs are of rollout.sampling.temperature = {temperature:g}"
                )
        if not any(group.valid_trajectories for group in placed):
            raise RecordError("there is no response to learn from")
        digest, fork = self._recorded.get(self.step, ("", 0))
        self._history.forks = [fork]
        batch = SampledGroups(placed, weights)
        metrics = train_step(self._updater, batch, self._history, self.step)
        self.step += 1
        self._history.add(self.step, digest)
        return metrics

    def _placed(self, group: Group) -> Group:
        """Returns the group with its tokens in this history: those of a run's own log as they are, others as
        drawn by this history's version of the same number, or by the newest."""
        if self.step in self._recorded and all(
            s.digest for t in group.trajectories for s in t.all_spans
        ):
            return group

        def placed(span: VersionSpan) -> VersionSpan:
            version = min(span.version, self.step)
            digest = self._history.digests.setdefault(version, "")
            return VersionSpan(version, span.tokens, digest)

        def moved(tokens: Any) -> Any:
            return replace(tokens, spans=[*map(placed, tokens.spans)])

        trajectories = [
            replace(moved(t), branches=tuple(map(moved, t.branches))) for t in group.trajectories
        ]
        return replace(group, trajectories=trajectories)

    @property
    def model(self) -> Decoder:
        return self.policy.model

    def save(self, directory: Path) -> None:
        """Writes the model in Hugging Face layout, in the dtype of the one that it began as and without UAQ's
        scaling. Raises ConfigError if it has adapters."""
        run = self.run
        if run.learner.lora:
            raise ConfigError("learner.lora: adapters are exported at the end of a run only")
        tokenizer = build_tokenizer(run.model, run.task)
        write_plain(run, copy.deepcopy(self.model), directory, tokenizer)
