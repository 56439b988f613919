"""What a run is expected to take, beside figures that were measured, and counts by hand."""

import json
import math
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import run_here
from helpers.engines import worker_beside
from helpers.fixture_types import MakeRun
from helpers.kinds import HALF_A_BILLION, M20, QUICKSTART, SMALL, SMOLLM2, write_foreign
from helpers.paths import ROOT
from msgspec import structs

from areal_q.checks.automatic import settled
from areal_q.checks.memory import FIRST_ALONE, total
from areal_q.checks.model import check_model
from areal_q.checks.pass_memory import Lengths
from areal_q.config import Run, dump_toml, load
from areal_q.errors import ConfigError, LogError
from areal_q.messages import Array, VersionSpan, encode
from areal_q.models import DecoderConfig, Experts
from areal_q.observability.metrics_log import read_metrics
from areal_q.plan import cli
from areal_q.plan.calibration import measured
from areal_q.plan.estimate import RunEstimate, estimate
from areal_q.plan.hardware import CPU_SHARES, GPUS, Device, Hardware, hardware, on_gpus, processor
from areal_q.plan.learner_speed import learner_flop, learner_seconds
from areal_q.plan.speed import HardwareSplit, expected_lag, speed
from areal_q.plan.step_load import Load
from areal_q.plan.wire import wire
from areal_q.plan.worker_speed import worker_rate, workers_seconds
from areal_q.system.disk import size
from areal_q.system.run_dir import METRICS_FILE
from areal_q.tasks import CharTokenizer
from bench.records import make_group, make_trajectory
from buffer.logs.step_log import StepLog, StepRecord
from learner.build import build_learner

SEVEN_BILLION = DecoderConfig(
    family="qwen2", vocab_size=152_064, width=3584, layers=28, heads=28, kv_heads=4, head_dim=128, mlp=18_944,
    max_positions=32_768, qkv_bias=True, tied=False,
)  # fmt: skip
MIXTURE = structs.replace(
    SMALL, family="qwen3_moe", layers=4, experts=Experts(count=64, per_token=2, mlp=16)
)


def cpu(gflops: float, cores: int = 2, memory: float = 64e9) -> Hardware:
    """Returns a processor with AVX-512, or one without, as the benches' and this project's are."""
    rate = gflops * 1e9
    bandwidth = 45e9 if gflops > 100 else 12e9
    return Hardware(Device("cpu", rate, rate, rate, bandwidth, memory, CPU_SHARES, cores), 1)


def batch(groups: int, size: int, minibatches: int = 1) -> list[str]:
    named = {"groups": groups, "group_size": size, "minibatches": minibatches}
    return [f"learner.{name}={value}" for name, value in named.items()]


SUMS = [
    *batch(4, 8), "learner.max_lag=2", "learner.dtype=float32", "rollout.format=bf16", "rollout.threads=2",
    "rollout.engine.slots=96", "rollout.unquantized=bf16", "learner.precision=qarl", "rollout.smoothing=off",
]  # fmt: skip


def test_flop_of_a_step_are_counted_as_by_hand():
    """A group of 2: prompt 3, responses of 4. Inputs 3 + 2 · 3, three passes' worth, no π_prox pass."""
    run = load(None, [*batch(1, 2), "learner.dtype=float32"])
    linears = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48
    attention = (3 + 4) / 2 * 32 * 4
    expected = 3 * 9 * (2 * linears + attention) + 4 * 8 * 2 * 100 * 32
    assert learner_flop(run, SMALL, Load(Lengths(3, 4)))[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ([], 3),
        (["learner.minibatches=2"], 3.5),
        (["learner.recompute=true"], 4),
        (["learner.epochs=2"], 6),
    ],
)
def test_passes_over_a_batch_count_as_the_learner_makes_them(settings: list[str], passes: float):
    run = load(None, [*batch(2, 2), *settings])
    told = learner_flop(run, SMALL, Load(Lengths(3, 4)))[1]
    assert told.startswith(f"{passes:.3g} · ")


MEASURED = [
    (SMOLLM2, SUMS, Lengths(46, 19), 33.4, 25.4),
    (HALF_A_BILLION, [*batch(1, 4), "learner.dtype=bfloat16"], Lengths(64, 448), 430, 16.9),
    (HALF_A_BILLION, [*batch(1, 4), "learner.dtype=float32"], Lengths(64, 448), 185, 44.4),
    (M20, [*batch(3, 8), "learner.dtype=float32"], Lengths(48, 1814 / 24), 185, 2.03),
    (QUICKSTART, [*batch(32, 8), "learner.dtype=float32"], Lengths(7, 4), 185, 0.0507),
    (QUICKSTART, [*batch(64, 8, 2), "learner.dtype=float32"], Lengths(6, 3.6), 33.4, 0.302),
]  # fmt: skip
"""Shape, settings, lengths, GFLOP/s of a large product, and seconds of the learner's step: of a run of
configs/smollm2-sums.toml on two cores with AVX2, those of bench/README.md with AVX-512, and that of the
quickstart with AVX2 (areal_q/checks/automatic.py)"""


@pytest.mark.parametrize(("shape", "settings", "lengths", "gflops", "seconds"), MEASURED)
def test_learners_steps_took_what_is_expected_within_15_percent(
    shape: DecoderConfig, settings: list[str], lengths: Lengths, gflops: float, seconds: float
):
    found, _ = learner_seconds(load(None, settings), shape, Load(lengths), cpu(gflops), 1)
    assert found == pytest.approx(seconds, rel=0.15)


def test_a_learner_on_a_gpu_was_as_fast_within_15_percent():
    """docs/gpu.md: 46,700 tokens/s in bfloat16, 32 sequences of 1,024 tokens, layers computed again."""
    settings = [*batch(32, 1), "learner.advantage={type='reinforce++', baseline='none'}"]
    run = load(
        None, [*settings, "learner.dtype=bfloat16", "learner.device=cuda", "learner.recompute=true"]
    )
    on = Hardware(GPUS["h100"], 1)
    seconds, _ = learner_seconds(run, HALF_A_BILLION, Load(Lengths(0, 1024)), on, 1)
    assert 32 * 1024 / seconds == pytest.approx(46_700, rel=0.15)


@pytest.mark.parametrize(
    ("shape", "settings", "lengths", "on", "rate"),
    [
        (SMOLLM2, SUMS, Lengths(46, 19), cpu(33.4), 67),
        (HALF_A_BILLION, [*batch(1, 64), "learner.max_lag=0", "rollout.format=bf16"], Lengths(7, 24),
         cpu(480), 423),
        (HALF_A_BILLION, [*batch(1, 64), "learner.max_lag=0", "rollout.format=int8"],
         Lengths(7, 24), replace(cpu(480), device=replace(cpu(325).device, eight_bits=800e9)), 611),
    ],
)  # fmt: skip
def test_a_busy_worker_drew_what_is_expected_within_a_third(
    shape: DecoderConfig, settings: list[str], lengths: Lengths, on: Hardware, rate: float
):
    """The run of configs/smollm2-sums.toml, and bench/README.md's one core with AVX-512 at 64 sequences."""
    assert worker_rate(load(None, settings), shape, Load(lengths), on, 1)[0] == pytest.approx(
        rate, rel=0.34
    )


@pytest.mark.parametrize(
    ("config", "settings", "shape", "load_", "seconds"),
    [
        ("smollm2-sums", [], SMOLLM2, Load(Lengths(46, 11.9), 0.48), 1.0),
        ("smollm2-sums", ["rollout.format=int4"], SMOLLM2, Load(Lengths(46, 11.9), 0.49), 1.59),
        ("smollm2-sums", ["rollout.format=bf16"], SMOLLM2, Load(Lengths(46, 11.9), 0.45), 1.33),
        (
            "smollm2-sums",
            ["rollout.format=int8-weight"],
            SMOLLM2,
            Load(Lengths(46, 11.9), 0.45),
            1.38,
        ),
        ("quickstart", [], QUICKSTART, Load(Lengths(6, 3.8)), 0.067),
    ],
)
def test_workers_were_busy_as_expected_within_15_percent(
    config: str, settings: list[str], shape: DecoderConfig, load_: Load, seconds: float
):
    """For a step and its part of an evaluation, on two cores with AVX512-BF16 and VNNI: docs/sizing.md."""
    run = load(ROOT / "configs" / f"{config}.toml", [*settings, "learner.dtype=bfloat16"])
    device = replace(cpu(245).device, bfloat16=490e9, eight_bits=980e9, bandwidth=20e9)
    found = speed(run, shape, load_, Hardware(device, 1), HardwareSplit(1, 1))
    assert found.workers_s == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize(
    ("format", "gflops", "rate"),
    [("int8", 59, 109), ("bf16", 62, 73), ("int8-weight", 67, 71), ("int4", 60, 67)],
)
def test_bfloat16_is_slow_where_a_processor_has_none(format: str, gflops: int, rate: int):
    """What a thread of the torch engine drew in a second, with AVX2 alone: docs/sizing.md."""
    settings = [f"rollout.format={format}", "rollout.threads=1", "learner.threads=1"]
    run = load(ROOT / "configs" / "smollm2-sums.toml", settings)
    found, _ = worker_rate(run, SMOLLM2, Load(Lengths(46, 12)), cpu(gflops), 1)
    assert found == pytest.approx(rate, rel=0.15)


def test_evaluations_and_the_longest_response_take_workers_time():
    """An evaluation's prompts are nobody else's; of responses as long as they may be none is the longest."""
    run = load(
        None, [*SUMS, "rollout.sampling.max_tokens=24", "eval.every=10", "eval.problems=100"]
    )
    on = cpu(33.4)

    def seconds(response: float, waiting: bool = False, *settings: str) -> tuple[float, float]:
        other = (
            load(None, [*SUMS, "rollout.sampling.max_tokens=24", *settings]) if settings else run
        )
        each = (other, SMOLLM2, Load(Lengths(46, response)), on, 1)
        return workers_seconds(*each, waiting=waiting)[:2]

    often = seconds(24, False, "eval.every=1", "eval.problems=100")
    assert often[1] - seconds(24)[1] == pytest.approx(90 * 24)
    rate = worker_rate(run, SMOLLM2, Load(Lengths(46, 24)), on, 1, shared=1)[0]
    assert often[0] - seconds(24)[0] == pytest.approx(90 * 24 / rate)
    assert seconds(24, waiting=True) == seconds(24)
    one = 1 / worker_rate(run, SMOLLM2, Load(Lengths(46, 12)), on, 1, rows=1)[0]
    assert seconds(12, waiting=True)[0] - seconds(12)[0] == pytest.approx(12 * one)


def test_a_step_takes_what_both_need_of_the_cores():
    run = load(None, [*SUMS, "learner.threads=2", "eval.every=1000"])
    made = speed(run, SMOLLM2, Load(Lengths(46, 19)), cpu(33.4), HardwareSplit(1, 1))
    assert made.step_s == pytest.approx((2 * made.learner_s + made.workers_s) / 2)
    assert made.step_s > max(made.learner_s, made.workers_s)


def test_a_pass_for_each_group_gains_nothing_by_more_groups():
    def rate(kind: str, slots: int) -> tuple[float, str]:
        settings = [*batch(8, 8), f"rollout.engine={{type='{kind}', slots={slots}}}"]
        return worker_rate(load(None, settings), SMOLLM2, Load(Lengths(46, 19)), cpu(480), 1)

    alone, several = rate("hf", 8), rate("hf", 64)
    assert several[0] == alone[0] and several[1] == f"{alone[1]}, a group at a time"
    assert alone == rate("torch", 8) and rate("torch", 64)[0] > 1.1 * alone[0]


SNAPSHOTS = {
    "bf16": (1_195_776, 156_436), "int8": (621_312, 42_600), "fp8": (607_296, 34_462),
    "fp8-channel": (621_312, 41_792), "int4": (321_600, 12_200), "int4-fp8": (321_600, 11_744),
    "nvfp4": (349_248, 14_176), "mxfp4": (329_472, 12_647), "nf4": (351_936, 29_118),
}  # fmt: skip
"""bench/README.md: bytes of a version of the quickstart, and of a step's delta"""


@pytest.mark.parametrize("format", SNAPSHOTS)
def test_versions_take_what_was_measured_within_15_percent(format: str):
    settings = [
        f"rollout.format={format}",
        "learner.optimizer.lr=1.5e-4",
        "rollout.unquantized=fp32",
    ]
    found = wire(load(None, settings), QUICKSTART)
    assert (found.snapshot, found.delta) == pytest.approx(SNAPSHOTS[format], rel=0.15)


def test_a_smaller_learning_rate_makes_smaller_deltas():
    run = [
        load(None, [f"learner.optimizer.lr={lr}"]) for lr in (1e-7, 1e-6, 3e-6, 1e-5, 1e-4, 1e-2)
    ]
    sizes = [wire(one, SMOLLM2).delta for one in run]
    assert sizes == sorted(sizes) and all(math.isfinite(one) for one in sizes)
    assert sizes[-1] <= wire(run[-1], SMOLLM2).snapshot


def test_with_adapters_only_they_travel():
    run = load(None, ["learner.lora={rank=4, targets=['q_proj']}", "rollout.format=nf4"])
    assert wire(run, SMALL).delta == 4 * 4 * (32 + 32)


@pytest.mark.parametrize(
    ("learner_s", "workers_s", "settings", "lag"),
    [
        (2.0, 1.0, ["learner.max_lag=2"], 2.0),
        (1.0, 2.0, ["learner.max_lag=2", "rollout.engine.slots=512"], 1.0),
        (1.0, 2.0, ["learner.max_lag=2", "rollout.engine.slots=16"], 0.0),
        (1.0, 2.0, ["learner.max_lag=0"], 0.0),
    ],
)
def test_staleness_follows_from_who_is_slower(
    learner_s: float, workers_s: float, settings: list[str], lag: float
):
    run = load(None, [*batch(4, 4), *settings])
    assert expected_lag(run, Load(Lengths(1, 1)), learner_s, workers_s, 1)[0] == lag


def test_idle_shares_are_those_of_the_slower_side():
    run = load(None, [*SUMS, "learner.oversampling=4"])
    made = speed(run, SMOLLM2, Load(Lengths(46, 19), 0.3), cpu(33.4), HardwareSplit(1, 1))
    assert made.step_s == max(made.learner_s, made.workers_s) == made.workers_s
    assert (
        made.learner_idle == pytest.approx(1 - made.learner_s / made.workers_s)
        and made.workers_idle == 0
    )
    alone = speed(
        load(None, [*SUMS, "learner.max_lag=0"]),
        SMOLLM2,
        Load(Lengths(46, 19)),
        cpu(33.4),
        HardwareSplit(1, 1),
    )
    assert alone.step_s == pytest.approx(alone.learner_s + alone.workers_s)


def gpu_run(*settings: str) -> Run:
    served = [
        "rollout.engine.type=vllm",
        "rollout.sampling.max_tokens=1024",
        "model.max_positions=4096",
    ]
    return on_gpus(load(None, [*batch(32, 16), *served, *settings]), True, True)


def test_the_best_split_of_gpus_is_found():
    """Of those in which the learner fits, which takes two GPUs at least, the one with the shortest step."""
    on, work = hardware("h100:8", 0, 0, 0), Load(Lengths(200, 1024))
    run = gpu_run("learner.optimizer.type=adamw8bit", "learner.recompute=true")
    made = estimate(run, SEVEN_BILLION, work, on)
    split = made.speed.split
    assert made.fits and split.learner_gpus + split.workers == 8
    each = {n: estimate(run, SEVEN_BILLION, work, on, n) for n in range(1, 8)}
    fitting = {n: one.speed.step_s for n, one in each.items() if one.fits}
    assert 1 not in fitting and 7 in fitting
    assert made.speed.step_s == pytest.approx(min(fitting.values()), rel=1e-3)
    assert made.others and not any("learner GPU" in line for line in made.advice)


@pytest.mark.parametrize("tokens", [512, 4096])
def test_a_response_takes_the_bytes_that_are_expected(tokens: int):
    """As a record of one says: plain, with what tokens were drawn from, and with routes."""
    prompt, count = 100, len(MIXTURE.sparse_layers)
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 50_000, tokens), -rng.random(tokens).astype(np.float32)
    spans = [VersionSpan(0, tokens, "a")]
    mask = Array.of(np.tile(np.arange(20, dtype=np.int32), (tokens, 1)))
    routes = Array.of(np.zeros((prompt + tokens - 1, count, 2), np.uint8))
    for more, settings in (
        ({}, []),
        ({"sampling_mask": mask}, ["rollout.sampling.top_p=0.9", "rollout.sampling.top_k=20"]),
        ({"routes": routes}, ["learner.routing_replay=true", "model.experts=64"]),
    ):
        each = [make_trajectory(n, *drawn, spans=spans, **more) for n in range(2)]
        held = [len(encode(make_group(trajectories=each[:n]))) for n in (1, 2)]
        run = load(None, [*batch(8, 8), *settings])
        told = estimate(run, MIXTURE, Load(Lengths(prompt, tokens)), cpu(100))
        steps = run.checkpoint.every + run.learner.max_lag + 1
        assert told.redis / (steps * 64) == pytest.approx(held[1] - held[0], rel=0.15)


def test_a_foreign_model_is_planned_as_it_will_run(tmp_path: Path):
    write_foreign(tmp_path, "phi")
    CharTokenizer().save(str(tmp_path))
    pretrained = f"model={{type='pretrained', path='{tmp_path}'}}"
    told = run_here(
        "plan", cli.main, "quickstart", pretrained, "learner.uaq=1.0", "warmstart.steps=0"
    )
    assert told.returncode == 0 and "learner" in told.stdout, told.stderr


@pytest.mark.parametrize(
    ("family", "settings", "engines"),
    [
        ("llama", [], "vllm or sglang"),
        ("llama", ["rollout.format=int4"], "sglang"),  # vLLM takes whole groups of 128
        ("llama", ["model.type=hf"], ""),
        ("phi", [], ""),
        ("gpt_oss", [], ""),
        ("qwen3_5_text", [], ""),
        ("qwen2_moe, no biases", [], "sglang"),
        ("llama", ["learner.lora={}"], "vllm"),  # SGLang in float32 alone
        ("llama", ["learner.lora={}", "rollout.format=nf4"], ""),
    ],
)
def test_only_an_engine_that_runs_the_model_is_advised(
    family: str, settings: list[str], engines: str, tmp_path: Path
):
    write_foreign(tmp_path, family)
    given = [
        f"model={{type='pretrained', path='{tmp_path}'}}",
        "learner.uaq=1",
        "rollout.format=bf16",
    ]
    run = settled(
        load(None, [*given, "rollout.sampling.max_tokens=8", *settings, f"model.path={tmp_path}"])
    )
    shape = check_model(run).shape
    made = estimate(run, shape, Load(Lengths(8, 8)), hardware("h100:4", 0, 0, 0))
    advised = [line.split(":")[0] for line in made.advice if "rollout.engine" in line]
    assert advised == ([f"rollout.engine.type={engines}"] if engines else [])


def test_what_does_not_fit_is_said_with_what_would_help():
    made = estimate(gpu_run(), SEVEN_BILLION, Load(Lengths(200, 1024)), hardware("l4:2", 0, 0, 0))
    assert not made.fits
    assert "does not fit: the learner takes" in made.advice[0] and "adamw8bit" in made.advice[0]


FRUGAL = ["learner.optimizer.type=adamw8bit", "learner.recompute=true", "learner.fidelity.share=0"]


def test_a_gpu_of_an_engine_on_several_has_to_hold_its_part():
    """A worker's parts are divided by the GPUs of its engine already: three quarters of that are no room."""
    served = ["rollout.engine.tensor_parallel=2", "rollout.engine.slots=512"]
    run = gpu_run(*served, *FRUGAL, "rollout.sampling.max_tokens=3000")

    def with_room(nbytes: float) -> RunEstimate:
        on = hardware("mine:8", 100, 1000, nbytes / 1e9)
        return estimate(run, SEVEN_BILLION, Load(Lengths(200, 1024)), on, 6)

    made = with_room(1e12)
    learner, worker = total(made.learner, True), total(made.worker, True)
    assert made.fits and made.need == worker and learner < 0.75 * worker
    short = with_room(0.75 * worker)
    told = f"it does not fit: the worker takes {size(worker)} of {size(0.75 * worker)}; "
    assert not short.fits and short.advice[0].startswith(told)


def test_what_shares_a_gpu_has_to_fit_together():
    """Either of the two would fit alone."""

    def with_room(nbytes: float) -> RunEstimate:
        on = hardware("mine", 100, 1000, nbytes / 1e9)
        return estimate(gpu_run(*FRUGAL), SEVEN_BILLION, Load(Lengths(200, 1024)), on)

    made = with_room(1e12)
    learner, worker = total(made.learner, True), total(made.worker, True)
    assert made.fits and made.need == learner + worker
    short = with_room(max(learner, worker) + 1e9)
    told = f"it does not fit: the learner and 1 worker take {size(made.need)} of "
    assert not short.fits and short.advice[0].startswith(told)


PROCESSES = [*SUMS, "learner.processes=4"]


def test_every_process_of_the_learner_is_counted():
    """Each has its share of weights, gradients and moments; versions and what is saved are the first one's."""
    on, work = cpu(33.4, cores=16), Load(Lengths(46, 19))
    one, four = (estimate(load(None, it), SMOLLM2, work, on) for it in (SUMS, PROCESSES))
    others = sum(part.nbytes for part in four.learner if part.name not in FIRST_ALONE)
    assert four.need == pytest.approx(total(four.learner) + 3 * others + total(four.worker), abs=4)
    moments = [
        part.nbytes for made in (one, four) for part in made.learner if part.name == "moments"
    ]
    assert moments[0] == 4 * moments[1]


def test_threads_of_all_processes_compute_a_step():
    on, load_ = cpu(33.4, cores=16), Load(Lengths(46, 19))
    runs = [load(None, it) for it in (SUMS, PROCESSES, [*SUMS, "learner.threads=4"])]
    one, four, threads = (learner_seconds(run, SMOLLM2, load_, on, 1)[0] for run in runs)
    assert four == threads < one / 2
    five = cpu(33.4, cores=5)  # one is left for the worker, which would take two
    alone, beside, same = (worker_rate(run, SMOLLM2, load_, five, 1)[0] for run in runs)
    assert beside == same < alone


def test_processes_of_the_learner_are_its_gpus():
    on, work = hardware("h100:8", 0, 0, 0), Load(Lengths(200, 1024))
    made = estimate(gpu_run("learner.processes=3"), SEVEN_BILLION, work, on)
    assert made.speed.split == HardwareSplit(3, 5) and not made.others


def test_more_workers_are_advised_where_the_learner_would_wait():
    run = load(None, [*SUMS, "rollout.threads=1", "learner.oversampling=5"])
    made = estimate(run, SMOLLM2, Load(Lengths(46, 19), 0.2), cpu(33.4, cores=8))
    assert made.speed.learner_idle > 0.15 and "rollout.workers=" in made.advice[0]


@pytest.mark.parametrize(
    ("text", "own", "complaint"),
    [
        ("h101:8", (0, 0, 0), "did you mean 'h100'"),
        ("h100:none", (0, 0, 0), "not NAME or NAME:COUNT"),
        ("h100:0", (0, 0, 0), "not NAME or NAME:COUNT"),
        ("h100:1025", (0, 0, 0), "COUNT is at most 1,024"),
        ("mine:2", (0, 0, 0), "--tflops, --gb-s and --gb as well"),
    ],
)
def test_hardware_that_is_not_known_is_refused(text: str, own: tuple[float, ...], complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        hardware(text, *own)


def test_figures_of_ones_own_go_before_published_ones():
    found = hardware("mine:2", 100, 2000, 48)
    assert found.count == 2 and found.device.bfloat16 == 100e12
    assert (found.device.bandwidth, found.device.memory) == (2000e9, 48e9)
    assert hardware("h100", 0, 0, 94).device.memory == 94e9


def logged_run(directory: Path, steps: int, on: Hardware | None = None, gpus: int = 1) -> Run:
    """Writes what a run of SUMS would have logged whose rates are half of the formulas', on so many GPUs."""
    run = load(None, [*SUMS, "name=logged", f"root={directory.parent}"])
    load_, on = Load(Lengths(46, 19), 0.5), on or cpu(33.4)
    busy = 2 * learner_seconds(run, SMOLLM2, load_, on, gpus)[0]
    rate = speed(run, SMOLLM2, load_, on, HardwareSplit(gpus, 1)).worker_tokens_s / 2
    directory.mkdir()
    (directory / "config.toml").write_text(dump_toml(run))
    records = [
        {
            "kind": "step", "step": n, "elapsed_s": n, "response/tokens_mean": 19.0, "buffer/groups": 8 * n,
            "learner/step_s": busy + 5, "learner/wait_s": 5.0, "weights/delta_bytes": 1e6 * n,
            "workers": [{"tokens_per_s": rate * 0.75, "idle_share": 0.25}],
        }
        for n in range(1, steps + 1)
    ]  # fmt: skip
    (directory / METRICS_FILE).write_text("".join(json.dumps(r) + "\n" for r in records))
    return run


def test_a_runs_own_rates_correct_the_formulas(tmp_path: Path):
    run = logged_run(tmp_path / "logged", 8)
    load_, correction = measured(tmp_path / "logged", SMOLLM2, 46, cpu(33.4))
    assert load_ == Load(Lengths(46, 19.0), 0.5)
    assert (correction.learner, correction.workers) == pytest.approx((2.0, 0.5))
    assert correction.delta * wire(run, SMOLLM2).delta == pytest.approx(1e6)


def test_on_shared_cores_one_factor_corrects_both(tmp_path: Path):
    """What the learner and a worker take there counts the other's turns, too."""
    run, on = logged_run(tmp_path / "logged", 8), cpu(33.4)
    shared = structs.replace(run, learner=structs.replace(run.learner, threads=2))
    (tmp_path / "logged" / "config.toml").write_text(dump_toml(shared))
    load_, correction = measured(tmp_path / "logged", SMOLLM2, 46, on)
    assert correction.learner == pytest.approx(1 / correction.workers)
    seen = read_metrics(tmp_path / "logged" / METRICS_FILE)[-1]["learner/step_s"]
    made = speed(shared, SMOLLM2, load_, on, HardwareSplit(1, 1), correction)
    assert made.step_s == pytest.approx(seen)


def test_a_resumed_runs_groups_are_those_of_its_steps(tmp_path: Path):
    """Where a learner went on, their count may begin anew."""
    logged_run(tmp_path / "logged", 9)
    log = tmp_path / "logged" / METRICS_FILE
    records = [json.loads(line) for line in log.read_text().splitlines()]
    for record in records[5:]:
        record["buffer/groups"] -= 40
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert measured(tmp_path / "logged", SMOLLM2, 46, cpu(33.4))[0].useful == 0.5


@pytest.mark.parametrize(
    ("machine", "gpus"), [("", 1), (", 3 ranks", 3), (", 12 ranks, megatron", 12)]
)
def test_a_run_measures_the_gpus_that_it_had(tmp_path: Path, machine: str, gpus: int):
    """Of its learner, by the step log, whatever the number of GPUs that are planned for."""
    on = hardware("h100:8", 0, 0, 0)
    logged_run(tmp_path / "logged", 8, on, gpus)
    log = StepLog(tmp_path / "logged" / "steps")
    for step in range(8):
        log.append(
            StepRecord(
                step=step, tickets=[], seeds=[], base_digest="", digest="", fork=0, settings="", metrics={},
                machine=f"torch 2.13, NVIDIA H100, AVX512, 2 threads{machine}",
            )
        )  # fmt: skip
    log.close()
    _, correction = measured(tmp_path / "logged", SMOLLM2, 46, on)
    assert (correction.learner, correction.workers) == pytest.approx((2.0, 0.5))


def test_a_step_log_that_cannot_be_read_is_named(tmp_path: Path):
    logged_run(tmp_path / "logged", 8)
    (tmp_path / "logged" / "steps").mkdir()
    (tmp_path / "logged" / "steps" / "part-000000.parquet").write_bytes(b"torn")
    with pytest.raises(LogError, match=r"part-000000\.parquet cannot be read"):
        measured(tmp_path / "logged", SMOLLM2, 46, cpu(33.4))


@pytest.mark.timeout(60)
def test_groups_are_counted_over_all_learners_of_a_run(
    make_run: MakeRun, redis_url: str, tmp_path: Path, short_dir: Path
):
    """As their responses are, each group once: those that wait at a checkpoint are read again."""
    stop, waiting = threading.Event(), "buffer.sampler={type='uniform', min_groups=6}"
    for steps in (2, 4):
        run = make_run(f"steps={steps}", "warmstart.steps=0", "eval.problems=1", waiting)
        announce, fetch = (f"ipc://{short_dir}/{name}-{steps}" for name in ("announce", "fetch"))
        learner = build_learner(run, tmp_path, redis_url, announce, fetch, steps > 2, stop)
        try:
            with worker_beside(redis_url, run.name):
                assert learner.train(stop) == steps
            assert learner.group_reader.held >= 2
        finally:
            learner.close()
    records = [r for r in read_metrics(tmp_path / METRICS_FILE) if r["kind"] == "step"]
    groups = [record["buffer/groups"] for record in records]
    assert groups == [r["buffer/responses"] / run.learner.group_size for r in records]
    assert len(groups) == 4


def test_a_run_of_too_few_steps_measures_nothing(tmp_path: Path):
    logged_run(tmp_path / "logged", 3)
    with pytest.raises(LogError, match="3 steps are too few"):
        measured(tmp_path / "logged", SMOLLM2, 46, cpu(33.4))


def test_a_run_without_workers_measures_nothing_of_them(tmp_path: Path):
    """A supervised run logs steps that have neither groups, responses nor versions."""
    logged_run(tmp_path / "logged", 0)
    records = [{"kind": "step", "step": n, "learner/step_s": 1.0} for n in range(1, 9)]
    log = tmp_path / "logged" / METRICS_FILE
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(
        ConfigError, match="logged: its steps have no buffer/groups, learner/wait_s"
    ):
        measured(tmp_path / "logged", SMOLLM2, 46, cpu(33.4))


def test_a_processor_is_measured_where_cores_are_not_told(monkeypatch: pytest.MonkeyPatch):
    """As on macOS."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert processor(tflops=1).cores >= 1


SERVED_BY_TWO = ["rollout.engine.type=vllm", "rollout.engine.tensor_parallel=2"]


@pytest.fixture
def this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_q.plan.hardware.processor", lambda tflops: cpu(33.4).device)


def plan(*arguments: object) -> Any:
    return run_here("plan", cli.main, *map(str, arguments))


@pytest.mark.usefixtures("this_machine")
def test_the_command_prints_each_part_and_its_formula():
    done = plan("quickstart", "--explain")
    assert done.returncode == 0, done.stderr
    for word in (
        "the learner",
        "each worker",
        "gradients",
        "4 · trained weights",
        "its delta",
        "staleness",
    ):
        assert word in done.stdout
    assert "it fits" in done.stdout
    assert "4 · trained weights" not in plan("quickstart").stdout


@pytest.mark.usefixtures("this_machine")
def test_the_command_tells_what_all_processes_take():
    asked = "quickstart", "learner.processes=4"
    shown, made = plan(*asked).stdout, json.loads(plan(*asked, "--json").stdout)
    assert "4 processes for the learner, 1 worker" in shown
    assert "each other of its 4 processes" in shown
    assert f"it fits: {size(made['need'])} of " in shown


def test_programs_get_the_same_as_json():
    done = plan("quickstart", "--gpu", "h100:4", "--json", "rollout.engine.type=vllm")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["fits"] and found["hardware"]["count"] == 4
    assert {part["name"] for part in found["learner"]} >= {"weights", "activations"}
    assert found["speed"]["step_s"] > 0 and found["speed"]["formulas"]["a worker"]


@pytest.mark.usefixtures("this_machine")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nothing.toml"], "nothing.toml"),
        (["quickstart", "--gpu=h999"], "--gpu h999"),
        (["quickstart", "--gpu=h100:2", "--learner-gpus=3"], "--learner-gpus 3: there are 2"),
        (["quickstart", "--gpu=h100:8", "--learner-gpus=8"], "8 in all, and a worker takes 1"),
        (
            ["quickstart", "--gpu=h100:8", "--learner-gpus=7", *SERVED_BY_TWO],
            "8 in all, and a worker takes 2",
        ),
        (
            ["quickstart", "--gpu=4090", *SERVED_BY_TWO],
            "tensor_parallel = 2: there is only 1 × 4090",
        ),
        (
            ["quickstart", "--gpu=h100:4", "learner.processes=4"],
            "learner.processes = 4: there are 4",
        ),
        (["quickstart", "--from=nowhere"], "nowhere"),
        (["quickstart", "--response=inf"], "--response inf: must be a finite number"),
        (["quickstart", "--network=inf"], "--network inf: must be a finite number"),
        (["quickstart", "--tflops=inf"], "--tflops inf: must be a finite number"),
        (
            ["quickstart", "--response=9", "rollout.sampling.max_tokens=8"],
            "--response 9: above the longest response, 8 tokens",
        ),
        (["quickstart", "model.width=0"], "model.width"),
    ],
)
def test_a_wrong_question_is_one_line(arguments: list[str], complaint: str):
    done = plan(*arguments)
    assert done.returncode == 2 and complaint in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.usefixtures("this_machine")
def test_what_agents_draw_in_all_their_turns_may_be_longer():
    agents = ["rollout.environment.type=external", "rollout.sampling.max_tokens=8"]
    done = plan("quickstart", "--response=9", *agents)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("this_machine")
def test_a_network_of_no_speed_is_refused():
    done = plan("quickstart", "--network=0")
    assert done.returncode == 2 and "'--network'" in done.stderr


def test_the_host_and_the_gpu_are_counted_apart():
    made = estimate(gpu_run(), SEVEN_BILLION, Load(Lengths(200, 1024)), hardware("h200:8", 0, 0, 0))
    assert total(made.learner, True) > 0 and total(made.learner) > 4 * SEVEN_BILLION.weights
