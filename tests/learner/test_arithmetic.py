"""Numbers too small for float32's normal range are taken as 0, by every thread of a learner and a replay, and
several threads give the same bits each time."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.paths import ROOT

from areal_q.kernels.jit import kernel
from areal_q.models.layers.packed_attention import Determinism
from learner.arithmetic import set_arithmetic

TINY = """
import threading, torch
from learner.arithmetic import set_arithmetic
set_arithmetic(2, "cpu")
many = torch.full((1 << 20,), 1e-30)
found = [int((many * 1e-10).count_nonzero())]
other = threading.Thread(target=lambda: found.append(int((many * 1e-10).count_nonzero())))
other.start()
other.join()
print(torch.get_num_threads(), *found)
"""
SHARED = """
import torch
from learner.arithmetic import set_arithmetic

def gradient(threads):
    set_arithmetic(threads, "cpu")
    hidden = torch.zeros(8, 256, requires_grad=True)
    grad = torch.randn(1024, 256, generator=torch.Generator().manual_seed(0))
    hidden[torch.arange(1024) % 3].backward(grad)
    return hidden.grad

one = gradient(1)
print(sum(not torch.equal(gradient(2), one) for _ in range(10)))
"""


def smallest() -> float:
    """Returns a product that float32 holds only as a subnormal number."""
    return float(torch.tensor([1e-30]) * torch.tensor([1e-10]))


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="a processor without this mode")
def test_every_thread_takes_tiny_products_as_zero():
    assert printed(TINY) == ["2", "0", "0"]


def test_two_threads_add_gradients_of_a_shared_token_in_order():
    assert printed(SHARED) == ["0"]


def test_a_gpu_is_given_nothing_that_it_cannot_repeat():
    program = """
import os, torch
from learner.arithmetic import set_arithmetic
set_arithmetic(1, "cuda:1")
enabled = torch.backends.cuda
print(torch.get_deterministic_debug_mode(), os.environ["CUBLAS_WORKSPACE_CONFIG"])
print(enabled.cudnn_sdp_enabled(), enabled.flash_sdp_enabled(), enabled.mem_efficient_sdp_enabled())
"""
    assert printed(program) == ["1", ":4096:8", "False", "True", "True"]


def test_only_what_lies_between_is_insisted_on():
    modes: list[int] = []
    x, weight = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    torch.set_deterministic_debug_mode("warn")
    try:
        a, b = Determinism.apply("warn", x, weight)
        product = a * b
        product.register_hook(lambda grad: modes.append(torch.get_deterministic_debug_mode()))
        a.register_hook(lambda grad: modes.append(torch.get_deterministic_debug_mode()))
        x.register_hook(lambda grad: modes.append(torch.get_deterministic_debug_mode()))
        (out,) = Determinism.apply("error", product)
        (3 * out).sum().backward()
    finally:
        after = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("default")
    assert (modes, after) == ([2, 2, 1], 1)
    assert [t.grad is not None and t.grad.tolist() for t in (x, weight)] == [[3.0] * 3] * 2


def printed(program: str) -> list[str]:
    """Returns the words that `program` prints, in a process whose threads take no mode from here."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="a processor without this mode")
def test_compiled_loops_take_tiny_products_as_zero():
    @kernel()
    def product(x, y, out):
        for i in range(x.shape[0]):
            out[i] = x[i] * y[i]

    out = np.empty(1, np.float32)
    product(np.array([1e-30], np.float32), np.array([1e-10], np.float32), out)
    assert out[0] > 0
    set_arithmetic(1, "cpu")
    product(np.array([1e-30], np.float32), np.array([1e-10], np.float32), out)
    assert out[0] == 0
