"""How fast workers draw, how long they are busy for a step, and how long the learner waits for them."""

import math

from areal_q.checks.disk_use import format_bytes
from areal_q.checks.pass_memory import Lengths
from areal_q.config import HfEngine, Run, ScriptedEngine, TorchEngine
from areal_q.models import DecoderConfig
from areal_q.plan.hardware import Hardware
from areal_q.plan.step_load import Load, active_linears, cores_of_worker, mixing_flop

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
RESPONSE_S = 1.1e-4
"""Seconds of a worker for a response beside its products: its row's own work, record, reward, Redis. Busy
workers of the quickstart drew 27,000 to 37,000 tokens/s in every format, 3.8 a response (bench/README.md)"""


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
        kind, units, paths = "cpu", cores_of_worker(run, on, workers), 1
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


def groups_drawn(run: Run, load: Load) -> float:
    """Returns the groups that are drawn for a step. What is ready lasts max_lag steps at most, so that of more
    than they use the rest grows too old."""
    cfg = run.learner
    ready = (cfg.max_outstanding - cfg.groups) / cfg.max_lag if cfg.max_lag else cfg.max_outstanding
    return max(cfg.groups / load.useful, ready)


def oversampling_of(run: Run, load: Load) -> float:
    """Returns the largest `learner.oversampling` of which nothing grows too old, while workers keep ahead."""
    lag = run.learner.max_lag
    return (lag / load.useful + 1) / (lag + 1) if lag else 1 / load.useful


def workers_seconds(
    run: Run, shape: DecoderConfig, load: Load, on: Hardware, workers: int, waiting: bool
) -> tuple[float, float, str]:
    """Returns the seconds in which the workers are busy for a step, the response tokens that they draw then,
    and the formula. If they are `waiting` for the next version, a step's last responses have them to
    themselves: the longest is taken to reach max_tokens."""
    response = load.lengths.response
    rate, _ = worker_rate(run, shape, load, on, workers)
    drawn = groups_drawn(run, load) * run.learner.group_size * response
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


def waiting_seconds(
    run: Run, shape: DecoderConfig, load: Load, on: Hardware, workers: int
) -> tuple[float, str]:
    """Returns the seconds that the learner waits at a step though workers keep ahead of it, and the formula.

    All that may be outstanding but B groups is ready then, with max_lag = 0 nothing. If too few of them are of
    use, others are drawn in rounds, each of them as long as its longest response, until B are."""
    cfg, response = run.learner, load.lengths.response
    alone, _ = worker_rate(run, shape, load, on, workers, rows=1)
    rest_s = max(0.0, run.rollout.sampling.max_tokens - response) / alone

    def round_s(groups: float) -> float:
        rows = groups * cfg.group_size / workers
        return rows * response / worker_rate(run, shape, load, on, workers, rows)[0] + rest_s

    ahead = cfg.max_outstanding - cfg.groups
    short, missing = _shortage(ahead if cfg.max_lag else 0, load.useful, cfg.groups)
    first, seconds = short, 0.0
    while short > 0.01:
        drawn = ahead + missing
        seconds += short * round_s(drawn)
        again, missing = _shortage(drawn, load.useful, missing)
        short *= again
    return seconds, f"{first:.0%} of the steps · rounds of {round_s(cfg.max_outstanding):.3g} s"


def _shortage(drawn: float, useful: float, wanted: float) -> tuple[float, float]:
    """Returns the probability that fewer of the groups drawn than `wanted` are useful, by the binomial
    distribution, and how many are missing then."""
    n, u = round(drawn), min(max(useful, 1e-3), 1 - 1e-9)
    logs = (
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        + k * math.log(u) + (n - k) * math.log(1 - u)
        for k in range(min(n + 1, math.ceil(wanted)))
    )  # fmt: skip
    chances = list(map(math.exp, logs))
    missing = sum(p * (wanted - k) for k, p in enumerate(chances))
    return sum(chances), missing / max(sum(chances), 1e-300)


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
