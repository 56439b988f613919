"""What `auto` becomes when a run starts, and that a run keeps it."""

import json
from pathlib import Path

import pytest

from areal_q.checks import automatic
from areal_q.checks.automatic import settled, why_dtype, why_rate, why_smoothing
from areal_q.config import Run, Smoothing, dump_toml, load, parse
from areal_q.config.load import as_before
from areal_q.errors import ConfigError
from areal_q.system import run_dir

INTEL = "flags : fpu avx512f avx512_bf16 amx_bf16 amx_tile"
ZEN5 = "flags : fpu avx512f avx512_vnni avx512_bf16"
HASWELL = "flags : fpu avx avx2 fma"


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """processor(ZEN5) makes this machine one with that line in /proc/cpuinfo."""

    def become(line: str) -> None:
        monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
        file = tmp_path / "cpuinfo"
        file.write_text(f"model name : any\n{line}\n")
        monkeypatch.setattr(automatic, "CPUINFO", file)

    return become


@pytest.mark.parametrize(
    ("line", "settings", "dtype", "why"),
    [
        (INTEL, [], "bfloat16", "AMX"),
        (ZEN5, [], "bfloat16", "AVX512-BF16"),
        (HASWELL, [], "float32", "neither"),
        ("Features : fp asimd bf16", [], "float32", "neither"),
        (HASWELL, ["learner.device=cuda:0"], "bfloat16", "GPU"),
        (ZEN5, ["learner.device=mps"], "float32", "mps"),
        (ZEN5, ["model.experts=4"], "float32", "experts"),
        (ZEN5, ["learner.precision=qarl"], "float32", "the rollouts' numbers"),
        (ZEN5, ["learner.lora={}"], "float32", "the rollouts' numbers"),
    ],
)
def test_auto_is_what_the_processor_is_fast_in(processor, line, settings, dtype, why):
    processor(line)
    run = load(None, settings)
    assert settled(run).learner.dtype == dtype
    assert dtype in why_dtype(run) and why in why_dtype(run)


def test_torch_told_to_be_older_makes_auto_float32(processor, monkeypatch):
    processor(ZEN5)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert settled(load(None)).learner.dtype == "float32"


def test_what_is_asked_for_stays(processor):
    processor(ZEN5)
    asked = ["learner.dtype=float32", "rollout.unquantized=bf16", "rollout.smoothing=off"]
    asked.append("learner.optimizer.lr=0.1")
    run = load(None, asked)
    assert settled(run) == run
    assert "as the settings say; auto were bfloat16" in why_dtype(run)


@pytest.mark.parametrize(
    ("config", "rest"),
    [
        ({"torch_dtype": "bfloat16"}, "bf16"),
        ({"dtype": "bfloat16"}, "bf16"),
        ({"dtype": "float32"}, "fp32"),
        ({"dtype": "float16"}, "fp32"),
        ({}, "fp32"),
    ],
)
def test_the_rest_is_published_in_the_dtype_of_the_model(tmp_path, config, rest):
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = load(None, ["model.type=pretrained", f"model.path={tmp_path}"])
    assert settled(run).rollout.unquantized == rest
    assert settled(load(None)).rollout.unquantized == "fp32"


SMALL = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
LARGE = SMALL | {"vocab_size": 10**6, "hidden_size": 1024}
SFT = "sft.path=rows.jsonl"
LORA = "learner.lora={}"
CRITIC = "learner.critic={optimizer={lr=0.5}}"


@pytest.mark.parametrize(
    ("config", "settings", "rates"),
    [
        (None, [], (1.5e-4, 1.5e-4)),
        (None, [SFT, LORA], (1.5e-4, 1.5e-4)),
        (SMALL, [], (5e-6, 5e-6)),
        (SMALL, [LORA], (5e-5, 5e-5)),
        (SMALL, [SFT], (2e-5, 2e-5)),
        (SMALL, ["learner.optimizer.lr=0.1", CRITIC], (0.1, 0.5)),
        (SMALL, ["learner.optimizer.type=muon", CRITIC], (5e-6, 0.5)),
        (SMALL, ["learner.optimizer.lr=0.1"], (0.1, 5e-6)),
        (None, ["learner.optimizer.lr=0.1"], (0.1, 1.5e-4)),
        (LARGE, [], (1e-6, 1e-6)),
        (LARGE, [LORA], (1e-5, 1e-5)),
        ({}, [], (5e-6, 5e-6)),
    ],
)
def test_a_learning_rate_goes_by_the_model(tmp_path, config, settings, rates):
    asked = ["learner.advantage.type=gae", "learner.critic={}", *settings]
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        asked += ["model.type=pretrained", f"model.path={tmp_path}"]
    run = settled(load(None, asked))
    assert as_before(load(None, asked), run) == run
    assert as_before(load(None, asked), load(None, asked)) == load(None, asked)
    assert run.learner.critic
    assert (run.learner.optimizer.lr, run.learner.critic.optimizer.lr) == rates
    told = config is not None and rates[0] != 0.1
    assert why_rate(run).startswith(f"learner.optimizer.lr is {rates[0]:g}, for") == told
    assert settled(run) == run


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_model_that_cannot_be_read_stays_what_it_is(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    run = load(None, ["model.type=pretrained", f"model.path={tmp_path}"])
    assert settled(run).model == run.model


@pytest.mark.parametrize(
    ("settings", "on", "why"),
    [
        (["rollout.format=int8"], True, "is on: int8 is nearer"),
        (["rollout.format=fp8-channel"], True, "is on: fp8-channel is nearer"),
        (["rollout.format=int8", "model={type='hf',path='none'}"], True, "is on: int8 is nearer"),
        (["rollout.format=fp8"], False, "is off: fp8 is no nearer"),
        (["rollout.format=int4"], False, ""),
        (
            ["rollout.format=int8", "learner.precision=qarl"],
            False,
            "the learner computes with the published weights",
        ),
        (["rollout.format=int8", "learner.lora={}"], False, "computes with the published weights"),
        (["rollout.format=int8", "rollout.smoothing=off"], False, "as the settings say"),
        (["rollout.format=fp8", "rollout.smoothing={}"], True, "as the settings say"),
        (["rollout.format=int8", "model.type=small"], False, ""),
    ],
)
def test_outliers_are_smoothed_where_it_pays(tmp_path, settings, on, why):
    run = load(None, ["model.type=pretrained", f"model.path={tmp_path}", *settings])
    became = settled(run)
    assert became.rollout.smooths == (Smoothing() if on else None)
    assert parse(dump_toml(became), "config.toml") == became
    for told in (why_smoothing(run), why_smoothing(became)):
        assert why in told and bool(told) == bool(why)


def a_run_from(directory: Path, recorded: Run) -> None:
    (directory / "checkpoints" / "step-000001").mkdir(parents=True)
    (directory / "config.toml").write_text(dump_toml(recorded))


def test_a_run_goes_on_in_its_dtype_on_another_processor(processor, tmp_path):
    place = ["name=moved", f"root={tmp_path}"]
    processor(ZEN5)
    a_run_from(tmp_path / "moved", settled(load(None, place)))
    processor(HASWELL)
    again = run_dir.resumes(load(None, place))  # a service, from the same CONFIG
    assert again and again.learner.dtype == "bfloat16"
    assert again.rollout.unquantized == "fp32"
    assert run_dir.resumed(tmp_path / "moved", []).learner.dtype == "bfloat16"
    assert run_dir.resumed(tmp_path / "moved", ["learner.dtype=auto"]).learner.dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"learner\.dtype: cannot change"):
        run_dir.resumed(tmp_path / "moved", ["learner.dtype=float32"])


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (["model.type=pretrained", "model.path=model"], []),
        (["model.type=hf", "model.path=model"], []),
        (["rollout.aqn={}"], ["steps=400"]),
        (["learner.reference_kl={}"], ["steps=400"]),
        (["model.type=pretrained", "model.path=ORG/NAME"], []),
    ],
)
def test_a_service_goes_on_with_what_was_filled_in(tmp_path, monkeypatch, first, again):
    """transformers' decoder and engine, the steps of the noise, the commit of a model of the Hub."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text('{"model_type": "gpt2"}')
    commit = tmp_path / "hub/models--ORG--NAME/snapshots" / ("0" * 40)
    place = [*first, "name=moved", f"root={tmp_path}"]
    began = run_dir.with_absolute_files(settled(load(None, place)))
    if "model.path=ORG/NAME" in first:
        began = run_dir.with_changes(began, "model", path=str(commit))
    a_run_from(tmp_path / "moved", began)
    found = run_dir.resumes(load(None, [*place, *again]))
    assert found
    assert set(run_dir.differences(began, run_dir.with_absolute_files(found))) <= {"steps"}
    (tmp_path / "moved/config.toml").write_text(dump_toml(run_dir.with_absolute_files(found)))
    assert run_dir.resumes(load(None, [*place, *again])) == found, "at the next restart, too"


def test_a_model_of_the_hub_is_compared_by_its_commit(tmp_path):
    """One that is named without a revision stays the commit that it was; a named one is looked up."""
    place = ["model.type=pretrained", "name=moved", f"root={tmp_path}"]
    cache = tmp_path / "hub/models--ORG--NAME/snapshots"

    def fetched(run: Run) -> Run:
        numbers = {"ORG/NAME@v1": 0, "ORG/NAME@v2": 1}
        path = run.model.path  # pyright: ignore[reportAttributeAccessIssue]
        commit = str(cache / f"{numbers[path]:040}") if path in numbers else path
        return run_dir.with_changes(run, "model", path=commit)

    a_run_from(
        tmp_path / "moved", settled(load(None, [*place, f"model.path={cache / ('0' * 40)}"]))
    )
    for same in ("ORG/NAME", "ORG/NAME@v1"):
        assert run_dir.resumes(load(None, [*place, f"model.path={same}"]), fetched)
    for other in ("ORG/NAME@v2", "ORG/OTHER"):
        with pytest.raises(ConfigError, match=r"model\.path: cannot change"):
            run_dir.resumes(load(None, [*place, f"model.path={other}"]), fetched)
