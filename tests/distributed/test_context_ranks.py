"""Ranks that share the tokens of a micro-batch, on real gloo processes: what one process learns from it."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from helpers.policies import build_policy
from helpers.strategies import DEEP, forest

from areal_q.config import Run
from areal_q.errors import ConfigError
from areal_q.models import Decoder, DecoderConfig, init_weights, save_decoder
from learner import checkpoint
from learner.data.packing import Sample
from learner.policy_update import update_policy

pytestmark = pytest.mark.timeout(240)
PASS = 48
"""The tokens of a micro-batch, of which each rank has its share: fewer than the longest response's"""
SHAPES = {
    # Fewer key and value heads than ranks.
    "one key head": {"heads": 4, "kv_heads": 1},
    # Neither kind of heads is divided evenly; of four ranks some use halves of two key heads.
    "a window, odd heads": {"heads": 6, "kv_heads": 3, "window": 4, "sliding": (0,)},
    # Fewer heads than ranks: several of these compute a part of one's queries.
    "one head": {"heads": 1, "kv_heads": 1},
    # Of four ranks two have the same head, of two one has two.
    "a window, three heads": {"heads": 3, "kv_heads": 3, "window": 4, "sliding": (0,)},
}
MORE = {
    "reference, entropy, recomputed": [
        "learner.reference_kl={coef=0.1}", "learner.entropy_coef=0.01", "learner.recompute=true",
    ],
    "sequences": ["learner.objective.type=gspo", "learner.epochs=2"],
    "critic": ["learner.advantage.type=gae", "learner.critic={optimizer={eps=1e-3, lr=1e-2}}"],
    "qarl": ["learner.precision=qarl", "rollout.format=int8"],
    "muon": ["learner.optimizer.type=muon"],
    "8-bit moments": ["learner.optimizer.type=adamw8bit"],
    "lora": ["learner.lora={rank=4}", "rollout.format=nf4", "learner.reference_kl={coef=0.1}"],
}  # fmt: skip
"""What shares tokens as well"""


@pytest.fixture
def run_of(make_run, byte_tokenizer: Path, tmp_path: Path) -> Callable[..., Run]:
    """run_of("one key head", 2) learns that model on ranks of which 2 share tokens."""

    def make(name: str, context: int, *settings: str) -> Run:
        path = tmp_path / name
        if not path.exists():
            shape = DecoderConfig(
                family="qwen3", vocab_size=257, width=32, layers=2, head_dim=8, mlp=48,
                max_positions=64, norm_eps=1e-6, **SHAPES[name],
            )  # fmt: skip
            init_weights(model := Decoder(shape), 0)
            save_decoder(model, path)
            for file in byte_tokenizer.iterdir():
                shutil.copy(file, path)
        return make_run(
            f"model={{type='pretrained', path='{path}'}}",
            # A large eps makes AdamW's step smooth in the gradient.
            "learner.optimizer={eps=1e-3, lr=1e-2}",
            f"learner.backend.context={context}",
            f"learner.microbatch_tokens={PASS // context}",
            *settings,
        )

    return make


def alone(run: Run) -> Any:
    """The policy of one process that has room for all tokens."""
    cfg = msgspec.structs.replace(
        run.learner, microbatch_tokens=PASS, backend=type(run.learner.backend)()
    )
    return build_policy(msgspec.structs.replace(run, learner=cfg), 0.7)


def batch(seed: int, make_samples) -> list[Sample]:
    """Trees of paths, short responses, and one that is longer than any rank's share of a micro-batch."""
    trees = [s for ticket in (50, 51) for s in forest(DEEP, seed + ticket, ticket)]
    long = forest([(0, 0, 2, PASS - 3)], seed, 60)
    short = [replace(s, advantage=0.0) if s.ticket == 0 else s for s in make_samples(9, seed)]
    return [*short, *trees, *long]


def assert_same(found: list[dict[str, float]], expected, path: Path, policy, at: float) -> None:
    """Metrics, weights and moments, which are the gradient's after one step, are equal but for rounding."""
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert one[name] == pytest.approx(value, rel=at, abs=1e-5), name
    path = path / "checkpoints" / "step-000009"
    tensors = checkpoint.read_tensors(path, checkpoint.read_state(path))
    for name, value in checkpoint.tensors_of(policy).items():
        if name != "rng":
            # A moment in eight bits may lie at the edge of two codes.
            most = at if value.is_floating_point() else 1
            torch.testing.assert_close(
                tensors[name], value, rtol=at, atol=most, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "context"), [(2, 2), (4, 4), (4, 2)])
def test_ranks_that_share_tokens_learn_what_one_does(
    run_of, make_samples, on_ranks, tmp_path: Path, ranks: int, context: int
):
    runs = {name: run_of(name, context) for name in SHAPES}
    steps = [batch(0, make_samples)]
    longest = max(s.num_tokens for s in steps[0])
    assert longest > PASS // context, "no rank could learn from it"
    found = on_ranks(
        ranks, {tmp_path / f"{name} shared": (run, steps) for name, run in runs.items()}
    )
    for (name, run), (metrics, _) in zip(runs.items(), found, strict=True):
        policy = alone(run)
        expected = [update_policy(policy, samples) for samples in steps]
        assert_same(metrics, expected, tmp_path / f"{name} shared", policy, 1e-5)


@pytest.mark.slow
def test_what_combines_with_shared_tokens_learns_alike(
    run_of, make_samples, on_ranks, tmp_path: Path
):
    runs = {name: run_of("one key head", 2, *settings) for name, settings in MORE.items()}
    steps = [batch(seed, make_samples) for seed in range(2)]
    found = on_ranks(2, {tmp_path / f"{name} shared": (run, steps) for name, run in runs.items()})
    for (name, run), (metrics, _) in zip(runs.items(), found, strict=True):
        policy = alone(run)
        expected = [update_policy(policy, samples) for samples in steps]
        # A number that another order of sums moves across a code's edge is a 127th off.
        at = 1e-2 if name == "qarl" else 1e-4
        assert_same(metrics, expected, tmp_path / f"{name} shared", policy, at)


def test_a_response_too_long_for_all_ranks_is_refused(run_of, make_samples):
    policy = build_policy(run_of("one key head", 4), 0.7)
    samples = forest([(0, 0, 2, PASS)], 0, 60)
    limit = rf"learner.microbatch_tokens = {PASS // 4} · learner.backend.context = 4: ticket 60"
    with pytest.raises(ConfigError, match=limit):
        update_policy(policy, samples)
