"""Repetition of learner steps from a checkpoint and the log alone, without Redis, engine or network.

    checkpoints/step-A ─▶ TorchPolicy ◀─ train_step(s) ◀─ trajectories/ (groups of s, in the order logged)
                             │                     ◀─ steps/ (digests and fork: the lag of every token)
                             └─▶ metrics, digest ─▶ compared with what steps/ recorded

`train_step` is the learner's own (learner/train_step.py). A token's lag is counted with the recorded digests,
not with those of the replay, so that it is as it was even if other settings give other weights.

Each step is replayed with the settings that its record names, since a resumed run may have had others from some
step on (areal_q/system/run_dir.py, MAY_CHANGE_ON_RESUME).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from areal_q.checks.combinations import check_foreign
from areal_q.checks.machine import check_device
from areal_q.checks.model import check_experts
from areal_q.config import Run, as_before, override
from areal_q.config.load import Override, pair_of
from areal_q.errors import ConfigError, LogError
from areal_q.messages import Group
from areal_q.models import DecoderConfig, new_decoder
from areal_q.system.run_dir import (
    FIXED_CODE,
    LEARNERS_CODE,
    checkpoint_at,
    code_tables,
    differences,
    recorded_settings,
    settings_of,
    with_digests,
)
from buffer.logs.step_log import StepRecord, iter_steps
from buffer.logs.trajectory_log import iter_log, logged_steps
from buffer.sampling.replay_pool import SampledGroups
from learner import checkpoint
from learner.arithmetic import machine_name, set_arithmetic
from learner.backends.precision import set_precision
from learner.backends.single_device import TorchPolicy
from learner.data.invalid_rewards import judged
from learner.data.staleness import VersionHistory
from learner.measure.token_recorder import TokenRecorder
from learner.policy_update import MICROBATCH, SingleProcessUpdater
from learner.publishing.version_builder import VersionBuilder
from learner.train_step import train_step

ROUNDING_ONLY = ("learner.device", "learner.threads", "learner.microbatch_tokens")
"""Settings that change a step by rounding alone."""
REPLAYABLE = ("rollout.sampling.temperature", "reward.on_error")
"""Settings outside of `learner` that a replay can change."""
FIXED = (
    "learner.groups",
    "learner.group_size",
    "learner.order",
    "learner.max_lag",
    "learner.drop_uniform",
    "learner.oversampling",
    "learner.uaq",
    "learner.lora",
    "learner.reference_kl.path",
    *(f"learner.teacher.{name}" for name in ("type", "path", "url", "model")),
)
"""Settings of `learner` that a replay cannot change, because logged groups or checkpoints depend on them."""

Before = Callable[[TorchPolicy, int, SampledGroups, VersionHistory], None]
"""A function of (policy, step, batch, history) that is called before each step."""


@dataclass(frozen=True)
class Replayed:
    """One step as it was recorded and as it was replayed."""

    record: StepRecord
    groups: Sequence[Group]
    metrics: dict[str, float]
    digest: str
    """Digest of the weights after the replayed step, as they would be published; empty under other settings."""


class Replay:
    """Replays steps `first` … `stop` - 1 of the run in `directory`, changed by `settings` from step `first` on.

    Raises ConfigError for a setting that a replay cannot change, CheckpointError if there is no checkpoint at
    or before `first`, LogError if a step is not in the log.
    """

    def __init__(
        self,
        directory: Path,
        settings: Sequence[Override] | None = None,
        first: int | None = None,
        stop: int | None = None,
    ) -> None:
        self.directory = directory
        self.settings = [*(settings or [])]
        self.run = _changed(recorded_settings(directory), self.settings)
        self.checkpoint = checkpoint_at(directory, first)
        self.state = checkpoint.read_state(self.checkpoint)
        self.first = self.state.step if first is None else first
        self.records = records = _records(directory, self.state.step, stop)
        if self.first > records[-1].step:
            raise LogError(f"{directory}: no record of step {self.first}: {_end_of(directory)}")
        self.stop = records[-1].step + 1
        in_force = {h: settings_of(directory, h) for h in {r.settings for r in records}}
        rounding = [s for s in self.settings if pair_of(s)[0] in ROUNDING_ONLY]
        # The code that was learnt with is needed only where there are steps before `first`.
        code = LEARNERS_CODE if self.state.step < self.first else ()
        self._before_first = {h: _changed(run, rounding, code) for h, run in in_force.items()}
        self._from_first = {h: _changed(run, self.settings) for h, run in in_force.items()}
        self.changes = {
            key for h, run in in_force.items() for key in _changes(run, self._from_first[h])
        }
        self.present = self._before_first[records[0].settings]
        """The settings of `policy`"""
        self.policy = self._begun()
        self.machine = machine_name(self.run.learner.device)
        self.recorder: TokenRecorder | None = None
        """Collects the tokens of the step replayed last, as for the token log; None collects nothing."""
        sticky = self.policy.sticky
        self.publishes = not self.what_if and (not sticky or bool(sticky.tensors()))
        """True if versions are built again and their digests compared. There is no record for weights of
        another history, which may even be impossible to quantize, and older checkpoints lack the ranges of
        sticky scales."""

    def _begun(self) -> TorchPolicy:
        """Returns the policy of the checkpoint. Raises ConfigError for a device that is not here, and for
        changed settings that the model does not have, in the words with which a run would."""
        device = self.present.learner.device
        try:
            check_device("learner.device", device)
        except ConfigError as error:
            without = "areal-q replay --set learner.device=cpu needs none"
            raise ConfigError(f"{error}; {without}") from error
        set_arithmetic(self.present.learner.threads, device)
        shape = DecoderConfig.from_hf(self.state.model)
        for run in self._from_first.values() if self.changes else ():
            if shape.foreign is not None:
                check_foreign(run, shape.family, rollouts=False)
            check_experts(shape, run.learner)
        policy = checkpoint.policy_of(new_decoder(shape).to(device), self.present)
        checkpoint.load(self.checkpoint, self.state, policy)
        return policy

    @property
    def begins(self) -> str:
        """A sentence on the steps that must be made before the first one asked for; "" if there are none."""
        start = self.state.step
        if start == self.first:
            return ""
        return (
            f"the replay begins at step {start}: no later checkpoint before step {self.first} was kept "
            "(checkpoint.every, checkpoint.keep)"
        )

    @property
    def what_if(self) -> bool:
        """True if other settings give another history than the recorded one."""
        return any(key not in ROUNDING_ONLY for key in self.changes)

    @property
    def exact(self) -> bool:
        """True if every bit must be as recorded, because settings, machine and micro-batches are the same."""
        if self.changes:
            return False
        for record in self.records:
            cfg = self.settings_at(record).learner
            if record.machine != machine_name(cfg.device, threads=cfg.threads):
                return False
            if record.metrics.get(MICROBATCH, cfg.pass_tokens) != cfg.pass_tokens:
                return False
        return True

    def settings_at(self, record: StepRecord) -> Run:
        """Returns the settings with which the step of `record` is replayed: those of the record, changed by the
        given ones, of which only ROUNDING_ONLY apply before `first`."""
        return (self._from_first if record.step >= self.first else self._before_first)[
            record.settings
        ]

    def steps(self, before: Before | None = None) -> Iterator[Replayed]:
        """Yields one replayed step after the other, beginning at the checkpoint, which may be before
        `first`."""
        history = VersionHistory(self.present.learner.versions_kept, self.state.digests)
        builder = VersionBuilder(self.run, self.policy.sticky, smoothing=self.policy.smoothing)
        logged = iter_log(self.directory / "trajectories", self.state.step, self.stop)
        for record in self.records:
            groups = _groups_of(record, next(logged, None), self.directory)
            batch = SampledGroups(groups, record.weights)
            self._take_up(self.settings_at(record))
            history.keep = self.present.learner.versions_kept
            if record.step >= self.first and "reward.on_error" in self.changes:
                on_error, fewest = self.run.reward.on_error, self.run.learner.fewest_valid
                batch = judged(batch, on_error, fewest)
            history.forks = [record.fork]
            if before:
                before(self.policy, record.step, batch, history)
            updater = SingleProcessUpdater(self.policy)
            metrics = train_step(updater, batch, history, record.step, self.recorder)
            history.add(record.step + 1, record.digest)
            digest = ""
            if self.publishes:
                made = builder.build(self.policy.model, record.step + 1, self.policy.kv_scales)
                digest = made.manifest.digest
            yield Replayed(record, batch.groups, metrics, digest)

    def _take_up(self, run: Run) -> None:
        """Goes on with the settings `run`, as the learner does that resumes with them."""
        before, self.present = self.present, run
        if not any(key.startswith(("learner.", *REPLAYABLE)) for key in differences(before, run)):
            return
        set_arithmetic(run.learner.threads, run.learner.device)
        old, self.policy = self.policy, with_settings(self.policy, run)
        if self.publishes:
            self.policy.calibrate, self.policy.kv_scales = old.calibrate, old.kv_scales
            self.policy.sticky = old.sticky
        if self.publishes or run.learner.precision != "full":
            self.policy.smoothing = old.smoothing
            self.policy.fold()

    def unequal_tensors(self, step: int) -> list[str] | None:
        """Returns the names of the tensors in which the policy, now at `step`, differs from the checkpoint of
        that step; None if there is no such checkpoint."""
        path = self.directory / "checkpoints" / f"step-{step:06d}"
        if not path.is_dir():
            return None
        saved = checkpoint.read_tensors(path, checkpoint.read_state(path))
        now = checkpoint.tensors_of(self.policy)
        names = sorted((saved.keys() | now.keys()) - {"rng"})
        if not self.publishes:
            names = [n for n in names if not n.startswith(checkpoint.STICKY)]
        return [n for n in names if n not in saved or n not in now or not _equal(saved[n], now[n])]


def with_settings(policy: TorchPolicy, run: Run) -> TorchPolicy:
    """Returns a policy with the weights and moments of `policy`, and its reference, and the settings of `run`.

    A critic or a reference that `policy` lacks begins here, from the present policy; so do the moments of an
    optimizer of another type.
    """
    set_precision(policy.model, run)
    new = TorchPolicy(
        policy.model,
        run.learner,
        run.rollout.sampling.temperature,
        updates=policy.updates,
        skipped=policy.skipped,
        reference=policy.reference if run.learner.reference_kl else None,
    )
    if new.reference is not None:
        set_precision(new.reference, run)
        new.reference.dtype = new.model.dtype
    if type(run.learner.optimizer) is type(policy.cfg.optimizer):
        take_over(new.optimizer, policy.optimizer)
    critic, before = new.critic, policy.critic
    if critic and before and critic.cfg.trunk == before.cfg.trunk:
        critic.load_state_dict(before.state_dict())
        if type(critic.cfg.optimizer) is type(before.cfg.optimizer):
            take_over(critic.optimizer, before.optimizer)
    return new


def take_over(new: torch.optim.Optimizer, old: torch.optim.Optimizer) -> None:
    """Copies the moments of `old` into `new`, which keeps its own settings."""
    moments, groups = old.state_dict()["state"], new.state_dict()["param_groups"]
    new.load_state_dict({"state": moments, "param_groups": groups})


def _changed(run: Run, settings: Sequence[Override], code: Sequence[str] = LEARNERS_CODE) -> Run:
    """Raises ConfigError or TaskError, the latter for `code` of the user's that is not what the run began
    with."""
    return as_before(with_digests(override(run, *settings), code, replayed=True), run)


def _changes(recorded: Run, run: Run) -> list[str]:
    changes = differences(recorded, run)
    # Code with the digest that the log names is the same, wherever it lies now.
    tables = code_tables(recorded, FIXED_CODE)
    moved = [f"{n}.path" for n in tables if f"{n}.digest" not in changes]
    changes = [key for key in changes if key not in moved]
    for key in changes:
        replayable = key.startswith("learner.") or key in REPLAYABLE
        if not replayable or key.startswith(FIXED):
            raise ConfigError(
                f"{key}: cannot change in a replay, which learns from what was logged"
            )
    return changes


def _records(directory: Path, first: int, stop: int | None) -> list[StepRecord]:
    """Returns the records of the steps from `first` to before `stop`, or to the end of the log. Raises LogError
    if one is missing."""
    records = list(iter_steps(directory / "steps", first, stop))
    for expected, record in enumerate(records, first):
        if record.step != expected:
            raise LogError(f"{directory / 'steps'}: no record of step {expected}")
    if not records or (stop is not None and records[-1].step < stop - 1):
        missing = records[-1].step + 1 if records else first
        raise LogError(f"{directory / 'steps'}: no record of step {missing}: {_end_of(directory)}")
    return records


def _end_of(directory: Path) -> str:
    steps = logged_steps(directory)
    return f"the log ends at step {steps - 1}" if steps else "nothing is logged"


def _groups_of(
    record: StepRecord, logged: tuple[int, list[Group]] | None, directory: Path
) -> list[Group]:
    """Returns the groups of `logged`, (step, groups). Raises LogError unless they are those that `record`
    names, in its order."""
    if logged is None or logged[0] != record.step:
        raise LogError(f"{directory / 'trajectories'}: no groups of step {record.step}")
    step, groups = logged
    if [group.ticket.number for group in groups] != record.tickets:
        raise LogError(
            f"{directory / 'trajectories'}: other groups at step {step} than were learnt from"
        )
    return groups


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns True if both tensors are equal bit for bit, so that NaN equals itself, and 0.0 is not -0.0."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
