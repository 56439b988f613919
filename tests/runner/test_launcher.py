"""The launcher, with a real Redis and small programs in the place of the learner and the workers."""

import asyncio
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import redis
from helpers.commands import full_disk, handlers_kept, limit
from rich.console import Console

from areal_q.config import Python, Run, TorchBackend, dump_toml, load
from areal_q.errors import CheckpointError, ConfigError, TaskError, UserError
from areal_q.observability.progress import History
from areal_q.observability.run_end import how_it_ended
from areal_q.runner import launcher
from areal_q.runner.asked_run import asked_for
from areal_q.runner.child_processes import Interrupts
from areal_q.runner.live_view import PlainView, awaited
from areal_q.runner.programs import Plan, Program, plan
from areal_q.system import disk, files, run_dir, socket_dir, stop_request
from areal_q.tasks import build_reward
from buffer.redis_store.local_server import RedisServer

CHILD = """
import os, signal, subprocess, sys, time
name, mode, events, sockets = sys.argv[1:]

def say(what):
    with open(events, "a") as file:
        file.write(f"{name} {what}\\n")

def term(*_):
    redis = "with" if os.path.exists(os.path.join(sockets, "redis")) else "without"
    say(f"stops {redis} redis")
    if mode != "stubborn":
        sys.exit(128 + signal.SIGTERM)

if mode != "early":
    signal.signal(signal.SIGTERM, term)
say("starts")
if mode == "crash":
    while "learner starts" not in open(events).read():
        time.sleep(0.05)
    print(*(f"line {i} of {name}" for i in range(40)), sep="\\n")
    sys.exit(3)
if mode == "mistake":
    print("much talk\\nlearner: task.path: no such file")
    sys.exit(2)
if mode == "parent":
    subprocess.Popen(["sleep", "60"])
if mode == "finish":
    while not {"learner starts", "rollout-0 starts"} <= {*open(events).read().splitlines()}:
        time.sleep(0.05)
    time.sleep(0.3)
    say("is done")
    sys.exit(0)
if mode == "finish last":
    while "rollout-0 is done" not in open(events).read():
        time.sleep(0.05)
    time.sleep(1)  # longer than the launcher takes to look
    say("is done")
    sys.exit(0)
while True:
    time.sleep(0.05)
"""

# The real command line, with the plan's learner and worker replaced.
DRIVER = """
import functools, sys
from areal_q.cli import app as cli
from areal_q.runner import launcher as launch, programs

def fake(run, run_dir, sockets, resume):
    real = programs.plan(run, run_dir, sockets, resume)
    with open("endpoints", "a") as file:
        print(*(a for a in real.learner.argv if "://" in a), file=file)
    def child(name, mode):
        return programs.Program(name, [sys.executable, CHILD, name, mode, EVENTS, str(sockets)])
    workers = [child("rollout-0", WORKER)]
    return programs.Plan(real.redis, real.redis_url, child("learner", LEARNER), workers)

launch.launch = functools.partial(launch.launch, plan=fake)
cli.main()
"""


class Launched:
    """A launcher under test and everything that it may leave behind."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.temp = Path(tempfile.mkdtemp(dir="/tmp"))
        self.events_file = root / "events"
        self.processes: list[subprocess.Popen[str]] = []
        (root / "child.py").write_text(CHILD)
        (root / "demo.toml").write_text('name = "demo"\n')

    def start(
        self, learner: str, worker: str, *args: str, terminal: int | None = None, **environment: str
    ) -> subprocess.Popen[str]:
        """`terminal`: its descriptor, in the place of pipes. It is closed here."""
        names = {
            "CHILD": str(self.root / "child.py"),
            "EVENTS": str(self.events_file),
            "LEARNER": learner,
            "WORKER": worker,
        }
        code = "".join(f"{key} = {value!r}\n" for key, value in names.items()) + DRIVER
        command = [sys.executable, "-c", code, "run", *(args or ["demo.toml"])]
        env = {k: v for k, v in os.environ.items() if k != "REDIS_URL"} | environment
        self.processes.append(
            subprocess.Popen(
                command,
                cwd=self.root,
                env=env | {"TMPDIR": str(self.temp)},
                stdout=subprocess.PIPE if terminal is None else terminal,
                stderr=subprocess.PIPE if terminal is None else terminal,
                text=True,
            )
        )
        if terminal is not None:
            os.close(terminal)
        return self.processes[-1]

    def events(self) -> list[str]:
        return self.events_file.read_text().splitlines() if self.events_file.exists() else []

    def wait_for(self, event: str) -> None:
        wait_until(lambda: event in self.events(), event)

    def pids(self, *excluded: int) -> list[int]:
        """Living processes that work below this test's directory, by what the kernel says."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                ours = (process / "cwd").readlink().is_relative_to(self.root)
            except OSError:  # it has ended
                continue
            if ours and int(process.name) not in excluded:
                found.append(int(process.name))
        return found

    def assert_nothing_left(self) -> None:
        assert self.pids() == []
        assert list(self.temp.iterdir()) == []

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.temp)


def wait_until(condition, what):
    while not condition():
        assert time.monotonic() < limit.at_s, f"waited in vain for {what}"
        time.sleep(0.02)


@pytest.fixture
def launched(tmp_path):
    launched = Launched(tmp_path)
    yield launched
    launched.close()


def pid_of(launched: Launched, word: str) -> int:
    for pid in launched.pids():
        if word in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
            return pid
    raise AssertionError(f"no process with {word!r}")


def test_workers_stop_before_redis_once_the_learner_is_done(launched):
    process = launched.start("finish", "serve")
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert "stopped before its first record" in out
    assert sorted(launched.events()[:2]) == ["learner starts", "rollout-0 starts"]
    assert launched.events()[2:] == ["learner is done", "rollout-0 stops with redis"]
    launched.assert_nothing_left()


def test_a_worker_that_ends_with_the_run_is_no_failure(launched):
    process = launched.start("finish last", "finish")
    _, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert launched.events()[2:] == ["rollout-0 is done", "learner is done"]
    launched.assert_nothing_left()


def test_a_learner_told_to_go_from_outside_ends_the_run(launched):
    process = launched.start("serve", "serve")
    launched.wait_for("learner starts")
    os.kill(pid_of(launched, "child.py learner"), signal.SIGTERM)
    _, err = process.communicate()
    assert (process.returncode, err) == (143, "")
    launched.assert_nothing_left()


def test_dead_worker_is_named_with_its_log_and_learner_drains(launched):
    process = launched.start("serve", "crash")
    _, err = process.communicate()
    assert process.returncode == 1
    assert "areal-q: error: rollout-0 ended with exit code 3" in err
    assert "runs/demo/logs/rollout-0.log" in err
    assert [line for line in err.splitlines() if line.startswith("  line")] == [
        f"  line {i} of rollout-0" for i in range(25, 40)
    ]
    assert "learner stops with redis" in launched.events()
    told = how_it_ended(launched.root / "runs" / "demo")
    assert told and err == told[0].replace("ended: ", "areal-q: error: ") + "\n" and not told[1]
    launched.assert_nothing_left()


def test_a_learner_that_crashes_is_named(launched):
    process = launched.start("crash", "serve")
    _, err = process.communicate()
    assert process.returncode == 1
    assert "learner ended with exit code 3" in err and "line 39 of learner" in err
    launched.assert_nothing_left()


def test_mistake_that_the_learner_finds_is_one_line_and_exit_2(launched):
    process = launched.start("mistake", "serve")
    _, err = process.communicate()
    assert (process.returncode, err) == (2, "areal-q: error: task.path: no such file\n")
    launched.assert_nothing_left()


def test_a_start_that_failed_leaves_what_was_there(launched):
    earlier = launched.root / "runs" / "demo" / "config.toml"
    (earlier.parent / "checkpoints" / "step-000000").mkdir(parents=True)
    earlier.write_text("# the earlier run")
    process = launched.start("mistake", "serve")
    assert process.communicate()[1] == "areal-q: error: task.path: no such file\n"
    assert earlier.read_text() == "# the earlier run"
    assert [path.name for path in earlier.parent.parent.iterdir()] == ["demo"]
    launched.assert_nothing_left()


def test_a_reward_that_no_worker_can_load_is_refused_first(tmp_path):
    """In the words of the worker, and an earlier run stays where it is."""
    (tmp_path / "own.py").write_text("def reward(response, ansr):\n    return 1.0\n")
    (tmp_path / "demo").mkdir()
    run = load(None, [f"root={tmp_path}", "name=demo", f"reward.path={tmp_path}/own.py"])
    with pytest.raises(TaskError, match=r"own\.py:1: a reward asks for ansr; there are ") as late:
        asyncio.run(build_reward(run).start())
    with pytest.raises(UserError) as early:
        launcher.launch(run, False, partial(PlainView, console=Console(file=StringIO())))
    assert early.value.lines() == late.value.lines()
    assert {path.name for path in tmp_path.glob("demo*")} == {"demo"}
    assert not [*(tmp_path / "demo").iterdir()]


def test_a_full_disk_is_named_as_the_cause(tmp_path, monkeypatch):
    assert launcher._disk_full(tmp_path) == ""
    full = shutil.disk_usage(tmp_path)._replace(free=4096)
    monkeypatch.setattr(launcher.shutil, "disk_usage", lambda path: full)
    assert f"the disk is full: 4.1 kB free at {tmp_path}" in launcher._disk_full(tmp_path)


def test_a_disk_that_becomes_full_is_said_once(tmp_path, monkeypatch):
    room = disk.shutil.disk_usage(tmp_path)
    free = iter([2 << 20, 4096, 0, 2 << 20, 0])
    monkeypatch.setattr(disk, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: room._replace(free=next(free)))
    watch = disk.DiskWatch(tmp_path)
    said = [bool(watch.complaint()) for _ in range(5)]
    assert said == [False, True, False, False, True]


def test_a_full_disk_is_said_while_the_run_goes_on(tmp_path, short_dir, monkeypatch):
    monkeypatch.setattr(disk, "NO_ROOM_BYTES", 1 << 60)
    run = load(None, [f"root={tmp_path}", "name=demo"])
    said = StringIO()
    with RedisServer.start(tmp_path / "redis", short_dir / "redis") as server:
        learner = Program("learner", [sys.executable, "-c", ""])
        planned = Plan(None, server.url, learner, [])
        console = Console(file=said, width=200)
        view_of = partial(PlainView, console=console)
        assert launcher.launch(run, False, view_of, lambda *given: planned) == 0
    assert f"warning: the disk is full: {tmp_path}/demo;" in said.getvalue()


def test_settings_of_sft_do_not_make_a_run_look_like_one():
    shown = list[Run]()

    def view_of(run):
        shown.append(run)
        raise ConfigError("seen")

    with pytest.raises(ConfigError, match="seen"):
        launcher.launch(load(None, ["sft.path=x"]), False, view_of)
    assert awaited(shown[0], History(Run(steps=1))).startswith("starting: Redis")


def test_the_append_only_file_keeps_what_is_alive(tmp_path, short_dir):
    with RedisServer.start(tmp_path, short_dir / "redis") as server:
        with redis.Redis.from_url(server.url) as client:
            for _ in range(200):
                client.set("version", os.urandom(20_000))
            alive = client.get("version")
        rewrite = launcher._Rewrite(server.url)
        wait_until(rewrite.ended, "the rewrite")
    kept = sum(path.stat().st_size for path in tmp_path.rglob("*appendonly*") if path.is_file())
    assert kept < 60_000
    with (
        RedisServer.start(tmp_path, short_dir / "redis") as server,
        redis.Redis.from_url(server.url) as client,
    ):
        assert client.get("version") == alive


def test_a_killed_redis_is_named_and_everything_else_stops(launched):
    process = launched.start("serve", "serve")
    launched.wait_for("rollout-0 starts")
    os.kill(pid_of(launched, "redis-server"), signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == 1
    assert "redis was killed by SIGKILL, as the kernel does where memory is short; the end" in err
    launched.assert_nothing_left()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_first_signal_drains_learner_then_workers_then_redis(launched, number, code):
    process = launched.start("serve", "serve")
    launched.wait_for("rollout-0 starts")
    launched.wait_for("learner starts")
    process.send_signal(number)
    out, err = process.communicate()
    assert (process.returncode, err) == (code, "")
    assert "draining" in out
    assert launched.events()[2:] == ["learner stops with redis", "rollout-0 stops with redis"]
    launched.assert_nothing_left()


def test_a_redis_told_to_go_with_the_launcher_is_no_failure(launched):
    process = launched.start("serve", "serve")
    launched.wait_for("learner starts")
    launched.wait_for("rollout-0 starts")
    process.send_signal(signal.SIGSTOP)
    os.kill(pid_of(launched, "redis-server"), signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: not has_redis(launched), "the end of Redis")
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate()
    assert (process.returncode, err) == (143, "")
    launched.assert_nothing_left()


def has_redis(launched: Launched) -> bool:
    return any("redis-server" in word for word in commands(launched))


def commands(launched: Launched) -> list[str]:
    return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in launched.pids()]


def test_signal_before_the_learner_listens_is_no_failure(launched):
    process = launched.start("early", "serve")
    launched.wait_for("learner starts")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    launched.assert_nothing_left()


def test_the_second_signal_kills_what_does_not_stop(launched):
    process = launched.start("stubborn", "stubborn")
    launched.wait_for("learner starts")
    launched.wait_for("rollout-0 starts")
    process.send_signal(signal.SIGINT)
    launched.wait_for("learner stops with redis")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    launched.assert_nothing_left()


def test_a_terminal_that_is_closed_asks_once(monkeypatch):
    """Its shell and the kernel both send SIGHUP, and as the second signal it killed the run."""
    with handlers_kept():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with Interrupts() as interrupts:
            for number, same_s, count in [
                (signal.SIGHUP, 3600.0, 1),
                (signal.SIGHUP, 3600.0, 1),
                (signal.SIGTERM, 3600.0, 1),
                (signal.SIGINT, 3600.0, 2),
                (signal.SIGTERM, 0.0, 3),
            ]:
                monkeypatch.setattr(stop_request, "SAME_S", same_s)
                signal.raise_signal(number)
                assert (interrupts.count, interrupts.first) == (count, signal.SIGHUP)


def test_a_run_drains_when_its_terminal_is_closed(launched):
    """What the launcher said of it met no terminal, and that error killed the run."""
    ours, terminal = pty.openpty()
    # Few lines, as nobody reads them; and no SIGHUP, which does nothing if the tests run under nohup.
    process = launched.start("serve", "serve", terminal=terminal, CI="1")
    launched.wait_for("learner starts")
    launched.wait_for("rollout-0 starts")
    os.close(ours)
    process.send_signal(signal.SIGTERM)
    process.wait()
    assert process.returncode == 143
    assert launched.events()[2:] == ["learner stops with redis", "rollout-0 stops with redis"]
    launched.assert_nothing_left()


def test_a_run_under_nohup_outlives_its_terminal():
    """It was killed with the terminal, since a handler took the place of what nohup had set."""
    with handlers_kept():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGHUP)
        assert interrupts.count == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_what_a_child_has_started_goes_with_it(launched):
    process = launched.start("serve", "parent")
    wait_until(lambda: launched.pids() and has_sleep(launched), "the grandchild")
    process.send_signal(signal.SIGINT)
    process.communicate()
    launched.assert_nothing_left()


def has_sleep(launched: Launched) -> bool:
    return any(
        Path(f"/proc/{pid}/cmdline").read_text().startswith("sleep") for pid in launched.pids()
    )


def test_no_child_survives_kill_9_of_the_launcher(launched):
    process = launched.start("stubborn", "serve")
    launched.wait_for("learner starts")
    launched.wait_for("rollout-0 starts")
    assert len(launched.pids(process.pid)) == 3
    process.kill()
    process.communicate()
    wait_until(lambda: not launched.pids(), "the children's end")
    again = launched.start("finish", "serve")
    assert again.communicate()[1] == ""
    launched.assert_nothing_left()


@pytest.mark.timeout(60)
def test_directory_in_use_is_refused_and_an_earlier_run_moved(launched):
    first = launched.start("serve", "serve")
    launched.wait_for("learner starts")
    second = launched.start("finish", "serve")
    _, err = second.communicate()
    assert second.returncode == 2
    assert err == "areal-q: error: runs/demo: a run is going on there; choose another --name\n"
    first.send_signal(signal.SIGTERM)
    first.communicate()
    (launched.root / "runs" / "demo" / "checkpoints" / "step-000000").mkdir(parents=True)
    third = launched.start("finish", "serve")
    out, _ = third.communicate()
    assert third.returncode == 0 and "moved to runs/demo.1" in out
    assert {path.name for path in (launched.root / "runs").iterdir()} == {"demo", "demo.1"}
    launched.assert_nothing_left()


def test_silent_redis_url_is_one_line_without_its_password(launched):
    process = launched.start("serve", "serve", REDIS_URL="redis://:secret@127.0.0.1:1/0")
    _, err = process.communicate()
    assert (process.returncode, launched.events()) == (2, [])
    assert err == "areal-q: error: REDIS_URL: no Redis answers there\n"
    launched.assert_nothing_left()


@pytest.mark.timeout(60)
def test_a_resumed_run_has_the_endpoints_that_it_had_before(launched):
    launched.start("finish", "serve").communicate()
    (launched.root / "runs" / "demo" / "checkpoints" / "step-1").mkdir(parents=True)
    launched.start("finish", "serve", "demo.toml", "--resume").communicate()
    first, second = (launched.root / "endpoints").read_text().splitlines()
    assert first == second and first.count("://") == 3
    launched.assert_nothing_left()


def test_workers_serve_on_ports_one_after_the_other(tmp_path):
    def served(address):
        run = load(None, ["rollout.workers=2", f"rollout.serve={address}"])
        argvs = [w.argv for w in plan(run, tmp_path, tmp_path, resume=False).workers]
        return [argv[argv.index("--serve") + 1] for argv in argvs]

    assert served("8000") == ["8000", "8001"]
    assert served('"[::1]:8000"') == ["[::1]:8000", "[::1]:8001"]
    assert served("localhost:0") == ["localhost:0", "localhost:0"]
    with pytest.raises(ConfigError, match=r"rollout\.serve"):
        served("here")


def test_plan_starts_modules_with_the_threads_of_the_settings(tmp_path, monkeypatch):
    monkeypatch.delenv("REDIS_URL", raising=False)
    run = load(None, ["rollout.workers=2", "learner.threads=3", "rollout.threads=2"])
    made = plan(run, tmp_path / "run", tmp_path / "s", resume=True)
    assert made.redis is not None and "buffer.redis_store.local_server" in made.redis.argv
    assert made.learner.threads == 3 and "--resume" in made.learner.argv
    assert [(w.name, w.threads) for w in made.workers] == [("rollout-0", 2), ("rollout-1", 2)]
    assert made.learner.argv[-4:-1] == [f"ipc://{tmp_path}/s/announce", "--fetch", f"ipc://{tmp_path}/s/fetch"]  # fmt: skip  # noqa: E501


def test_several_processes_of_the_learner_run_under_torchrun(tmp_path):
    argv = plan(load(None, ["learner.processes=2"]), tmp_path, tmp_path, resume=True).learner.argv
    started = argv[argv.index("-m") + 1 :]
    assert started[:2] == ["areal_q.system.torchrun", "--standalone"]
    assert "--nproc-per-node=2" in started and "--local-addr=127.0.0.1" in started
    rest = started[started.index("-m") :]
    assert rest[:2] == ["-m", "learner"] and "--run-dir" in rest and rest[-1] == "--resume"


ON_CUDA = ["learner.device=cuda", "rollout.engine.device=cuda"]


@pytest.mark.parametrize(
    ("settings", "gpus", "seen"),
    [
        # one GPU, or none: whoever asks for it has it
        (ON_CUDA, 1, [None, None]),
        ([], 4, [None, None]),
        # the first are the learner's
        (ON_CUDA, 4, ["1", "2", "3", "1"]),
        ([*ON_CUDA, "learner.processes=2"], 4, ["2", "3", "2", "3"]),
        # a learner that names its GPU, or is on the CPU, leaves the others
        (["learner.device=cuda:1", "rollout.engine.device=cuda"], 3, ["0", "2", "0"]),
        (["rollout.engine.device=cuda"], 2, ["0", "1", "0"]),
        # all are the learner's: they are shared
        ([*ON_CUDA, "learner.processes=2"], 2, ["0", "1", "0"]),
        # an engine whose device is named has it
        (["learner.device=cuda", "rollout.engine.device=cuda:3"], 4, [None, None]),
        (
            [
                "learner.device=cuda",
                "rollout.engine={type='vllm', tensor_parallel=2}",
                "rollout.format=bf16",
            ],
            5,
            ["1,2", "3,4", "1,2"],
        ),
        # too few are left for one engine: they are shared
        (
            [
                "learner.device=cuda",
                "rollout.engine={type='vllm', tensor_parallel=2}",
                "rollout.format=bf16",
            ],
            2,
            ["0,1", "0,1"],
        ),
        # too few are there: vLLM says so
        (["rollout.engine={type='vllm', tensor_parallel=4}", "rollout.format=bf16"], 2, [None]),
    ],
)
def test_workers_see_the_gpus_that_the_learner_leaves(
    tmp_path, monkeypatch, settings: list[str], gpus: int, seen: list[str | None]
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    run = load(None, [*settings, f"rollout.workers={len(seen)}"])
    workers = plan(run, tmp_path, tmp_path, resume=False).workers
    assert [worker.env.get("CUDA_VISIBLE_DEVICES") for worker in workers] == seen


def test_a_redis_that_is_there_already_is_not_started(tmp_path, monkeypatch):
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere:6379/0")
    made = plan(Run(), tmp_path, tmp_path, resume=False)
    assert made.redis is None and made.redis_url == "redis://elsewhere:6379/0"


def test_no_password_is_in_the_arguments_of_a_child(tmp_path, monkeypatch):
    """`ps` shows them to every user of the machine; the children read REDIS_URL, which they inherit."""
    monkeypatch.setenv("REDIS_URL", "redis://:secret@elsewhere:6379/0")
    made = plan(Run(), tmp_path, tmp_path, resume=False)
    arguments = [a for program in (made.learner, *made.workers) for a in program.argv]
    assert "--redis" not in arguments and not any("secret" in a for a in arguments)


@pytest.fixture
def ended(tmp_path):
    """A run that left a checkpoint."""
    directory = tmp_path / "runs" / "demo"
    (directory / "checkpoints" / "step-50").mkdir(parents=True)
    run = load(None, ['name="demo"', "steps=100", "learner.max_lag=3"])
    (directory / "config.toml").write_text(dump_toml(run))
    return directory


def test_resumed_run_has_saved_settings_and_harmless_overrides(ended):
    run = run_dir.resumed(
        ended, ["steps=400", "rollout.workers=4", "learner.max_lag=3", "rollout.serve=8001"]
    )
    assert (run.steps, run.rollout.workers, run.learner.max_lag) == (400, 4, 3)
    assert run_dir.path_of(run) == ended


def test_a_run_goes_back_to_an_older_checkpoint(ended):
    newer = ended / "checkpoints" / "step-60"
    (newer / "x").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="no checkpoint of step 55; there are: 50, 60"):
        asked_for(str(ended), [], True, None, 55)
    with pytest.raises(ConfigError, match="--from goes with --resume"):
        asked_for(str(ended), [], False, None, 50)
    with pytest.raises(ConfigError, match="no such setting"):
        asked_for(str(ended), ["learner.optimzer.lr=1"], True, None, 50)
    run = asked_for(str(ended), ["steps=55"], True, None, 50)
    assert run.steps == 55
    lock = files.try_lock(ended)
    assert lock is not None
    with pytest.raises(ConfigError, match="going on there"), run_dir.claimed(run, True, 50):
        pass
    os.close(lock)
    assert {*run_dir.checkpoints_of(ended)} == {50, 60}, "whatever is refused sets nothing aside"
    with run_dir.claimed(run, True, 50):
        pass
    assert {*run_dir.checkpoints_of(ended)} == {50}
    assert (newer.with_name("later-step-60") / "x").is_dir()


def test_a_run_s_own_files_are_found_from_any_directory(tmp_path, monkeypatch):
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    settings = ['task={type="python", path="mine.py"}', f'root="{tmp_path}"']
    with run_dir.claimed(load(None, settings), False) as (directory, _):
        pass
    monkeypatch.chdir("/")
    saved = load(directory / "config.toml")
    assert isinstance(saved.task, Python) and saved.task.path == str(tmp_path / "mine.py")
    (directory / "checkpoints" / "step-50").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert run_dir.resumed(directory, ['task.path="mine.py"'])


def test_starts_that_learnt_nothing_leave_one_directory(tmp_path):
    """Each restart of a learner that ran out of memory in its warm start once left a directory."""
    settings = load(None, [f'root="{tmp_path}"', 'name="demo"'])
    for said in ("once", "twice"):
        with run_dir.claimed(settings, False) as (directory, moved):
            assert moved is None and not (directory / "metrics.jsonl").exists()
            id = run_dir.run_id(directory)
            (directory / "metrics.jsonl").write_text('{"kind":"warmstart","step":0}\n')
            (directory / ".tmp-config.toml").touch()  # of a launcher that was killed over it
            with (directory / "logs" / "learner.log").open("a") as log:
                log.write(f"{said}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
    assert (directory / "logs" / "learner.log").read_text() == "once\ntwice\n"
    assert run_dir.run_id(directory) == id


@pytest.mark.parametrize(
    "kept", ["checkpoints/step-000000/state.json", "steps/part-000000.parquet", "notes.txt"]
)
def test_what_was_learnt_or_is_not_ours_is_moved_aside(tmp_path, kept):
    file = tmp_path / "demo" / kept
    file.parent.mkdir(parents=True)
    file.touch()
    with run_dir.claimed(load(None, [f'root="{tmp_path}"', 'name="demo"']), False) as (_, moved):
        assert moved == tmp_path / "demo.1" and (moved / kept).exists()


@pytest.mark.parametrize("learnt", [False, True])
def test_a_start_keeps_others_out_while_it_looks(tmp_path, monkeypatch, learnt):
    """A second start, between the first one's look and its rename, lost its directory or its config.toml."""
    run, look = load(None, [f'root="{tmp_path}"', 'name="demo"']), run_dir.learnt_nothing
    (tmp_path / "demo" / ("checkpoints/step-000005" if learnt else "logs")).mkdir(parents=True)

    def other_start(directory):
        found = look(directory)
        monkeypatch.setattr(run_dir, "learnt_nothing", look)
        with pytest.raises(ConfigError, match="going on there"), run_dir.claimed(run, False):
            pass
        return found

    monkeypatch.setattr(run_dir, "learnt_nothing", other_start)
    with run_dir.claimed(run, False) as (directory, moved):
        assert moved == (tmp_path / "demo.1" if learnt else None)
        assert (directory / "config.toml").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "demo.1"][: 1 + learnt]


def test_launchers_that_start_together_have_their_sockets(tmp_path, short_dir, monkeypatch):
    """One crashed if another took its directory, not locked yet, for abandoned."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_dir))
    directory, tries, lock = socket_dir.sockets_of(tmp_path / "demo"), [], files.try_lock

    def removed_before(path):
        tries.append(path)
        if len(tries) == 1:
            path.rmdir()
        return None if len(tries) == 2 else lock(path)

    monkeypatch.setattr(socket_dir, "try_lock", removed_before)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: directory.rmdir())
    monkeypatch.setattr(socket_dir, "time", clock)
    with socket_dir.socket_dir(tmp_path / "demo") as path:
        assert path.is_dir() and len(tries) == 3
    assert not path.exists()


def test_a_failed_start_keeps_what_was_learnt(tmp_path):
    """Steps before the first checkpoint, with all that says why it failed, were removed."""
    log = tmp_path / "demo" / "steps" / "part-000000.parquet"
    log.parent.mkdir(parents=True)
    assert run_dir.given_up(tmp_path / "demo", None) and not log.parent.exists()
    log.parent.mkdir(parents=True)
    log.touch()
    assert not run_dir.given_up(tmp_path / "demo", None) and log.exists()


def test_a_full_disk_leaves_the_settings_of_a_run_as_they_were(tmp_path):
    run = load(None, [f'root="{tmp_path}"', 'name="demo"', "steps=7"])
    with run_dir.claimed(run, False):
        pass
    (tmp_path / "demo" / "checkpoints" / "step-000001").mkdir(parents=True)
    with full_disk(9), pytest.raises(ConfigError, match="File too large"):
        run_dir.claimed(run, True).__enter__()
    assert load(tmp_path / "demo" / "config.toml").steps == 7


def test_the_id_of_a_data_set_is_no_file_to_be_found():
    run = load(
        None, ["model={type='pretrained', path='/'}", "task={type='gsm8k', path='openai/gsm8k'}"]
    )
    assert run_dir.with_absolute_files(run) == run


def test_a_resumed_run_goes_on_with_the_other_backend_and_back(ended):
    run = run_dir.resumed(ended, ["learner.backend={type='megatron', tensor=2}"])
    (ended / "config.toml").write_text(dump_toml(run))
    assert run_dir.resumed(ended, ["learner.backend={type='torch'}"]).learner.backend == (
        TorchBackend()
    )


def test_a_resumed_run_may_change_the_size_of_its_micro_batches(ended):
    """A run with a group that was too long for it could once never be mended."""
    again = run_dir.resumed(ended, ["learner.microbatch_tokens=20000"])
    assert again.learner.microbatch_tokens == 20000


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learner.optimizer.lr", 1e-5),
        ("learner.optimizer.decay", "linear"),
        ("learner.objective.clip_high", 0.3),
        ("learner.max_lag", 1),
        ("reward.timeout_s", 60.0),
        ("reward.settings.scale", 2),
    ],
)
def test_a_resumed_run_may_change_how_it_goes_on_learning(ended, key: str, value: object):
    again = run_dir.resumed(ended, [f"{key}={json.dumps(value)}"])
    assert run_dir.flat(msgspec.to_builtins(again))[key] == value


@pytest.mark.parametrize(
    "text", ["seed=7", "learner.groups=1", "model.width=64", "task.digits=3", "name=other"]
)
def test_a_resumed_run_cannot_change_what_is_being_learnt(ended, text):
    with pytest.raises(ConfigError, match=text.split("=")[0]):
        run_dir.resumed(ended, [text])


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        (
            "learner.objective.type=tis",
            r"^learner\.objective\.type: cannot change .* steps, eval\.\*",
        ),
        ("steps=30", r"^steps = 30: .*demo is at step 50 already; .* such as steps=100$"),
    ],
)
def test_a_refused_resume_says_what_can_be_changed(ended, setting, complaint):
    with pytest.raises(ConfigError, match=complaint):
        run_dir.resumed(ended, [setting])
    assert run_dir.resumed(ended, ["steps=50"]).steps == 50


def test_a_run_without_a_checkpoint_cannot_resume(ended):
    shutil.rmtree(ended / "checkpoints")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        run_dir.resumed(ended, [])
    with pytest.raises(CheckpointError, match="no such run"):
        run_dir.resumed(ended.parent / "other", [])


def test_a_run_that_was_moved_aside_resumes_where_it_is(ended):
    moved = ended.rename(ended.with_name("demo.1"))
    run = run_dir.resumed(moved, [])
    assert run_dir.path_of(run) == moved


def test_the_newest_run_is_the_one_last_written_to(ended):
    other = ended.with_name("other")
    shutil.copytree(ended, other)
    (other / "metrics.jsonl").touch()
    os.utime(ended / "config.toml", (1, 1))
    assert run_dir.newest(ended.parent) == other
    with pytest.raises(CheckpointError):
        run_dir.newest(ended / "nothing")


def test_a_lock_is_held_once_and_only_while_it_is_held(tmp_path):
    handle = files.try_lock(tmp_path)
    assert handle is not None and files.try_lock(tmp_path) is None
    os.close(handle)
    again = files.try_lock(tmp_path)
    assert again is not None
    os.close(again)
