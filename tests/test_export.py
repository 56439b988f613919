"""`areal-q export`: a checkpoint as a model directory, against transformers and the run's own export."""

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from areal_q.config import dump_toml
from areal_q.errors import CheckpointError, LogError
from areal_q.models import load_decoder, save_decoder
from areal_q.models.packing import PackedLayout
from areal_q.quant.uaq import apply_uaq, fold_back
from areal_q.tasks import build_tokenizer
from learner import checkpoint
from learner.build import build_model
from learner.export import export
from learner.trainer import Trainer


@pytest.fixture
def run_dir(make_run, make_samples, tmp_path: Path) -> Path:
    """Checkpoints of steps 2 and 4; hf/ is the model of step 4, before UAQ (s = 2) scaled it."""
    run = make_run("learner.uaq=2")
    directory = tmp_path / "run"
    model = build_model(run, build_tokenizer(run))
    trainer = Trainer(model, run.learner, 1.0)
    for step in (2, 4):
        trainer.step(make_samples(4, step))
        save_decoder(model, directory / "hf", build_tokenizer(run))
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
        checkpoint.save(directory / "checkpoints", state, trainer, keep=2)
        with torch.no_grad():
            fold_back(model, 2.0)
    (directory / "config.toml").write_text(dump_toml(run))
    return directory


def test_the_newest_checkpoint_gives_what_the_end_of_the_run_would(run_dir: Path, tmp_path: Path):
    assert export(run_dir, tmp_path / "out").name == "step-000004"
    ours, theirs = (sorted(p.iterdir()) for p in (tmp_path / "out", run_dir / "hf"))
    assert [p.name for p in ours] == [p.name for p in theirs]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(ours, theirs, strict=True))


def test_an_earlier_step_is_loaded_by_transformers_and_says_the_same(run_dir: Path, tmp_path: Path):
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


def test_a_step_that_has_no_checkpoint_is_refused_and_those_there_are_named(
    run_dir: Path, tmp_path: Path
):
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
