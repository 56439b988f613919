"""`areal-q export`: a checkpoint as a model directory, against transformers and the run's own export."""

import json
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch
from helpers.chain_models import byte_tokenizer, write_chain
from helpers.commands import refused, run_here
from helpers.policies import initial_model
from safetensors.torch import load_file
from transformers import GenerationConfig

from areal_q.cli.quantize import quantize
from areal_q.config import Chat, PretrainedModel, dump_toml
from areal_q.errors import CheckpointError, LogError
from areal_q.models import load_decoder, save_decoder
from areal_q.models.packed_layout import PackedLayout
from areal_q.observability.metrics_log import MetricsLog
from areal_q.quant.rescaling import apply_uaq, fold_back
from areal_q.tasks import build_tokenizer, load_tokenizer
from learner import checkpoint
from learner.backends.single_device import TorchPolicy
from learner.final_export import finish
from learner.policy_update import update_policy
from learner.replay.export import ExportDtype, best_step, export, main
from learner.replay.export import declared as declared_for


@pytest.fixture
def run_dir(make_run, make_samples, tmp_path: Path) -> Path:
    """Checkpoints of steps 2 and 4; hf/ is the model of step 4, before UAQ (s = 2) scaled it."""
    run = make_run("learner.uaq=2")
    directory = tmp_path / "run"
    model = initial_model(run)
    policy = TorchPolicy(model, run.learner, 1.0)
    for step in (2, 4):
        update_policy(policy, make_samples(4, step))
        save_decoder(model, directory / "hf", build_tokenizer(run.model, run.task))
        apply_uaq(model, 2.0)
        state = checkpoint.State(
            step=step,
            position="0-1",
            cursor=1,
            outstanding=[],
            digests={},
            updates=2,
            skipped=0,
            model=model.config.to_hf(),
        )
        checkpoint.save(directory / "checkpoints", state, policy, keep=2)
        with torch.no_grad():
            fold_back(model, 2.0)
    (directory / "config.toml").write_text(dump_toml(run))
    return directory


def test_the_best_checkpoint_is_of_those_that_are_there(run_dir: Path, tmp_path: Path):
    with MetricsLog(run_dir, tensorboard=False) as metrics:
        with pytest.raises(CheckpointError, match="no checkpoint has eval/accuracy"):
            best_step(run_dir)
        for step, accuracy, hard in ((0, 0.9, 0.9), (2, 0.5, 0.1), (3, 0.8, 0.8), (4, 0.4, 0.2)):
            metrics.write("eval", step, {"eval/accuracy": accuracy, "eval/hard/accuracy": hard})
    assert best_step(run_dir) == 2
    config = (run_dir / "config.toml").read_text()
    hard = '[eval]\nbest = "eval/hard/accuracy"\n[eval.sets.hard]\nsamples = 2\n'
    (run_dir / "config.toml").write_text(config.partition("[eval]")[0] + hard)
    assert best_step(run_dir) == 4

    with MetricsLog(run_dir, tensorboard=False) as metrics:  # of newer weights than those of step 2
        late = {"eval/hard/accuracy": 1.0, "eval/hard/late_by": 1000.0}
        metrics.write("eval", 2, late)
    assert best_step(run_dir) == 4
    done = run_here("export", main, str(run_dir), str(tmp_path / "best"), "--best")
    assert done.stdout.startswith(f"{tmp_path / 'best'}: step-000004")
    both = run_here("export", main, str(run_dir), str(tmp_path / "x"), "--best", "--step", "2")
    refused(both, "only one of them")


def test_newest_checkpoint_gives_what_the_end_of_the_run_would(run_dir: Path, tmp_path: Path):
    assert export(run_dir, tmp_path / "out")[0].name == "step-000004"
    ours, theirs = (sorted(p.iterdir()) for p in (tmp_path / "out", run_dir / "hf"))
    assert [p.name for p in ours] == [p.name for p in theirs]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(ours, theirs, strict=True))


def test_earlier_step_answers_alike_when_transformers_loads_it(run_dir: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    export(run_dir, tmp_path / "out", step=2)
    newest = load_file(run_dir / "hf" / "model.safetensors")
    earlier = load_file(tmp_path / "out" / "model.safetensors")
    assert any(not torch.equal(earlier[name], newest[name]) for name in newest)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ours, ids = load_decoder(tmp_path / "out"), torch.tensor([3, 1, 4, 1, 5])
    with torch.no_grad():
        logits = ours.logits(ours(ids, PackedLayout.of([5])))
        torch.testing.assert_close(logits, oracle(ids[None]).logits[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_dtype_is_what_transformers_makes_of_the_model(
    run_dir: Path, tmp_path: Path, dtype: ExportDtype
):
    from transformers import AutoModelForCausalLM

    export(run_dir, tmp_path / "out", dtype=dtype)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    oracle = AutoModelForCausalLM.from_pretrained(run_dir / "hf", dtype=getattr(torch, dtype))
    assert found.dtype == oracle.dtype == getattr(torch, dtype)
    pairs = zip(found.named_parameters(), oracle.named_parameters(), strict=True)
    assert all(a == b and torch.equal(p, q) for (a, p), (b, q) in pairs)
    half, full = (
        sum(f.stat().st_size for f in d.glob("*.safetensors"))
        for d in (tmp_path / "out", run_dir / "hf")
    )
    assert half < 0.6 * full


def test_without_a_dtype_it_is_the_one_that_the_source_declares(tmp_path: Path):
    (source := tmp_path / "source").mkdir()
    for declared, expected in (
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "float64"}, "float32"),
        ({}, "float32"),
    ):
        (source / "config.json").write_text(json.dumps(declared))
        assert declared_for(PretrainedModel(path=str(source))) == expected
    shutil.rmtree(source)
    assert declared_for(PretrainedModel(path=str(source))) == "float32"


def test_an_export_keeps_the_source_s_ends_and_dtype(tmp_path: Path, make_run):
    ends = {"eos_token_id": [258, 256], "temperature": 0.7}
    source = write_chain(tmp_path / "m", "42<|im_end|>", eos=[258, 256], generation_config=ends)
    model = f'model={{type="pretrained",path="{source}"}}'
    run = make_run(model, "task.template=chat", "learner.uaq=1")
    policy = TorchPolicy(load_decoder(source), run.learner, 1.0)
    state = checkpoint.State(
        step=1, position="0-1", cursor=1, outstanding=[], digests={}, updates=0, skipped=0,
        model=policy.model.config.to_hf(),
    )  # fmt: skip
    checkpoint.save(tmp_path / "run" / "checkpoints", state, policy, keep=1)
    (tmp_path / "run" / "config.toml").write_text(dump_toml(run))
    export(tmp_path / "run", tmp_path / "out")
    learner = Mock(run=run, policy=policy)
    learner.heldout.accuracy = None
    finish(learner, tmp_path / "run", run.steps - 1)
    for made in (tmp_path / "out", tmp_path / "run" / "hf"):
        assert json.loads((made / "generation_config.json").read_text()) == ends
        config = json.loads((made / "config.json").read_text())
        assert (config["eos_token_id"], config["torch_dtype"]) == ([258, 256], "bfloat16")
        stops = [load_tokenizer(d, Chat()).stops for d in (source, made)]
        assert stops[0] == stops[1]
        before, after = (load_file(d / "model.safetensors") for d in (source, made))
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_export_names_an_end_that_only_the_template_has(tmp_path: Path):
    """transformers and servers would draw on behind it."""
    source = write_chain(
        tmp_path / "m", "42<|im_end|>", byte_tokenizer(eos="<|endoftext|>"), eos=256
    )
    for chat, ends in ((None, None), (Chat(), [256, 258])):
        save_decoder(load_decoder(source), tmp_path / "out", load_tokenizer(source, chat))
        named = tmp_path / "out" / "generation_config.json"
        assert (json.loads(named.read_text())["eos_token_id"] if named.is_file() else None) == ends


def test_an_end_of_config_json_is_named_where_that_is_not_read(tmp_path: Path):
    """Where generation_config.json names any, transformers reads no other."""
    ends = {"eos_token_id": 258}
    source = write_chain(tmp_path / "m", "42<|im_end|>", eos=[258, 256], generation_config=ends)
    save_decoder(load_decoder(source), tmp_path / "out", load_tokenizer(source), source=source)
    named = GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id
    assert named == [258, 256]


def test_an_export_of_a_supervised_run_keeps_its_template(tmp_path: Path, make_run):
    source = write_chain(tmp_path / "m", "42<|im_end|>", eos=[258, 256])
    (file := tmp_path / "own.jinja").write_text("{{ messages[0].content }} of sft")
    model = f'model={{type="pretrained",path="{source}"}}'
    run = make_run(model, "sft.path=rows.jsonl", f"sft.chat.template_file={file}")
    policy = TorchPolicy(load_decoder(source), run.learner, 1.0)
    state = checkpoint.State(
        step=1, position="0-1", cursor=1, outstanding=[], digests={}, updates=0, skipped=0,
        model=policy.model.config.to_hf(),
    )  # fmt: skip
    checkpoint.save(tmp_path / "run" / "checkpoints", state, policy, keep=1)
    (tmp_path / "run" / "config.toml").write_text(dump_toml(run))
    export(tmp_path / "run", tmp_path / "out")
    assert load_tokenizer(tmp_path / "out", Chat()).template == file.read_text()


def test_weight_beyond_the_dtype_is_named_and_nothing_written(tmp_path: Path, make_run):
    run = make_run()
    model = initial_model(run)
    with torch.no_grad():
        model.model.norm.weight[0] = 1e5
    with pytest.raises(
        CheckpointError, match=r"model\.norm\.weight does not fit into torch\.float16"
    ):
        save_decoder(model, tmp_path / "out", dtype=torch.float16)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)]
)
def test_what_is_written_is_as_open_to_others_as_the_umask_says(
    tmp_path: Path, make_run, umask: int, file: int, folder: int
):
    run = make_run()
    model = initial_model(run)
    before = os.umask(umask)
    try:
        save_decoder(model, tmp_path / "hf", build_tokenizer(run.model, run.task))
        quantize(tmp_path / "hf", tmp_path / "int8", "int8", torch.bfloat16)
        policy = TorchPolicy(model, run.learner, 1.0)
        state = checkpoint.State(
            step=1, position="0-1", cursor=1, outstanding=[], digests={}, updates=0, skipped=0,
            model=model.config.to_hf(),
        )  # fmt: skip
        checkpoint.save(tmp_path / "checkpoints", state, policy, keep=1)
    finally:
        os.umask(before)
    found = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert sum(path.suffix == ".safetensors" for path in found) == 3
    wrong = {p: m for p, m in found.items() if m != (folder if p.is_dir() else file)}
    assert not wrong


def test_step_without_a_checkpoint_is_refused_and_others_named(run_dir: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match="no checkpoint of step 3; there are: 2, 4"):
        export(run_dir, tmp_path / "out", step=3)
    with pytest.raises(LogError, match="no such run"):
        export(tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_not_exported(run_dir: Path, tmp_path: Path):
    state = run_dir / "checkpoints" / "step-000004" / "state.json"
    altered = msgspec.json.decode(state.read_bytes()) | {"cursor": 2}
    state.write_bytes(msgspec.json.encode(altered))
    with pytest.raises(CheckpointError, match="step-000004"):
        export(run_dir, tmp_path / "out")
