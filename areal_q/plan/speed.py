"""How long a step takes, of the learner and of the workers, and what follows for idle shares and staleness.

    learner   FLOP of a step / (rate of products · the share that a whole step reaches)
    workers   tokens of a step, and of its part of an evaluation, / (workers · tokens/s of one)
              + steps in which only the longest response is still drawn, unless there is other work meanwhile
    a step    the longer of both; with max_lag = 0 their sum, as each waits for the other; on a processor no
              less than both need of its cores

A token's FLOP: 2 for each weight in a forward pass and 4 in the backward pass, attention beside it.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from areal_q.checks.disk_use import format_bytes
from areal_q.checks.memory import linear_weights
from areal_q.checks.pass_memory import Lengths, keeps_exponentials, microbatch_responses
from areal_q.config import HfEngine, Run, ScriptedEngine, TorchEngine
from areal_q.models import DecoderConfig
from areal_q.models.layer_kinds import CHUNK
from areal_q.observability.run_summary import plural
from areal_q.plan.hardware import Hardware

DECODE_SHARE = {"as bfloat16": 0.75, "emulated": 0.42, "other": 0.64, "gpu": 0.5}
"""The part of products' or memory's rate that decoding reaches: measured on CPUs (docs/sizing.md), of formats
that are multiplied as bfloat16 is, of bfloat16 that is asked for where the processor does not multiply it, and
of others; assumed for vLLM and SGLang on GPUs"""
CODES = ("int8", "fp8", "fp8-channel")
"""Formats whose products are of eight bits on both sides"""
AS_BFLOAT16 = ("bf16", "int8-weight", "fp8-weight")
"""Formats whose weights have a byte or two each, beside activations that are not rounded"""
LAYER_S = {"cpu": 6e-5, "torch on a GPU": 6.8e-4, "served": 1.5e-4, "served, compiled": 3e-5}
"""Seconds that a layer of a decoding step takes however few rows there are: measured for our engine
(bench/README.md, docs/gpu.md), assumed for served ones"""
SERVED_S = 5e-3
"""Seconds that a served engine's scheduler takes for a step, assumed"""
PASS_LAYER_S = {"cpu": 7e-3, "gpu": 3e-3}
"""Seconds that Python and the launches of kernels take for a layer, forward and backward: 0.02 s of a step of
0.6M parameters (bench/README.md), 0.15 of the 14,900 launches at 0.5B on an H100 (docs/gpu.md)"""
RESPONSE_S = 1.1e-4
"""Seconds of a worker for a response beside its products: its row's own work, record, reward, Redis. Busy
workers of the quickstart drew 27,000 to 37,000 tokens/s in every format, 3.8 a response (bench/README.md)"""
OPTIMIZER_BYTES = 28
"""Bytes read and written for a weight in an optimizer step: itself, its gradient, two moments"""


@dataclass(frozen=True)
class Load:
    """What a step works on."""

    lengths: Lengths
    useful: float = 1.0
    """The part of the groups drawn that the learner uses; the rest is dropped."""


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


def active_linears(shape: DecoderConfig) -> float:
    """Returns how many weights of the linears a token meets: with experts, those of the few it goes to."""
    if shape.experts is None:
        return linear_weights(shape)
    expert = 3 * shape.width * shape.experts.mlp * len(shape.sparse_layers)
    return linear_weights(shape) - expert * (shape.experts.count - shape.experts.per_token)


def mixing_flop(shape: DecoderConfig, seen: float, chunk: float = 1) -> float:
    """Returns the FLOP of a token's attention to the `seen` ones before it, and of the states that it moves on
    among the tokens of a `chunk`: areal_q/models/layers/gated_delta.py has their products."""
    flop = 4 * seen * shape.heads * shape.head_dim * len(shape.attention_layers)
    if rule := shape.delta:
        within = chunk * (5 * rule.key_dim + 3 * rule.value_dim)
        each = 6 * rule.key_dim * rule.value_dim + within
        flop += len(rule.layers) * rule.value_heads * each
    return flop


def passes_of(run: Run, load: Load) -> float:
    """Returns how many micro-batches a step has."""
    cfg = run.learner
    responses = cfg.groups * cfg.group_size / microbatch_responses(run, load.lengths)
    return max(float(cfg.minibatches), responses)


def learner_flop(run: Run, shape: DecoderConfig, load: Load) -> tuple[float, str]:
    """Returns the FLOP of a step, and their formula. A group's prompt counts once, a response's last token
    predicts nothing; the head works on response tokens alone, whose logits are computed again backward unless
    they are kept."""
    cfg, (prompt, response) = run.learner, (load.lengths.prompt, load.lengths.response)
    responses = cfg.groups * cfg.group_size
    inputs, drawn = responses * max(0.0, response - 1) + cfg.groups * prompt, responses * response
    passes = passes_of(run, load)
    before = 0.0 if cfg.proximal == "loglinear" else 1.0
    if cfg.update_scores_itself:
        before *= 1 - 1 / passes
    units = before + cfg.epochs * (3 + cfg.recompute) + bool(cfg.reference_kl)
    again = not keeps_exponentials(run, shape, load.lengths)
    of_head = before + (3 + again) * cfg.epochs + bool(cfg.reference_kl)
    mixing = mixing_flop(shape, (prompt + response) / 2, min(CHUNK, prompt + response))
    flop = (
        units * inputs * (2 * active_linears(shape) + mixing)
        + of_head * drawn * 2 * shape.vocab_size * shape.width
    )
    return flop, (
        f"{units:.3g} · {inputs:,.0f} tokens · 2 · {active_linears(shape):,.0f} weights"
        f" + {of_head:.3g} · {drawn:,.0f} · 2 · V · D + attention = {flop:.3g} FLOP"
    )


def learner_seconds(
    run: Run, shape: DecoderConfig, load: Load, on: Hardware, gpus: int
) -> tuple[float, str]:
    """Returns the seconds of a learner's step on `gpus`, or on its threads of a processor, and the formula."""
    device, cfg = on.device, run.learner
    flop, told = learner_flop(run, shape, load)
    dtype = cfg.products
    share = device.shares[dtype]
    units = _cores_of_learner(run, on) if on.is_cpu else gpus
    rate = {"float32": device.float32, "bfloat16": device.bfloat16}[dtype]
    optimizer = cfg.minibatches * cfg.epochs * OPTIMIZER_BYTES * shape.weights / device.bandwidth
    rest = optimizer / (1 if on.is_cpu else gpus)
    rest += (
        cfg.epochs
        * passes_of(run, load)
        * PASS_LAYER_S["cpu" if on.is_cpu else "gpu"]
        * shape.layers
    )
    seconds = flop / (units * rate * share) + rest
    what = plural(units, "thread" if on.is_cpu else "GPU")
    return seconds, (
        f"{told} / ({what} · {rate / 1e9:,.0f} GFLOP/s of {dtype} · {share:g})"
        f" + {rest:.2g} s of the optimizer and between kernels"
    )


def worker_rate(
    run: Run,
    shape: DecoderConfig,
    load: Load,
    on: Hardware,
    workers: int,
    rows: float = math.inf,
    shared: int | None = None,
) -> tuple[float, str]:
    """Returns the response tokens that a worker draws per second with `rows` responses at once, by default as
    many as it has, and the formula. `shared`: responses to a prompt, by default those of a group."""
    engine, device = run.rollout.engine, on.device
    if isinstance(engine, ScriptedEngine):
        return engine.tokens_per_s, "rollout.engine.tokens_per_s"
    outstanding = run.learner.max_outstanding * run.learner.group_size
    rows = max(1.0, min(rows, engine.slots, outstanding / workers))
    shared = shared or run.learner.group_size
    torch_engine = isinstance(engine, TorchEngine)
    codes = run.rollout.format in CODES and (on.is_cpu or not torch_engine)
    rate = device.eight_bits if codes else device.bfloat16
    if on.is_cpu:
        kind, units, paths = "cpu", _cores_of_worker(run, on, workers), 1
    else:
        units = paths = getattr(engine, "tensor_parallel", 1)
        kind = "torch on a GPU" if torch_engine else "served"
        kind += ", compiled" if getattr(engine, "compiled", False) else ""
    # The rows of one pass, of which transformers' engine makes one for each group
    each = min(rows, shared) if isinstance(engine, HfEngine) else rows
    flop, read = _decoding(run, shape, load.lengths, each, 4 if on.is_cpu else 2, shared)
    reading, multiplying = read / (device.bandwidth * paths), each * flop / (rate * units)
    share = _decode_share(run, on)
    layers = LAYER_S[kind] * shape.layers + SERVED_S * kind.startswith("served")
    step = max(reading, multiplying) / share + layers
    beside = each * RESPONSE_S / load.lengths.response
    told = (
        f"{each:,.0f} rows / (max(memory {reading * 1e3:.3g} ms, products {multiplying * 1e3:.3g} ms)"
        f" / {share:g} + {layers * 1e3:.3g} ms between kernels + {beside * 1e3:.3g} ms of records)"
    )
    return each / (step + beside), told + ", a group at a time" * (each < rows)


def _decode_share(run: Run, on: Hardware) -> float:
    if not on.is_cpu:
        return DECODE_SHARE["gpu"]
    asked = getattr(run.rollout.engine, "dtype", "auto") in ("bfloat16", "int8")
    if asked and run.rollout.format not in CODES and on.device.bfloat16 <= on.device.float32:
        return DECODE_SHARE["emulated"]
    return DECODE_SHARE["as bfloat16" if run.rollout.format in AS_BFLOAT16 else "other"]


def _cores_of_learner(run: Run, on: Hardware) -> int:
    return min(run.learner.processes * run.learner.threads, on.device.cores)


def _cores_of_worker(run: Run, on: Hardware, workers: int) -> float:
    cores = (on.device.cores - _cores_of_learner(run, on)) / workers
    return max(1.0, min(run.rollout.threads, cores))


def workers_seconds(
    run: Run, shape: DecoderConfig, load: Load, on: Hardware, workers: int, waiting: bool
) -> tuple[float, float, str]:
    """Returns the seconds in which the workers are busy for a step, the response tokens that they draw then,
    and the formula. If they are `waiting` for the next version, a step's last responses have them to
    themselves: the longest is taken to reach max_tokens."""
    response = load.lengths.response
    rate, _ = worker_rate(run, shape, load, on, workers)
    drawn = run.learner.groups * run.learner.group_size * response / load.useful
    evaluated = run.eval.problems / run.eval.every * response
    alone, _ = worker_rate(run, shape, load, on, workers, shared=1)
    rest = max(0.0, run.rollout.sampling.max_tokens - response) if waiting else 0.0
    last_s = rest / worker_rate(run, shape, load, on, workers, rows=1)[0]
    seconds = drawn / (rate * workers) + evaluated / (alone * workers) + last_s
    told = f"{drawn:,.0f} tokens / ({workers} · {rate:,.0f} /s)"
    told += f" + {evaluated:,.0f} of evaluations / ({workers} · {alone:,.0f} /s)"
    return (
        seconds,
        drawn + evaluated,
        told + f" + {last_s:.2g} s of the longest response" * (rest > 0),
    )


def _decoding(
    run: Run, shape: DecoderConfig, lengths: Lengths, rows: float, item: int, shared: int
) -> tuple[float, float]:
    """Returns the FLOP of a token, its part of a prompt of `shared` responses included, and the bytes that a
    step of `rows` reads: weights, head, and keys and values of `item` bytes each."""
    prompt, response = lengths.prompt, lengths.response
    weights, head = active_linears(shape), shape.vocab_size * shape.width
    flop = 2 * (weights + head) + 2 * weights * prompt / (shared * response)
    flop += mixing_flop(shape, prompt + response / 2)
    item = 1 if getattr(run.rollout.engine, "kv_cache", "auto") == "fp8" else item
    kv = 2 * len(shape.attention_layers) * shape.kv_heads * shape.head_dim * item
    read = format_bytes(run.rollout.format) * weights + 2 * head
    if shape.delta:  # read and written
        read += rows * 8 * len(shape.delta.layers) * shape.delta.state_numbers
    return flop, read + rows * kv * (prompt + response / 2)


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
    waits = cfg.max_lag == 0
    workers_s, drawn, of_workers = workers_seconds(*each, waits)
    if not waits and workers_s / correction.workers < learner_s:
        workers_s, drawn, of_workers = workers_seconds(*each, waiting=True)
    workers_s /= correction.workers
    step_s = learner_s + workers_s if waits else max(learner_s, workers_s)
    if on.is_cpu:
        busy = learner_s * _cores_of_learner(run, on)
        busy += workers_s * split.workers * _cores_of_worker(run, on, split.workers)
        step_s = max(step_s, busy / on.device.cores)
    lag, of_lag = expected_lag(run, learner_s, workers_s, split.workers)
    return Speed(
        split,
        learner_s,
        workers_s,
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
            "a step": "learner + workers" if waits else "max(learner, workers, what the cores do)",
            "staleness": of_lag,
        },
    )


def expected_lag(run: Run, learner_s: float, workers_s: float, workers: int) -> tuple[float, str]:
    """Returns the mean version lag of tokens.

    Where the learner is the slower one, workers draw at once what a new version admits, and it waits until
    max_lag further steps are done. Where workers are, c batches are drawn at once, through c versions."""
    cfg = run.learner
    if cfg.max_lag == 0:
        return 0.0, "max_lag = 0"
    if learner_s >= workers_s:
        return float(cfg.max_lag), "max_lag, since the learner is the slower one"
    slots = getattr(run.rollout.engine, "slots", 1 << 20)
    at_once = min(cfg.max_lag + 1, max(1.0, workers * slots / (cfg.groups * cfg.group_size)))
    return (
        at_once - 1
    ) / 2, f"({at_once:.2g} batches drawn at once - 1) / 2, since the workers are the slower ones"
