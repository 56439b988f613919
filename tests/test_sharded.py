"""The learner over two real processes on gloo, with FSDP2: the same losses and weights as one process."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from areal_q.algorithms import reducers
from areal_q.config import Run, dump_toml
from areal_q.messages import Array
from areal_q.tasks import build_tokenizer
from learner import checkpoint
from learner.batch import Sample
from learner.build import build_model
from learner.checkpoint import State
from learner.ranks import KINDS, decoded, encoded, filler, shares
from learner.sharded import Piece
from learner.trainer import Trainer

MakeRun = Callable[..., Run]
MakeSamples = Callable[..., list[Sample]]

RANK = """
import json, sys
from pathlib import Path
import msgspec, torch
from areal_q.config import load
from areal_q.tasks import build_tokenizer
from learner import checkpoint
from learner.build import build_model
from learner.precision import set_precision
from learner.sharded import Leader, Piece, follow, join
from learner.trainer import Trainer

directory = Path(sys.argv[1])
run = load(directory / "config.toml")
torch.set_num_threads(1)
ranks = join(run)
if ranks.rank:
    follow(run, ranks)
    sys.exit()
model = build_model(run, build_tokenizer(run))
set_precision(model, run)
whole = Trainer(model, run.learner, 0.7)
if list(directory.glob("checkpoints/step-*")):
    checkpoint.restore(directory / "checkpoints", whole)
leader = Leader(whole, run, ranks)
steps = msgspec.msgpack.decode((directory / "samples").read_bytes(), type=list[list[Piece]])
found = [leader.step([piece.sample() for piece in pieces]) for pieces in steps]
state = checkpoint.State(step=9, position="0-1", cursor=1, outstanding=[], digests={},
                         updates=leader.updates, skipped=leader.skipped)
checkpoint.save(directory / "checkpoints", state, leader, keep=5)
leader.close()
(directory / "metrics.json").write_text(json.dumps(found))
"""


def build(run: Run) -> Trainer:
    return Trainer(build_model(run, build_tokenizer(run)), run.learner, 0.7)


def on_two_ranks(directory: Path, run: Run, steps: list[list[Sample]]) -> list[dict[str, float]]:
    """Takes `steps` from where the checkpoint in `directory` stands, if any; leaves one of step 9."""
    directory.mkdir(exist_ok=True)
    (directory / "config.toml").write_text(dump_toml(run))
    pieces = [[Piece.of(sample) for sample in samples] for samples in steps]
    (directory / "samples").write_bytes(msgspec.msgpack.encode(pieces))
    (directory / "rank.py").write_text(RANK)
    argv = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *argv, str(directory / "rank.py"), str(directory)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((directory / "metrics.json").read_text())


def assert_close(path: Path, trainer: Trainer, tolerance: float) -> None:
    """The checkpoint in `path` holds what `trainer` does."""
    found = checkpoint.read_tensors(path, checkpoint.read_state(path))
    expected = checkpoint.tensors_of(trainer)
    assert found.keys() == expected.keys()
    for name in expected.keys() - {"rng"}:
        torch.testing.assert_close(
            found[name],
            expected[name],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


SETTINGS = [
    # A large eps makes AdamW's step smooth in the gradient; at 1e-8 rounding alone could turn its sign.
    "learner.optimizer.eps=1e-3",
    "learner.optimizer.lr=1e-2",
    "learner.microbatch_tokens=24",
]


def some_without_advantage(samples: list[Sample]) -> list[Sample]:
    """The first group has none, so that both kinds of micro-batches occur."""
    return [replace(s, advantage=0.0) if s.group == 0 else s for s in samples]


def with_routes(samples: list[Sample], layers: int = 2, experts: int = 5) -> list[Sample]:
    """Each token sent to two experts of each layer, at random, a group's prompt to the same; those of the first
    group were not recorded."""

    def routed(sample: Sample) -> Sample:
        of_prompt, rng = (np.random.default_rng(n) for n in (sample.group, len(sample.lag)))
        rows = [(len(sample.prompt_ids), of_prompt), (sample.trajectory.num_tokens - 1, rng)]
        scores = np.concatenate([draw.random((n, layers, experts)) for n, draw in rows])
        routes = Array.of(scores.argsort(-1)[..., :2], "uint8")
        trajectory = msgspec.structs.replace(sample.trajectory, routes=routes)
        return replace(sample, trajectory=trajectory)

    return [sample if sample.group == 0 else routed(sample) for sample in samples]


@pytest.mark.timeout(240)
def test_two_ranks_learn_experts_and_replay_routes_as_one_does(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path
):
    experts = ["model.experts=5", "learner.routing_replay=true", "learner.router_aux_coef=0.1"]
    run = make_run(*SETTINGS, *experts, "learner.recompute=true")
    steps = [with_routes(make_samples(15, seed)) for seed in range(2)]
    alone = build(make_run(*SETTINGS, *experts))
    expected = [alone.step(samples) for samples in steps]
    found = on_two_ranks(tmp_path / "two", run, steps)
    assert_close(tmp_path / "two" / "checkpoints" / "step-000009", alone, 1e-4)
    for one, two in zip(expected, found, strict=True):
        assert one["routing/disagreement"] == two["routing/disagreement"] > 0
        assert two["loss/router"] == pytest.approx(one["loss/router"], rel=1e-4)


@pytest.mark.timeout(240)
def test_two_ranks_learn_what_one_does_and_resume_from_each_other(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path
):
    run = make_run(*SETTINGS, "learner.recompute=true")
    steps = [some_without_advantage(make_samples(15, seed)) for seed in range(4)]
    alone = build(make_run(*SETTINGS))
    expected = [alone.step(samples) for samples in steps[:3]]
    found = on_two_ranks(tmp_path / "two", run, steps[:3])
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert one[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    path = tmp_path / "two" / "checkpoints" / "step-000009"
    assert_close(path, alone, 1e-5)

    # One process goes on from the checkpoint of two …
    resumed = build(make_run(*SETTINGS, "seed=3"))
    checkpoint.restore(path.parent, resumed)
    resumed.step(steps[3])
    # … and two from the checkpoint of one.
    state = State(
        step=3,
        position="0-1",
        cursor=1,
        outstanding=[],
        digests={},
        updates=alone.updates,
        skipped=0,
    )
    checkpoint.save(tmp_path / "one" / "checkpoints", state, alone, keep=5)
    on_two_ranks(tmp_path / "one", run, steps[3:])
    alone.step(steps[3])
    assert_close(tmp_path / "one" / "checkpoints" / "step-000009", alone, 1e-5)
    for (name, a), b in zip(
        resumed.model.named_parameters(), alone.model.parameters(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_shares_are_whole_groups_of_about_as_many_tokens(make_samples: MakeSamples):
    samples = make_samples(60)
    for size in (1, 2, 3):
        found = shares(samples, size)
        assert sorted(map(id, (s for share in found for s in share))) == sorted(map(id, samples))
        owners: dict[int, set[int]] = {}
        for rank, share in enumerate(found):
            for sample in share:
                owners.setdefault(sample.group, set()).add(rank)
            assert [s.group for s in share] == sorted(s.group for s in share)
        assert all(len(ranks) == 1 for ranks in owners.values())
        loads = [sum(s.num_tokens for s in share) for share in found]
        longest = max(sum(s.num_tokens for s in samples if s.group == group) for group in owners)
        assert max(loads) - min(loads) <= longest


def test_a_sample_arrives_as_it_was_sent_and_a_filler_counts_for_nothing(
    make_samples: MakeSamples,
):
    for sample in make_samples(5):
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(Piece.of(sample)), type=Piece).sample()
        assert (sent.group, sent.advantage, sent.weight) == (sample.group, sample.advantage, 1.0)
        assert sent.trajectory == sample.trajectory
        assert np.array_equal(sent.prompt_ids, sample.prompt_ids)
        assert np.array_equal(sent.lag, sample.lag)
        assert not filler(sample).trajectory.loss_mask.numpy().any()


def test_every_kind_of_metric_arrives_as_it_was_sent():
    defined = {
        name
        for name, kind in vars(reducers).items()
        if isinstance(kind, type) and hasattr(kind, "merge") and name != "Metric"
    }
    assert set(KINDS) == defined
    sent = {"mean": reducers.Mean(0.1, 3), "max": reducers.Max(-np.inf)}
    assert decoded(encoded(sent)) == sent
    counts = np.arange(reducers.BINS)
    quantile = decoded(encoded({"q": reducers.RatioQuantile(counts, 0.5)}))["q"]
    assert quantile.value() == reducers.RatioQuantile(counts, 0.5).value()


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("learner.optimizer.type=muon", "learner.optimizer.type"),
        ("learner.reference_kl.coef=0.1", "learner.reference_kl"),
        ("learner.fsdp.offload=true", "learner.fsdp.offload"),
    ],
)
def test_what_needs_one_process_is_refused_by_name(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, setting: str, name: str
):
    from areal_q.errors import ConfigError
    from learner.sharded import join

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=f"{name}: not with 2 processes on cpu"):
        join(make_run(setting).learner)


def test_recomputing_layers_gives_the_same_bits(make_run: MakeRun, make_samples: MakeSamples):
    kept, again = build(make_run()), build(make_run("learner.recompute=true"))
    for trainer in (kept, again):
        trainer.step(make_samples(6))
    for a, b in zip(kept.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
