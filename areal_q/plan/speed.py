"""How long a step takes, of the learner and of the workers, and what follows for idle shares and staleness.

    learner   FLOP of a step / (rate of products · the share that a whole step reaches)
    workers   tokens of a step, and of its part of an evaluation, / (workers · tokens/s of one)
              + steps in which only the longest response is still drawn, unless there is other work meanwhile
    waiting   rounds in which workers draw groups anew for the learner, where too few that it can use are ready
    a step    the longer of learner + waiting and workers; with max_lag = 0 learner + the longer of the others,
              as each waits for the other; on a processor no less than all need of its cores

`Speed.formulas` has each with its numbers.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from areal_q.config import Run
from areal_q.models import DecoderConfig
from areal_q.plan.hardware import Hardware
from areal_q.plan.learner_speed import learner_seconds
from areal_q.plan.step_load import Load, cores_of_learner, cores_of_worker
from areal_q.plan.worker_speed import waiting_seconds, worker_rate, workers_seconds


@dataclass(frozen=True)
class Correction:
    """What a run measured, over what these formulas give for it."""

    learner: float = 1.0
    workers: float = 1.0
    delta: float = 1.0


NONE = Correction()


class HardwareSplit(NamedTuple):
    """A division of the hardware. On a CPU both counts are of processes."""

    learner_gpus: int
    workers: int


@dataclass(frozen=True)
class Speed:
    """What is expected of a run, in the long run."""

    split: HardwareSplit
    learner_s: float
    """Seconds of the learner for a step, waiting not included."""
    workers_s: float
    """Seconds of all workers for a step's tokens."""
    waiting_s: float
    """Seconds of them in which the learner waits for groups in place of others."""
    step_s: float
    learner_tokens_s: float
    """Response tokens that the learner could learn from per second."""
    worker_tokens_s: float
    """Response tokens, those of evaluations among them, that one busy worker draws per second."""
    learner_idle: float
    workers_idle: float
    lag: float
    """Mean version lag of a token that is learnt from."""
    formulas: dict[str, str] = field(default_factory=dict)


def speed(
    run: Run,
    shape: DecoderConfig,
    load: Load,
    on: Hardware,
    split: HardwareSplit,
    correction: Correction = NONE,
) -> Speed:
    """Returns what is expected with `split`."""
    cfg, each = run.learner, (run, shape, load, on, split.workers)
    learner_s, of_learner = learner_seconds(run, shape, load, on, split.learner_gpus)
    learner_s *= correction.learner
    by_turns = cfg.max_lag == 0
    workers_s, drawn, of_workers = workers_seconds(*each, by_turns)
    if not by_turns and workers_s / correction.workers < learner_s:
        workers_s, drawn, of_workers = workers_seconds(*each, waiting=True)
    waiting_s, of_waiting = waiting_seconds(*each)
    workers_s, waiting_s = workers_s / correction.workers, waiting_s / correction.workers
    step_s = max(learner_s + waiting_s, workers_s + by_turns * learner_s)
    if on.is_cpu:
        beside = max(0.0, workers_s - waiting_s) * split.workers
        busy = learner_s * cores_of_learner(run, on)
        busy += beside * cores_of_worker(run, on, split.workers)
        step_s = max(step_s, waiting_s + busy / on.device.cores)
    lag, of_lag = expected_lag(run, load, learner_s, workers_s, split.workers)
    return Speed(
        split,
        learner_s,
        workers_s,
        waiting_s,
        step_s,
        learner_tokens_s=cfg.groups * cfg.group_size * load.lengths.response / learner_s,
        worker_tokens_s=drawn / (workers_s * split.workers),
        learner_idle=1 - learner_s / step_s,
        workers_idle=1 - workers_s / step_s,
        lag=lag,
        formulas={
            "learner's step": of_learner,
            "a worker": worker_rate(*each)[1],
            "workers' step": of_workers,
            "waiting": of_waiting,
            "a step": "learner + max(workers, waiting)"
            if by_turns
            else "max(learner + waiting, workers, waiting + what the cores do beside it)",
            "staleness": of_lag,
        },
    )


def expected_lag(
    run: Run, load: Load, learner_s: float, workers_s: float, workers: int
) -> tuple[float, str]:
    """Returns the mean version lag of tokens.

    Where the learner is the slower one, workers draw at once what a new version admits, and it waits until
    the batches before it are done, which are fewer if a part of their groups is dropped. Where workers are, c
    batches are drawn at once, through c versions."""
    cfg = run.learner
    if cfg.max_lag == 0:
        return 0.0, "max_lag = 0"
    if learner_s >= workers_s:
        ahead = load.useful * (cfg.max_outstanding / cfg.groups - 1)
        told = f"min(max_lag, {ahead:.2g} batches ahead), since the learner is the slower one"
        return min(cfg.max_lag, ahead), told
    slots = getattr(run.rollout.engine, "slots", 1 << 20)
    at_once = min(cfg.max_lag + 1, max(1.0, workers * slots / (cfg.groups * cfg.group_size)))
    return (
        at_once - 1
    ) / 2, f"({at_once:.2g} batches drawn at once - 1) / 2, since the workers are the slower ones"
