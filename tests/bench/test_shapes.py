"""The bench of three shapes, at the smallest."""

import pytest

from bench.shapes.limits import Limits
from bench.shapes.run import SECTIONS
from bench.shapes.settings import Settings
from bench.shapes.shapes import SHAPES


def test_sizes_of_products_are_those_of_the_model():
    shape = SHAPES["0.6M"]
    weights = {name.split(".")[-2]: w.shape for name, w in shape.model().named_parameters()}
    q, k, v, gate, o, down = (weights[f"{x}_proj"] for x in ("q", "k", "v", "gate", "o", "down"))
    assert shape.linears["qkv"] == (q[1], q[0] + k[0] + v[0])
    assert shape.linears["gate_up"] == (gate[1], 2 * gate[0])
    assert shape.linears["o"] == (o[1], o[0])
    assert shape.linears["down"] == (down[1], down[0])


@pytest.mark.slow
@pytest.mark.parametrize("section", list(SECTIONS))
def test_a_section_measures_each_format_asked_for(section):
    shape = SHAPES["0.6M"]
    settings = Settings(
        formats=["int8", "int4"], sequences=[8], dtypes=["auto"], peers=False, repeats=1
    )
    text, numbers = SECTIONS[section](shape, settings, Limits(shape))
    assert "int8" in text and "int4" in text and numbers
