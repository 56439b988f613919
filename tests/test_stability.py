"""The laboratory: two steps of two arms, and what its numbers must obey."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from areal_q.config import Run, override, settings_hash
from areal_q.messages import Group
from areal_q.quant import FORMATS, quantize_state
from areal_q.quant.uaq import apply_uaq
from areal_q.tasks import build_task, build_tokenizer
from bench import stability, stability_report, uaq
from bench.int3 import with_format
from bench.lab import Values, train, warm_model

MakeRun = Callable[..., Run]


def trained(run: Run) -> list[Values]:
    async def collect() -> list[Values]:
        return [values async for values in train(run)]

    return asyncio.run(collect())


def rewarded(group: Group) -> Group:
    """As if every second response were right: an untrained model's never are."""
    return replace(
        group, trajectories=[replace(t, reward=float(t.index % 2)) for t in group.trajectories]
    )


def timeless(steps: list[Values]) -> list[Values]:
    return [{k: v for k, v in values.items() if k != "cpu_s"} for values in steps]


def test_a_run_twice_gives_the_same_numbers(make_run: MakeRun):
    run = with_format(make_run("steps=3", "eval.every=1"), "int3")
    assert timeless(trained(run)) == timeless(trained(run))


def test_every_token_lags_by_as_much_as_the_bound_allows(make_run: MakeRun):
    steps = trained(make_run("steps=5", "learner.max_lag=2"))
    assert [(v["lag/mean"], v["lag/max"]) for v in steps] == [(0, 0), (1, 1)] + [(2, 2)] * 3


def test_without_quantization_staleness_and_updates_no_ratio_differs_from_one(make_run: MakeRun):
    # bfloat16 rounds the weights, so a format without any rounding is not to be had: 2⁻⁸ relative.
    [first] = trained(make_run("steps=1", "rollout.format=bf16", "learner.minibatches=1"))
    assert first["policy/ratio_max"] == pytest.approx(1, abs=1e-6)
    assert first["mismatch/weight_max"] == pytest.approx(1, abs=0.05)
    assert first["mismatch/kl"] == pytest.approx(0, abs=1e-3)


def test_two_arms_are_run_stored_and_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stability, "RUNS", tmp_path / "runs")
    small = ["steps=2", "warmstart.steps=0", "model.layers=1", "model.width=32", "model.mlp=32"]
    small += ["learner.groups=2", "learner.group_size=2", "eval.problems=4", "eval.every=1"]
    rows = []
    for arm in (stability.Arm("ppo", "bf16"), stability.Arm("acr", uaq=1.5)):
        rows += stability.run_arm(arm, 0, *small)
        before = [(p, p.stat().st_mtime_ns) for p in sorted((tmp_path / "runs").iterdir())]
        assert stability.run_arm(arm, 0, *small) == rows[-1:]
        assert before == [(p, p.stat().st_mtime_ns) for p in sorted((tmp_path / "runs").iterdir())]
    assert [(r["arm"], r["step"]) for r in rows] == [("bf16 ppo", 2), ("int3 acr uaq1.5", 2)]
    path = tmp_path / "stability.csv"
    stability_report.write(rows, path)
    assert stability_report.read(path) == rows
    assert "int3 acr uaq1.5" in stability_report.summary(rows)
    stability_report.figure(rows, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 0


def test_a_final_value_is_the_mean_of_the_last_fifth_of_the_steps():
    rows = [
        {"arm": "a", "seed": 0, "step": 10 * i, "reward": float(i), "weight_max": 100.0 / i}
        for i in range(1, 11)
    ]
    results = stability_report.Results(rows)
    assert results.final("a", "reward") == {0: 9.5}
    assert results.final("a", "weight_max") == {0: pytest.approx(100 / 9)}
    assert results.largest("a", "weight_max") == 100


def test_every_arm_has_settings_of_its_own():
    hashes = {settings_hash(arm.run(0)) for arm in stability.ARMS}
    assert len(hashes) == len(stability.ARMS) == len({arm.name for arm in stability.ARMS})


def test_int3_has_seven_levels_and_errs_by_half_a_step():
    weight = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    parts = FORMATS["int3"].quantize(weight, "w")
    assert parts["weight"].unique().tolist() == [-3, -2, -1, 0, 1, 2, 3]
    error = (weight - FORMATS["int3"].dequantize(parts)).abs()
    assert (error <= weight.abs().amax(1, keepdim=True) / 6 * (1 + 1e-6)).all()


@pytest.mark.parametrize("format", ["int8", "fp8-channel", "int3"])
def test_uaq_alone_changes_no_code_where_scales_are_real_numbers(make_run: MakeRun, format: str):
    run = make_run("learner.uaq=1")
    model = warm_model(run, build_task(run.task), build_tokenizer(run))
    before = quantize_state(model.state_dict(), format)
    apply_uaq(model, 2.0)
    after = quantize_state(model.state_dict(), format)
    for name in (n for n in before if n.endswith("proj.weight")):
        assert torch.equal(before[name].float(), after[name].float()), name


@pytest.mark.parametrize(("optimizer", "power"), [("SGD", 2), ("AdamW", 1), ("Muon", 1)])
def test_uaq_raises_update_over_error_by_a_power_that_the_optimizer_sets(
    make_run: MakeRun, optimizer: str, power: int
):
    run = make_run("steps=1", "learner.minibatches=1", "learner.max_lag=0", "learner.groups=8")
    run = override(run, "learner.optimizer.warmup_steps=0", "learner.max_grad_norm=1e9")
    drawn, digest = asyncio.run(uaq.draw(override(run, "learner.uaq=1")))
    batches = [[rewarded(group) for group in batch] for batch in drawn]
    ratios = [
        uaq.measure(override(run, f"learner.uaq={s}"), optimizer, 1e-5, batches, digest)["ratio"]
        for s in (1.0, 2.0)
    ]
    assert ratios[1] / ratios[0] == pytest.approx(2**power, rel=0.02)
