"""Settings that are `auto` until a run starts: what they become on this machine with this model, and why.

| setting | becomes | where |
|---|---|---|
| learner.dtype | bfloat16 | on a GPU, or a processor that multiplies bfloat16 numbers, for a dense model |
| | float32 | elsewhere; and with the rollouts' numbers (`precision`, `lora`), of whose format products are |
| learner.optimizer.lr, | 1.5e-4 | a model of type small |
| and the critic's | 5e-6 | a pretrained one; 1e-6 from a billion weights on, 2e-5 in supervised training |
| | ten times that | with `lora` |
| rollout.unquantized | bf16 | the model's own config.json names bfloat16 |
| | fp32 | elsewhere |
| model.type | hf | our decoder does not have the family of a pretrained model, or that variant of it |
| rollout.engine.type | hf | in place of torch, for a model of type hf |
| rollout.smoothing | its defaults | a pretrained model in int8 or fp8-channel, which are nearer to it then |
| | off | elsewhere; and with a learner that computes with the rollouts' numbers |

What they became is recorded in config.toml, so that the run goes on, and is replayed, with the same numbers on
any other machine.

CPU seconds of a learner's step in one thread, bench/README.md:

| processor | 0.6M parameters: float32, bfloat16 | 20M parameters: float32, bfloat16 |
|---|---|---|
| AVX512-BF16 (AMD EPYC, family 26) | 0.200, 0.087 | 3.19, 1.57 |
| AVX2 alone (AMD EPYC, family 25), on a busy machine | 0.302, 1.852 | 4.03, not awaited |
"""

import json
import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from areal_q.config import (
    HfModel,
    PretrainedModel,
    Run,
    SmallModel,
    Smoothing,
    with_transformers,
)
from areal_q.config.learner import SMALL_RATE
from areal_q.config.load import with_rates
from areal_q.config.run import ROUNDS_ACTIVATIONS, WORTH_SMOOTHING
from areal_q.errors import CheckpointError, ConfigError, NotOurs
from areal_q.models.config import OFFSET_NORMS, DecoderConfig
from areal_q.models.shape import config_at
from areal_q.models.variants import text_part

Dtype = Literal["float32", "bfloat16"]

CPUINFO = Path("/proc/cpuinfo")
_BF16_FLAGS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"}
"""Instructions that multiply bfloat16 numbers, by their names in /proc/cpuinfo"""


def settled(run: Run) -> Run:
    """Returns `run` with values in place of `auto`, and with transformers' in place of our decoder and engine
    for a model that is not ours."""
    run = with_transformers(run, type(run.model) is PretrainedModel and _is_foreign(run))
    learner, rollout = run.learner, run.rollout
    if learner.dtype == "auto":
        learner = msgspec.structs.replace(learner, dtype=_dtype(run)[0])
    if "auto" in (learner.optimizer.lr, learner.critic and learner.critic.optimizer.lr):
        rate = _rate(run)
        learner = with_rates(learner, (rate, rate))
    if rollout.unquantized == "auto":
        model = _config_of(run)
        own = model.get("dtype") or model.get("torch_dtype")
        rest: Literal["bf16", "fp32"] = "bf16" if own == "bfloat16" else "fp32"
        rollout = msgspec.structs.replace(rollout, unquantized=rest)
    if rollout.smoothing == "auto":
        smoothing = "off" if _unsmoothed(run) else Smoothing()
        rollout = msgspec.structs.replace(rollout, smoothing=smoothing)
    return msgspec.structs.replace(run, learner=learner, rollout=rollout)


def _is_foreign(run: Run) -> bool:
    """Returns True if the model is of a family, or a variant of one, that our decoder does not have; False if
    its config.json cannot be read."""
    if not (table := _config_of(run)):
        return False
    try:
        DecoderConfig.from_hf(table)
    except NotOurs:
        return True
    except (CheckpointError, ValueError, TypeError, ArithmeticError):
        pass
    return False


def why_dtype(run: Run) -> str:
    """Returns a sentence that says what the learner of `run` computes in, and why."""
    (here, why), set_to = _dtype(run), run.learner.dtype
    if set_to in ("auto", here):
        return f"the learner computes in {here}: {why}"
    return f"the learner computes in {set_to}, as the settings say; auto were {here}: {why}"


def why_smoothing(run: Run) -> str:
    """Returns a sentence that says whether the activations of a pretrained model are smoothed before they are
    rounded, and why; "" for a run in which there are none to smooth."""
    format = run.rollout.format
    if isinstance(run.model, SmallModel) or format not in ROUNDS_ACTIVATIONS:
        return ""
    why, settles = _unsmoothed(run), run.rollout.smoothing == "auto"
    on = not why if settles else run.rollout.smooths is not None
    if on == (not why):
        why = why or f"{format} is nearer to a pretrained model with it"
    else:
        why = "as the settings say"
    return f"rollout.smoothing is {'on' if on else 'off'}: {why}"


def why_no_scales(run: Run) -> str:
    """Returns why the model of `run` has no scales by channel, or needs none; "" if it can be smoothed."""
    if isinstance(run.model, SmallModel):
        return "a small model has no outliers"
    if isinstance(run.model, HfModel):
        return ""
    family = _config_of(run).get("model_type")
    if family in OFFSET_NORMS:
        return "its scales do not fit norms that multiply by 1 + w"
    if family == "gpt_oss":
        return "its scales do not fit experts whose products are clamped"
    return ""


def _unsmoothed(run: Run) -> str:
    """Returns why `rollout.smoothing` becomes off if it is `auto`; "" if it becomes on."""
    if why := why_no_scales(run):
        return why
    if run.rollout.format not in WORTH_SMOOTHING:
        return f"{run.rollout.format} is no nearer to a pretrained model with it"
    if run.learner.precision != "full" or run.learner.lora:
        return "the learner computes with the published weights"
    return ""


def _rate(run: Run) -> float:
    """Returns what a learning rate becomes if it is `auto`: for a pretrained model that with which SmolLM2-135M
    learns (docs/stability.md), for a large one verl's and TRL's, and ten times that for adapters."""
    if isinstance(run.model, SmallModel):
        return SMALL_RATE
    try:
        large = config_at(run.model, run.model.path).weights >= 10**9
    except (CheckpointError, ConfigError):  # which its loading reports
        large = False
    full, adapters = (2e-5, 2e-4) if run.sft else (1e-6, 1e-5) if large else (5e-6, 5e-5)
    return adapters if run.learner.lora else full


def why_rate(run: Run) -> str:
    """Returns a sentence that says that a pretrained model has the learning rate that `auto` is; "" if it has
    another, or is small."""
    rate = _rate(run)
    if isinstance(run.model, SmallModel) or run.learner.optimizer.lr not in ("auto", rate):
        return ""
    adapters = "adapters on " if run.learner.lora else ""
    return f"learner.optimizer.lr is {rate:g}, for {adapters}a pretrained model"


def _dtype(run: Run) -> tuple[Dtype, str]:
    """Returns what `learner.dtype` becomes if it is `auto`, and why."""
    learner = run.learner
    if learner.precision != "full" or learner.lora:
        return "float32", "it computes with the rollouts' numbers"
    if has_experts(run):
        return "float32", "a mixture of experts has no kernels in bfloat16"
    if learner.device.startswith("cuda"):
        return "bfloat16", "a GPU multiplies it faster"
    if learner.device == "cpu" and (found := _bf16_instructions()):
        return "bfloat16", f"the processor has {found}"
    if learner.device == "cpu":
        return "float32", "the processor has neither AMX nor AVX512-BF16"
    return "float32", f"nothing is known of {learner.device}"


def cpu_flags() -> set[str]:
    """Returns the processor's features by their names in /proc/cpuinfo; none where there is no such file, or
    torch is told to compute as an older processor does."""
    if os.environ.get("ATEN_CPU_CAPABILITY", "avx512") in ("default", "avx2"):
        return set()
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def _bf16_instructions() -> str:
    """Returns the name of the instructions with which the processor multiplies bfloat16 numbers, or ""."""
    flags = cpu_flags()
    return next((name for flag, name in _BF16_FLAGS.items() if flag in flags), "")


def _config_of(run: Run) -> dict[str, Any]:
    """Returns config.json of a pretrained model; {} where it cannot be read, which its loading reports."""
    if isinstance(run.model, SmallModel):
        return {}
    try:
        table = json.loads((Path(run.model.path) / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return text_part(table) if isinstance(table, dict) else {}


def has_experts(run: Run) -> bool:
    """Returns True if the model of `run` is a mixture of experts."""
    if isinstance(run.model, SmallModel):
        return run.model.experts > 0
    model = _config_of(run)
    return any(model.get(name) for name in ("num_experts", "num_local_experts"))
