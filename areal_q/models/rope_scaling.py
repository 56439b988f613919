"""RoPE's frequencies, plain and stretched over a longer context, read from Hugging Face's `config.json`.

With the base θ, channel pair i of a head of d numbers turns by f_i = θ^(-2i/d) radians a position. The kinds
stretch that by a factor s:

    linear   f_i / s                                              (arXiv 2306.15595)
    llama3   by the turns t = L·f_i / 2π within the original context L:
             f_i · m + f_i / s · (1 - m),  m = clamp((t - low) / (high - low), 0, 1)
    yarn     f_i · (1 - r_i) + f_i / s · r_i, where r_i rises from 0 to 1 between the pairs that turn β_fast and
             β_slow times within L; cos and sin are multiplied by 0.1·ln(s) + 1 (arXiv 2309.00071, eq. 22 to 25)
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from areal_q.errors import CheckpointError, NotOurs
from areal_q.models.variants import STATEFUL

Table = dict[str, Any]
CONTEXT = "original_max_position_embeddings"
_BASES = {"smollm3": 2_000_000.0, "gemma3_text": 1_000_000.0, "gpt_oss": 150_000.0}
"""θ where config.json has none: transformers' default of the family; elsewhere 10,000."""
_STRETCHED = {"gpt_oss": {"rope_type": "yarn", "factor": 32.0, "truncate": False, CONTEXT: 4096}}
"""The ways to stretch where config.json has none; of the other families, none"""
PARTIAL = dict.fromkeys(STATEFUL, 0.25)
"""The families in which RoPE turns a share of each head alone, and that share where config.json has none"""
_NO_STRETCH = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""What such a family's table has besides. The last two are of images: a token of a text has one position."""
WINDOW_THETA = 10_000.0
"""The same of Gemma's layers that see a window alone"""


class Kind(NamedTuple):
    """A way to stretch."""

    needed: tuple[str, ...]
    """Positive numbers that the table must have."""
    allowed: tuple[str, ...]
    """Positive numbers that it may have."""
    stretch: Callable[[list[float], float, Table], list[float]]
    """(f, θ, table) → the frequencies."""
    turned_by: Callable[[Table], float] = lambda table: 1.0
    """Returns what cos and sin are multiplied by."""


def _linear(freqs: list[float], theta: float, table: Table) -> list[float]:
    return [f / table["factor"] for f in freqs]


def _llama3(freqs: list[float], theta: float, table: Table) -> list[float]:
    factor, low, high = table["factor"], table["low_freq_factor"], table["high_freq_factor"]

    def scale(freq: float) -> float:
        turns = table[CONTEXT] * freq / (2 * math.pi)
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        return freq * smooth + freq / factor * (1 - smooth)

    return [scale(f) for f in freqs]


def _yarn(freqs: list[float], theta: float, table: Table) -> list[float]:
    dim = 2 * len(freqs)

    def pair_that_turns(times: float) -> float:
        return dim * math.log(table[CONTEXT] / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_that_turns(table.get("beta_fast") or 32.0)
    high = pair_that_turns(table.get("beta_slow") or 1.0)
    if table.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    ramps = [min(1.0, max(0.0, (i - low) / width)) for i in range(len(freqs))]
    return [
        f * (1 - ramp) + f / table["factor"] * ramp for f, ramp in zip(freqs, ramps, strict=True)
    ]


def _yarn_turned_by(table: Table) -> float:
    def by(weight: float) -> float:
        return 0.1 * weight * math.log(table["factor"]) + 1.0 if table["factor"] > 1 else 1.0

    if (given := table.get("attention_factor")) is not None:
        return float(given)
    mscale, of_all = table.get("mscale"), table.get("mscale_all_dim")
    return by(mscale) / by(of_all) if mscale and of_all else by(1.0)


KINDS = {
    "linear": Kind(("factor",), (), _linear),
    "llama3": Kind(("factor", "low_freq_factor", "high_freq_factor", CONTEXT), (), _llama3),
    "yarn": Kind(
        ("factor", CONTEXT),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        _yarn,
        _yarn_turned_by,
    ),
}


def ropes_of(family: str, hf: Table) -> tuple[float, Table | None, float | None]:
    """Returns what `read_rope` does, and the base of the layers that see a window alone, where the family has
    one for them: as transformers 5 writes it, a table for each kind of layer, or as those before it did.
    Raises what `read_rope` does, and NotOurs for RoPE that is stretched in these layers."""
    if family != "gemma3_text":
        return *read_rope(hf), None
    tables = hf.get("rope_parameters") or {}
    of_window = dict(tables.get("sliding_attention") or {})
    of_window.setdefault("rope_theta", hf.get("rope_local_base_freq") or WINDOW_THETA)
    window_theta, stretched = read_rope({"rope_parameters": of_window})
    if stretched:
        raise NotOurs("RoPE that is stretched in layers that see a window is not implemented")
    whole = {**(tables.get("full_attention") or {}), **(hf.get("rope_scaling") or {})}
    theta, scaling = read_rope(hf | {"rope_scaling": whole, "rope_parameters": None})
    return theta, scaling, window_theta


def read_rope(hf: Table) -> tuple[float, Table | None]:
    """Returns θ and the table of a way to stretch, if there is one, with transformers' precedence:
    `rope_scaling` before `rope_parameters`, and a θ in either before `rope_theta`. Raises CheckpointError for
    values that are not valid or a kind that is not implemented."""
    family = hf.get("model_type", "")
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or _STRETCHED.get(family, {})
    rope = dict(rope)
    if any(isinstance(value, dict) for value in rope.values()):
        raise NotOurs("RoPE of a kind of layer each is not implemented")
    base = _BASES.get(family, 10_000.0)
    theta = float(rope.pop("rope_theta", None) or hf.get("rope_theta") or base)
    if not 1 < theta < math.inf:
        raise CheckpointError(f"rope_theta = {theta}")
    if family in PARTIAL:
        rope = {name: value for name, value in rope.items() if name not in _NO_STRETCH}
    elif rope.get("partial_rotary_factor", hf.get("partial_rotary_factor") or 1.0) != 1.0:
        raise NotOurs("partial_rotary_factor is not implemented")
    name = rope.get("rope_type", rope.get("type", "default"))
    if name == "default":
        return theta, None
    if name not in KINDS:
        raise NotOurs(f"rope type {name!r} is not implemented")
    _complete(rope, name, hf)
    return theta, rope


def rope_dim_of(family: str, hf: Table, head_dim: int) -> int | None:
    """Returns how many of a head's channels RoPE turns; None for all. Raises CheckpointError for no share."""
    if family not in PARTIAL:
        return None
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    usual = hf.get("partial_rotary_factor", PARTIAL[family])
    share = rope.get("partial_rotary_factor", usual)
    if not isinstance(share, int | float) or not 0 < share <= 1 or head_dim * share < 2:
        raise CheckpointError(f"partial_rotary_factor = {share!r} of a head of {head_dim}")
    return int(head_dim * share)


def _complete(rope: Table, name: str, hf: Table) -> None:
    """Adds what transformers takes from elsewhere where the table lacks it, and checks the numbers. Raises
    CheckpointError."""
    kind, longest = KINDS[name], hf.get("max_position_embeddings")
    if CONTEXT in kind.needed:
        if (beside := hf.get(CONTEXT)) is not None:  # it goes before the table's
            rope[CONTEXT] = beside
        rope.setdefault(CONTEXT, longest)
    if name == "yarn" and rope.get("factor") is None and rope[CONTEXT] and longest:
        rope["factor"] = longest / rope[CONTEXT]
    for key in kind.needed + tuple(key for key in kind.allowed if rope.get(key) is not None):
        if not isinstance(rope.get(key), int | float) or not 0 < rope[key] < math.inf:
            raise CheckpointError(f"rope type {name!r} with {key} = {rope.get(key)!r}")
    if name == "llama3" and not rope["low_freq_factor"] < rope["high_freq_factor"]:
        raise CheckpointError("rope type 'llama3' with low_freq_factor not below high_freq_factor")


def inverse_frequencies(head_dim: int, theta: float, table: Table | None) -> list[float]:
    """Returns the head_dim / 2 angular frequencies in radians per position. `table` is as `read_rope` returns
    it."""
    freqs = [theta ** (-i / head_dim) for i in range(0, head_dim, 2)]
    return freqs if table is None else kind_of(table).stretch(freqs, theta, table)


def turned_by(table: Table | None) -> float:
    """Returns what cos and sin are multiplied by."""
    return 1.0 if table is None else kind_of(table).turned_by(table)


def kind_of(table: Table) -> Kind:
    return KINDS[table.get("rope_type") or table["type"]]
