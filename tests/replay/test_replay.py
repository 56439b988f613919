"""Replay: a real run, then its steps again in other processes, from its directory alone."""

import csv
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import typer
from helpers.commands import refused, run_here, stretched
from helpers.paths import EXECUTABLE, ROOT
from helpers.readers import iter_tokens

from areal_q.config import load, settings_hash
from areal_q.errors import CheckpointError, LogError, RecordError, UserError
from areal_q.messages import Array, VersionSpan
from areal_q.observability.metrics_log import read_metrics
from areal_q.system.run_dir import keep_settings
from buffer.logs.step_log import StepLog, iter_steps
from buffer.logs.token_log import tokens_to_table
from buffer.logs.trajectory_log import iter_log
from buffer.logs.trajectory_schema import TRAJECTORY_SCHEMA, groups_from_table, groups_to_table
from learner import checkpoint
from learner.arithmetic import machine_name
from learner.measure.token_recorder import TokenRecorder
from learner.replay.cli import main
from learner.replay.replay_steps import Replay

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
"""The first of them waits for two runs"""
STEPS = 8
FORK = 5
"""Where the run was stopped and resumed"""
RESUMED = [
    "learner.max_lag=1",
    "learner.microbatch_tokens=64",
    "learner.objective.clip_high=0.4",
    "learner.optimizer.lr=1e-3",
    "reward.timeout_s=20",
]
SETTINGS = [
    "model.width=64",
    "model.layers=1",
    "model.mlp=128",
    "task.digits=1",
    "task.heldout=20",
    "warmstart.steps=60",
    "learner.dtype=float32",  # the bounds below are of its rounding
    "learner.groups=16",
    "learner.group_size=8",
    "rollout.sticky_scales=0.02",
    "checkpoint.every=3",
    "checkpoint.keep=2",
    "eval.problems=4",
]


def areal_q(cwd: Path, *args: str, **more) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "COLUMNS": "160",
        "NO_COLOR": "1",
        "XDG_CACHE_HOME": str(cwd / "cache"),
    }
    environment.pop("REDIS_URL", None)
    return subprocess.run(
        [EXECUTABLE, *args],
        cwd=cwd,
        env=environment | more.pop("env", {}),
        capture_output=True,
        text=True,
        timeout=stretched(100),
        **more,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of STEPS steps, resumed at FORK with RESUMED; its checkpoints are of 0, 6 and 8."""
    cwd = tmp_path_factory.mktemp("replay")
    quickstart = str(ROOT / "configs" / "quickstart.toml")
    directory = cwd / "runs" / "quickstart"
    for args in (
        [quickstart, *SETTINGS, f"steps={FORK}"],
        [str(directory), "--resume", f"steps={STEPS}", *RESUMED],
    ):
        result = areal_q(cwd, "run", *args)
        assert result.returncode == 0, result.stderr
    shutil.rmtree(directory / "redis")
    return directory


@pytest.fixture
def run_dir(finished, tmp_path) -> Path:
    """A copy that a test may spoil."""
    return shutil.copytree(finished, tmp_path / "run")


def replay(directory: Path, *args: str, **more) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    return areal_q(directory.parent, "replay", directory.name, *args, **more)


@pytest.fixture
def here(capsys, monkeypatch):
    """here(directory, …) is (exit code, output) of the command's function, in this process."""
    monkeypatch.setenv("COLUMNS", "160")

    def call(directory: Path, **options) -> tuple[int, str]:
        with pytest.raises(typer.Exit) as exit:
            main(directory, **options)
            raise typer.Exit(0)
        return exit.value.exit_code, capsys.readouterr().out

    return call


def rewrite(directory: Path, step: int, change) -> None:
    """Changes the groups of one logged step: change(groups) gives the new ones."""
    for path in sorted((directory / "trajectories").glob("*.parquet")):
        with pq.ParquetFile(path) as file:
            tables = [file.read_row_group(i) for i in range(file.num_row_groups)]
        with pq.ParquetWriter(path, TRAJECTORY_SCHEMA) as writer:
            for table in tables:
                changed = table["step"][0].as_py() == step
                writer.write_table(
                    groups_to_table(step, step, change(groups_from_table(table)))
                    if changed
                    else table
                )


def with_first(groups, index: int, **fields):
    """`groups` with other fields in the first trajectory of group `index`."""
    first, *rest = groups[index].trajectories
    trajectories = [msgspec.structs.replace(first, **fields), *rest]
    changed = msgspec.structs.replace(groups[index], trajectories=trajectories)
    return [*groups[:index], changed, *groups[index + 1 :]]


def test_the_logged_tokens_come_out_again_bit_for_bit(finished):
    replay = Replay(finished)
    tap = replay.recorder = TokenRecorder()
    again = [tokens_to_table(one.record.step, tap.scores()) for one in replay.steps()]
    logged = [table for _, table in iter_tokens(finished / "tokens")]
    assert len(again) == len(logged) == STEPS
    for ours, theirs in zip(again, logged, strict=True):
        assert ours.equals(theirs)


def test_every_step_comes_out_bit_for_bit_in_another_process(finished):
    result = replay(finished)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"steps 0–{STEPS - 1}:" in result.stdout and "weights bit for bit" in result.stdout
    assert "step-000008: weights and optimizer equal, tensor by tensor" in result.stdout


def test_a_replay_from_a_later_checkpoint_ends_in_the_same_bits(finished, here):
    code, out = here(finished, first=6)
    assert code == 0 and "steps 6–7:" in out
    assert "equal, tensor by tensor" in out


def test_step_between_checkpoints_is_reached_from_the_one_before(finished, here):
    code, out = here(finished, first=2, stop=5)
    assert code == 0 and "steps 2–4:" in out and "bit for bit" in out


def test_a_replay_says_where_it_begins_and_how_far_it_is(finished, capsys):
    """What it says is beside the result, since no terminal shows a bar."""
    with pytest.raises(typer.Exit):
        main(finished, first=2, stop=5)
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith(
        "the replay begins at step 0: no later checkpoint before step 2 was kept"
    )
    assert told[1:] == [f"{n} of 5 steps" for n in range(1, 5)]
    with pytest.raises(typer.Exit):
        main(finished, first=6)
    assert "begins" not in capsys.readouterr().err


def test_lags_and_metrics_are_those_that_the_run_itself_wrote(finished):
    """Against metrics.jsonl, which the replay does not read."""
    written = {
        r["step"]: r for r in read_metrics(finished / "metrics.jsonl") if r["kind"] == "step"
    }
    for one in Replay(finished).steps():
        line = written[one.record.step + 1]
        for name, value in one.metrics.items():
            assert line[name] == value, (one.record.step, name)
    assert max(line["lag/max"] for line in written.values()) == 2


def test_tokens_of_an_abandoned_history_keep_their_recorded_lag(run_dir):
    """As if the learner had crashed, resumed at 4, and a token of the abandoned version 5 came in at step 6."""
    records = list(iter_steps(run_dir / "steps"))
    shutil.rmtree(run_dir / "steps")
    log = StepLog(run_dir / "steps")
    for record in records:
        log.append(msgspec.structs.replace(record, fork=4 if record.step >= 4 else 0))
    log.close()

    def change(groups):
        tokens = groups[0].trajectories[0].num_tokens
        return with_first(groups, 0, spans=[VersionSpan(5, tokens, "abandoned")])

    rewrite(run_dir, 6, change)
    lags = {one.record.step: one.metrics["lag/max"] for one in Replay(run_dir).steps()}
    assert lags[6] == (5 - 4) + (6 - 4)
    assert lags[7] == records[7].metrics["lag/max"]


def test_the_step_log_names_batch_order_seeds_and_settings(finished):
    records = list(iter_steps(finished / "steps"))
    logged = list(iter_log(finished / "trajectories"))
    assert [r.step for r in records] == list(range(STEPS))
    for record, (step, groups) in zip(records, logged, strict=True):
        assert record.step == step
        assert record.tickets == [g.ticket.number for g in groups]
        assert record.seeds == [g.ticket.seed for g in groups]
    assert [r.base_digest for r in records[1:]] == [r.digest for r in records[:-1]]
    assert len({r.digest for r in records}) == STEPS
    assert [r.fork for r in records] == [0] * FORK + [FORK] * (STEPS - FORK)
    hashes = [r.settings for r in records]
    assert hashes[-1] == settings_hash(load(finished / "config.toml"))
    assert len(set(hashes[:FORK])) == len(set(hashes[FORK:])) == 1 < len(set(hashes))


def test_what_a_resumption_changed_is_told_with_its_first_step(finished):
    notes = [r["message"] for r in read_metrics(finished / "metrics.jsonl") if r["kind"] == "note"]
    [told] = [note for note in notes if note.startswith(f"from step {FORK} on: ")]
    assert "learner.optimizer.lr = 0.001, was 0.00015; " in told
    for setting in (*RESUMED, f"steps={STEPS}"):
        assert f"{setting.partition('=')[0]} = " in told


def test_each_step_is_replayed_with_the_threads_that_it_had(run_dir):
    """As if the run had been resumed with two threads; what two threads give is not compared."""
    records = list(iter_steps(run_dir / "steps"))
    resumed = load(run_dir / "config.toml", ["learner.threads=2"])
    keep_settings(run_dir, resumed)
    two = machine_name("cpu", threads=2)
    shutil.rmtree(run_dir / "steps")
    log = StepLog(run_dir / "steps")
    for r in records:
        new = {"machine": two, "settings": settings_hash(resumed)} if r.step >= FORK else {}
        log.append(msgspec.structs.replace(r, **new))
    log.close()
    replay, threads = Replay(run_dir), {}

    def look(policy, step, *_) -> None:
        threads[step] = (policy.cfg.threads, torch.get_num_threads())

    for _ in replay.steps(look):
        pass
    assert threads == {step: (1, 1) if step < FORK else (2, 2) for step in range(STEPS)}
    assert replay.exact


def test_another_objective_is_shown_beside_the_first(run_dir, here):
    code, out = here(run_dir, first=2, settings=["learner.objective.type=tbpo"])
    assert code == 0 and "learner.objective.type=tbpo: another history" in out
    with (run_dir / "replay" / "replay.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(2, STEPS))
    for row, record in zip(rows, iter_steps(run_dir / "steps", 2), strict=True):
        assert float(row["train/grad_norm"]) == record.metrics["train/grad_norm"]
        assert row["train/grad_norm, replayed"] != row["train/grad_norm"]


def test_other_settings_begin_at_the_first_step_asked_for(run_dir):
    changed = {
        one.record.step: one
        for one in Replay(run_dir, ["learner.optimizer.lr=1e-2"], first=3).steps()
    }
    for step in range(3):
        assert changed[step].metrics == changed[step].record.metrics
    # The first loss is that of the same weights; the update that follows is another.
    assert changed[3].metrics["mismatch/kl"] == changed[3].record.metrics["mismatch/kl"]
    assert changed[4].metrics["mismatch/kl"] != changed[4].record.metrics["mismatch/kl"]


@pytest.mark.parametrize("kind", ["adamw8bit", "muon"])
def test_moments_of_another_optimizer_begin_anew(run_dir, kind: str):
    """Codes of 8 bits were taken for moments, and Muon's for those of other weights."""
    changed = {
        one.record.step: one
        for one in Replay(run_dir, [f"learner.optimizer.type={kind}"], first=3).steps()
    }
    assert changed[3].metrics["mismatch/kl"] == changed[3].record.metrics["mismatch/kl"]
    assert all(math.isfinite(one.metrics["train/grad_norm"]) for one in changed.values())
    assert changed[4].metrics["mismatch/kl"] != changed[4].record.metrics["mismatch/kl"]


def test_other_settings_stop_at_the_first_difference_if_asked(run_dir, here):
    code, out = here(run_dir, until_diverges=True, settings=["learner.optimizer.lr=1e-2"])
    assert code == 0, out
    assert "step 0 with" in out
    assert re.search(
        r"step 0 is the first that differs by.* rounding:\s\S+/\S+\s[-\d.e]+\sbecame", out
    )


def test_the_runs_own_reward_scores_as_the_worker_did(run_dir):
    """The text that is judged comes out of the log as it came out of the engine."""
    main(run_dir, settings=["reward.correct=1"])
    with (run_dir / "replay" / "rewards.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(STEPS))
    written = [r for r in read_metrics(run_dir / "metrics.jsonl") if r["kind"] == "step"]
    for row, line in zip(rows, written, strict=True):
        assert float(row["alike"]) == 1
        assert float(row["now"]) == pytest.approx(line["reward/mean"])


def test_other_micro_batches_are_allowed_nothing_but_rounding(finished, here):
    code, out = here(finished, settings=["learner.microbatch_tokens=128"])
    assert code == 0, out
    assert "within tolerances" in out and "bit for bit" not in out


def test_another_instruction_set_stays_within_the_tolerances(finished):
    """The nearest thing to a log from another device: every kernel of torch without AVX, or, where these tests
    run without, with it."""
    plain = torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    capability, isa = ("avx2", "AVX2") if plain else ("default", "SSE41")
    env = {"ATEN_CPU_CAPABILITY": capability, "ONEDNN_MAX_CPU_ISA": isa}
    result = areal_q(finished.parent, "replay", str(finished), env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "within tolerances" in result.stdout and capability.upper() in result.stdout
    other = areal_q(finished.parent, "replay", str(finished), "--step", "7", env=env)
    differs = re.search(r"^ *\S+/\S+ +\S+ +\S+ +[+-]\S+ *$", other.stdout, re.MULTILINE)
    assert differs, f"the same bits, nothing was compared: {other.stdout}"


def test_other_backend_gives_other_bits_within_tolerances():
    assert machine_name("cpu", "torch") == machine_name("cpu")
    assert machine_name("cpu", "megatron") == machine_name("cpu") + ", megatron"


def test_bits_are_asked_of_the_same_processor(finished, monkeypatch):
    replay = Replay(finished)
    assert replay.exact
    monkeypatch.setattr("learner.arithmetic._processor", lambda: "Z80")
    assert not Replay(finished).exact


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="a processor without this mode")
def test_tiny_products_are_zero_as_in_the_learner(finished):
    tiny, small = torch.tensor([1e-30]), torch.tensor([1e-10])
    torch.set_flush_denormal(False)
    assert float(tiny * small) > 0
    Replay(finished)
    assert float(tiny * small) == 0


def test_fetched_steps_replay_elsewhere(finished, tmp_path):
    """Of the checkpoints only the one that the steps need."""
    argv = [EXECUTABLE, "fetch", str(finished), "--from", "2", "--to", "4"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as child:
        assert child.stdout
        with tarfile.open(fileobj=child.stdout, mode="r|") as tar:
            tar.extractall(tmp_path, filter="data")
    assert child.returncode == 0
    there = tmp_path / finished.name
    assert [path.name for path in (there / "checkpoints").iterdir()] == ["step-000000"]
    assert [step.record.step for step in Replay(there, None, 2, 4).steps()][-1] == 3
    refused = areal_q(tmp_path, "fetch", finished.name, "--from", "900")
    assert (refused.returncode, refused.stdout) == (2, "")


def test_a_changed_log_prob_is_found_at_its_step(run_dir, here):
    def change(groups):
        t = groups[1].trajectories[0]
        values = t.behavior_logprobs.numpy().copy()
        values[0] -= 1e-3
        return with_first(groups, 1, behavior_logprobs=Array.of(values))

    rewrite(run_dir, 5, change)
    code, out = here(run_dir, until_diverges=True)
    assert code == 1
    assert "steps 0–4:" in out and "step 5 differs" in out
    assert re.search(r"\S+/\S+ [-\d.e]+ became [-\d.e]+ \([+-]", out)


def test_groups_in_another_order_are_not_the_learnt_step(run_dir):
    rewrite(run_dir, 4, lambda groups: groups[::-1])
    with pytest.raises(LogError, match="other groups at step 4"):
        list(Replay(run_dir).steps())


def test_a_part_that_was_never_finished_shortens_the_log(run_dir, here):
    for log in ("trajectories", "steps"):
        last = max((run_dir / log).glob("*.parquet"))
        last.rename(last.with_suffix(".parquet.tmp"))
    code, out = here(run_dir)
    assert code == 0 and "steps 0–5:" in out
    with pytest.raises(LogError, match="no record of step 6"):
        main(run_dir, stop=STEPS)


@pytest.mark.parametrize("log", ["trajectories", "steps"])
def test_a_torn_part_is_named(run_dir, log):
    last = max((run_dir / log).glob("*.parquet"))
    last.write_bytes(last.read_bytes()[:-20])
    with pytest.raises(RecordError, match=last.name):
        list(Replay(run_dir).steps())


def test_flipped_bytes_in_a_part_are_one_line_and_exit_code_2(run_dir):
    part = min((run_dir / "trajectories").glob("*.parquet"))
    data = bytearray(part.read_bytes())
    data[200:4000] = bytes(b ^ 0xFF for b in data[200:4000])
    part.write_bytes(data)
    refused(run_here("replay", main, str(run_dir)), part.name)


def test_no_run_is_one_line_and_exit_code_2(run_dir):
    refused(run_here("replay", main, str(run_dir / "gone")), "gone")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"first": 99}, "the log ends at step 7"),
        ({"stop": 99}, "no record of step 8: the log ends at step 7"),
        ({"first": 6, "stop": 4}, "--to 4 is not after --from 6"),
        ({"step": 8}, "no record of step 8"),
        ({"settings": ["task.digits=3"]}, "task.digits"),
        ({"settings": ["learner.groups=4"]}, "learner.groups"),
        ({"debug": True}, "--step"),
    ],
)
def test_what_cannot_be_replayed_is_named(finished, options, complaint):
    with pytest.raises(UserError, match=complaint):
        main(finished, **options)


def test_missing_and_damaged_checkpoints_are_named(run_dir):
    checkpoints = run_dir / "checkpoints"
    shutil.rmtree(checkpoints / "step-000000")
    with pytest.raises(CheckpointError, match="no checkpoint at or before step 3"):
        Replay(run_dir, first=3)
    tensors = checkpoints / "step-000006" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="step-000006"):
        Replay(run_dir)
    shutil.rmtree(checkpoints)
    with pytest.raises(CheckpointError, match=r"no checkpoint$"):
        Replay(run_dir)


def test_a_run_that_logged_no_step_is_named(run_dir):
    shutil.rmtree(run_dir / "steps")
    with pytest.raises(LogError, match="no record of step 0"):
        Replay(run_dir)


def test_debug_stops_inside_the_step_with_the_batch_at_hand(finished):
    script = "p int(batch.version_lag.max()), len(samples), inputs.logprobs.shape\nc\n"
    result = replay(finished, "--step", "6", "--debug", input=script)
    assert result.returncode == 0, result.stderr
    assert re.search(r"\(\d+, 128, torch\.Size\(\[\d+\]\)\)", result.stdout)
    assert "step 6:" in result.stdout and "bit for bit" in result.stdout
    assert "inspect()" in result.stdout and "--Return--" not in result.stdout
    assert "look at samples" in result.stdout


@pytest.mark.parametrize("script", ["q\n", ""], ids=["q", "end of input"])
def test_leaving_the_debugger_ends_it_cleanly(finished, script):
    result = replay(finished, "--step", "6", "--debug", input=script)
    assert result.returncode == 0, result.stderr
    assert "BdbQuit" not in result.stdout + result.stderr


def test_ctrl_c_ends_it_cleanly(finished):
    command = [sys.executable, "-m", "areal_q", "replay", str(finished), "--step", "6", "--debug"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONBREAKPOINT": "signal.pause", "NO_COLOR": "1"},
    ) as child:
        assert child.stdout is not None
        assert any("look at samples" in line for line in child.stdout)
        time.sleep(0.2)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate()
    assert child.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in errors


def test_the_checkpoint_of_the_start_outlives_the_newest_ones(finished):
    names = [path.name for path in checkpoint.steps(finished / "checkpoints")]
    assert names == ["step-000000", "step-000006", "step-000008"]
    assert load(finished / "config.toml").checkpoint.keep == 2


def test_the_step_log_is_plain_parquet_of_standard_types(finished):
    table = pq.read_table(finished / "steps")
    assert table.num_rows == STEPS
    assert table.schema.field("metrics").type == pa.map_(pa.string(), pa.float64())
    assert table["step"].to_pylist() == list(range(STEPS))


def test_the_doctor_follows_a_run_until_it_ends(tmp_path):
    """The run ends by Ctrl-C once it was looked at twice, however slow the machine is."""
    quickstart, looks = str(ROOT / "configs" / "quickstart.toml"), list[int]()
    command = [EXECUTABLE, "run", quickstart, *SETTINGS, "steps=100000", "name=live"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as run:
        try:
            parts = tmp_path / "runs" / "live" / "steps"
            while not list(parts.glob("part-*.parquet")):
                assert run.poll() is None, "the run ended before its first part"
                time.sleep(0.05)
            with subprocess.Popen(
                [EXECUTABLE, "doctor", "runs/live", "--follow"],
                cwd=tmp_path, stdout=subprocess.PIPE, text=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            ) as doctor:  # fmt: skip
                assert doctor.stdout
                for line in doctor.stdout:
                    if found := re.search(r"steps \d+–(\d+): \d+ responses", line):
                        looks.append(int(found[1]))
                        if len(looks) == 2:
                            run.send_signal(signal.SIGINT)
            assert doctor.returncode in (0, 1) and run.wait() == 0
        finally:
            run.kill()
    assert looks == sorted({*looks})
    assert looks[-1] == max(pq.read_table(parts)["step"].to_pylist())


def test_probe_at_learning_rate_0_has_no_staleness_at_any_lag(run_dir):
    """Through launcher, engine and buffer; the run itself, which learns, has some."""
    results = {}
    for name, args in (("run", ()), ("probe", ("--probe", "4"))):
        result = areal_q(run_dir.parent, "doctor", run_dir.name, *args)
        assert result.returncode in (0, 1), result.stderr
        path = Path(result.stdout.splitlines()[-1])
        results[name] = msgspec.json.decode((run_dir.parent / path).read_bytes())
    rms = {
        name: {part["term"]: part["rms"] for part in table["terms"]}
        for name, table in results.items()
    }
    assert results["probe"]["window"]["exact"] and results["run"]["window"]["exact"]
    assert max(x["lag"] for x in results["probe"]["by_lag"]) >= 1  # how far, the machine decides
    assert rms["probe"]["staleness"] == 0.0 < rms["run"]["staleness"]
    for name in ("run", "probe"):
        assert rms[name]["engine"] < 0.01 and rms[name]["activations"] > 1e-4
