"""The papers' settings: every file loads, cites its place, and holds the constants printed there."""

import re
from pathlib import Path

import numpy as np
import pytest
from helpers.paths import ROOT

from areal_q.config import Acr, AdamW8bit, Gae, Lora, Ppo, ReferenceKl, Run, Tbpo, Tis, load
from areal_q.errors import ConfigError
from areal_q.evaluation.benchmarks import BENCHMARKS, PRESETS
from areal_q.tasks import TASKS

CONFIGS = ROOT / "configs"
PAPERS = sorted((CONFIGS / "papers").glob("*.toml"))
NAMED = sorted((*CONFIGS.glob("*.toml"), *PAPERS))
"""Those that are named; areal-q init gives its templates the name that it is told."""


def paper(name: str) -> Run:
    return load(CONFIGS / "papers" / f"{name}.toml")


def test_there_is_a_preset_for_each_paper():
    names = {p.stem for p in PAPERS}
    assert {"qurl-gsm8k", "qurl-dapo", "qurl-deepscaler", "qarl-tbpo", "jet-rl", "fp8-rl"} <= names
    assert {"qerl-gsm8k", "qerl-bigmath"} <= names


@pytest.mark.parametrize("path", NAMED, ids=lambda p: p.stem)
def test_every_configuration_loads_under_its_own_name(path: Path):
    assert load(path).name == path.stem


@pytest.mark.parametrize("path", PAPERS, ids=lambda p: p.stem)
def test_papers_file_cites_its_place_and_its_evaluation(path: Path):
    text = path.read_text()
    assert re.search(r"§\d|table \d|appendix [A-Z]", text.splitlines()[0])
    preset = re.search(r"areal-q eval .* --task (\S+) .* --preset (\S+)", text)
    assert preset and preset[1] in BENCHMARKS and preset[2] in PRESETS


def test_qarls_constants_are_those_of_its_appendix():
    run = paper("qarl-tbpo")
    learner = run.learner
    assert learner.objective == Tbpo(
        clip_high=4e-4, negative_clip_low=3e-4, negative_clip_high=7e-4, cap=2.0, outside="drop"
    )
    assert (learner.groups, learner.group_size, learner.groups // learner.minibatches) == (
        512,
        8,
        64,
    )
    assert (learner.optimizer.lr, learner.optimizer.weight_decay) == (1e-6, 0.01)
    assert (run.rollout.sampling.max_tokens, run.rollout.sampling.temperature) == (16384, 1.0)


def test_the_other_papers_constants_are_those_printed():
    dapo = paper("qurl-dapo")
    assert isinstance(dapo.learner.objective, Acr)
    assert (dapo.learner.objective.clip_low, dapo.learner.objective.clip_high) == (0.2, 0.28)
    assert (dapo.learner.groups, dapo.learner.group_size, dapo.steps) == (512, 16, 200)
    assert dapo.learner.drop_uniform and dapo.learner.uaq == 1.5
    ppo = paper("qurl-gsm8k")
    assert (ppo.steps, ppo.rollout.sampling.max_tokens, ppo.learner.uaq) == (435, 512, 1.0)
    assert ppo.steps == 15 * (7473 // 256)  # epochs over GSM8K's training problems
    assert (ppo.learner.groups, ppo.learner.group_size, ppo.learner.optimizer.lr) == (256, 1, 1e-5)
    assert isinstance(ppo.learner.advantage, Gae) and ppo.learner.critic is not None
    for name in ("qurl-deepscaler", "jet-rl"):
        assert paper(name).learner.reference_kl == ReferenceKl(coef=1e-3, estimator="k3")
    for name in ("qurl-dapo", "qarl-tbpo", "qerl-gsm8k", "qerl-bigmath"):
        assert paper(name).learner.reference_kl is None
    scaler = paper("qurl-deepscaler")
    assert (scaler.learner.groups, scaler.learner.group_size, scaler.steps) == (256, 8, 800)
    assert (scaler.rollout.sampling.temperature, scaler.rollout.sampling.max_tokens) == (0.6, 8192)
    qerl = paper("qerl-gsm8k").learner
    assert isinstance(qerl.objective, Ppo)
    assert (qerl.groups, qerl.group_size, qerl.minibatches, qerl.optimizer.lr) == (128, 8, 4, 1e-5)
    assert isinstance(qerl.optimizer, AdamW8bit) and qerl.lora == Lora(rank=32)
    noise = paper("qerl-gsm8k").rollout.aqn
    assert noise and (noise.sigma_start, noise.sigma_end, noise.stages) == (1e-2, 5e-4, 10)
    jet = paper("jet-rl")
    assert (jet.learner.groups, jet.learner.group_size, jet.eval.every) == (256, 4, 5)
    fp8 = paper("fp8-rl").learner
    assert isinstance(fp8.objective, Tis) and (fp8.objective.cap, fp8.objective.level) == (
        2,
        "token",
    )
    assert (fp8.groups, fp8.group_size, fp8.minibatches) == (32, 16, 1)


def test_bands_printed_for_short_responses_are_the_setting_s():
    rows = re.findall(
        r"^#  +(\d+) +(\S+) +(\S+) +(\S+)$", (CONFIGS / "papers/qarl-tbpo.toml").read_text(), re.M
    )
    assert len(rows) == 5
    for tokens, *bands in rows:
        assert tuple(map(float, bands)) == pytest.approx(Tbpo(response_tokens=int(tokens)).bands)


@pytest.mark.parametrize("tokens", [64, 1024])
def test_scaled_band_holds_as_many_short_responses_as_long_ones(tokens: int):
    rng = np.random.default_rng(0)

    def outside(cfg: Tbpo, length: int) -> float:
        """Share of 1,000 responses of independent token log-ratios that are above the upper bound."""
        ratios = np.exp([rng.normal(0, 0.05, length).mean() for _ in range(1000)])
        return float((ratios > 1 + cfg.bands[0]).mean())

    reference = outside(Tbpo(), 16384)
    assert 0.1 < reference < 0.2  # the bound is one standard deviation: 0.05/128
    assert outside(Tbpo(response_tokens=tokens), tokens) == pytest.approx(reference, abs=0.06)
    assert outside(Tbpo(), tokens) > 0.35


def test_every_benchmark_has_a_task_and_every_preset_a_source():
    tags = {cfg.__struct_config__.tag for cfg in TASKS}
    assert set(BENCHMARKS.values()) <= tags
    for preset in PRESETS.values():
        assert re.match(r"(QuRL|QaRL|QeRL|Jet-RL|FP8-RL) (§|appendix)", preset.source)
    aime, qerl = PRESETS["qurl-aime"], PRESETS["qerl"]
    assert (aime.samples, aime.temperature, aime.top_p) == (32, 1.0, 0.7)
    assert (qerl.temperature, qerl.top_p, qerl.max_tokens) == (0.6, 0.95, 4096)
    assert (PRESETS["qarl"].temperature, PRESETS["qarl"].max_tokens) == (0.6, 16384)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["learner.advantage.type=gae"], "learner.advantage.type = 'gae' needs a critic"),
        (["learner.critic={}"], "learner.critic serves learner.advantage.type = 'gae' alone"),
        (["learner.group_size=1"], "learner.group_size = 1 gives no response an advantage"),
        (
            [
                "learner.group_size=1",
                "learner.advantage.type=reinforce++",
                "learner.drop_uniform=true",
            ],
            "learner.drop_uniform would drop every group",
        ),
        (["task.type=math", "task.path=x"], "task.type = 'math' needs model.type"),
        (["task.type=countdown", "task.template=chat"], "task.template = 'chat' needs model.type"),
        (["task.type=python", "task.path=x", "reward.path=y"], r"reward\.path"),
    ],
)
def test_what_the_learner_cannot_run_is_refused_with_one_line(settings: list[str], named: str):
    with pytest.raises(ConfigError, match=named) as refused:
        load(None, settings)
    assert "\n" not in str(refused.value)
