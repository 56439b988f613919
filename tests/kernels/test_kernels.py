"""The kernels that read a weight once give, to the bit, what the torch operations of a format give."""

import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.kinds import E4M3, every_format
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numba.core.dispatcher import Dispatcher

import areal_q.kernels
from areal_q.errors import QuantizationError
from areal_q.kernels import cpu_gemm, jit
from areal_q.kernels.cpu_rows import dots, weighted_sums
from areal_q.kernels.cpu_tile import LANES
from areal_q.kernels.quantize import dispatch, eight_bits
from areal_q.kernels.training.product import ROWS, add_product
from areal_q.quant import FORMATS
from areal_q.quant.activations import to_e4m3
from areal_q.quant.format import Parts, Ranges

any_weights = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 140), st.integers(1, 140).map(lambda n: 2 * n)),
    elements=st.floats(-(2.0**127), 2.0**127, width=32)
    | st.floats(-(2.0**-10), 2.0**-10, width=32),
    fill=st.sampled_from([0.0, -0.0, 1.0, 0.375]),
).map(torch.from_numpy)


def plain(name: str, weight: torch.Tensor, ranges: Ranges | None = None) -> Parts:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_for", lambda weight: None)
        return FORMATS[name].quantize(weight, "w", ranges)


def assert_same(ours: Parts, wanted: Parts) -> None:
    assert ours.keys() == wanted.keys()
    for suffix, tensor in wanted.items():
        assert ours[suffix].dtype == tensor.dtype and ours[suffix].shape == tensor.shape
        assert torch.equal(ours[suffix].view(torch.uint8), tensor.view(torch.uint8)), suffix


@settings(max_examples=40, deadline=None)
@given(weight=any_weights)
@every_format
def test_kernels_and_torch_operations_give_the_same_bits(name, weight):
    assert_same(FORMATS[name].quantize(weight, "w"), plain(name, weight))


@every_format
def test_they_do_so_for_given_ranges_that_clamp(name):
    weight = torch.randn(200, 300)
    ranges = FORMATS[name].ranges(0.5 * weight)
    assert_same(FORMATS[name].quantize(weight, "w", ranges), plain(name, weight, ranges))


@every_format
@pytest.mark.parametrize("width", [30, 128, 130, 256])
def test_they_do_so_for_every_code_and_every_border_between_two(name, width):
    steps = torch.arange(-2048, 2048, dtype=torch.float32) / 4
    weight = torch.cat((steps, steps.nextafter(torch.tensor(9e9)), steps.nextafter(-steps - 1)))
    weight = weight[: len(weight) // width * width].view(-1, width)
    weight[:, 0] = 448.0  # so that scales are exact and codes fall on their borders
    assert_same(FORMATS[name].quantize(weight, "w"), plain(name, weight))


def test_floats_near_the_range_of_e4m3_round_as_torch_rounds():
    bits = torch.arange(0, 2**31, 997, dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    x = torch.cat((x[x <= 2.0**120], -x[x <= 2.0**120]))[: 2 * 10**6]
    x = torch.cat((x, torch.tensor([449.0, 464.0, 480.0, 1e9, 2.0**-10, 3 * 2.0**-10])))
    codes = np.empty(len(x), np.uint8)
    eight_bits._e4m3(x.numpy(), np.float32(1), codes)
    assert np.array_equal(codes, to_e4m3(x).view(torch.uint8).numpy())


@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
@pytest.mark.parametrize("block", [(1, 300), (128, 128)])
def test_factors_precede_quantizing(dtype, block):
    weight, columns, rows = torch.randn(200, 300), torch.rand(300), torch.rand(200)
    folded = dispatch.eight_bits(weight * columns * rows[:, None], "w", dtype, block)
    got = dispatch.eight_bits(weight, "w", dtype, block, factors=(columns, rows))
    assert got is not None and folded is not None
    assert torch.equal(got[0].view(torch.int8), folded[0].view(torch.int8))
    assert torch.equal(got[1], folded[1])


@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
def test_factors_that_overflow_are_refused(dtype):
    weight, factors = torch.full((2, 3), 2.0**126), (torch.full((3,), 4.0), torch.ones(2))
    with pytest.raises(QuantizationError, match="big"):
        dispatch.eight_bits(weight, "big", dtype, (1, 3), factors=factors)


def test_weights_that_no_kernel_takes_are_left_to_torch():
    assert dispatch.row_blocks(torch.randn(4, 6).t(), 2) is None
    assert dispatch.row_blocks(torch.randn(4, 6, dtype=torch.float64), 2) is None
    assert dispatch.row_blocks(torch.empty(0, 6), 2) is None


@pytest.mark.parametrize("inner", [1, 2, 17])
@pytest.mark.parametrize("turned", [False, True])
def test_add_product_is_that_of_numpy_row_by_row(inner: int, turned: bool):
    rng = np.random.default_rng(inner)
    a, b = rng.standard_normal((3 * ROWS, inner)), rng.standard_normal((inner, 2 * LANES))
    a, b, out = (x.astype(np.float32) for x in (a, b, np.ones((3 * ROWS, 2 * LANES))))
    given = np.ascontiguousarray(a.T).T if turned else a
    add_product(given, b, out)
    np.testing.assert_allclose(out, 1 + a @ b, rtol=1e-5, atol=1e-5)
    alone = np.ones((ROWS, LANES), np.float32)
    add_product(given[ROWS : 2 * ROWS], b[:, LANES:], alone)
    assert np.array_equal(alone, out[ROWS : 2 * ROWS, LANES:])


@pytest.mark.parametrize("width", [1, 15, 16, 24, 64, 80])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 131])
def test_weighted_sums_are_added_as_numpy_has_them(count: int, width: int):
    rng = np.random.default_rng(count + width)
    weights = rng.standard_normal((2, count + 3)).astype(np.float32)
    rows = rng.standard_normal((count + 3, width)).astype(np.float32)
    rows[count:] = np.nan  # what lies behind the last row is not read
    padded = np.full((2, count + 5), np.nan, np.float32)
    padded[:, 2 : 2 + count] = weights[:, :count]
    out = np.full((3, width), 7, np.float32)
    weighted_sums(padded, 2, 2 + count, rows, out[:2])
    wide, rows = weights[:, :count].astype(np.float64), rows[:count]
    bound = 1e-6 * (7 + abs(wide) @ abs(rows))
    assert (np.abs(out[:2] - 7 - wide @ rows) <= bound).all()
    assert (out[2] == 7).all()


@pytest.mark.parametrize("width", [1, 8, 15, 16, 24, 64, 80])
@pytest.mark.parametrize("count", [1, 7, 8, 16, 33])
def test_dots_are_those_of_numpy(count: int, width: int):
    rng = np.random.default_rng(count + width)
    rows = rng.standard_normal((count + 3, width)).astype(np.float32)
    rows[count:], x = np.nan, rng.standard_normal((2, width)).astype(np.float32)
    out = np.full((2, count + 3), 7, np.float32)
    dots(rows, x, out, 2, 2 + count)
    wide = rows[:count].astype(np.float64)
    assert (np.abs(out[:, 2 : 2 + count] - x @ wide.T) <= 1e-6 * abs(x) @ abs(wide.T)).all()
    assert (out[:, :2] == 7).all() and (out[:, 2 + count :] == 7).all()


CALLEE = """
from jit import kernel

@kernel()
def grown(x):
    return x + {step}
"""
CALLER = """
from callee import grown
from jit import kernel

@kernel()
def twice(x):
    return grown(grown(x))

print(twice(1), sum(twice.stats.cache_hits.values()))
"""


def test_no_kernel_asks_for_another_cache_entry_each_time():
    """numba's key of one has the pickled cells of the closure, and those of a kernel differ by the process."""
    found = pkgutil.walk_packages(areal_q.kernels.__path__, "areal_q.kernels.")
    modules = [importlib.import_module(one.name) for one in found if "triton" not in one.name]
    values = [value for module in modules for value in vars(module).values()]
    kernels = [value for value in values if isinstance(value, Dispatcher)]
    assert cpu_gemm.few_rows in kernels and add_product in kernels
    assert not [k for k in kernels for cell in k.py_func.__closure__ or () if cell.cell_contents]


def test_kernels_of_several_threads_share_one_cache(monkeypatch: pytest.MonkeyPatch):
    """Their modules may be imported at the same time."""
    seen = set[str]()

    def numba_reads(*_: Any, **__: Any) -> Callable[[Any], Any]:
        time.sleep(0)  # another thread's turn
        seen.add(jit.config.CACHE_DIR)
        return lambda function: function

    monkeypatch.setattr(jit, "njit", numba_reads)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(jit.kernel(), range(5000)))
    assert len(seen) == 1


@pytest.mark.timeout(60)
def test_a_kernel_is_compiled_again_when_one_it_calls_changes(tmp_path: Path):
    shutil.copy(jit.__file__, tmp_path)
    (tmp_path / "caller.py").write_text(CALLER)
    clean = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    for kept in ({}, {"NUMBA_CACHE_DIR": str(tmp_path / "kept")}):
        said = []
        for step in (1, 1, 10):
            (tmp_path / "callee.py").write_text(CALLEE.format(step=step))
            command = [sys.executable, str(tmp_path / "caller.py")]
            done = subprocess.run(command, env=clean | kept, capture_output=True, text=True)
            said.append(done.stdout.split())
        assert said == [["3", "0"], ["3", "1"], ["21", "0"]], done.stderr
