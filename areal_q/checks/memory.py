"""The memory that a run's processes take, part by part, each with its formula: the one judge of memory, for
`areal-q check`, the start of a run and `areal-q plan`.

Notation of the formulas: W weights of the model, L those of the linears that a format applies to; more of them
in pass_memory.py. docs/sizing.md has what runs took beside this.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from areal_q.checks.automatic import cpu_flags, settled
from areal_q.checks.combinations import adaptable
from areal_q.checks.disk_use import format_bytes, moment_bytes
from areal_q.checks.machine import CheckResult
from areal_q.checks.pass_memory import Lengths, Part, pass_memory
from areal_q.config import ModelTeacher, PretrainedModel, Run, ScriptedEngine, TorchEngine
from areal_q.config.engines import PAGE, SglangEngine, VllmEngine
from areal_q.models import DecoderConfig
from areal_q.models.shape import frozen_shape
from areal_q.observability.run_summary import plural
from areal_q.quant import is_quantized
from areal_q.system.disk import size

PROCESS_BYTES = 520 << 20
"""Python, torch, compiled kernels and mapped libraries of a process, without a model"""
PAYLOADS, LAID_OUT = 4, 3
"""Versions that a worker holds as they were published: in use, received, the next, a spare; and as its kernels
take them: in use, the next, and what the C library keeps of the one before"""
FIRST_ALONE = ("copy on the host", "published versions", "fidelity meter", "teacher")
"""Parts that the first of several processes of the learner has alone"""
_BOUNDED = "rollout.engine.kv_cache_bytes"
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def total(parts: Iterable[Part], on_gpu: bool = False) -> int:
    """Returns the bytes of the parts on the host, or of those on a GPU."""
    return int(sum(part.nbytes for part in parts if part.on_gpu == on_gpu))


def of_others(learner: Iterable[Part]) -> list[Part]:
    """Returns the parts that each other of the learner's processes has as well."""
    return [part for part in learner if part.name not in FIRST_ALONE]


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
    yield Part("process", PROCESS_BYTES, "Python, torch, kernels, libraries")
    yield from _models(run, shape, ranks)
    yield from pass_memory(run, shape, lengths)
    yield from _published(run, shape)
    if ranks > 1 or run.learner.device != "cpu":
        each = 4 * (1 + (_has_reference(run) + _has_own_trunk(run) if ranks > 1 else 0))
        told = f"{each} · W, what is published, sharded and saved"
        yield Part("copy on the host", each * shape.weights, told)


def _models(run: Run, shape: DecoderConfig, ranks: int) -> Iterator[Part]:
    """Yields weights, what is kept for each of them, and further models."""
    cfg, format = run.learner, run.rollout.format
    gpu, shared = cfg.device != "cpu", "" if ranks == 1 else f" / {ranks} ranks"
    trained, moments = trained_weights(run, shape), moment_bytes(run)
    if cfg.lora:  # the packed base is whole on every rank
        base, packed = format_bytes(format), linear_weights(shape)
        nbytes = base * packed + 4 * (shape.weights - packed + trained)
        yield Part("weights", nbytes, f"{base:g} · L + 4 · (W - L) + 4 · adapters", gpu)
    else:
        yield Part("weights", 4 * shape.weights / ranks, f"4 · W{shared}", gpu)
    yield Part("gradients", 4 * trained / ranks, f"4 · trained weights{shared}", gpu)
    yield Part("moments", moments * trained / ranks, f"{moments} · trained weights{shared}", gpu)
    if cfg.precision != "full" and not cfg.lora:
        each = format_bytes(format) + (2 if gpu else laid_out_bytes(format))
        nbytes = each * linear_weights(shape)
        yield Part("rollouts' numbers", nbytes, f"{each:g} · L, as published and laid out", gpu)
    if _has_reference(run):
        yield Part("reference", 4 * shape.weights / ranks, f"4 · W{shared}", gpu)
    if isinstance(cfg.teacher, ModelTeacher):  # whole, on the first rank alone
        yield Part("teacher", 4 * frozen_shape(cfg.teacher.path).weights, "4 · its weights", gpu)
    if _has_own_trunk(run):
        yield Part("critic", 16 * shape.weights / ranks, f"16 · W{shared}", gpu)


def _has_reference(run: Run) -> bool:
    return run.learner.reference_kl is not None and run.learner.lora is None


def _has_own_trunk(run: Run) -> bool:
    return run.learner.critic is not None and run.learner.critic.trunk == "separate"


def _published(run: Run, shape: DecoderConfig) -> Iterator[Part]:
    """Yields the versions that the learner holds, and the policy that the fidelity meter makes of one."""
    cfg, linears = run.learner, linear_weights(shape)
    gpu = cfg.device != "cpu"
    if cfg.fidelity.share:
        each = 4 if gpu else laid_out_bytes(run.rollout.format)
        nbytes = each * linears + 4 * (shape.weights - linears)
        told = f"{each} · L + 4 · (W - L), a policy on published numbers"
        yield Part("fidelity meter", nbytes, told, gpu)
    payload, kept = version_bytes(run, shape), max(cfg.versions_kept, run.broadcast.hold) + 2
    if cfg.lora:
        nbytes, told = (
            payload + kept * 4 * trained_weights(run, shape),
            f"the base, {kept} · adapters",
        )
    else:
        nbytes, told = kept * payload, f"{kept} · {size(payload)}: max_lag + 2, the next, a spare"
    yield Part("published versions", nbytes, told)


def trained_weights(run: Run, shape: DecoderConfig) -> int:
    """Returns how many weights the optimizer changes."""
    lora = run.learner.lora
    if lora is None:
        return shape.weights
    every = lora.every(shape.foreign is not None)
    return sum(
        lora.rank * sum(size)
        for name, size in adaptable(shape).items()
        if every or name.split(".")[-2] in lora.targets
    )


def worker_memory(run: Run, shape: DecoderConfig, lengths: Lengths) -> Iterator[Part]:
    """Yields the parts of one worker; of vLLM and SGLang the engine's processes included, and what lies on one
    of the GPUs that share the model."""
    run = settled(run)
    rollout, engine = run.rollout, run.rollout.engine
    yield Part("process", PROCESS_BYTES, "Python, torch, kernels, libraries")
    if isinstance(engine, ScriptedEngine):
        return
    gpu = not isinstance(engine, TorchEngine) or engine.device != "cpu"
    payload, linears = version_bytes(run, shape), linear_weights(shape)
    rest, gpus = shape.weights - linears, getattr(engine, "tensor_parallel", 1)
    shared = "" if gpus == 1 else f" / {gpus} GPUs"
    told = f"{PAYLOADS} · {size(payload)}: in use, received, next, spare"
    yield Part("received versions", PAYLOADS * payload, told)
    if isinstance(engine, TorchEngine):
        each = 4 if gpu else laid_out_bytes(rollout.format)
        told = f"{LAID_OUT} · ({each} · L + 4 · (W - L)): in use, the next, freed"
        yield Part("weights laid out", LAID_OUT * (each * linears + 4 * rest), told, gpu)
    else:
        wide = 4 if engine.dtype == "float32" else 2
        each = wide if rollout.format == "bf16" else format_bytes(rollout.format)
        told = f"{each:g} · L + {wide} · (W - L){shared}"
        yield Part("the engine's weights", (each * linears + wide * rest) / gpus, told, gpu)
        yield Part("the engine's process", 2 * PROCESS_BYTES, "its own Python and scheduler")
    if isinstance(engine, SglangEngine):
        each = 4 * shape.weights if run.learner.lora else payload
        yield Part("handed over", 2 * each, f"2 · {size(each)}: a version, and its file in memory")
    rows = min(engine.slots, run.learner.max_outstanding * run.learner.group_size)
    positions = rows * (lengths.prompt + rollout.tokens_after_prompt)
    each = position_bytes(engine, shape)
    told = f"{each:,} bytes a position · {positions:,.0f} of {rows} responses{shared}"
    nbytes = each * positions / min(gpus, shape.kv_heads)  # a head is whole
    if type(engine) is TorchEngine:
        nbytes, told = 2 * nbytes, f"2 · {told}, as many kept for later prompts"
        if engine.kv_cache_bytes and engine.kv_cache_bytes < nbytes:
            nbytes, told = engine.kv_cache_bytes, _BOUNDED
    yield Part("KV cache", nbytes, told, gpu)
    if rule := shape.delta:
        # Slots double, and prompts on their way have states of their own.
        each = 4 * len(rule.layers) * rule.state_numbers
        told = f"2 · {each:,} bytes of {rows} responses{shared}"
        yield Part("states", 2 * rows * each / gpus, told, gpu)


def position_bytes(engine: TorchEngine | VllmEngine | SglangEngine, shape: DecoderConfig) -> int:
    """Returns the bytes of a position in the KV cache, in E4M3, else float32 by the torch engine and the
    engine's `dtype`, bfloat16 unless it says otherwise, by others."""
    wide = isinstance(engine, TorchEngine) or engine.dtype == "float32"
    item = 1 if getattr(engine, "kv_cache", "auto") == "fp8" else 4 if wide else 2
    return 2 * len(shape.attention_layers) * shape.kv_heads * shape.head_dim * item


def cached_pages(engine: TorchEngine, shape: DecoderConfig) -> int:
    """Returns how many pages of the cache `kv_cache_bytes` allows; as the engine has it, at least one."""
    return max(1, engine.kv_cache_bytes // max(1, PAGE * position_bytes(engine, shape)))


def memory_of(run: Run, shape: DecoderConfig, prompt: int) -> Iterator[CheckResult]:
    """Yields what a run of a pretrained model takes of this machine's memory; nothing for the small one."""
    free = available_bytes()
    if not isinstance(run.model, PretrainedModel) or free is None:
        return
    run = settled(run)
    lengths, workers = Lengths(prompt, run.rollout.tokens_after_prompt), run.rollout.workers
    ranks = run.learner.processes
    parts = list(learner_memory(run, shape, lengths, ranks))
    learner, beside = total(parts), ""
    if ranks > 1:
        other = total(of_others(parts))
        beside = f", {size(other)} for each other of its {ranks} processes"
        learner += (ranks - 1) * other
    of_worker = list(worker_memory(run, shape, lengths))
    worker = total(of_worker)
    says = (
        f"about {size(total(parts))} for the learner{beside}, {size(worker)} for each of "
        f"{plural(workers, 'worker')}; {size(free)} available"
    )
    if learner + workers * worker <= free:
        yield CheckResult("memory", "ok", says)
        return
    over = learner + workers * worker - free
    fix = "a smaller model, learner.lora, fewer workers, or what else runs here ended"
    cache = next((part for part in of_worker if part.name == "KV cache"), None)
    if cache and workers * cache.nbytes >= over:
        says += f"; {size(cache.nbytes)} of a worker are for the keys and values of its responses"
        tokens = run.rollout.sampling.max_tokens
        fix = f"a smaller rollout.engine.slots or rollout.sampling.max_tokens (now {tokens})"
        fix = f"a smaller {_BOUNDED}" if cache.formula == _BOUNDED else fix
    if fewer := _fewer_tokens(run, shape, lengths, over / ranks):
        says += f"; {size(total(pass_memory(run, shape, lengths)))} are for a pass of the learner"
        fix = f"learner.microbatch_tokens={fewer}, which changes no result"
    yield CheckResult("memory", "warning", says, fix)


def _fewer_tokens(run: Run, shape: DecoderConfig, lengths: Lengths, over: float) -> int | None:
    """Returns the most tokens of a micro-batch, halved time and again, with which a pass of the learner takes
    `over` bytes less; None where one that still holds a response does not."""
    now = total(pass_memory(run, shape, lengths))
    tokens = run.learner.microbatch_tokens // 2
    while tokens * run.learner.context >= lengths.prompt + lengths.response:
        learner = msgspec.structs.replace(run.learner, microbatch_tokens=tokens)
        less = msgspec.structs.replace(run, learner=learner)
        if now - total(pass_memory(less, shape, lengths)) >= over:
            return tokens
        tokens //= 2
    return None
