"""What a setting may be: every number is bounded, and a setting that would do nothing is refused by name."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from helpers.policies import initial_model
from msgspec import inspect as types

from areal_q.checks.model import check_format
from areal_q.config import Run, load
from areal_q.config.struct_types import GENERAL, LARGEST_FLOAT
from areal_q.errors import ConfigError, QuantizationError
from areal_q.models import DecoderConfig
from areal_q.quant import FORMATS
from areal_q.quant.linears import check_inputs

ENDLESS = {
    *("clip_high", "cap", "cap_high", "max_widening"),
    *("max_grad_norm",),
}
"""Settings of which an infinity says: no bound"""


def numbers(kind: types.Type, name: str) -> Iterator[tuple[str, types.IntType | types.FloatType]]:
    """(name, type) of every number in the settings, those inside of lists included."""
    match kind:
        case types.Metadata():
            yield from numbers(kind.type, name)
        case types.StructType():
            for field in kind.fields:
                yield from numbers(field.type, field.name)
        case types.UnionType():
            for member in kind.types:
                yield from numbers(member, name)
        case types.VarTupleType():
            yield from numbers(kind.item_type, name)
        case types.TupleType():
            for item in kind.item_types:
                yield from numbers(item, name)
        case types.IntType() | types.FloatType():
            yield name, kind
        case _:
            return


def found() -> list[tuple[str, types.IntType | types.FloatType]]:
    return list(numbers(types.type_info(Run), ""))


def test_all_settings_of_a_run_have_their_defaults_alike():
    factories = [f.name for f in msgspec.structs.fields(Run) if f.default is msgspec.NODEFAULT]
    assert factories == []


def test_every_whole_number_has_bounds_on_both_sides():
    whole = [(name, k) for name, k in found() if isinstance(k, types.IntType)]
    assert len(whole) > 60
    for name, kind in whole:
        least = kind.ge if kind.ge is not None else kind.gt
        most = kind.le if kind.le is not None else kind.lt
        assert least is not None and most is not None, name
        assert most <= GENERAL or name == "seed", name


def test_no_float_takes_an_infinity_that_means_nothing():
    floats = [(name, k) for name, k in found() if isinstance(k, types.FloatType)]
    assert len(floats) > 60
    for name, kind in floats:
        assert kind.ge is not None or kind.gt is not None, name
        most = kind.le if kind.le is not None else kind.lt
        assert (most is None) == (name in ENDLESS), name
        assert most is None or most <= LARGEST_FLOAT, name


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("reward.correct", v) for v in ("nan", "inf")),
        *(("reward.format", v) for v in ("nan", "-inf")),
        *(("broadcast.heartbeat_s", v) for v in ("inf", "1e9")),
        *(("learner.optimizer.lr", v) for v in ("inf", "nan")),
        *(("learner.uaq", v) for v in ("inf", "1e30")),
        *(("learner.groups", v) for v in ("1" + "0" * 21, "1000000")),
        ("rollout.sampling.temperature", "inf"),
        ("learner.optimizer.betas", "[0.9, 1]"),
        ("learner.optimizer.betas", "[1, 0.9]"),
        ("steps", "1" + "0" * 20),
        ("seed", "1" + "0" * 23),
        ("learner.threads", "100000"),
        ("rollout.threads", "100000"),
        ("model.width", str(2**63)),
    ],
)
def test_a_number_that_means_nothing_is_refused_by_name(setting: str, value: str):
    with pytest.raises(ConfigError) as refused:
        load(None, [f"{setting}={value}"])
    assert setting in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("setting", ["learner.max_grad_norm", "learner.objective.cap"])
def test_an_infinity_that_says_no_bound_is_taken(setting: str):
    run: Any = load(None, [f"{setting}=inf"])
    for name in setting.split("."):
        run = getattr(run, name)
    assert math.isinf(run)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["reward.overlong={max_tokens=16,cache_tokens=100}"], "every response would be punished"),
        (["reward.overlong={max_tokens=16,cache_tokens=16}"], "every response would be punished"),
        (["reward.overlong={max_tokens=400,cache_tokens=100}"], "which no response of"),
        (["rollout.format=bf16", "rollout.sticky_scales=0.05"], "bf16 has no scales"),
        (["learner.lora={}", "rollout.sticky_scales=0.05"], "base does not change"),
        (["rollout.format=nvfp4", "model.mlp=33"], "needs an even model.mlp, not 33"),
        (["rollout.format=mxfp4", "model.mlp=33"], "needs an even model.mlp, not 33"),
    ],
)
def test_a_setting_that_does_nothing_is_refused(settings: list[str], named: str):
    with pytest.raises(ConfigError, match=named):
        load(None, settings)


@pytest.mark.parametrize("age_s", ["0.001", "0", "-1", "nan"])
def test_an_age_at_which_no_step_is_made_is_refused(age_s: str):
    with pytest.raises(ConfigError, match=r"buffer\.removal\.max_age_s"):
        load(None, [f"buffer.removal.max_age_s={age_s}"])


def test_a_soft_length_penalty_inside_the_budget_is_taken():
    overlong = load(None, ["reward.overlong={max_tokens=16,cache_tokens=4}"]).reward.overlong
    assert overlong is not None and overlong.cache_tokens == 4


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_every_format_takes_the_small_model(format: str, make_run: Any):

    run = make_run(f"rollout.format={format}")
    check_format(initial_model(run).config, format)


def test_a_model_that_a_format_cannot_hold_is_refused_at_start():
    odd = DecoderConfig(
        family="llama", vocab_size=8, width=4, layers=1, heads=1, kv_heads=1, head_dim=4, mlp=33,
        max_positions=8,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"rollout\.format = 'mxfp4': .*down_proj.*33 inputs"):
        check_format(odd, "mxfp4")


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_a_width_is_refused_unread_where_quantizing_refuses_it(format: str):
    def refused(check: Callable[..., object], *args: Any) -> bool:
        try:
            check(*args)
        except QuantizationError:
            return True
        return False

    for inputs in (1, 2, 3, 31, 32, 33, 127, 128, 129, 133_144, 133_145, 140_000):
        row = torch.zeros(()).expand(1, inputs)
        by_quantizing = refused(FORMATS[format].quantize, row, "x")
        assert refused(check_inputs, format, inputs, "x") == by_quantizing, inputs


def test_int8_sums_that_may_wrap_are_refused_by_name():
    """Ones times ones of 140,000 inputs once gave −126,288.5."""
    FORMATS["int8"].quantize(torch.ones(1, 133_144), "x.down_proj.weight")
    with pytest.raises(QuantizationError, match=r"x\.down_proj\.weight: sums over 133,145"):
        FORMATS["int8"].quantize(torch.ones(1, 133_145), "x.down_proj.weight")
