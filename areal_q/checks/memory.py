"""The memory that a run's processes take, part by part, each with its formula: the one judge of memory, for
`areal-q check`, the start of a run and `areal-q plan`.

Notation of the formulas: W weights of the model, L those of the linears that a format applies to, D its width,
V its vocabulary; N tokens of a micro-batch, in which a group shares its prompt. docs/sizing.md has what runs
took beside this.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from areal_q.checks.automatic import cpu_flags, settled
from areal_q.checks.disk_use import format_bytes, moment_bytes
from areal_q.checks.machine import CheckResult
from areal_q.config import PretrainedModel, Run, ScriptedEngine, TorchEngine
from areal_q.models import DecoderConfig
from areal_q.observability.run_summary import plural
from areal_q.quant import is_quantized
from areal_q.system.disk import size

PROCESS_BYTES = 520 << 20
"""Python, torch, compiled kernels and mapped libraries of a process, without a model"""
PAYLOADS, LAID_OUT = 4, 3
"""Versions that a worker holds as they were published: in use, received, the next, a spare; and as its kernels
take them: in use, the next, and what the C library keeps of the one before"""
KV_ITEM_BYTES = {"auto": 4, "fp8": 1}
CPU_BLOCK, GPU_BLOCK = 1 << 22, 1 << 27
"""Logits in a block of the output head (areal_q/models/logprobs.py)"""
_KEPT_EXPONENTIALS = 1 << 29
"""Most that are kept (areal_q/models/fused/head.py)"""
_FREED, _MOST_FREED = 15, 700e6
"""What the C library keeps of the blocks that passes have freed (areal_q/system/processes.py): the quickstart's
learner came from 0.4 to 1.36 GB within 150 steps, and stayed there for the 270 that followed"""
_BLOCK_COPIES = 3
"""Tensors of a block's size at once: logits, their exponentials, their gradient"""
_SHARE_OF_GPU = 0.9
"""Of a GPU's memory that vLLM and SGLang take for weights and KV cache, unless told otherwise"""
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Part:
    """A part of a process's memory. Example: Part("gradients", 2.15e9, "4 · W")"""

    name: str
    nbytes: float
    formula: str
    on_gpu: bool = False
    """True if it lies in a GPU's memory."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt and of a response, on average or at most."""

    prompt: float
    response: float


def total(parts: Iterable[Part], on_gpu: bool = False) -> int:
    """Returns the bytes of the parts on the host, or of those on a GPU."""
    return int(sum(part.nbytes for part in parts if part.on_gpu == on_gpu))


def available_bytes() -> int | None:
    """Returns how many bytes can still be taken; None where the system does not say so in Linux's way."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    table = dict(line.split(":", 1) for line in lines if ":" in line)
    if "MemAvailable" not in table:
        return None
    free = int(table["MemAvailable"].split()[0]) << 10
    try:
        most = (_CGROUP / "memory.max").read_text().strip()
        taken = int((_CGROUP / "memory.current").read_text())
    except OSError:
        return free
    return free if most == "max" else min(free, int(most) - taken)


def linear_weights(shape: DecoderConfig) -> int:
    """Returns how many weights a number format applies to."""
    return sum(math.prod(s) for name, s in shape.tensors().items() if is_quantized(name))


def version_bytes(run: Run, shape: DecoderConfig) -> int:
    """Returns about how many bytes a whole version has on the wire; with adapters, its base included."""
    linears, rest = linear_weights(shape), 2 if run.rollout.unquantized == "bf16" else 4
    return int(linears * format_bytes(run.rollout.format) + (shape.weights - linears) * rest)


def laid_out_bytes(format: str) -> int:
    """Returns the bytes of a linear's weight as this processor's kernels take it: codes where they multiply
    int8, bfloat16 where they multiply that, else float32 (areal_q/linear/cpu_linear.py)."""
    flags = cpu_flags()
    if format == "int8" and flags & {"avx512_vnni", "avx_vnni"}:
        return 1
    return 2 if flags & {"avx512_bf16", "amx_bf16"} else 4


def learner_memory(
    run: Run, shape: DecoderConfig, lengths: Lengths, ranks: int = 1
) -> Iterator[Part]:
    """Yields the parts of the learner's first process, of `ranks` that share the model by FSDP2."""
    run = settled(run)
    cfg, weights, linears = run.learner, shape.weights, linear_weights(shape)
    gpu, of_ranks = cfg.device != "cpu", "" if ranks == 1 else f" / {ranks} ranks"
    trained = _trained(run, shape)
    yield Part("process", PROCESS_BYTES, "Python, torch, kernels, libraries")
    base, what = (format_bytes(run.rollout.format), "packed base") if cfg.lora else (4, "4 · W")
    yield Part(
        "weights",
        (base * weights + (4 * trained if cfg.lora else 0)) / ranks,
        f"{what}{of_ranks}",
        gpu,
    )
    yield Part("gradients", 4 * trained / ranks, f"4 · trained weights{of_ranks}", gpu)
    moments = moment_bytes(run)
    yield Part("moments", moments * trained / ranks, f"{moments} · trained weights{of_ranks}", gpu)
    if cfg.precision != "full" and not cfg.lora:
        each = format_bytes(run.rollout.format) + (
            laid_out_bytes(run.rollout.format) if not gpu else 2
        )
        yield Part(
            "rollouts' numbers", each * linears, f"{each:g} · L, as published and laid out", gpu
        )
    if cfg.reference_kl and not cfg.lora:
        yield Part("reference", 4 * weights / ranks, f"4 · W{of_ranks}", gpu)
    if cfg.critic and cfg.critic.trunk == "separate":
        yield Part("critic", 16 * weights / ranks, f"16 · W{of_ranks}", gpu)
    yield from pass_memory(run, shape, lengths, gpu)
    if cfg.fidelity.share:
        each = 4 if gpu else laid_out_bytes(run.rollout.format)
        nbytes = each * linears + 4 * (weights - linears)
        yield Part(
            "fidelity meter",
            nbytes,
            f"{each} · L + 4 · (W - L), a policy on published numbers",
            gpu,
        )
    payload, kept = version_bytes(run, shape), max(cfg.versions_kept, run.broadcast.hold) + 2
    if cfg.lora:
        yield Part(
            "published versions", payload + kept * 4 * trained, f"the base, {kept} · adapters"
        )
    else:
        yield Part(
            "published versions",
            kept * payload,
            f"{kept} · {size(payload)}: max_lag + 2, the next, one spare",
        )
    if ranks > 1 or gpu:
        yield Part("copy on the host", 4 * weights, "4 · W, what is published and saved")


def _trained(run: Run, shape: DecoderConfig) -> int:
    """Returns how many weights the optimizer changes."""
    lora = run.learner.lora
    if lora is None:
        return shape.weights
    shapes = shape.tensors().items()
    chosen = [s for name, s in shapes if name.split(".")[-2] in lora.targets and len(s) == 2]
    return sum(lora.rank * (out + into) for out, into in chosen)


def microbatch_responses(run: Run, lengths: Lengths) -> float:
    """Returns how many responses one forward and backward pass has at most."""
    cfg, one = run.learner, lengths.prompt + lengths.response
    return min(cfg.groups * cfg.group_size / cfg.minibatches, max(1.0, cfg.microbatch_tokens / one))


def keeps_exponentials(run: Run, shape: DecoderConfig, lengths: Lengths) -> bool:
    """Returns True if the head keeps its exponentials for the backward pass, in bfloat16 on a CPU."""
    fused = run.learner.products == "bfloat16" and run.learner.device == "cpu"
    drawn = microbatch_responses(run, lengths) * lengths.response
    return fused and drawn * shape.vocab_size <= _KEPT_EXPONENTIALS


def pass_memory(
    run: Run, shape: DecoderConfig, lengths: Lengths, gpu: bool = False
) -> Iterator[Part]:
    """Yields what a forward pass keeps for its backward pass, and what the head's blocks take.

    Numbers of a layer for a token, in float32 as plain torch keeps them: 7 · D (two norms with their inputs and
    results, o's input) and 4 · mlp (gate, its silu, up, their product); for each token of the padded sequences,
    which share no prompt, attention's queries, keys, values and outputs. The fused pass in bfloat16 keeps gate
    and up in two bytes, the residual stream in four (areal_q/models/fused/trunk.py).
    """
    cfg, heads = run.learner, shape.heads * shape.head_dim
    responses = microbatch_responses(run, lengths)
    drawn = responses * lengths.response
    # A response's last token predicts nothing.
    tokens = drawn - responses + math.ceil(responses / cfg.group_size) * lengths.prompt
    alone = responses * (lengths.prompt + lengths.response - 1)
    mlp = shape.mlp
    if shape.experts:
        mlp = shape.experts.mlp * shape.experts.per_token
    if cfg.products == "bfloat16" and cfg.precision == "full":
        layer = tokens * (4 * mlp + 16 * shape.width + 4 * heads)
        formula = "N · layers · (4 · mlp + 16 · D + 4 · heads)"
    else:
        both = 2 * (heads + shape.kv_heads * shape.head_dim)
        layer = 4 * tokens * (7 * shape.width + 4 * mlp) + 4 * alone * both
        formula = "4 · layers · (N · (7 · D + 4 · mlp) + padded tokens · (q + k + v + out))"
    if cfg.recompute:
        kept = 4 * tokens * shape.width * shape.layers + layer
        formula = "4 · N · layers · D, and one layer's own"
    else:
        kept = layer * shape.layers
    yield Part("activations", kept, formula, gpu)
    if not gpu:
        free = min(_FREED * kept, _MOST_FREED)
        yield Part(
            "freed and kept",
            free,
            f"{_FREED} passes, at most {size(_MOST_FREED)}: seen in long runs",
        )
    logits = min(drawn * shape.vocab_size, GPU_BLOCK if gpu else CPU_BLOCK)
    kept_too = drawn * shape.vocab_size if keeps_exponentials(run, shape, lengths) else 0
    yield Part(
        "logits",
        _BLOCK_COPIES * 4 * logits + 2 * kept_too,
        f"{_BLOCK_COPIES} · 4 · {logits:.3g} in a block{f', 2 · {kept_too:.3g} kept' if kept_too else ''}",
        gpu,
    )
    head = shape.vocab_size * shape.width
    if not cfg.lora:
        yield Part(
            "the head's gradient",
            8 * head,
            "8 · V · D, of head and embedding before they are added",
            gpu,
        )


def worker_memory(run: Run, shape: DecoderConfig, lengths: Lengths) -> Iterator[Part]:
    """Yields the parts of one worker; of vLLM and SGLang the engine's processes included."""
    run = settled(run)
    rollout, engine = run.rollout, run.rollout.engine
    yield Part("process", PROCESS_BYTES, "Python, torch, kernels, libraries")
    if isinstance(engine, ScriptedEngine):
        return
    gpu = not isinstance(engine, TorchEngine) or engine.device != "cpu"
    payload, linears = version_bytes(run, shape), linear_weights(shape)
    yield Part(
        "received versions",
        PAYLOADS * payload,
        f"{PAYLOADS} · {size(payload)}: in use, received, next, spare",
    )
    outstanding = run.learner.max_outstanding * run.learner.group_size
    rows = min(engine.slots, outstanding)
    positions = rows * (lengths.prompt + rollout.tokens_after_prompt)
    item = (
        2
        if gpu and getattr(engine, "kv_cache", "auto") == "auto"
        else KV_ITEM_BYTES[getattr(engine, "kv_cache", "auto")]
    )
    a_position = 2 * shape.layers * shape.kv_heads * shape.head_dim * item
    if isinstance(engine, TorchEngine):
        each = 4 if gpu else laid_out_bytes(rollout.format)
        laid_out = each * linears + 4 * (shape.weights - linears)
        yield Part(
            "weights laid out",
            LAID_OUT * laid_out,
            f"{LAID_OUT} · ({each} · L + 4 · (W - L)): in use, the next, freed",
            gpu,
        )
    else:
        served = int(linears * format_bytes(rollout.format) + (shape.weights - linears) * 2)
        yield Part(
            "the engine's weights",
            served / engine.tensor_parallel,
            "as published, bfloat16 beside them",
            gpu,
        )
        yield Part("the engine's process", 2 * PROCESS_BYTES, "its own Python and scheduler")
    yield Part(
        "KV cache",
        a_position * positions,
        f"{a_position:,} bytes a position · {positions:,.0f} of {rows} responses",
        gpu,
    )


def learner_bytes(run: Run, shape: DecoderConfig, prompt: int) -> int:
    """Returns about how much of the host's memory the learner takes, alone, with prompts of `prompt` tokens."""
    lengths = Lengths(prompt, run.rollout.tokens_after_prompt)
    return total(learner_memory(run, shape, lengths))


def worker_bytes(run: Run, shape: DecoderConfig, prompt: int) -> int:
    """Returns about how much of the host's memory one worker takes, with prompts of `prompt` tokens."""
    return total(worker_memory(run, shape, Lengths(prompt, run.rollout.tokens_after_prompt)))


def memory_of(run: Run, shape: DecoderConfig, prompt: int) -> Iterator[CheckResult]:
    """Yields what a run of a pretrained model takes of this machine's memory; nothing for the small one."""
    free = available_bytes()
    if not isinstance(run.model, PretrainedModel) or free is None:
        return
    learner, workers = learner_bytes(run, shape, prompt), run.rollout.workers
    worker = worker_bytes(run, shape, prompt)
    says = (
        f"about {size(learner)} for the learner, {size(worker)} for each of {plural(workers, 'worker')}; "
        f"{size(free)} available"
    )
    if learner + workers * worker <= free:
        yield CheckResult("memory", "ok", says)
    else:
        fix = "a smaller model, learner.lora, fewer workers, or what else runs here ended"
        yield CheckResult("memory", "warning", says, fix)
