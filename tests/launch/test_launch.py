"""Runs on a cluster: scripts for Slurm, SkyPilot and Ray, which stand-ins of their commands really start."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.commands import refused, run_here, wait_until
from helpers.kinds import write_foreign
from helpers.paths import ROOT
from helpers.slurm.cluster import directives

from areal_q.config import load
from areal_q.errors import ConfigError
from areal_q.launch import cli, ray_job, role, sky, slurm
from areal_q.launch.cluster import Cluster
from areal_q.launch.place import (
    PASSWORD,
    RunAddresses,
    prepared,
    read_ended,
    read_endpoint,
    write_endpoint,
)
from areal_q.observability.metrics_log import read_metrics
from areal_q.system.files import try_lock
from areal_q.system.run_dir import METRICS_FILE
from areal_q.tasks import CharTokenizer
from buffer.weight_sync.curve import client_keys, server_keys

SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
"""That of the package, which is beside Python, or the machine's"""

SETTINGS = """
name = "far"
steps = 60
model = {type = "small", layers = 1, width = 16, heads = 2, kv_heads = 1, mlp = 16, max_positions = 32}
learner = {groups = 4, group_size = 2, max_lag = 1}
rollout = {engine = {type = "scripted", tokens_per_s = 300}, sampling = {max_tokens = 4}}
task = {type = "arithmetic", digits = 1, heldout = 4}
checkpoint = {every = 5}
eval = {every = 1000, problems = 4}
"""
STUBS = ROOT / "tests" / "helpers"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "far.toml"
    path.write_text(SETTINGS)
    return path


class Slurm:
    """The stand-in of a Slurm whose jobs end with the test."""

    def __init__(self, directory: Path) -> None:
        self.state, self.bin = directory / "state", directory / "bin"
        self.state.mkdir()
        self.bin.mkdir()
        for name in ("sbatch", "srun", "scontrol", "scancel"):
            command = shlex.join([sys.executable, str(STUBS / "slurm" / "cluster.py")])
            (self.bin / name).write_text(f'#!/bin/sh\nexec {command} {name} "$@"\n')
            (self.bin / name).chmod(0o755)

    def code(self, job: str, start: int = 0) -> str:
        """Returns the exit code of that start of a job, "" while it goes on."""
        path = self.state / f"{job}.code-{start}"
        return path.read_text() if path.exists() else ""

    def said(self, place: Path) -> str:
        return "\n".join(path.read_text()[-3000:] for path in (place / "logs").iterdir())


@pytest.fixture
def roles_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends what a test leaves of the processes that it started, which use no Redis of ours."""
    monkeypatch.delenv("REDIS_URL", raising=False)
    yield
    for pid in _processes_of(tmp_path):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def cluster_stub(roles_end: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    found = Slurm(tmp_path)
    monkeypatch.setenv("PATH", f"{found.bin}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_STUB", str(found.state))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return found


def _processes_of(directory: Path) -> list[int]:
    """Returns the processes that the scripts of a launch below `directory` have started and left."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(directory).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def launch(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_here("launch", cli.main, *map(str, arguments))


def steps_of(run: Path) -> list[int]:
    path = run / METRICS_FILE
    return [r["step"] for r in read_metrics(path) if r["kind"] == "step"] if path.exists() else []


def reason_of(run: Path) -> str:
    return read_metrics(run / METRICS_FILE)[-1].get("reason", "")


@pytest.mark.slow
def test_a_run_goes_on_after_its_time_was_over(config: Path, tmp_path: Path, cluster_stub: Slurm):
    asked = ["slurm", config, f"root={tmp_path}", "--workers=2", "--time=1:00:00"]
    done = launch(*asked, "steps=1000000")
    assert done.returncode == 0 and "learner 1000, workers 1001" in done.stdout, done.stderr
    run, place = tmp_path / "far", tmp_path / "far.launch"
    said = lambda: cluster_stub.said(place)  # noqa: E731
    wait_until(lambda: len(steps_of(run)) > 6, said)
    assert "--dependency=after:1000" in (cluster_stub.state / "submitted-workers.sh").read_text()
    (cluster_stub.state / "held").touch()
    subprocess.run(["scancel", "--signal=USR1", "1001_0", "--signal=USR1", "1000"], check=True)
    wait_until(lambda: cluster_stub.code("1000"), said)
    assert cluster_stub.code("1000") == "143", said()
    at = steps_of(run)[-1]
    assert (run / "checkpoints" / f"step-{at:06d}").is_dir()
    assert launch(*asked, f"steps={at + 5}", "--print").returncode == 0
    (cluster_stub.state / "held").unlink()
    wait_until(lambda: cluster_stub.code("1000", 1), said)
    assert cluster_stub.code("1000", 1) == "0", said()
    assert steps_of(run) == list(range(1, at + 6)) and reason_of(run) == "done"
    wait_until(lambda: all(cluster_stub.code("1001_0", i) for i in (0, 1)), said)
    wait_until(lambda: cluster_stub.code("1001_1"), said)
    assert [cluster_stub.code("1001_0", i) for i in (0, 1)] == ["143", "0"], said()
    assert cluster_stub.code("1001_1") == "0", said()


@pytest.mark.slow
def test_two_hosts_share_the_learner(config: Path, tmp_path: Path, cluster_stub: Slurm):
    options = ["--workers=1", "--learner-nodes=2", "--time=1:00:00"]
    assert launch("slurm", config, f"root={tmp_path}", "steps=3", *options).returncode == 0
    place = tmp_path / "far.launch"
    wait_until(lambda: cluster_stub.code("1000"), lambda: cluster_stub.said(place))
    assert cluster_stub.code("1000") == "0", cluster_stub.said(place)
    assert steps_of(tmp_path / "far") == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "key"), [(1, "server"), (2, "server"), (1, "worker")])
def test_what_has_to_be_mended_ends_all_jobs(
    config: Path, tmp_path: Path, cluster_stub: Slurm, nodes: int, key: str
):
    """Whether the learner refuses it or each worker does, for which the learner would wait in vain."""
    hosts = f"--learner-nodes={nodes}"
    assert launch("slurm", config, f"root={tmp_path}", hosts, "--print").returncode == 0
    place = tmp_path / "far.launch"
    (place / "keys" / f"{key}.key_secret").chmod(0o644)
    slurm.submit([place / "learner.sh", place / "workers.sh"])
    said = lambda: cluster_stub.said(place)  # noqa: E731
    wait_until(lambda: cluster_stub.code("1000") and cluster_stub.code("1001_0"), said)
    assert (cluster_stub.code("1000"), cluster_stub.code("1001_0")) == ("2", "2"), said()
    assert f"{key}.key_secret" in said()
    # Not after a minute in which its worker looks for the Redis of a learner that is gone.
    assert "(for 60 s)" not in said(), said()
    assert "Traceback" not in said() and "frame #" not in said(), said()


@pytest.mark.slow
@pytest.mark.usefixtures("roles_end")
def test_a_ray_job_runs_all_roles_to_the_end(config: Path, tmp_path: Path):
    assert launch("ray", config, f"root={tmp_path}", "steps=3", "--print").returncode == 0
    script = tmp_path / "far.launch" / "ray_job.py"
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{STUBS / 'ray_stub'}"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert steps_of(tmp_path / "far") == [1, 2, 3] and reason_of(tmp_path / "far") == "done"


@pytest.mark.slow
@pytest.mark.usefixtures("roles_end")
def test_roles_end_well_when_what_started_them_is_killed(config: Path, tmp_path: Path):
    """As a Ray job is that does not end within the seconds that it is given."""
    options = [f"root={tmp_path}", "steps=1000000", "--print"]
    assert launch("ray", config, *options).returncode == 0
    script, run = tmp_path / "far.launch" / "ray_job.py", tmp_path / "far"
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{STUBS / 'ray_stub'}"}
    with (tmp_path / "said").open("wb") as said:
        job = subprocess.Popen([sys.executable, str(script)], env=env, stdout=said, stderr=said)
    wait_until(lambda: len(steps_of(run)) > 3, lambda: (tmp_path / "said").read_text()[-3000:], job)
    job.kill()
    job.wait()
    wait_until(lambda: not _processes_of(tmp_path), lambda: (tmp_path / "said").read_text()[-3000:])
    at = steps_of(run)[-1]
    assert reason_of(run) == "drained" and (run / "checkpoints" / f"step-{at:06d}").is_dir()


def cluster_of(config: Path, tmp_path: Path, **asked: Any) -> Cluster:
    run = load(config, [f"root={tmp_path}"])
    place = prepared(run)
    return Cluster(run=load(place / "settings.toml"), place=place, python="python", **asked)


def scripts_of(cluster: Cluster) -> list[str]:
    table = sky.task(cluster, "H100", "")
    return [
        slurm.learner_script(cluster, 100, "1:00:00"),
        slurm.workers_script(cluster, 100, ""),
        f"#!/bin/bash\n{table['run']}",
    ]


@pytest.mark.parametrize("setup", ["", "module load cuda; export A='b c'"])
def test_scripts_are_sound_shell(config: Path, tmp_path: Path, setup: str):
    cluster = cluster_of(config, tmp_path / "with a space", nodes=2, gpus=4, setup=setup)
    for script in scripts_of(cluster):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_slurm_reads_paths_with_spaces_whole(config: Path, tmp_path: Path):
    place = tmp_path / "a space, #1" / "far.launch"
    assert launch("slurm", config, f"root={place.parent}", "--print").returncode == 0
    for name, log in (("learner", "learner-%j.log"), ("workers", "worker-%A_%a.log")):
        asked = directives(str(place / f"{name}.sh"))
        assert asked["output"] == f"{place}/logs/{log}" and "open-mode" in asked


def test_setup_may_use_what_is_not_set(config: Path, tmp_path: Path):
    """As `activate` of conda does, and `module`."""
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\nexit 7\n")
    srun.chmod(0o755)
    cluster = cluster_of(config, tmp_path, setup='export A="$OF_NOBODY"')
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1"}
    env |= {"SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "0"}
    for script in scripts_of(cluster)[:2]:
        done = subprocess.run(["bash"], input=script, text=True, env=env, capture_output=True)
        assert (done.returncode, done.stderr) == (7, "")


def test_memory_is_asked_for_each_process_on_a_gpu(config: Path, tmp_path: Path):
    """A host has a process for each of its GPUs: what further ones take beyond a share is CUDA's."""
    asked = [cluster_of(config, tmp_path, gpus=n, worker_gpus=n).megabytes() for n in (1, 8)]
    for few, many in zip(*asked, strict=True):
        assert many - few > 7 * 2000


@pytest.mark.skipif(not SHELLCHECK, reason="there is no shellcheck")
def test_shellcheck_finds_nothing_in_the_scripts(config: Path, tmp_path: Path):
    for script in scripts_of(cluster_of(config, tmp_path, nodes=2, gpus=4)):
        done = subprocess.run(
            [str(SHELLCHECK), "-s", "bash", "-"], input=script, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stdout


def test_secrets_are_files_of_their_owner_and_in_no_script(config: Path, tmp_path: Path):
    cluster = cluster_of(config, tmp_path)
    secrets = [cluster.place / PASSWORD, *(cluster.place / "keys").glob("*_secret")]
    assert len(secrets) == 3 and {path.stat().st_mode & 0o777 for path in secrets} == {0o600}
    assert cluster.place.stat().st_mode & 0o777 == 0o700
    password = secrets[0].read_text()
    scripts = [*scripts_of(cluster), ray_job.script(cluster), sky.yaml(sky.task(cluster, "", ""))]
    scripts.append((cluster.place / "settings.toml").read_text())
    assert len(password) == 64 and not [s for s in scripts if password in s]
    assert prepared(cluster.run) == cluster.place and secrets[0].read_text() == password


def test_slurm_is_asked_for_what_was_said(config: Path, tmp_path: Path):
    asked = {"nodes": 2, "gpus": 8, "workers": 5, "worker_gpus": 1}
    options = {"learner_options": ("--partition=gpu",), "worker_options": ("--partition=preempt",)}
    cluster = cluster_of(config, tmp_path, **asked, **options)
    learner, workers = (
        [
            line.removeprefix("#SBATCH --")
            for line in script.splitlines()
            if line.startswith("#SBATCH")
        ]
        for script in scripts_of(cluster)[:2]
    )
    expected = {"nodes=2", "ntasks-per-node=1", "gpus-per-node=8", "cpus-per-task=9", "mem=100M"}
    always = {"requeue", "open-mode=append", "signal=B:USR1@300"}
    assert expected | always | {"partition=gpu", "time=1:00:00"} <= {*learner}
    assert {"array=0-4", "gpus=1", "partition=preempt"} | always <= {*workers}
    assert not {"partition=preempt", "gpus=1"} & {*learner}


def test_sky_yaml_reads_as_the_task_that_was_meant(config: Path, tmp_path: Path):
    options = {
        "learner_options": ("use_spot=true", "region=us-east-1"),
        "setup": "pip install areal-q",
    }
    cluster = cluster_of(config, tmp_path, nodes=1, gpus=8, workers=3, **options)
    table = sky.task(cluster, "H100", "my-runs")
    assert yaml.safe_load(sky.yaml(table)) == table
    assert table["resources"]["use_spot"] is True and table["resources"]["region"] == "us-east-1"
    assert table["num_nodes"] == 4 and table["resources"]["accelerators"] == "H100:8"
    assert table["file_mounts"][str(tmp_path / "far")] == {
        "name": "my-runs",
        "mode": "MOUNT_CACHED",
    }
    assert table["file_mounts"][str(cluster.place)] == str(cluster.place)
    large = cluster_of(config, tmp_path, gpus=1, worker_gpus=4)
    assert sky.task(large, "H100", "")["resources"]["accelerators"] == "H100:4"


@pytest.mark.parametrize("function", ["", ":mine"])
def test_sky_copies_what_the_settings_name(config: Path, tmp_path: Path, function: str):
    """Data as a file, a model as a directory, own code with what lies beside it, a module by its name not."""
    model, data, code = tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "code" / "mine.py"
    for directory in (model, code.parent):
        directory.mkdir()
    data.write_text("")
    code.write_text("def objective(inputs): ...")
    settings = [
        "task.type=jsonl",
        f"task.path={data}",
        "model.type=pretrained",
        f"model.path={model}",
    ]
    settings += [
        f"learner.objective.path={code}{function}",
        "learner.advantage.path=package.module:name",
    ]
    run = load(config, [f"root={tmp_path}", *settings])
    cluster = Cluster(
        run=load(prepared(run) / "settings.toml"), place=prepared(run), python="python"
    )
    mounts = sky.task(cluster, "", "")["file_mounts"]
    assert set(mounts) == {*map(str, (cluster.place, model, data, code.parent))}
    (model / "model.safetensors").symlink_to(data)
    with pytest.raises(ConfigError, match=r"model\.safetensors: SkyPilot copies no links"):
        sky.task(cluster, "", "")


def test_sky_hosts_fetch_a_model_of_the_hub(config: Path, tmp_path: Path):
    """The cache has links to its files, which SkyPilot leaves out: hosts found a directory without any."""
    model = tmp_path / "hub" / "models--org--name" / "snapshots" / ("0" * 40)
    model.mkdir(parents=True)
    (model / "config.json").symlink_to(tmp_path)
    pretrained = ["model.type=pretrained", f"model.path={model}", "task.type=gsm8k", "task.path=x"]
    run = load(config, [f"root={tmp_path}", *pretrained])
    cluster = Cluster(run=run, place=prepared(run), python="python")
    assert set(sky.task(cluster, "", "")["file_mounts"]) == {str(cluster.place)}


def test_a_foreign_model_s_memory_is_asked_for(config: Path, tmp_path: Path):
    write_foreign(tmp_path / "model", "phi")
    CharTokenizer().save(str(tmp_path / "model"))
    pretrained = [f"model={{type='pretrained', path='{tmp_path}/model'}}", "learner.uaq=1.0"]
    run = load(config, [f"root={tmp_path}", *pretrained])
    learner, worker = Cluster(run=run, place=tmp_path, python="python").megabytes()
    assert learner > 0 and worker > 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("sky --learner-gpus=8", "--gpu"),
        ("sky --worker-gpus=1", "--gpu"),
        ("sky --gpu=H100 --time=1:00:00", "--time is for slurm alone"),
        ("ray --time=1:00:00", "--time is for slurm alone"),
        ("slurm --gpu=H100", "--gpu is for sky alone"),
        ("ray --bucket=runs", "--bucket is for sky alone"),
        ("sky --worker-option=--partition=a", "--worker-option is for slurm alone"),
        ("ray --option=--partition=a", "--option is for slurm and sky alone"),
    ],
)
def test_options_of_another_scheduler_are_refused(
    config: Path, tmp_path: Path, arguments: str, named: str
):
    engine, *options = arguments.split()
    refused(launch(engine, config, f"root={tmp_path}", "--print", *options), engine, named)
    assert not (tmp_path / "far.launch").exists()


@pytest.mark.parametrize(
    ("rank", "gpus", "each", "roles"),
    [
        (0, 2, 0, ["learner --rank=0"]),
        (1, 2, 1, ["worker --id=1-0 gpu=0", "worker --id=1-1 gpu=1"]),
        (1, 5, 2, ["worker --id=1-0 gpu=0,1", "worker --id=1-2 gpu=2,3"]),
        (2, 0, 0, ["worker --id=2-0 gpu=0"]),
    ],
)
def test_each_host_of_sky_starts_its_roles(
    config: Path, tmp_path: Path, rank: int, gpus: int, each: int, roles: list[str]
):
    """A stand-in of the interpreter, found by what --setup does, writes what it is started with."""
    stub, said = tmp_path / "python", tmp_path / "said"
    told = f'echo "$6 $* gpu=${{CUDA_VISIBLE_DEVICES:-}}" >> {said}'
    stub.write_text(f"#!/bin/sh\n{told}\n")
    stub.chmod(0o755)
    run = load(config, [f"root={tmp_path}"])
    setup = f"export PATH={tmp_path}:$PATH"
    asked = {"gpus": gpus, "worker_gpus": each, "setup": setup}
    cluster = Cluster(run=run, place=prepared(run), python="python", **asked)
    env = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3", "SKYPILOT_NODE_RANK": str(rank)}
    env |= {"SKYPILOT_NUM_GPUS_PER_NODE": str(gpus), "PATH": os.environ["PATH"]}
    subprocess.run(["bash", "-c", sky.task(cluster, "", "")["run"]], env=env, check=True)
    lines = sorted(said.read_text().splitlines())
    assert len(lines) == len(roles)
    for line, words in zip(lines, roles, strict=True):
        assert all(word in line.split() for word in ["--head=10.0.0.1", *words.split()]), line


def test_nothing_is_submitted_where_there_is_no_scheduler(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    for engine, command in (("slurm", "sbatch"), ("sky", "sky"), ("ray", "ray")):
        done = launch(engine, config, f"root={tmp_path}")
        assert done.returncode == 2 and f"there is no {command} here" in done.stderr


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """What replaced a role, interpreter and command, which is noted here in place of being run."""
    noted: list[tuple[str, list[str]]] = []

    def note(python: str, command: list[str]) -> None:
        noted.append((python, command))
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", note)
    monkeypatch.setattr("areal_q.launch.role.end_with_parent", lambda number: None)
    for variable in ("REDIS_PASSWORD_FILE", "AREAL_Q_WATCHDOG", "PYTHONSAFEPATH"):
        monkeypatch.setenv(variable, "")
    return noted


@pytest.mark.parametrize("name", ["worker", "learner"])
def test_roles_take_the_environment_that_setup_made(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    begun: list[tuple[str, list[str]]],
    name: str,
):
    """As `areal-q run` does."""
    place = prepared(load(config, [f"root={tmp_path}"]))
    at = {"host": "h", "redis": "redis://h:1", "announce": 2, "fetch": 3, "ranks": 4, "start": ""}
    write_endpoint(place, RunAddresses(**at))
    monkeypatch.setattr(f"areal_q.launch.role.{name}_python", lambda run: f"/{name}/python")
    assert run_here("role", role.main, f"{name}-once", str(place)).returncode == 0
    ((python, command),) = begun
    assert python == command[0] == f"/{name}/python" and "redis://h:1" in command


@pytest.mark.parametrize(("nodes", "first"), [(1, "127.0.0.1"), (2, "h")])
def test_ranks_of_one_host_meet_on_loopback(
    config: Path, tmp_path: Path, begun: list[tuple[str, list[str]]], nodes: int, first: str
):
    place = prepared(load(config, [f"root={tmp_path}"]))
    asked = ["learner-once", str(place), "--head=h", "--ranks=2", f"--nodes={nodes}"]
    assert run_here("role", role.main, *asked).returncode == 0
    assert f"--master-addr={first}" in begun[0][1]


def test_a_second_learner_leaves_the_first_alone(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    begun: list[tuple[str, list[str]]],
):
    """The other hosts of its start end too, which would wait for it in vain."""
    place = prepared(load(config, [f"root={tmp_path}"]))
    first = RunAddresses(host="h", redis="redis://h:1", announce=2, fetch=3, ranks=4, start="one")
    write_endpoint(place, first)
    monkeypatch.setattr(role, "_GIVE_UP_S", 0.0)
    monkeypatch.setattr(role, "answers", lambda url: True)
    monkeypatch.setattr(role.Supervisor, "run", lambda self: 2)
    held = try_lock(place)
    for rank, said in ((0, "an earlier launch"), (1, "did not begin")):
        asked = ["learner", str(place), "--redis=redis://h:9", "--start=two", f"--rank={rank}"]
        done = run_here("role", role.main, *asked)
        refused(done, str(place), said)
    again = launch("ray", config, f"root={tmp_path}", "steps=7", "--print")
    refused(again, str(place), "an earlier launch")
    assert load(place / "settings.toml").steps == 60
    assert held and read_endpoint(place) == first and read_ended(place) is None
    assert not begun
    os.close(held)


def test_secrets_that_came_without_modes_are_closed(
    config: Path, tmp_path: Path, begun: list[tuple[str, list[str]]]
):
    """As from SkyPilot's bucket: keys that others can read are refused."""
    place = prepared(load(config, [f"root={tmp_path}"]))
    secrets = [place / PASSWORD, *(place / "keys").glob("*_secret")]
    for path in secrets:
        path.chmod(0o644)
    assert run_here("role", role.main, "learner-once", str(place), "--head=h").returncode == 0
    assert begun and client_keys(place / "keys") and server_keys(place / "keys")
    assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}


def test_a_model_that_is_not_there_is_refused_before_all(config: Path, tmp_path: Path):
    done = launch(
        "slurm", config, f"root={tmp_path}", "model.type=pretrained", "model.path=/nowhere"
    )
    assert done.returncode == 2 and "model.path: /nowhere: no such directory" in done.stderr
    assert not (tmp_path / "far.launch").exists()


def test_a_failing_sbatch_says_how_to_take_the_first_back(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(
        '#!/bin/sh\ncase "$*" in *workers*) echo "sbatch: error: no partition" >&2; exit 1;; esac\necho 77\n'
    )
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = launch("slurm", config, f"root={tmp_path}")
    assert done.returncode == 2 and "no partition; scancel 77" in done.stderr
    assert json.loads(json.dumps(done.stdout)) == ""
