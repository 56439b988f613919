"""The laboratory: two steps of two arms, and what its numbers must obey."""

import asyncio
import fcntl
from pathlib import Path

import pytest
import torch
from helpers.fixture_types import MakeRun
from msgspec.structs import replace

from areal_q.checks.format_advice import STUDIES, Study
from areal_q.config import Run, override, settings_hash
from areal_q.messages import Group
from areal_q.models import Decoder
from areal_q.quant import FORMATS, quantize_state
from areal_q.quant.rescaling import apply_uaq, fold_back
from areal_q.tasks import build_task, build_tokenizer
from bench.learner import uaq
from bench.stability import eight_sums, report
from bench.stability import run as stability
from bench.stability.int3 import Int3, with_format
from bench.stability.lab import Values, train, warm_model
from buffer.sampling.replay_pool import SampledGroups
from learner.backends.single_device import TorchPolicy
from learner.data.staleness import VersionHistory
from learner.policy_update import SingleProcessUpdater
from learner.train_step import train_step


@pytest.fixture(autouse=True)
def int3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the laboratory's format out of the table again, which other tests go through."""
    monkeypatch.setitem(FORMATS, "int3", Int3())


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


def test_ratios_are_one_without_quantization_lag_and_updates(make_run: MakeRun):
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
    for arm in (stability.Arm("tis", "bf16"), stability.Arm("acr", uaq=1.5)):
        rows += stability.run_arm(arm, 0, *small)
        before = [(p, p.stat().st_mtime_ns) for p in sorted((tmp_path / "runs").iterdir())]
        assert stability.run_arm(arm, 0, *small) == rows[-1:]
        assert before == [(p, p.stat().st_mtime_ns) for p in sorted((tmp_path / "runs").iterdir())]
    assert [(r["arm"], r["step"]) for r in rows] == [("bf16 tis", 2), ("int3 acr uaq1.5", 2)]
    path = tmp_path / "stability.csv"
    report.write(rows, path)
    assert report.read(path) == rows
    assert "int3 acr uaq1.5" in report.summary(rows)
    report.figure(rows, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 0


def test_a_study_keeps_the_runs_that_others_measured(tmp_path: Path):
    path = tmp_path / "stability.csv"
    before = [{"arm": arm, "seed": 1, "step": 10, "reward": 0.5} for arm in ("a", "b")]
    report.write(before, path)
    again, more = ({"arm": "a", "seed": seed, "step": 10, "reward": 0.25} for seed in (1, 2))
    report.write([more, again], path)
    assert report.read(path) == [again, more, before[1]]


def test_a_run_that_another_process_is_at_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stability, "RUNS", tmp_path)
    begun: list[str] = []
    monkeypatch.setattr(stability, "run_arm", lambda arm, seed, on: begun.append(arm.name))
    first, second = stability.ARMS[:2]
    with stability.result(first, 4).with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stability.work([(first, 4), (second, 4)])
    assert begun == [second.name]


def test_a_window_holds_means_and_maxima_of_its_steps():
    steps = [
        {"reward/mean": float(i), "policy/ratio_max": float(i), "eval/accuracy": i / 100}
        for i in range(12)
    ]
    del steps[10]["eval/accuracy"]
    assert stability.windows("int3 acr", 7, steps) == [
        {
            "arm": "int3 acr",
            "seed": 7,
            "step": 10,
            "reward": 4.5,
            "ratio_max": 9.0,
            "accuracy": 0.045,
        },
        {
            "arm": "int3 acr",
            "seed": 7,
            "step": 12,
            "reward": 10.5,
            "ratio_max": 11.0,
            "accuracy": 0.11,
        },
    ]


def test_final_value_is_the_mean_of_the_last_fifth_of_the_steps():
    rows = [
        {"arm": "a", "seed": 0, "step": 10 * i, "reward": float(i), "weight_max": 100.0 / i}
        for i in range(1, 11)
    ]
    results = report.Results(rows)
    assert results.final("a", "reward") == {0: 9.5}
    assert results.final("a", "weight_max") == {0: pytest.approx(100 / 9)}
    assert results.largest("a", "weight_max") == 100


def arm_of(name: str) -> str:
    """Returns the arm of a study that trains with the format `name`, as the product calls it."""
    format, *rest = name.split(", ")
    variant = {"aligned": "qarl", "jet": "jet", "smoothed": "awq" if "4" in format else "smoothed"}
    chosen = [variant[rest[-1]]] if rest else []
    return " ".join([format, "tis" if format == "bf16" else "acr", *chosen])


@pytest.mark.parametrize(("study", "csv"), [*zip(STUDIES, ("sums", "screen"), strict=True)])
def test_the_advice_quotes_what_the_studies_measured(study: Study, csv: str):
    """The steps, the seeds and each accuracy, and of the long study no arm of ACR is left out."""
    results = report.Results(report.read(stability.STUDIES[csv].csv))
    steps, seeds = study.length.split(", ")
    for name, quoted in study.accuracy.items():
        runs, found = results.runs[arm_of(name)], results.final(arm_of(name), "accuracy")
        assert f"{sum(found.values()) / len(found):.2f}" == f"{quoted:.2f}", name
        assert {rows[-1]["step"] for rows in runs.values()} == {int(steps.split()[0])}
        assert str(len(runs)) in seeds
    arms = {arm for arm in results.runs if arm.split()[1] != "naive"}
    assert csv == "screen" or arms == {*map(arm_of, study.accuracy)}


def test_every_arm_has_settings_of_its_own():
    hashes = {settings_hash(arm.run(0)) for arm in stability.ARMS}
    names = {(arm.study, arm.name) for arm in stability.ARMS}
    assert len(hashes) == len(stability.ARMS) == len(names)


def test_of_eight_sums_each_counts_as_it_was_said_last():
    asked, right = eight_sums.problems()[0]
    lines = right.split(", ")
    wrong = [line + "0" for line in lines[:2]]  # ten times too much
    assert asked.count("What is") == len(lines) == 8 and eight_sums.problems()[0] == (asked, right)
    for response, share in (("", 0.0), ("\n".join(lines), 1.0), ("\n".join(lines[2:]), 0.75)):
        assert eight_sums.reward(asked, response, right) == share
    assert eight_sums.reward(asked, "\n".join([*lines, *wrong]), right) == 0.75
    assert eight_sums.reward(asked, "\n".join([*wrong, *lines]), right) == 1.0


def test_int3_has_seven_levels_and_errs_by_half_a_step():
    weight = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    parts = FORMATS["int3"].quantize(weight, "w")
    assert parts["weight"].unique().tolist() == [-3, -2, -1, 0, 1, 2, 3]
    error = (weight - FORMATS["int3"].dequantize(parts)).abs()
    assert (error <= weight.abs().amax(1, keepdim=True) / 6 * (1 + 1e-6)).all()


@pytest.mark.parametrize("format", ["int8", "fp8", "fp8-channel", "int3"])
def test_uaq_alone_changes_no_code_where_scales_are_real_numbers(make_run: MakeRun, format: str):
    run = make_run("learner.uaq=1")
    model = warm_model(run, build_task(run.task), build_tokenizer(run.model, run.task))
    before = quantize_state(model.state_dict(), format)
    apply_uaq(model, 2.0)
    after = quantize_state(model.state_dict(), format)
    for name in (n for n in before if n.endswith("proj.weight")):
        assert torch.equal(before[name].float(), after[name].float()), name


@pytest.mark.parametrize(("optimizer", "power"), [("SGD", 2), ("AdamW", 1), ("Muon", 1)])
def test_uaq_raises_update_over_error_by_the_optimizers_power(
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


def test_uaq_under_adam_is_a_learning_rate_for_each_weight_kind(make_run: MakeRun):
    s = 2.0
    run = make_run("steps=3", "learner.minibatches=1", "learner.max_lag=0", "learner.uaq=1")
    run = override(run, "learner.max_grad_norm=1e9", "learner.optimizer.eps=1e-20")
    drawn, digest = asyncio.run(uaq.draw(run))
    learnt = []
    for scale in (s, 1.0):
        model = warm_model(
            override(run, f"learner.uaq={scale}"),
            build_task(run.task),
            build_tokenizer(run.model, run.task),
        )
        policy = TorchPolicy(model, run.learner, 1.0)
        lr = {"linear": 1.0, "norm": 1.0} if scale > 1 else {"linear": s, "norm": 1 / s}
        policy.optimizer = KeptRates(model, {**lr, "other": 1.0}, run.learner.optimizer.rate)
        for batch in drawn:
            train_step(
                SingleProcessUpdater(policy),
                SampledGroups([rewarded(g) for g in batch]),
                VersionHistory(9, {0: digest}),
                0,
            )
        state = model.state_dict()
        if scale > 1:
            fold_back(state, scale)
        learnt.append(state)
    for name, tensor in learnt[0].items():
        torch.testing.assert_close(tensor, learnt[1][name], rtol=1e-4, atol=1e-6, msg=name)


class KeptRates(torch.optim.Adam):
    """Each kind of parameter has its own learning rate, whatever the policy sets."""

    def __init__(self, model: Decoder, factors: dict[str, float], lr: float) -> None:
        kinds = {name: kind(name) for name, _ in model.named_parameters()}
        self.rates = [lr * factors[k] for k in factors]
        groups = [[p for n, p in model.named_parameters() if kinds[n] == k] for k in factors]
        super().__init__([{"params": g} for g in groups], betas=(0.9, 0.95), eps=1e-20)

    def step(self, closure: None = None) -> None:
        for group, rate in zip(self.param_groups, self.rates, strict=True):
            group["lr"] = rate
        super().step(closure)


def kind(name: str) -> str:
    if name.split(".")[-2] in uaq.RESCALED:
        return "linear"
    return "norm" if "_layernorm." in name else "other"
