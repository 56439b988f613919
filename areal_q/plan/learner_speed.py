"""What a step of the learner computes, and how long that takes.

A token's FLOP: 2 for each weight in a forward pass and 4 in the backward pass, attention beside it.
"""

from areal_q.checks.pass_memory import keeps_exponentials, microbatch_responses
from areal_q.config import Run
from areal_q.models import DecoderConfig
from areal_q.models.layer_kinds import CHUNK
from areal_q.observability.run_summary import plural
from areal_q.plan.hardware import Hardware
from areal_q.plan.step_load import Load, active_linears, cores_of_learner, mixing_flop

PASS_LAYER_S = {"cpu": 7e-3, "gpu": 3e-3}
"""Seconds that Python and the launches of kernels take for a layer, forward and backward: 0.02 s of a step of
0.6M parameters (bench/README.md), 0.15 of the 14,900 launches at 0.5B on an H100 (docs/gpu.md)"""
OPTIMIZER_BYTES = 28
"""Bytes read and written for a weight in an optimizer step: itself, its gradient, two moments"""


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
    units = cores_of_learner(run, on) if on.is_cpu else gpus
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
