"""Optimizers: against torch's AdamW and Muon, bitsandbytes' table of values, and through a checkpoint."""

import itertools
import math
import subprocess
import sys
import threading
from unittest.mock import Mock, create_autospec

import pytest
import torch
from helpers.fixture_types import MakeRun, MakeSamples
from helpers.policies import build_policy, save_at
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from areal_q.config import AdamW, AdamW8bit, Muon, OptimizerConfig
from areal_q.errors import DivergedError
from areal_q.models.hf.checkpoint import save_decoder
from learner import checkpoint
from learner.backends import critic, single_device
from learner.backends.single_device import TorchPolicy
from learner.loop import Learner
from learner.optim.adamw_8bit import BLOCK, code_values, dequantize, quantize
from learner.optim.build import build_optimizer, learning_rate, optimizer_step
from learner.policy_update import update_policy


def weights(policy: TorchPolicy) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in policy.model.named_parameters()}


class Net(nn.Module):
    """A hidden matrix, an output head and a bias."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        attention = nn.ModuleDict({"q_proj": nn.Linear(64, 80)})
        self.layers = nn.ModuleList([nn.ModuleDict({"self_attn": attention})])
        self.lm_head = nn.Linear(80, 64, bias=False)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=g) / 8

    @property
    def q_proj(self) -> nn.Linear:
        return self.get_submodule("layers.0.self_attn.q_proj")  # type: ignore[return-value]

    def learn(self, cfg: OptimizerConfig, steps: int, lr: float) -> float:
        """Regression on a fixed problem; returns the last loss."""
        g = torch.Generator().manual_seed(1)
        x, y = torch.randn(32, 64, generator=g), torch.randn(32, 64, generator=g)
        optimizer = build_optimizer(self, cfg)
        loss = torch.tensor(0.0)
        for _ in range(steps):
            loss = (self.lm_head(self.q_proj(x).tanh()) - y).square().mean()
            loss.backward()
            optimizer_step(self, optimizer, lr, math.inf)
        return loss.item()


def test_the_256_values_are_those_of_the_dynamic_tree():
    for signed, decades in ((True, 127), (False, 254)):
        values = code_values(signed)
        assert len(values) == len(values.unique()) == 256
        assert 0.0 in values and float(values[-1]) == 1.0
        assert int(((values > 0) & (values < 1)).sum()) == decades
    # By hand: the first decade of signed values is 10^-6 · (0.1 … 1), not cut, so its middle is 0.55e-6.
    assert float(code_values(True)[128]) == pytest.approx(0.55e-6)
    assert float(code_values(False)[1]) == pytest.approx(0.325e-6)


def test_the_values_and_codes_are_those_of_bitsandbytes():
    functional = pytest.importorskip(
        "bitsandbytes",
        reason="bitsandbytes is not installed: make test-formats",
        exc_type=ImportError,
    ).functional
    for signed in (True, False):
        theirs = functional.create_dynamic_map(signed=signed).float()
        torch.testing.assert_close(code_values(signed), theirs, rtol=0, atol=1e-7)
        x = torch.randn(5 * BLOCK, generator=torch.Generator().manual_seed(0))
        x = x if signed else x.square()
        codes, state = functional.quantize_blockwise(x, code=theirs, blocksize=BLOCK)
        ours, largest = quantize(x, signed)
        torch.testing.assert_close(largest, state.absmax)
        # On a CPU theirs rounds small values more coarsely; ours is never further off.
        codes = codes.flatten()
        assert float((ours == codes).float().mean()) > 0.9
        errors = [(dequantize(c, largest, signed) - x).abs() for c in (ours, codes)]
        assert bool((errors[0] <= errors[1] + 1e-7).all())


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=600),
    st.booleans(),
)
def test_a_moment_comes_back_within_the_bound(numbers: list[float], signed: bool):
    x = torch.tensor(numbers)
    x = x if signed else x.abs()
    codes, largest = quantize(x, signed)
    back = dequantize(codes, largest, signed)
    scale = largest.repeat_interleave(BLOCK)[: len(x)]
    # Half the widest gap between neighbours bounds the error of the whole range.
    values = code_values(signed)
    widest = float(values.diff().max()) / 2
    low = float(values[0] + 1) if signed else 0.0
    assert bool(((back - x).abs() <= max(widest, low) * scale * 1.001 + 1e-37).all())
    assert bool((back[x == 0] == 0).all())


def test_8_bit_moments_learn_like_float32_ones():
    eight, full = Net(), Net()
    losses = [
        net.learn(cfg, 60, 3e-3)
        for net, cfg in ((eight, AdamW8bit(weight_decay=0.1)), (full, AdamW(weight_decay=0.1)))
    ]
    assert losses[1] < 0.3
    assert losses[0] == pytest.approx(losses[1], rel=0.1)


def test_with_float32_moments_it_is_torchs_adamw():
    eight, full = Net(), Net()
    eight.learn(AdamW8bit(small=10**9, weight_decay=0.1), 20, 1e-2)
    full.learn(AdamW(weight_decay=0.1), 20, 1e-2)
    for one, other in zip(eight.parameters(), full.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_8_bit_moments_take_two_bytes_a_weight():
    net = Net()
    cfg = AdamW8bit(small=1)
    optimizer = build_optimizer(net, cfg)
    net.q_proj(torch.ones(64)).sum().backward()
    optimizer_step(net, optimizer, 1e-3, 1.0)
    slot = optimizer.state[net.q_proj.weight]
    nbytes = sum(v.nbytes for k, v in slot.items() if k != "step")
    assert nbytes == 64 * 80 * (2 + 8 / BLOCK)


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest():
    ours, net = Net(), Net()
    ours.learn(Muon(weight_decay=0.1), 3, 1e-2)
    muon = torch.optim.Muon(
        [net.q_proj.weight], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    head = {"params": [net.lm_head.weight], "weight_decay": 0.1}
    bias = {"params": [net.q_proj.bias], "weight_decay": 0.0}
    adamw = torch.optim.AdamW([head, bias], lr=1e-2, betas=(0.9, 0.95))
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 64, generator=g), torch.randn(32, 64, generator=g)
    for _ in range(3):
        (net.lm_head(net.q_proj(x).tanh()) - y).square().mean().backward()
        for part in (muon, adamw):
            part.step()
            part.zero_grad()
    for one, other in zip(ours.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_adamw_is_torchs_bit_for_bit():
    ours, net = Net(), Net()
    ours.learn(AdamW(weight_decay=0.1), 5, 1e-2)
    decay = [{"params": [net.q_proj.weight, net.lm_head.weight], "weight_decay": 0.1}]
    groups = [*decay, {"params": [net.q_proj.bias], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 64, generator=g), torch.randn(32, 64, generator=g)
    for _ in range(5):
        (net.lm_head(net.q_proj(x).tanh()) - y).square().mean().backward()
        adamw.step()
        adamw.zero_grad()
    for one, other in zip(ours.parameters(), net.parameters(), strict=True):
        assert torch.equal(one, other)


STEP = """
import sys, torch
from areal_q.config import AdamW, AdamW8bit
from areal_q.models import load_decoder
from learner.optim.build import build_optimizer, optimizer_step

for cfg in (AdamW(), AdamW8bit(small=1)):
    model = load_decoder(sys.argv[1])
    optimizer = build_optimizer(model, cfg)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer_step(model, optimizer, 0.1, 1.0)
    optimizer.load_state_dict(optimizer.state_dict())
print("torch._dynamo" in sys.modules)
"""


def test_a_loaded_model_takes_steps_without_torch_compile(make_run: MakeRun, tmp_path):
    """It would take a second and 70 MiB."""
    save_decoder(build_policy(make_run()).model, tmp_path / "model")
    command = [sys.executable, "-c", STEP, str(tmp_path / "model")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "muon"])
def test_a_restored_optimizer_goes_on_bit_for_bit(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path, kind: str
):
    settings = [f"learner.optimizer.type={kind}", "learner.optimizer.weight_decay=0.01"]
    settings += ["learner.optimizer.small=100"] if kind == "adamw8bit" else []
    policy, resumed = build_policy(make_run(*settings)), build_policy(make_run(*settings, "seed=9"))
    start = weights(policy)
    update_policy(policy, make_samples(4))
    save_at(1, tmp_path, policy)
    update_policy(resumed, make_samples(3, 7))
    checkpoint.restore(tmp_path, resumed)
    for one in (policy, resumed):
        update_policy(one, make_samples(6, 1))
    after = weights(policy)
    assert all(torch.equal(v, weights(resumed)[k]) for k, v in after.items())
    assert all(not torch.equal(v, start[k]) for k, v in after.items())


def test_the_learning_rate_falls_along_a_line_or_half_a_cosine():
    line = AdamW(lr=1.0, warmup_steps=0, decay_steps=4, decay="linear", final=0.2)
    assert [learning_rate(line, u) for u in range(6)] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2])
    curve = AdamW(lr=1.0, warmup_steps=0, decay_steps=4, final=0.0)
    expected = [1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0]
    assert [learning_rate(curve, u) for u in range(5)] == pytest.approx(expected)


def test_bad_gradients_in_a_row_end_training_on_old_weights(
    make_run: MakeRun, make_samples: MakeSamples
):
    policy = build_policy(make_run("learner.minibatches=1", "learner.max_skipped=3"))
    before = weights(policy)
    calls = itertools.count()
    bad = {0, 1, 3, 4, 5}  # the third is good: the count begins anew
    policy.model.model.norm.weight.register_hook(
        lambda g: g * math.nan if next(calls) in bad else g
    )
    for _ in range(2):
        update_policy(policy, make_samples(2))
    assert all(torch.equal(before[k], v) for k, v in weights(policy).items())
    for _ in range(3):
        update_policy(policy, make_samples(2))
    with pytest.raises(DivergedError, match=r"step 6: .* 3 times in a row \(learner.max_skipped\)"):
        update_policy(policy, make_samples(2))
    assert all(v.isfinite().all() for v in weights(policy).values())


def test_frozen_parameters_get_no_optimizer(make_run: MakeRun):
    for cfg in (AdamW(), AdamW8bit(), Muon()):
        model = build_policy(make_run()).model
        model.model.embed_tokens.requires_grad_(False)
        optimizer = build_optimizer(model, cfg)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert id(model.model.embed_tokens.weight) not in held
        assert held == {id(p) for p in model.parameters() if p.requires_grad}


def test_workers_draw_while_the_optimizers_are_built(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
):
    events: list[str] = []

    def build(model: nn.Module, cfg: OptimizerConfig) -> torch.optim.Optimizer:
        events.append(f"optimizer of {type(model).__name__}")
        return build_optimizer(model, cfg)

    for module in (single_device, critic):
        monkeypatch.setattr(module, "build_optimizer", build)
    run = make_run("learner.advantage.type=gae", "learner.critic={}")
    learner = create_autospec(Learner, policy=build_policy(run), run=run, step=0)
    for name in ("begin_version", "evaluate", "save"):
        getattr(learner, name).side_effect = lambda step, name=name: events.append(name)
    learner.group_reader = Mock(take=Mock(return_value=None))
    learner.metrics = learner.buffer_metrics = learner.heldout = Mock()
    learner.begin = lambda: Learner.begin(learner)
    Learner.take_steps(learner, threading.Event())
    assert events[:3] == ["begin_version", "evaluate", "save"]  # of which the second admits tickets
    assert events[3:] == ["optimizer of Decoder", "optimizer of Critic"]
    learner.policy.build_optimizers()
    assert len(events) == 5  # each is built once
