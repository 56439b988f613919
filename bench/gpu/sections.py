"""The sections of bench.gpu: each yields rows as they are measured, on the device that it is given."""

import asyncio
import importlib.util
import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import numpy as np
import torch
from torch import Tensor

from areal_q.config import LearnerConfig, Sampling, TorchEngine, VllmEngine
from areal_q.errors import AReaLQError
from areal_q.linear import fp8_gemm
from areal_q.linear.registry import linear_of
from areal_q.models import Decoder, DecoderConfig
from areal_q.models.low_bit.quantized_forward import use
from areal_q.quant import FORMATS
from areal_q.quant.activations import quantize_groups_e4m3, quantize_rows
from areal_q.weights.version import WeightVersion
from bench.gpu import Row
from bench.gpu.runs import runs
from bench.records import make_trajectory
from bench.weights.packed import packed
from learner.backends.precision import LINEARS
from learner.backends.single_device import TorchPolicy
from learner.data.packing import Sample
from learner.policy_update import update_policy
from rollout.engines import build_engine
from rollout.engines.base import Request

TINY = DecoderConfig(
    family="qwen2", vocab_size=97, width=128, layers=2, heads=4, kv_heads=2, head_dim=32, mlp=256,
    max_positions=4096, qkv_bias=True,
)  # fmt: skip
QWEN_500M = DecoderConfig(
    family="qwen2", vocab_size=151936, width=896, layers=24, heads=14, kv_heads=2, head_dim=64, mlp=4864,
    max_positions=4096, qkv_bias=True,
)  # fmt: skip
"""The shape of Qwen2.5-0.5B"""
QWEN_1500M = DecoderConfig(
    family="qwen2", vocab_size=151936, width=1536, layers=28, heads=12, kv_heads=2, head_dim=128, mlp=8960,
    max_positions=4096, qkv_bias=True,
)  # fmt: skip
"""The shape of Qwen2.5-1.5B"""
LEARNERS = (
    ("float32", "full", "fp8"),
    ("bfloat16", "full", "fp8"),
    ("bfloat16", "qarl", "int8"),
    ("bfloat16", "qarl", "fp8"),
    ("bfloat16", "jet", "fp8"),
)
"""(learner.dtype, learner.precision, rollout.format)"""


def bits(device: torch.device, small: bool) -> Iterator[Row]:
    """Beside a CPU: share of the bytes of codes and scales that are the same, and the largest error of a
    linear, relative to its largest output. Shares must be 1."""
    rows, columns = (96, 192) if small else (1152, 2048)
    torch.manual_seed(0)
    weight, x = torch.randn(rows, columns) * 0.02, torch.randn(64, columns)
    weight[0, 0] = 3.0
    for name, format in FORMATS.items():
        here, there = (format.quantize(w, "w") for w in (weight, weight.to(device)))
        same = [
            float((flat(here[part]) == flat(there[part].cpu())).float().mean()) for part in here
        ]
        want, got = linear_of(format, [here])(x), linear_of(format, [there])(x.to(device)).cpu()
        error = float((got - want).abs().max() / want.abs().max())
        values = {"codes": same[0], "scales": min(same[1:], default=1.0), "linear": error}
        yield Row(name, values, "" if min(same) == 1 else "DIFFERENT BITS")


def kernels(device: torch.device, small: bool) -> Iterator[Row]:
    """Quantizing float32 weights: GB read and written per second, beside a copy on the same device."""
    size = 512 if small else 8192
    weight = torch.randn(size, size, device=device) * 0.02
    other = torch.empty_like(weight)
    copied = 2 * weight.nbytes / seconds(lambda: other.copy_(weight), device)
    yield Row("copy", {"GB/s": copied / 1e9, "of the copy": 1.0})
    for name, format in FORMATS.items():
        parts = format.quantize(weight, "w")
        moved = weight.nbytes + sum(t.nbytes for t in parts.values())
        rate = moved / seconds(lambda format=format: format.quantize(weight, "w"), device)
        yield Row(name, {"GB/s": rate / 1e9, "of the copy": rate / copied})


def gemm(device: torch.device, small: bool) -> Iterator[Row]:
    """Matrix products, TFLOP/s: bfloat16, int8, and FP8 with 128×128 and with 1×128 scales on the right,
    the operands quantized before."""
    sizes = [(256, 256, 256)] if small else [(8192, 8192, 8192), (8192, 18944, 3584)]
    for m, n, k in sizes:
        a, b = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
        for name, product in products(a, b).items():
            done = 2e-12 * m * n * k / seconds(product, device) if product else None
            values = {} if done is None else {"TFLOP/s": done}
            yield Row(f"{name} {m}×{n}×{k}", values, "" if values else "refuses, or is wrong")


def products(a: Tensor, b: Tensor) -> dict[str, Callable[[], object] | None]:
    """Ways to multiply a [M, K] by b [N, K]; None where a way there is does not do."""
    wide = a.bfloat16(), b.bfloat16().t()
    whole = quantize_rows(a)[0], quantize_rows(b)[0].t()
    left, right = (fp8_gemm.Operand(*quantize_groups_e4m3(x)) for x in (a, b))
    parts = FORMATS["fp8"].quantize(b, "w")
    square = fp8_gemm.Operand(parts["weight"], parts["weight_scale_inv"], blocks=True)
    found: dict[str, Callable[[], object] | None] = {
        "bfloat16": lambda: wide[0] @ wide[1],
        "int8": lambda: torch._int_mm(*whole),  # pyright: ignore[reportPrivateImportUsage]
    }
    for name, way in (("emulated", fp8_gemm.emulated), ("scaled_mm", fp8_gemm.scaled_mm)):
        if fp8_gemm.agrees(way, a.device):
            found[f"{name} 128×128"] = lambda way=way: way(left, square)
            found[f"{name} 1×128"] = lambda way=way: way(left, right)
        else:
            found[name] = None
    return found


def learner(device: torch.device, small: bool) -> Iterator[Row]:
    """A learner's step on packed sequences: tokens a second, MFU (6 FLOP per parameter and token, of what a
    bfloat16 product reaches on this device), and the memory's peak. The model has Qwen2.5-0.5B's shape."""
    length, count = (16, 4) if small else (1024, 32)
    config = TINY if small else QWEN_500M
    peak = matmul_flops(device, small)
    torch.manual_seed(0)
    samples = [random_sample(i, length, config.vocab_size) for i in range(count)]
    for dtype, precision, format in LEARNERS:
        model = Decoder(config).to(device)
        if precision != "full":
            use(LINEARS[precision], model, format)
        cfg = LearnerConfig(
            device=str(device), minibatches=1, recompute=True, microbatch_tokens=length * count // 2
        )
        cfg = msgspec.structs.replace(cfg, dtype=dtype, precision=precision)
        policy = TorchPolicy(model, cfg, 1.0)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        took = seconds(partial(update_policy, policy, samples), device, repeats=2)
        tokens = sum(s.num_tokens for s in samples) / took
        parameters = sum(p.numel() for p in model.parameters())
        values = {"tokens/s": tokens, "MFU": 6 * parameters * tokens / peak}
        if device.type == "cuda":
            values["peak, GiB"] = torch.cuda.max_memory_allocated() / 2**30
        name = dtype if precision == "full" else f"{dtype}, {precision} {format}"
        yield Row(name, values)
        del policy, model


def generation(device: torch.device, small: bool) -> Iterator[Row]:
    """Tokens a second of rollouts by the torch engine in each number format, random weights of Qwen2.5-1.5B's
    shape: the last 512 of 4,096 tokens, four prompts with eight responses each."""
    yield from generated(TorchEngine(slots=32, device=str(device)), small)


def vllm(device: torch.device, small: bool) -> Iterator[Row]:
    """The same by vLLM, with its CUDA graphs."""
    if importlib.util.find_spec("vllm"):
        yield from generated(VllmEngine(slots=32, compiled=not small), small)
    else:
        yield Row("vllm", {}, "not installed here")


def generated(engine: TorchEngine | VllmEngine, small: bool) -> Iterator[Row]:
    config = TINY if small else QWEN_1500M
    prompt, tokens = (8, 8) if small else (3584, 512)
    torch.manual_seed(0)
    state = {k: v.detach() for k, v in Decoder(config).state_dict().items()}
    first, can = None, build_engine(engine).capabilities.formats
    for format in ("bf16", "int8", "fp8", "int4", "nvfp4"):
        if format not in can:
            yield Row(format, {}, "not on this device")
            continue
        weights = packed(state, format, config.to_hf())
        try:
            rate = asyncio.run(drawn(engine, weights, prompt, tokens))
        except AReaLQError as error:
            yield Row(format, {}, str(error)[:160])
            continue
        first = first or rate
        yield Row(format, {"tokens/s": rate, "of bf16": rate / first})


SECTIONS: dict[str, Callable[[torch.device, bool], Iterator[Row]]] = {
    "bits": bits,
    "kernels": kernels,
    "gemm": gemm,
    "learner": learner,
    "generation": generation,
    "runs": runs,
    "vllm": vllm,
}


def flat(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8).flatten()


def seconds(run: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """The fastest of `repeats` runs, after one that warms up; the device is waited for."""

    def once() -> float:
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    once()
    return min(once() for _ in range(repeats))


def matmul_flops(device: torch.device, small: bool) -> float:
    n = 256 if small else 8192
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16)
    return 2 * n**3 / seconds(lambda: a @ a, device)


def random_sample(index: int, length: int, vocabulary: int) -> Sample:
    rng = np.random.default_rng(index)
    prompt = length // 8
    count = length - prompt
    return Sample(
        ticket=index,
        prompt_ids=rng.integers(0, vocabulary, prompt).astype(np.int32),
        trajectory=make_trajectory(
            0, rng.integers(0, vocabulary, count), -np.log(vocabulary), finish_reason="length"
        ),
        advantage=float(rng.choice((-1.0, 1.0))),
        lag=np.zeros(count, np.int64),
    )


async def drawn(
    settings: TorchEngine | VllmEngine, weights: WeightVersion, prompt: int, tokens: int
) -> float:
    """Tokens a second of a warm engine, the prompts' time included."""
    engine = build_engine(settings)
    await engine.start()
    try:
        await engine.load_weights(weights)
        rate = 0.0
        for count in (4, tokens):
            began = time.perf_counter()
            requests = [request(seed, prompt, count) for seed in range(4)]
            done = await asyncio.gather(*(engine.generate(r) for r in requests))
            drawn = sum(len(response.response_ids) for group in done for response in group)
            rate = drawn / (time.perf_counter() - began)
        return rate
    finally:
        await engine.close()


def request(seed: int, prompt: int, tokens: int) -> Request:
    return Request(
        prompt_ids=np.random.default_rng(seed).integers(1, 90, prompt, dtype=np.int32),
        num_samples=8,
        sampling=Sampling(max_tokens=tokens),
        seed=seed,
        stop_ids=frozenset(),
    )
