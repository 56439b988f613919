"""Checkpoints: bit-exact, whole or absent, and refused by name when damaged."""

import itertools
import json
import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
import xxhash
from helpers.commands import full_disk
from helpers.fixture_types import MakeRun, MakeSamples
from helpers.policies import build_policy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_q.config import CheckpointConfig
from areal_q.errors import CheckpointError
from areal_q.system import files as system_files
from learner import checkpoint
from learner.backends.single_device import TorchPolicy
from learner.checkpoint import files
from learner.checkpoint.async_writer import CheckpointWriter
from learner.checkpoint.files import State
from learner.data.packing import Sample
from learner.policy_update import SingleProcessUpdater, update_policy


def state_at(step: int, policy: TorchPolicy) -> State:
    return State(
        step=step,
        position=f"17-{step}",
        cursor=100 + step,
        outstanding=[98, 99, 100],
        digests={step - 1: "a0", step: "b1"},
        updates=policy.updates,
        skipped=policy.skipped,
    )


def everything(policy: TorchPolicy) -> dict[str, torch.Tensor]:
    tensors = {k: v.detach().clone() for k, v in policy.model.state_dict().items()}
    for i, slot in policy.optimizer.state_dict()["state"].items():
        tensors |= {f"{i}.{k}": v.clone() for k, v in slot.items()}
    if policy.critic:
        tensors |= {f"critic.{k}": v.clone() for k, v in policy.critic.state_dict().items()}
        for i, slot in policy.critic.optimizer.state_dict()["state"].items():
            tensors |= {f"critic.{i}.{k}": v.clone() for k, v in slot.items()}
    if policy.reference:
        tensors |= {f"reference.{k}": v.clone() for k, v in policy.reference.state_dict().items()}
    return tensors | {"random": torch.rand(5)}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.fixture
def policy(make_run: MakeRun, make_samples: MakeSamples) -> TorchPolicy:
    """After one step, so that the optimizer has something to remember."""
    policy = build_policy(make_run())
    update_policy(policy, make_samples(4))
    return policy


def test_a_restored_learner_goes_on_bit_for_bit(
    make_run: MakeRun, make_samples: MakeSamples, policy: TorchPolicy, tmp_path: Path
):
    torch.manual_seed(5)
    state = state_at(3, policy)
    checkpoint.save(tmp_path, state, policy, keep=2)
    for seed in (1, 2):
        update_policy(policy, make_samples(6, seed))

    resumed = build_policy(make_run("seed=9"))
    update_policy(resumed, make_samples(3, 7))  # what it held before does not matter
    restored = checkpoint.restore(tmp_path, resumed)
    assert msgspec.structs.replace(restored, digest="") == state
    assert (resumed.updates, resumed.skipped) == (state.updates, state.skipped)
    uninterrupted = everything(policy)
    torch.manual_seed(0)
    checkpoint.restore(tmp_path, resumed)
    for seed in (1, 2):
        update_policy(resumed, make_samples(6, seed))
    assert_equal(everything(resumed), uninterrupted)
    assert resumed.updates == policy.updates


@pytest.mark.parametrize("trunk", ["separate", "shared"])
def test_a_critic_and_a_reference_go_on_bit_for_bit_too(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path, trunk: str
):
    settings = ["learner.advantage.type=gae", f"learner.critic.trunk={trunk}"]
    settings += ["learner.reference_kl.place=reward"]

    def samples(count: int, seed: int) -> list[Sample]:
        made = make_samples(count, seed)
        trajectories = [
            msgspec.structs.replace(s.trajectory, reward=float(i % 3)) for i, s in enumerate(made)
        ]
        return [replace(s, trajectory=t) for s, t in zip(made, trajectories, strict=True)]

    policy = build_policy(make_run(*settings))
    update_policy(policy, samples(4, 0))
    assert policy.critic
    assert policy.critic.head.weight.abs().max() > 0
    checkpoint.save(tmp_path, state_at(3, policy), policy, keep=2)
    for seed in (1, 2):
        update_policy(policy, samples(6, seed))

    resumed = build_policy(make_run(*settings, "seed=9"))
    update_policy(resumed, samples(3, 7))
    torch.manual_seed(0)
    uninterrupted = everything(policy)
    checkpoint.restore(tmp_path, resumed)
    for seed in (1, 2):
        update_policy(resumed, samples(6, seed))
    torch.manual_seed(0)
    assert_equal(everything(resumed), uninterrupted)


def test_checkpoint_without_the_wanted_critic_is_refused(
    make_run: MakeRun, policy: TorchPolicy, tmp_path: Path
):
    checkpoint.save(tmp_path, state_at(1, policy), policy, keep=2)
    other = build_policy(make_run("learner.advantage.type=gae", "learner.critic={}"))
    with pytest.raises(CheckpointError, match=r"step-000001: .*critic\."):
        checkpoint.restore(tmp_path, other)


def test_a_checkpoint_before_the_first_step_restores_too(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path
):
    fresh, other = build_policy(make_run()), build_policy(make_run("seed=1"))
    checkpoint.save(tmp_path, state_at(0, fresh), fresh, keep=2)
    checkpoint.restore(tmp_path, other)
    for t in (fresh, other):
        update_policy(t, make_samples(4))
    torch.manual_seed(1)
    one = everything(fresh)
    torch.manual_seed(1)
    assert_equal(one, everything(other))


def test_the_newest_checkpoints_are_kept(policy: TorchPolicy, tmp_path: Path):
    for step in (8, 9, 10, 11):
        path = checkpoint.save(tmp_path, state_at(step, policy), policy, keep=2)
        assert path == tmp_path / f"step-{step:06d}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000010", "step-000011"]
    assert checkpoint.restore(tmp_path, policy).step == 11


def test_checkpoints_of_every_so_many_steps_stay(policy: TorchPolicy, tmp_path: Path):
    """So that a replay of any step begins near it."""
    tensors = checkpoint.tensors_of(policy)
    for step in range(0, 70, 10):
        checkpoint.write(tmp_path, state_at(step, policy), tensors, keep=2, keep_every=20)
    assert [path.name for path in checkpoint.steps(tmp_path)] == [
        f"step-{step:06d}" for step in (0, 20, 40, 50, 60)
    ]


def test_checkpoints_beyond_a_million_steps_are_the_newest(policy: TorchPolicy, tmp_path: Path):
    """As text step-1000000 sorts before step-999950, and its own save once removed it."""
    for step in (0, 999_950, 1_000_000, 1_000_050):
        checkpoint.save(tmp_path, state_at(step, policy), policy, keep=2)
    kept = [path.name for path in checkpoint.steps(tmp_path)]
    assert kept == ["step-000000", "step-1000000", "step-1000050"]
    assert checkpoint.restore(tmp_path, policy).step == 1_000_050


def test_a_step_saved_again_is_replaced(policy: TorchPolicy, tmp_path: Path):
    checkpoint.save(tmp_path, state_at(4, policy), policy, keep=2)
    again = msgspec.structs.replace(state_at(4, policy), cursor=777)
    checkpoint.save(tmp_path, again, policy, keep=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000004"]
    assert checkpoint.restore(tmp_path, policy).cursor == 777


def test_what_a_killed_save_left_is_removed(policy: TorchPolicy, tmp_path: Path):
    checkpoint.save(tmp_path, state_at(1, policy), policy, keep=2)
    for torn in (tmp_path / ".tmp-step-000002", checkpoint.stage(tmp_path, 2)):
        torn.mkdir(exist_ok=True)
        (torn / "tensors.safetensors").write_bytes(b"torn")
    assert checkpoint.restore(tmp_path, policy).step == 1
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("room", [1, 100, 20_000])
def test_a_full_disk_is_one_line_and_costs_no_checkpoint(
    policy: TorchPolicy, tmp_path: Path, room: int
):
    tensors = {"model.w": torch.zeros(5000)}
    files.write(tmp_path, state_at(1, policy), tensors, keep=1)
    attempts = {
        "step-000002": lambda: files.write(tmp_path, state_at(2, policy), tensors, keep=1),
        "tensors-00003.safetensors": lambda: files.write_share(tmp_path, 3, tensors),
    }
    for name, attempt in attempts.items():
        with full_disk(room), pytest.raises(CheckpointError) as caught:
            attempt()
        assert str(caught.value).startswith(f"{tmp_path}/{name}: cannot be written: ")
        assert "\n" not in str(caught.value)
    assert [path.name for path in checkpoint.steps(tmp_path)] == ["step-000001"]


def test_no_checkpoint_is_an_error_that_names_the_place(policy: TorchPolicy, tmp_path: Path):
    with pytest.raises(CheckpointError, match=f"{tmp_path}/none: no checkpoint"):
        checkpoint.restore(tmp_path / "none", policy)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
@pytest.mark.parametrize("damage", [cut, flip, lambda data: b"", None])
def test_damaged_checkpoint_is_refused_and_the_one_before_named(
    policy: TorchPolicy, tmp_path: Path, name: str, damage: Callable[[bytes], bytes] | None
):
    for step in (1, 2):
        checkpoint.save(tmp_path, state_at(step, policy), policy, keep=2)
    file = tmp_path / "step-000002" / name
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError) as refused:
        checkpoint.restore(tmp_path, policy)
    assert str(tmp_path / "step-000002") in str(refused.value)
    assert "remove it to resume from step-000001" in str(refused.value)

    (tmp_path / "step-000002").rename(tmp_path / "damaged")
    assert checkpoint.restore(tmp_path, policy).step == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_of_the_state_goes_unnoticed(
    policy: TorchPolicy, tmp_path: Path, place: float, bit: int
):
    path = checkpoint.save(tmp_path, state_at(1, policy), policy, keep=2)
    data = bytearray((path / "state.json").read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    (path / "state.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"step-000001: ((?!remove).)*$"):
        checkpoint.restore(tmp_path, policy)


def test_a_checkpoint_of_another_model_is_refused(
    make_run: MakeRun, policy: TorchPolicy, tmp_path: Path
):
    checkpoint.save(tmp_path, state_at(1, policy), policy, keep=2)
    for other in ("model.width=64", "model.layers=3"):
        with pytest.raises(CheckpointError, match="step-000001"):
            checkpoint.restore(tmp_path, build_policy(make_run(other)))


def test_a_checkpoint_from_before_a_field_was_added_restores(policy: TorchPolicy, tmp_path: Path):
    path = checkpoint.save(tmp_path, state_at(1, policy), policy, keep=2)
    older = json.loads((path / "state.json").read_bytes())
    del older["forks"]
    blank = json.dumps(older | {"digest": ""}, separators=(",", ":")).encode()
    digest = xxhash.xxh3_128_hexdigest((path / "tensors.safetensors").read_bytes() + blank)
    (path / "state.json").write_bytes(
        blank.replace(b'"digest":""', f'"digest":"{digest}"'.encode())
    )
    assert checkpoint.restore(tmp_path, policy).forks == []


def test_a_checkpoint_holds_what_the_learner_held_when_it_began(
    make_samples: MakeSamples, policy: TorchPolicy, tmp_path: Path
):
    writer = CheckpointWriter(tmp_path, CheckpointConfig())
    policy.readers.append(writer.wait_until_read)
    before = everything(policy)
    writer.save(state_at(1, policy), SingleProcessUpdater(policy))
    update_policy(policy, make_samples(6, 1))
    stands = writer.finish()
    assert stands
    assert (stands[0].step, stands[1]) == (1, tmp_path / "step-000001")
    assert writer.finish() is None and writer.settle() is None
    checkpoint.restore(tmp_path, policy)
    del before["random"]
    after = everything(policy)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    writer.close()


def test_the_optimizer_waits_for_a_checkpoint_on_the_host(
    make_samples: MakeSamples, policy: TorchPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    disk, save_tensors = threading.Event(), files.save_tensors

    def slow_disk(tensors: checkpoint.Tensors, path: Path) -> None:
        disk.wait()
        save_tensors(tensors, path)

    monkeypatch.setattr(files, "save_tensors", slow_disk)
    writer = CheckpointWriter(tmp_path, CheckpointConfig())
    policy.readers.append(writer.wait_until_read)
    before = everything(policy)
    writer.save(state_at(1, policy), SingleProcessUpdater(policy))
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(update_policy, policy, make_samples(6, 1))
        with pytest.raises(TimeoutError):
            step.result(timeout=0.3)
        now = everything(policy)
        del before["random"]
        assert all(torch.equal(tensor, now[name]) for name, tensor in before.items())
        disk.set()
        step.result()
    assert writer.finish()
    writer.close()


def test_writing_a_checkpoint_copies_no_tensor(
    policy: TorchPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    written: list[int] = []
    own = {p.data_ptr() for p in policy.model.parameters()}
    own |= {t.data_ptr() for slot in policy.optimizer.state.values() for t in slot.values()}
    save_tensors = files.save_tensors

    def noted(tensors: checkpoint.Tensors, path: Path) -> None:
        written.extend(t.data_ptr() for name, t in tensors.items() if name != "rng")
        save_tensors(tensors, path)

    monkeypatch.setattr(files, "save_tensors", noted)
    writer = CheckpointWriter(tmp_path, CheckpointConfig())
    writer.save(state_at(1, policy), SingleProcessUpdater(policy))
    assert writer.finish()
    writer.close()
    assert written and own.issuperset(written)


def test_a_checkpoint_is_hashed_piece_by_piece(policy: TorchPolicy, tmp_path: Path):
    state, rest = state_at(1, policy), {"large": torch.zeros(1 << 25, dtype=torch.uint8)}
    tracemalloc.start()
    path = checkpoint.write(tmp_path, state, rest, keep=1)
    checkpoint.read_tensors(path, checkpoint.read_state(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < rest["large"].nbytes / 4


def test_a_failed_checkpoint_lets_the_optimizer_go_on(policy: TorchPolicy, tmp_path: Path):
    (tmp_path / "checkpoints").write_text("in the way")
    writer = CheckpointWriter(tmp_path / "checkpoints", CheckpointConfig())
    writer.save(state_at(1, policy), SingleProcessUpdater(policy))
    writer.wait_until_read()
    with pytest.raises(CheckpointError, match="checkpoints"):
        writer.finish()
    writer.close()


def test_a_checkpoint_is_reported_only_once_it_stands_on_disk(
    policy: TorchPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gate, sync = threading.Event(), system_files.sync

    def slow_disk(path: Path) -> None:
        gate.wait()
        sync(path)

    monkeypatch.setattr(system_files, "sync", slow_disk)
    writer = CheckpointWriter(tmp_path, CheckpointConfig())
    writer.save(state_at(1, policy), SingleProcessUpdater(policy))
    assert writer.settle() is None
    assert checkpoint.steps(tmp_path) == []
    gate.set()
    stands = writer.finish()
    assert stands and stands[1].is_dir()
    writer.close()


def test_background_error_is_raised_by_the_next_call(policy: TorchPolicy, tmp_path: Path):
    (tmp_path / "checkpoints").write_text("in the way")
    writer = CheckpointWriter(tmp_path / "checkpoints", CheckpointConfig())
    writer.save(state_at(1, policy), SingleProcessUpdater(policy))
    with pytest.raises(CheckpointError, match="checkpoints"):
        writer.finish()
    (tmp_path / "checkpoints").unlink()
    writer.save(state_at(1, policy), SingleProcessUpdater(policy))
    assert writer.finish()
    writer.close()


# Forks a child for each file system operation of a save, and kills it right before that operation.
KILLED = """
import itertools, os, shutil, signal, sys
from pathlib import Path
import torch
from areal_q.config import CheckpointConfig, load
from areal_q.tasks import build_tokenizer
from learner import checkpoint
from learner.checkpoint import files
from learner.build_policy import build_model
from learner.checkpoint.async_writer import CheckpointWriter
from learner.policy_update import SingleProcessUpdater
from learner.backends.single_device import TorchPolicy

root, settings = Path(sys.argv[1]), sys.argv[2:]
run = load(None, settings)
model = build_model(run.model, build_tokenizer(run.model, run.task), run.seed)
policy = TorchPolicy(model, run.learner, 1.0)

def state(step, cursor):
    return checkpoint.State(step=step, position="0-0", cursor=cursor, outstanding=[], digests={},
                            updates=0, skipped=0)

def weights(value):
    with torch.no_grad():
        policy.model.model.norm.weight.fill_(value)

def save_killed_at(directory, operation, new_step, background):
    count = itertools.count()
    def hook(event, args):
        changes = event in ("os.rename", "os.mkdir", "os.rmdir", "os.remove") or (
            event == "open" and isinstance(args[2], int) and args[2] & (os.O_CREAT | os.O_WRONLY))
        if changes and next(count) == operation:
            os.kill(os.getpid(), signal.SIGKILL)
    weights(2.0)
    sys.addaudithook(hook)
    if background:
        writer = CheckpointWriter(directory, CheckpointConfig())
        writer.save(state(new_step, 2), SingleProcessUpdater(policy))
        writer.wait_until_read()
        weights(3.0)  # what comes after is no part of it
        writer.finish()
    else:
        checkpoint.save(directory, state(new_step, 2), policy, keep=2)

# The step that is there already, then the next one.
for background, new_step in itertools.product((False, True), (4, 5)):
    for operation in itertools.count():
        directory = root / f"{new_step}-{operation}"
        weights(1.0)
        for step in (3, 4):
            checkpoint.save(directory, state(step, 1), policy, keep=2)
        child = os.fork()
        if child == 0:
            save_killed_at(directory, operation, new_step, background)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        weights(0.0)
        found = checkpoint.restore(directory, policy)
        value = policy.model.model.norm.weight[0].item()
        print(background, new_step, os.WIFSIGNALED(status), found.step, found.cursor, value, flush=True)
        # A save after the crash works and leaves nothing hidden behind.
        checkpoint.save(directory, state(6, 3), policy, keep=2)
        assert all(p.name.startswith("step-") for p in directory.iterdir())
        shutil.rmtree(directory)
        if not os.WIFSIGNALED(status):
            break
"""


@pytest.mark.timeout(60)
def test_a_save_killed_at_any_moment_loses_no_checkpoint(tmp_path: Path):
    small = [
        "model.layers=1",
        "model.width=16",
        "model.heads=2",
        "model.kv_heads=1",
        "model.mlp=16",
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path), *small],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    for background, new_step in itertools.product(("False", "True"), ("4", "5")):
        mine = [row for row in rows if row[:2] == [background, new_step]]
        killed = [row[2] == "True" for row in mine]
        assert killed == [True] * (len(mine) - 1) + [False]
        assert len(killed) > 6
        outcomes = [tuple(row[3:]) for row in mine]
        # The old one or the new one, weights and state together, and after the turn only the new one.
        old, new = ("4", "1", "1.0"), (new_step, "2", "2.0")
        turn = outcomes.index(new)
        assert outcomes == [old] * turn + [new] * (len(outcomes) - turn)
        assert turn > 0
