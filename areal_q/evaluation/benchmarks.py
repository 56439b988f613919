"""Names of public benchmarks, and the sampling settings under which papers report them. No torch.

No data is shipped: `areal-q eval MODEL --task aime --data aime24.jsonl --preset qurl-aime`.
"""

from msgspec import Struct
from msgspec.structs import replace

from areal_q.config import EvalSet, Sampling
from areal_q.errors import ConfigError

BENCHMARKS: dict[str, str] = {
    "gsm8k": "gsm8k",
    "math-500": "math",
    "aime": "math",
    "amc": "math",
    "minerva": "math",
    "olympiad": "math",
    "gpqa": "choice",
    "arc-c": "choice",
    "mmlu-pro": "choice",
}
"""The `task.type` of each benchmark, whose reader knows its fields
(areal_q/tasks/datasets/benchmark_fields.py)"""


class Preset(Struct, frozen=True, kw_only=True):
    """How a paper draws the answers that it scores. None means that the paper does not say, and that the run's
    setting is used."""

    source: str
    samples: int = 0
    """Number of sampled answers to each problem; 0 means greedy answers alone."""
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None


PRESETS: dict[str, Preset] = {
    "qurl-gsm8k": Preset(source="QuRL §5.1, PPO on GSM8K, table 1: greedy", max_tokens=512),
    "qurl-aime": Preset(
        source="QuRL §5.1, DAPO on AIME 2024, table 2: greedy and Avg@32",
        samples=32,
        temperature=1.0,
        top_p=0.7,
    ),
    "qurl-deepscaler": Preset(
        source="QuRL §5.1, DeepScaleR, table 3: Avg@32; temperature and context are those of training",
        samples=32,
        temperature=0.6,
        max_tokens=24 * 1024,
    ),
    "qarl": Preset(
        source="QaRL appendix B: val_kwargs.temperature, max_response_length; samples are not stated",
        samples=1,
        temperature=0.6,
        max_tokens=16384,
    ),
    "qerl": Preset(
        source="QeRL §4.1: Pass@1 as a mean of several samples, how many is not stated",
        samples=1,
        temperature=0.6,
        top_p=0.95,
        max_tokens=4096,
    ),
    "jet-rl": Preset(
        source="Jet-RL §5.1: sampling is not stated, so greedy; the rollout length of table 2",
        max_tokens=8192,
    ),
    "fp8-rl": Preset(
        source="FP8-RL §2.2.1: AIME24 under the DAPO recipe, whose validation (arXiv 2503.14476 §4.1) "
        "is avg@32 at temperature 1.0 and top-p 0.7; 20K tokens",
        samples=32,
        temperature=1.0,
        top_p=0.7,
        max_tokens=20 * 1024,
    ),
}
"""Presets by name; `--samples` and the other options take precedence over them."""


def drawn_as(one: EvalSet, training: Sampling, setting: str) -> tuple[int, Sampling]:
    """Returns how many responses an evaluation set asks for, and how they are drawn: one, greedily, unless it
    has samples. They are as long as in training. Raises ConfigError, which names the setting, for a preset that
    there is not, or whose responses are longer than that."""
    preset = preset_of(one, setting)
    if (preset.max_tokens or 0) > training.max_tokens:
        raise ConfigError(
            f"{setting} = {one.preset!r} is of responses of {preset.max_tokens} tokens: "
            f"rollout.sampling.max_tokens = {training.max_tokens} cuts them off"
        )
    if not preset.samples:
        return 1, replace(training, temperature=0.0)
    return preset.samples, replace(training, temperature=preset.temperature, top_p=preset.top_p)


def preset_of(one: EvalSet, setting: str) -> Preset:
    """Returns the preset of an evaluation set with what the set says otherwise. Raises ConfigError, which names
    the setting, for one that there is not."""
    preset = preset_named(one.preset, f"{setting} = {one.preset!r}")
    return with_options(preset, one.samples, one.temperature, one.top_p)


def preset_named(name: str | None, setting: str) -> Preset:
    """Returns a preset of PRESETS; for None, one in which all is as default. Raises ConfigError, which begins
    with `setting`, for one that there is not."""
    if name and name not in PRESETS:
        raise ConfigError(f"{setting}: none of {', '.join(PRESETS)}")
    return PRESETS[name] if name else Preset(source="")


def with_options(
    preset: Preset,
    samples: int | None,
    temperature: float | None,
    top_p: float | None,
    max_tokens: int | None = None,
) -> Preset:
    """Returns `preset` with those of its fields that are given."""
    fields = {
        "samples": samples,
        "temperature": temperature,
        "top_p": top_p,
        "max_tokens": max_tokens,
    }
    return replace(preset, **{name: x for name, x in fields.items() if x is not None})
