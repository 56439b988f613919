"""One examination by the doctor: checks of the logged groups, then a replay of some steps with measurements."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from typer import echo

from areal_q.config import Run
from areal_q.errors import CheckpointError, ConfigError, LogError, TaskError
from areal_q.models import DecoderConfig
from areal_q.observability.learning_faults import learning_faults
from areal_q.observability.metrics_log import Record, read_metrics
from areal_q.observability.progress_bar import progress_of
from areal_q.observability.run_summary import mean
from areal_q.system.run_dir import METRICS_FILE, recorded_settings
from areal_q.tasks.stops import read_stops
from buffer.logs.step_log import StepRecord, iter_steps
from buffer.logs.trajectory_log import iter_log, logged_steps
from learner import checkpoint
from learner.doctor.diagnosis import TERMS, Case, Finding, LogFacts, TokenTable, diagnose, look_at
from learner.doctor.probe import Probe
from learner.replay.compare import compare
from learner.replay.replay_steps import Replay

WINDOW = 10
"""Number of the newest steps that are examined by default."""


@dataclass(frozen=True)
class Examined:
    directory: Path
    run: Run
    first: int
    stop: int
    facts: LogFacts
    tokens: TokenTable
    """The tokens of the steps; empty if these could not be replayed."""
    findings: list[Finding]
    exact: bool | None
    """True if the replay gave what was recorded; None if there was no replay."""
    note: str
    """Why there was no replay; empty if there was one."""


def examine(directory: Path, first: int | None, stop: int | None) -> Examined:
    """Examines steps `first` … `stop` - 1 of the run in `directory`, by default the newest WINDOW steps. Raises
    LogError if there is no run, or its log lacks such a step."""
    run = recorded_settings(directory)
    end = logged_steps(directory)
    asked, stop = stop, end if stop is None else min(stop, end)
    records = list(iter_steps(directory / "steps", 0, stop))
    steps = [record.step for record in records]
    if not steps:
        before = f" before {asked}" if asked else ""
        raise LogError(f"{directory / 'steps'}: no step is logged{before}; see logs/learner.log")
    stop = steps[-1] + 1
    first = max(steps[0], stop - WINDOW) if first is None else first
    if first >= stop:
        raise LogError(f"{directory / 'steps'}: no record of step {first}")
    logged = iter_log(directory / "trajectories", first, stop, validate=False)
    checkpoints = checkpoint.steps(directory / "checkpoints")
    layout = checkpoint.read_state(checkpoints[-1]).model if checkpoints else {}
    model = DecoderConfig.from_hf(layout) if layout else None
    facts = look_at(logged, tuple(read_stops(directory)))
    probe = Probe(run, first)
    exact, note = None, ""
    if facts.missing or facts.positive:
        note = "the log breaks its contract, so its steps were not replayed"
    else:
        try:
            exact = _replay(directory, first, stop, probe)
        except (CheckpointError, ConfigError, TaskError) as error:  # own code may be another by now
            note = f"no decomposition: {error}"
    tokens = probe.table() if probe.parts else empty()
    disagreement = mean((r.metrics for r in records if r.step >= first), "routing/disagreement")
    experts = bool(model and model.sparse_layers)
    faults = learning_faults(_of_whole_run(directory, records))
    case = Case(run, facts, tokens, disagreement, experts, faults, probe.noise_rms())
    findings = diagnose(case)
    return Examined(directory, run, first, stop, facts, tokens, findings, exact, note)


def _of_whole_run(directory: Path, records: Sequence[StepRecord]) -> Iterable[Record]:
    """Returns the run's metrics; without their file those of the logged steps, which lack the evaluations."""
    path = directory / METRICS_FILE
    if path.exists():
        return read_metrics(path)
    return [{"kind": "step", "step": r.step + 1, **r.metrics} for r in records]


def _replay(directory: Path, first: int, stop: int, probe: Probe) -> bool:
    replay = Replay(directory, None, first, stop)
    same = True
    if replay.begins:
        echo(replay.begins, err=True)
    with progress_of(len(replay.records), "steps replayed") as advance:
        for one in replay.steps(probe):
            advance()
            same = same and not compare(one, replay.exact)
    return same


def empty() -> TokenTable:
    none = np.zeros(0)
    whole = dict.fromkeys(("step", "lag", "position", "response"), none.astype(np.int64))
    real = dict.fromkeys(("advantage", "behavior", "proximal", "entropy"), none)
    return TokenTable(**whole, **real, terms=np.zeros((0, len(TERMS))))
