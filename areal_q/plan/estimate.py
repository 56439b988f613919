"""Memory, wire and speed of a run together: does it fit, how fast is it, what would be better."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from msgspec import structs

from areal_q.checks.automatic import settled
from areal_q.checks.combinations import check_family, check_foreign
from areal_q.checks.memory import learner_memory, of_others, total, worker_memory
from areal_q.checks.model import check_engine
from areal_q.checks.pass_memory import Lengths, Part
from areal_q.config import Run, SglangEngine, TorchEngine, VllmEngine
from areal_q.config.rules import broken_rules
from areal_q.errors import ConfigError
from areal_q.models import DecoderConfig
from areal_q.observability.run_summary import plural
from areal_q.plan.hardware import Hardware
from areal_q.plan.speed import NONE, Correction, HardwareSplit, Speed, speed
from areal_q.plan.step_load import Load
from areal_q.plan.wire import ZEROMQ_SHARE, Wire, wire
from areal_q.plan.worker_speed import groups_drawn, oversampling_of
from areal_q.system.disk import size

REDIS_BYTES = 9.2
"""Bytes of a response's token in Redis (docs/sizing.md)"""
_IDLE = 0.15
"""Idle shares above this, and such a part of a step, are worth a line of advice."""


@dataclass(frozen=True)
class RunEstimate:
    """What a run takes and how fast it is expected to be. Times are in seconds, sizes in bytes."""

    weights: int
    hardware: Hardware
    lengths: Lengths
    useful: float
    learner: list[Part]
    """Those of its first process, if there are several."""
    worker: list[Part]
    need: int
    """Bytes of the fullest GPU; of a processor's memory those of all processes."""
    fits: bool
    wire: Wire
    sending_s: float
    """Seconds for which a version occupies the learner's network card, all workers elsewhere."""
    redis: float
    token_bytes: float
    """The share of each token of a response in it."""
    speed: Speed
    others: list[Speed] = field(default_factory=list)
    """Other splits, the best first; only --json shows them."""
    advice: list[str] = field(default_factory=list)


def estimate(
    run: Run,
    shape: DecoderConfig,
    load: Load,
    on: Hardware,
    learner_gpus: int = 0,
    gbit_s: float = 100.0,
    correction: Correction = NONE,
) -> RunEstimate:
    """Returns the estimate for the learner on `learner_gpus`, 0: on `learner.processes` if these are several,
    else on as many as are best, and workers on the others; on a processor with the processes of the settings.
    Raises ConfigError if no worker's GPUs are left."""
    run = settled(run)
    found = [
        speed(run, shape, load, on, split, correction) for split in _splits(run, on, learner_gpus)
    ]
    longest = Lengths(load.lengths.prompt, run.rollout.tokens_after_prompt)
    needs = {one.split: _need(run, shape, longest, on, one.split) for one in found}
    fitting = [one for one in found if needs[one.split] <= on.device.memory]
    # Of equals the one that leaves the fewest GPUs idle: the learner's are the dearer ones.
    ranked = sorted(
        fitting or found, key=lambda one: (round(one.step_s, 3), one.split.learner_gpus)
    )
    best, others = ranked[0], ranked[1:]
    whole = wire(run, shape)
    sent = Wire(whole.snapshot, whole.delta * correction.delta)
    made = RunEstimate(
        weights=shape.weights,
        hardware=on,
        lengths=load.lengths,
        useful=load.useful,
        learner=list(learner_memory(run, shape, longest, best.split.learner_gpus)),
        worker=list(worker_memory(run, shape, longest)),
        need=needs[best.split],
        fits=bool(fitting),
        wire=sent,
        sending_s=best.split.workers * sent.delta * 8 / (gbit_s * 1e9 * ZEROMQ_SHARE),
        redis=_redis_bytes(run, shape, load.lengths),
        token_bytes=_token_bytes(run, shape),
        speed=best,
        others=others[:3],
    )
    return replace(made, advice=list(_advice(run, shape, load, correction, made)))


def _redis_bytes(run: Run, shape: DecoderConfig, lengths: Lengths) -> float:
    """Returns the bytes of the groups that no checkpoint covers yet."""
    cfg = run.learner
    steps = run.checkpoint.every + cfg.max_lag + 1
    each = lengths.response * _token_bytes(run, shape) + lengths.prompt * _route_bytes(run, shape)
    return steps * cfg.groups * cfg.group_size * each


def _token_bytes(run: Run, shape: DecoderConfig) -> float:
    """Returns the bytes of a response's token: id, log-prob and mask, the ids that it was drawn from where
    sampling is truncated, and its routes."""
    drawn_from = 4 * run.rollout.sampling.top_k if run.rollout.sampling.truncated else 0
    return REDIS_BYTES + drawn_from + _route_bytes(run, shape)


def _route_bytes(run: Run, shape: DecoderConfig) -> int:
    if shape.experts is None or not run.learner.routing_replay:
        return 0
    number = 1 if shape.experts.count <= 256 else 2
    return len(shape.sparse_layers) * shape.experts.per_token * number


def _splits(run: Run, on: Hardware, learner_gpus: int) -> Iterator[HardwareSplit]:
    """Yields who may work on what: on GPUs every number of learner's GPUs that leaves some for a worker."""
    each = getattr(run.rollout.engine, "tensor_parallel", 1)
    asked, processes = f"--learner-gpus {learner_gpus}", run.learner.processes
    if processes > 1 and not learner_gpus and not on.is_cpu:
        asked, learner_gpus = f"learner.processes = {processes}", processes
    if learner_gpus > (on.count - each if on.count > each else on.count):
        raise ConfigError(f"{asked}: there are {on.count} in all, and a worker takes {each}")
    if on.is_cpu:
        yield HardwareSplit(processes, max(1, run.rollout.workers))
        return
    if on.count < each:
        raise ConfigError(f"rollout.engine.tensor_parallel = {each}: there is only {on}")
    if on.count == each:  # learner and worker share them
        yield HardwareSplit(learner_gpus or on.count, 1)
        return
    for gpus in [learner_gpus] if learner_gpus else range(1, on.count - each + 1):
        yield HardwareSplit(gpus, (on.count - gpus) // each)


def _need(
    run: Run, shape: DecoderConfig, longest: Lengths, on: Hardware, split: HardwareSplit
) -> int:
    """Returns the bytes of the fullest GPU, or of a processor's memory those of all processes."""
    learner = list(learner_memory(run, shape, longest, split.learner_gpus))
    worker = list(worker_memory(run, shape, longest))
    if on.is_cpu:
        others = (split.learner_gpus - 1) * total(of_others(learner))
        return total(learner) + others + split.workers * total(worker)
    mine, theirs = total(learner, True), total(worker, True)
    shared = on.count == getattr(run.rollout.engine, "tensor_parallel", 1)
    return mine + theirs if shared else max(mine, theirs)


def _advice(
    run: Run, shape: DecoderConfig, load: Load, correction: Correction, made: RunEstimate
) -> Iterator[str]:
    """Yields what would be better, the most important first."""
    now, on = made.speed, made.hardware
    if not made.fits:
        yield _too_large(made)
    elif on.is_cpu:
        yield from _workers_wanted(run, shape, load, correction, made)
    else:
        yield from _splits_compared(made)
    most = min(100, round(oversampling_of(run, load), 1))
    then_s = _step_s(run, shape, load, correction, made, oversampling=most)
    if run.learner.oversampling < most and then_s < (1 - _IDLE) * now.step_s:
        yield (
            f"the learner would wait {now.waiting_s:.2g} s a step for groups in place of others: "
            f"learner.oversampling={most:g}, a step would take {then_s:.3g} s"
        )
    old = 1 - run.learner.groups / load.useful / groups_drawn(run, load)
    if old > _IDLE:
        yield f"{old:.0%} of what is drawn would grow too old: learner.oversampling={most:g}"
    if run.learner.max_lag == 0 and made.fits:
        then_s = _step_s(run, shape, load, correction, made, max_lag=1)
        yield f"learner.max_lag=1: learner and workers work at the same time, a step would take {then_s:.3g} s"
    if not isinstance(run.rollout.engine, TorchEngine) or on.is_cpu:
        return
    if engines := " or ".join(_serving(run, shape, int(load.lengths.prompt))):
        yield f"rollout.engine.type={engines}: the torch engine is a reference, and slow on a GPU"


def _step_s(
    run: Run,
    shape: DecoderConfig,
    load: Load,
    correction: Correction,
    made: RunEstimate,
    **learner: float,
) -> float:
    """Returns the seconds of a step with these settings of the learner in place of its own."""
    other = structs.replace(run, learner=structs.replace(run.learner, **learner))
    return speed(other, shape, load, made.hardware, made.speed.split, correction).step_s


def _serving(run: Run, shape: DecoderConfig, prompt: int) -> Iterator[str]:
    """Yields the types of the engines for GPUs that a model of this `shape` may be run by."""
    for engine in (VllmEngine(), SglangEngine()):
        served = structs.replace(run, rollout=structs.replace(run.rollout, engine=engine))
        if broken_rules(served):
            continue
        with suppress(ConfigError):
            if shape.foreign is None:
                check_family(served, shape)
            else:
                check_foreign(served, shape.family)
            check_engine(shape, served, prompt)
            yield str(engine.__struct_config__.tag)


def _too_large(made: RunEstimate) -> str:
    gpu = not made.hardware.is_cpu
    learner, worker = total(made.learner, gpu), total(made.worker, gpu)
    where = "learner" if learner >= worker else "worker"
    who = f"the {where} takes"
    if made.need > max(learner, worker):
        who = f"the learner and {plural(made.speed.split.workers, 'worker')} take"
    fix = "learner.optimizer.type=adamw8bit, learner.recompute=true, learner.microbatch_tokens, learner.lora"
    if where == "worker":
        fix = "rollout.format=int4, fewer rollout.engine.slots"
    return f"it does not fit: {who} {size(made.need)} of {size(made.hardware.device.memory)}; {fix}"


def _workers_wanted(
    run: Run, shape: DecoderConfig, load: Load, correction: Correction, made: RunEstimate
) -> Iterator[str]:
    now, cores = made.speed, made.hardware.device.cores
    if now.learner_idle > _IDLE and run.learner.max_lag:
        more = range(now.split.workers + 1, 4 * now.split.workers + 2)
        each = (now.split._replace(workers=n) for n in more)
        found = (speed(run, shape, load, made.hardware, split, correction) for split in each)
        wanted = next((one.split.workers for one in found if one.learner_idle < _IDLE), 0)
        told = f"the learner would idle {now.learner_idle:.0%}"
        if wanted:
            yield f"{told}: rollout.workers={wanted}, if there are cores for them"
        else:
            yield f"{told}: workers on other machines (areal-q rollout), or a lighter rollout.format"
    elif now.workers_idle > 0.5 and now.split.workers > 1:
        yield f"workers would idle {now.workers_idle:.0%}: fewer of them suffice"
    elif now.workers_idle > 0.5 and now.split.learner_gpus * run.learner.threads == 1 < cores:
        yield f"the worker would idle {now.workers_idle:.0%}: learner.threads=2"


def _splits_compared(made: RunEstimate) -> Iterator[str]:
    now = made.speed
    if now.learner_idle > _IDLE:
        yield f"the learner would idle {now.learner_idle:.0%}: more GPUs for workers, or a lighter format"
    elif now.workers_idle > _IDLE:
        yield f"workers would idle {now.workers_idle:.0%}: a larger batch, or fewer GPUs"


def rows(made: RunEstimate) -> Sequence[tuple[str, str, str]]:
    """Returns (name, value, formula) of each line about wire and speed."""
    now, formulas = made.speed, made.speed.formulas
    drawn = f"of {made.lengths.response:.3g} tokens after prompts of {made.lengths.prompt:.3g}"
    return [
        ("a version", size(made.wire.snapshot), "codes, scales, and what is not quantized"),
        (
            "its delta",
            size(made.wire.delta),
            "2 · W / what deltas were smaller at this learning rate; within a factor of 5",
        ),
        (
            "sent a version",
            f"{made.sending_s:.3g} s",
            "workers · delta / (network · 0.7), if all are on other hosts",
        ),
        (
            "Redis",
            size(made.redis),
            f"(checkpoint.every + max_lag + 1) · responses {drawn} · {made.token_bytes:g} bytes",
        ),
        (
            "learner",
            f"{now.learner_tokens_s:,.0f} tokens/s, {now.learner_s:.3g} s a step",
            formulas["learner's step"],
        ),
        ("a worker", f"{now.worker_tokens_s:,.0f} tokens/s", formulas["a worker"]),
        ("workers", f"{now.workers_s:.3g} s a step", formulas["workers' step"]),
        ("waiting", f"{now.waiting_s:.3g} s a step", formulas["waiting"]),
        ("a step", f"{now.step_s:.3g} s", formulas["a step"]),
        ("learner idle", f"{now.learner_idle:.0%}", "1 - learner / step"),
        ("workers idle", f"{now.workers_idle:.0%}", "1 - workers / step"),
        ("staleness", f"{now.lag:.2g} versions", formulas["staleness"]),
    ]
