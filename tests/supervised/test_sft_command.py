"""`areal-q sft`: a whole run, what the other commands make of it, kill -9, ranks, and RL from its model."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.commands import refused, run_here, wait_until
from helpers.kinds import write_foreign
from helpers.paths import ROOT
from safetensors.torch import load_file, save_file

from areal_q.config import Arithmetic, dump_toml, load
from areal_q.errors import DivergedError
from areal_q.observability.metrics_log import read_metrics
from areal_q.tasks import CharTokenizer, build_task
from learner import checkpoint
from learner.replay.export import main as export
from learner.sft.cli import main as sft
from rollout.commands.status import main as status

SMALL = [
    *("model.layers=2", "model.width=32", "model.mlp=48", "model.max_positions=32"),
    *("task.digits=1", "task.heldout=20", "learner.dtype=float32", "learner.optimizer.lr=3e-3"),
    *("sft.batch=16", "sft.accuracy=false", "eval.every=4", "eval.problems=20"),
]


def settings(root: Path, *more: str) -> list[str]:
    return [f"root={json.dumps(str(root))}", "name=adds", *SMALL, *more]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "hf" / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def records(directory: Path, kind: str) -> list[dict[str, Any]]:
    file = directory / "metrics.jsonl"
    found = read_metrics(file) if file.exists() else []
    return [record for record in found if record["kind"] == kind]


def config(root: Path, *more: str) -> str:
    root.mkdir(exist_ok=True)
    file = root / "adds.toml"
    file.write_text(dump_toml(load(None, settings(root, *more))))
    return str(file)


def test_a_run_learns_and_the_other_commands_know_it(tmp_path: Path):
    done = run_here("sft", sft, config(tmp_path, "steps=24"))
    assert done.returncode == 0, done.stderr
    directory = tmp_path / "adds-sft"
    losses = [(r["step"], r["eval/loss"]) for r in records(directory, "eval")]
    assert [step for step, _ in losses] == [0, 4, 8, 12, 16, 20, 24]
    assert losses[-1][1] < losses[0][1] / 2
    steps = records(directory, "step")
    assert [r["step"] for r in steps] == list(range(1, 25))
    assert steps[-1]["train/epoch"] == 24 * 16 / (110 - 20)
    assert records(directory, "end")[0]["reason"] == "done"
    for said in ("held-out loss", f"areal-q sft {directory} --resume", "loss"):
        assert said in done.stdout
    assert CharTokenizer().wrote(directory / "hf")
    (newest,) = checkpoint.steps(directory / "checkpoints")
    assert newest.name == "step-000024"
    assert run_here("export", export, str(directory), str(tmp_path / "out")).returncode == 0
    assert same(load_file(tmp_path / "out" / "model.safetensors"), weights(directory))
    ended = run_here("status", status, str(directory))
    assert (ended.returncode, ended.stdout) == (0, f"{directory}: ended: done at step 24\n")


def test_passes_over_a_file_s_rows_are_its_steps(tmp_path: Path):
    rows = [{"prompt": f"{n}+1=", "answer": "1" * (40 if n < 26 else 2)} for n in range(10, 90)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [f"sft.path={file}", "sft.heldout=0.2", "sft.epochs=1.5", "sft.template=plain"]
    done = run_here("sft", sft, config(tmp_path, *data))
    assert done.returncode == 0 and "--resume steps=10" in done.stdout, done.stdout
    directory = tmp_path / "adds-sft"
    assert load(directory / "config.toml").steps == 5, "48 rows that are short enough, 16 a step"
    assert [r["step"] for r in records(directory, "step")] == [1, 2, 3, 4, 5]
    # A resumption that asks for more goes on; one whose rows have changed is refused.
    assert run_here("sft", sft, str(directory), "steps=6", "--resume").returncode == 0
    assert records(directory, "step")[-1]["step"] == 6
    file.write_text(file.read_text() + json.dumps(rows[0]) + "\n")
    again = run_here("sft", sft, str(directory), "steps=7", "--resume")
    refused(again, str(file), "not those that the run began with")


def test_processes_of_a_run_of_rl_are_those_of_torchrun(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    file = config(tmp_path, "learner.processes=2", "sft.path=none.jsonl")
    refused(run_here("sft", sft, file), "none.jsonl")
    assert "here it is python -m areal_q.system.torchrun --nproc-per-node 2" in caplog.text


def test_what_cannot_be_trained_is_refused_in_one_line(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "1"}]}\n')
    no_reply = run_here("sft", sft, config(tmp_path, f"sft.path={file}"))
    refused(no_reply, f"{file}:1", "none of the assistant")
    refused(run_here("sft", sft, config(tmp_path, "sft.path=none.jsonl")), "none.jsonl")
    refused(run_here("sft", sft, config(tmp_path), "sft.batch=0"), "sft.batch")
    path = tmp_path / "adds"
    (path / "checkpoints" / "step-000001").mkdir(parents=True)
    (path / "config.toml").write_text(dump_toml(load(None, ["name=adds", f"root='{tmp_path}'"])))
    refused(run_here("sft", sft, str(path), "--resume"), "areal-q run --resume")


def test_a_model_of_transformers_learns_from_rows(tmp_path: Path):
    """Its file also has what older versions wrote: a tensor that follows from config.json."""
    write_foreign(tmp_path / "neox", "gpt_neox")
    file = tmp_path / "neox" / "model.safetensors"
    derived = {"gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(4)}
    save_file(load_file(file) | derived, file, {"format": "pt"})
    run = tmp_path / "neox.toml"
    run.write_text(
        f'name = "neox"\nroot = "{tmp_path}"\nmodel = {{ type = "pretrained", path = "{file.parent}" }}\n'
    )
    small = [setting for setting in SMALL if not setting.startswith("model.")]
    small += ["task.template=plain", "steps=4"]
    done = run_here("sft", sft, str(run), *small, "rollout.engine.type=vllm")
    assert done.returncode == 0, done.stderr
    losses = [record["eval/loss"] for record in records(tmp_path / "neox-sft", "eval")]
    assert len(losses) == 2 and losses[1] < losses[0]
    adapters = run_here("sft", sft, str(run), *small, "learner.lora.rank=4", "name=adapters")
    assert adapters.returncode == 0, adapters.stderr
    assert (tmp_path / "adapters-sft/adapter/adapter_model.safetensors").is_file()


@pytest.mark.parametrize("more", [[], ["learner.lora.rank=4"]])
def test_a_run_that_dies_leaves_no_model_of_its_start(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The task's accuracy before the first step is that of an export."""
    asked = list[set[str]]()

    def answers(directory: Path, problems: int) -> tuple[dict[str, float], list[Any]]:
        asked.append({file.parent.name for file in directory.glob("*/*.safetensors")})
        return {}, []

    monkeypatch.setattr("learner.sft.stage.greedy_accuracy", answers)
    monkeypatch.setattr("learner.sft.stage.learn", Mock(side_effect=DivergedError("as ever")))
    file = config(tmp_path, "steps=4", "rollout.format=nf4", *more)
    refused(run_here("sft", sft, file, "sft.accuracy=true"), "as ever")
    assert asked == [{"hf", "base", "adapter"} if more else {"hf"}]
    assert not [*(tmp_path / "adds-sft").glob("*/*.safetensors")]


def test_ranks_meet_before_any_row_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those that wait for the first one end after two minutes, and rows may take longer."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    file = config(tmp_path, "sft.path=none.jsonl", "learner.backend.offload=true")
    refused(run_here("sft", sft, file), "learner.backend.offload", "2 processes")


def test_a_follower_needs_no_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As of several hosts without a common disk, where the run is on that of rank 0."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    file = config(tmp_path, "learner.backend.offload=true")
    refused(run_here("sft", sft, file, "--resume"), "no such run to resume")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("areal_q.system.stop_request.RANK_0_S", 0.0)
    refused(run_here("sft", sft, file, "--resume"), "learner.backend.offload", "2 processes")


def started(*arguments: str, log: Path, **variables: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    with log.open("ab") as out:
        return subprocess.Popen([sys.executable, "-m", *arguments], stdout=out, stderr=out, env=env)


@pytest.mark.slow
def test_kill_9_and_a_resumption_give_the_same_bits(tmp_path: Path):
    straight = tmp_path / "straight"
    assert run_here("sft", sft, config(straight, "steps=240")).returncode == 0
    other, log = tmp_path / "other", tmp_path / "log"
    file, directory = config(other, "steps=240", "checkpoint.every=5"), other / "adds-sft"
    with started("areal_q", "sft", file, log=log) as run:
        wait_until(lambda: len(records(directory, "step")) > 12, log.read_text, run)
        run.send_signal(signal.SIGSTOP)  # it must not end while it is asked about
        told = run_here("status", status, str(directory), "--json")
        run.send_signal(signal.SIGKILL)
    assert json.loads(told.stdout)["steps"] == 240
    assert len(records(directory, "step")) < 240
    assert run_here("sft", sft, str(directory), "--resume").returncode == 0
    assert same(weights(directory), weights(straight / "adds-sft"))
    kept = ("step", "train/loss", "train/lr", "train/epoch")
    histories = [
        [[r[key] for key in kept] for r in records(path, "step")]
        for path in (directory, straight / "adds-sft")
    ]
    assert histories[0] == histories[1]


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_two_ranks_learn_what_one_process_learns(tmp_path: Path):
    alone, log = tmp_path / "alone", tmp_path / "log"
    assert run_here("sft", sft, config(alone, "steps=6")).returncode == 0
    file = config(tmp_path / "two", "steps=6")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with started(*torchrun, "-m", "areal_q", "sft", file, log=log) as run:
        assert run.wait() == 0, log.read_text()[-3000:]
    found = [
        [(r["step"], r["eval/loss"]) for r in records(root / "adds-sft", "eval")]
        for root in (alone, tmp_path / "two")
    ]
    assert [step for step, _ in found[1]] == [0, 4, 6]
    assert [loss for _, loss in found[1]] == pytest.approx([loss for _, loss in found[0]], abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_task_s_accuracy_rises_and_rl_goes_on(tmp_path: Path):
    """What is learnt are the held-out problems themselves."""
    task = build_task(Arithmetic(digits=1, heldout=20))
    rows = [json.dumps({"prompt": p.prompt, "answer": p.answer}) for p in task.heldout]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    data = [f"sft.path={tmp_path / 'rows.jsonl'}", "sft.heldout=0", "sft.accuracy=true"]
    more = [*data, "steps=150", "rollout.sampling.max_tokens=4", "sft.batch=20"]
    assert run_here("sft", sft, config(tmp_path, *more)).returncode == 0
    directory = tmp_path / "adds-sft"
    evals = [r for r in records(directory, "eval") if "eval/accuracy" in r]
    assert [r["step"] for r in evals] == [0, 150]
    assert evals[0]["eval/accuracy"] < 0.3
    assert evals[1]["eval/accuracy"] > 0.7
    assert len(evals[1]["samples"]) == 5
    model = [f"model={{type='pretrained', path='{directory / 'hf'}'}}", "steps=1", "name=rl"]
    rest = ["learner.groups=2", "learner.minibatches=1", "rollout.sampling.max_tokens=4"]
    log = tmp_path / "log"
    arguments = [*model, *rest, f"root={tmp_path}"]
    with started("areal_q", "run", config(tmp_path / "x"), *arguments, log=log) as run:
        assert run.wait() == 0, log.read_text()[-3000:]
    first = records(tmp_path / "rl", "eval")[0]["eval/accuracy"]
    assert first == pytest.approx(evals[1]["eval/accuracy"], abs=0.15), "int8 rounds the model"
    assert load(tmp_path / "rl" / "config.toml").sft is None
