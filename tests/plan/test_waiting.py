"""How long a learner that drops uniform groups waits for others, beside a simulation and timed runs."""

import numpy as np
import pytest
from helpers.kinds import SMALL, SMOLLM2
from helpers.paths import ROOT

from areal_q.checks.pass_memory import Lengths
from areal_q.config import Run, load
from areal_q.plan.estimate import RunEstimate, estimate
from areal_q.plan.hardware import CPU_SHARES, Device, Hardware
from areal_q.plan.speed import HardwareSplit, Speed, speed
from areal_q.plan.step_load import Load
from areal_q.plan.worker_speed import waiting_seconds, workers_seconds

TWO_CORES = Hardware(Device("cpu", 78e9, 207e9, 414e9, 14e9, 24e9, CPU_SHARES, 2), 1)
"""With AVX512-BF16 and VNNI, as `areal-q plan` measured them"""


def of_one_speed(*settings: str) -> Run:
    """Returns a run whose workers draw 8 tokens a second however many rows there are: a group of two responses
    of four tokens takes one."""
    engine = "rollout.engine={type='scripted', tokens_per_s=8}"
    sampling = ["rollout.sampling.max_tokens=4", "learner.group_size=2", "learner.minibatches=1"]
    return load(None, [engine, *sampling, "learner.drop_uniform=true", *settings])


def groups_waited_for(run: Run, useful: float) -> float:
    """Returns how many groups are drawn in a step while the learner waits, the mean of many steps."""
    rng, cfg, steps, drawn = np.random.default_rng(0), run.learner, 20_000, 0
    ahead = cfg.max_outstanding - cfg.groups
    for _ in range(steps):
        missing = cfg.groups - (rng.binomial(ahead, useful) if cfg.max_lag else 0)
        while missing > 0:
            drawn += ahead + missing
            missing -= rng.binomial(ahead + missing, useful)
    return drawn / steps


@pytest.mark.parametrize("useful", [0.3, 0.5, 0.9])
@pytest.mark.parametrize(
    "settings",
    [
        ["learner.groups=4", "learner.max_lag=2"],
        ["learner.groups=4", "learner.max_lag=2", "learner.oversampling=2"],
        ["learner.groups=16", "learner.max_lag=1"],
        ["learner.groups=1", "learner.max_lag=1"],
        ["learner.groups=8", "learner.max_lag=0", "learner.oversampling=1.5"],
    ],
)
def test_the_learner_waits_as_long_as_in_a_simulation(settings: list[str], useful: float):
    run = of_one_speed(*settings)
    found, _ = waiting_seconds(run, SMALL, Load(Lengths(6, 4), useful), TWO_CORES, 1)
    assert found == pytest.approx(groups_waited_for(run, useful), rel=0.15, abs=0.2)


@pytest.mark.parametrize("groups", [1, 64, 4096])
@pytest.mark.parametrize("useful", [1e-9, 1.0])
def test_nothing_useful_and_all_useful_have_an_end(groups: int, useful: float):
    run = of_one_speed(f"learner.groups={groups}", "learner.max_lag=1")
    found, _ = waiting_seconds(run, SMALL, Load(Lengths(6, 4), useful), TWO_CORES, 1)
    assert found == 0 if useful == 1 else found > 100 * groups


def sums(useful: float, response: float, *settings: str) -> Speed:
    run = load(ROOT / "configs" / "smollm2-sums.toml", ["learner.dtype=bfloat16", *settings])
    work = Load(Lengths(46, response), useful)
    return speed(run, SMOLLM2, work, TWO_CORES, HardwareSplit(1, 1))


A_CORE_EACH = ["rollout.threads=1", "learner.threads=1", "learner.max_lag=1"]


@pytest.mark.parametrize(
    ("useful", "response", "settings", "step_s", "waiting_s", "lag"),
    [
        (0.367, 11.67, [], 3.95, 1.37, 0.75),
        (0.456, 11.77, [], 3.67, 0.84, 1.03),
        (0.347, 11.65, ["rollout.threads=1"], 4.08, 1.55, 0.73),
        (0.310, 11.65, ["learner.oversampling=2"], 3.56, 0.28, 1.48),
        (0.379, 11.62, A_CORE_EACH, 5.68, 2.37, 0.38),
        (0.300, 11.65, [*A_CORE_EACH, "learner.oversampling=2"], 4.62, 1.22, 0.79),
    ],
)
def test_steps_took_what_is_expected_within_15_percent(
    useful: float, response: float, settings: list[str], step_s: float, waiting_s: float, lag: float
):
    """Of configs/smollm2-sums.toml on two cores, 30 to 70 steps each: docs/sizing.md."""
    found = sums(useful, response, *settings)
    assert found.step_s == pytest.approx(step_s, rel=0.15)
    assert found.waiting_s == pytest.approx(waiting_s, rel=0.3, abs=0.35)
    assert found.lag == pytest.approx(lag, abs=0.5)


def test_more_groups_at_once_are_advised_where_the_learner_waits():
    """As many as do not grow too old, (1 / 0.38 + 1) / 2; on shared cores they gained next to nothing."""
    work, config = Load(Lengths(46, 11.62), 0.38), ROOT / "configs" / "smollm2-sums.toml"

    def planned(*settings: str) -> RunEstimate:
        return estimate(load(config, settings), SMOLLM2, work, TWO_CORES)

    (advised,) = (line for line in planned(*A_CORE_EACH).advice if "oversampling" in line)
    then = planned(*A_CORE_EACH, "learner.oversampling=1.8")
    told = f"learner.oversampling=1.8, a step would take {then.speed.step_s:.3g} s"
    assert advised.endswith(told)
    for made in (then, planned()):
        assert not [line for line in made.advice if "oversampling" in line]


@pytest.mark.parametrize(("factor", "advised"), [(1, False), (2, True)])
def test_what_nobody_can_use_is_drawn_as_well(factor: int, advised: bool):
    """With max_lag = 1 three batches are ready for each step, all useful, and two are too old for the next."""
    settings = f"learner.oversampling={factor}", "learner.max_lag=1"
    run, work = of_one_speed(*settings), Load(Lengths(6, 4))
    drawn = workers_seconds(run, SMALL, work, TWO_CORES, 1, False)[1]
    evaluated = run.eval.problems / run.eval.every * 4
    assert drawn - evaluated == pytest.approx((2 * factor - 1) * run.learner.groups * 2 * 4)
    told = "67% of what is drawn would grow too old: learner.oversampling=1"
    assert (told in estimate(run, SMALL, work, TWO_CORES).advice) == advised
