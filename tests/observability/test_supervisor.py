"""The entry point of a container's service: what it starts again, and what it leaves."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.commands import is_alive

from areal_q.observability import supervisor
from areal_q.observability.supervisor import Supervisor
from areal_q.system import stop_request


@pytest.fixture(autouse=True)
def signals_and_waits(monkeypatch):
    """Restores the handlers that a supervisor sets; nothing waits long."""
    monkeypatch.setattr(supervisor, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(supervisor, "LATE_S", float("inf"))
    monkeypatch.setattr(supervisor, "LONGEST_WAIT_S", 0.0)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def ends_with(directory: Path, *codes: str) -> list[str]:
    """A command that ends with the first of `codes` (or kills itself with -9), then with the next."""
    script = directory / "command.sh"
    script.write_text(
        f"""echo start >> {directory}/starts
n=$(wc -l < {directory}/starts)
code=$(echo {" ".join(codes)} | cut -d' ' -f$n)
[ "$code" = -9 ] && kill -9 $$
exit $code
"""
    )
    return ["sh", str(script)]


def starts(directory: Path) -> int:
    return len((directory / "starts").read_text().splitlines())


def test_a_finished_service_is_not_started_again(tmp_path):
    assert Supervisor(ends_with(tmp_path, "0", "1")).run() == 0
    assert starts(tmp_path) == 1


def test_crashed_and_killed_services_are_started_again(tmp_path):
    assert Supervisor(ends_with(tmp_path, "1", "-9", "1", "0")).run() == 0
    assert starts(tmp_path) == 4


def test_a_service_is_told_how_often_it_has_crashed(tmp_path, monkeypatch):
    """A fault that is tried again is no crash."""
    monkeypatch.setattr(supervisor, "MENDING_S", (0.0,))
    monkeypatch.setattr(supervisor, "WELL_S", 0.0)
    command = ends_with(tmp_path, "1", "-9", "2", "1", "0")
    script = Path(command[1])
    script.write_text(f"echo $AREAL_Q_CRASHES >> {tmp_path}/told\n{script.read_text()}")
    assert Supervisor(command).run() == 0
    assert (tmp_path / "told").read_text().split() == ["0", "1", "2", "2", "3"]


def test_a_wrong_setting_is_not_tried_again(tmp_path):
    assert Supervisor(ends_with(tmp_path, "2", "0")).run() == 2
    assert starts(tmp_path) == 1


def test_a_fault_after_a_good_while_is_tried_a_few_times(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "MENDING_S", (0.0, 0.0))
    monkeypatch.setattr(supervisor, "WELL_S", 0.0)
    first = Supervisor(ends_with(tmp_path, "2", "2", "0"))
    assert first.run() == 0
    assert starts(tmp_path) == 3


def test_waits_of_crashes_grow_and_of_faults_end(monkeypatch):
    monkeypatch.setattr(supervisor, "LONGEST_WAIT_S", 60.0)
    crashes = Supervisor([])
    waits = [crashes._wait_before_again(1, 0.0) for _ in range(8)]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    faults = Supervisor([])
    assert faults._wait_before_again(2, 3.0) is None
    assert [faults._wait_before_again(2, t) for t in (90.0, 3.0, 3.0, 3.0)] == [10, 60, 300, None]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_passed_on_and_its_exit_code_back(tmp_path, number):
    asked = f"trap 'exit 77' TERM INT; touch {tmp_path}/up; while :; do sleep 0.05; done"
    command = [sys.executable, "-m", "areal_q.observability.supervisor", "sh", "-c", asked]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        while not (tmp_path / "up").exists():
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait() == 77


def test_a_stuck_service_is_killed_and_started_again(tmp_path, monkeypatch, caplog):
    looks = iter([None])

    def complaint(port: int, now_s: float) -> str | None:
        started = (tmp_path / "starts").exists()
        return next(looks, "it hangs" if starts(tmp_path) == 1 else None) if started else None

    def kill(pid: int, number: int) -> None:
        plain_kill(pid, number)
        time.sleep(0.1)  # the shell would end with 0 meanwhile, if its `sleep` were killed first

    plain_kill = os.kill
    monkeypatch.setattr(supervisor.os, "kill", kill)
    monkeypatch.setattr(supervisor, "complaint", complaint)
    monkeypatch.setattr(supervisor, "STUCK_S", 0.08)
    script = f"echo start >> {tmp_path}/starts; [ $(wc -l < {tmp_path}/starts) = 2 ] || sleep 600"
    assert Supervisor(["sh", "-c", f"{script}; exit 0"], 1).run() == 0
    assert starts(tmp_path) == 2
    assert "it hangs for" in caplog.text and "killed by SIGKILL" in caplog.text


@pytest.mark.parametrize(
    ("late_s", "healthy_again", "killed_after"),
    [
        ([0.0] * 40, None, 14),  # the first look is the good one
        ([0.0, 270.0] + [0.0] * 40, None, 15),  # frozen, and then hanging: from the thaw on
        ([0.0, 270.0] + [0.0] * 40, 8, None),  # frozen, and up again after a while
        ([0.0] + [90.0] * 40, None, None),  # a machine short of memory, where no look is in time
    ],
)
def test_time_in_which_the_machine_stood_still_does_not_count(
    monkeypatch, late_s, healthy_again, killed_after
):
    """A clock and a child of its own: each wait ends `late_s` too late, and the service is healthy at first and
    from look number `healthy_again` on."""
    now, looks, kills = [0.0], [0], []

    class Child:
        pid = 1 << 30

        def wait(self, timeout: float) -> int:
            if kills or looks[0] == len(late_s):
                return 0
            now[0] += timeout + late_s[looks[0]]
            looks[0] += 1
            raise subprocess.TimeoutExpired("child", timeout)

    def complaint(port: int, now_s: float) -> str | None:
        well = looks[0] == 1 or (healthy_again or 1000) <= looks[0]
        return None if well else "no metrics"

    monkeypatch.setattr(supervisor, "LOOK_EVERY_S", 10.0)
    monkeypatch.setattr(supervisor, "LATE_S", 20.0)
    monkeypatch.setattr(supervisor, "complaint", complaint)
    monkeypatch.setattr(
        supervisor, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    )
    monkeypatch.setattr(supervisor.os, "kill", lambda pid, number: kills.append(looks[0]))
    Supervisor([], 1)._watch(Child())  # pyright: ignore[reportArgumentType]
    assert kills == ([killed_after] if killed_after else [])


def test_a_stuck_service_takes_its_children_with_it(tmp_path, monkeypatch):
    pid_file, looks = tmp_path / "child", iter([None])
    alive = lambda: pid_file.exists() and is_alive(int(pid_file.read_text() or 0))  # noqa: E731
    monkeypatch.setattr(
        supervisor, "complaint", lambda port, now_s: next(looks, "it hangs" if alive() else None)
    )
    monkeypatch.setattr(supervisor, "STUCK_S", 0.0)
    child = f"setsid sh -c 'echo $$ > {pid_file}; exec sleep 600'"
    script = f"[ -e {pid_file} ] && exit 0; {child} & wait"
    assert Supervisor(["sh", "-c", script], 1).run() == 0
    while alive():
        time.sleep(0.02)


def test_a_child_that_ends_as_it_is_looked_at_has_no_children(monkeypatch):
    """The supervisor itself ended with a traceback, and what was stuck went on."""

    def ends(path: Path) -> str:
        raise ProcessLookupError(path)

    monkeypatch.setattr(Path, "read_text", ends)
    assert supervisor._descendants(os.getpid()) == []


@pytest.mark.parametrize(("same_s", "passed_on"), [(3600.0, 1), (0.0, 3)])
def test_a_request_that_comes_by_several_ways_is_passed_on_once(
    monkeypatch, same_s: float, passed_on: int
):
    """Such as to a process group, and from each thread of what started it; torchrun bears two."""
    monkeypatch.setattr(stop_request, "SAME_S", same_s)
    service, sent = Supervisor([]), []
    monkeypatch.setattr(service, "_child", SimpleNamespace(send_signal=sent.append))
    for _ in range(3):
        service._pass_on(signal.SIGTERM, None)
    assert sent == [signal.SIGTERM] * passed_on


def test_a_service_that_was_never_well_is_left_to_start(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "complaint", lambda port, now_s: "no metrics")
    monkeypatch.setattr(supervisor, "STUCK_S", 0.0)
    assert Supervisor(["sleep", "0.5"], 1).run() == 0


V2 = {"memory.events": "low 0\noom 2\noom_kill 3\n", "memory.max": "260000000\n"}
V1 = {
    "memory/memory.oom_control": "under_oom 0\noom_kill 3\n",
    "memory/memory.failcnt": "2\n",
    "memory/memory.limit_in_bytes": "260000000\n",
}
LIMIT = "the container may have 260 MB (mem_limit; docker/.env)"
MACHINE = "the machine had none left"
BELOW = f"{MACHINE}; the container was below its own limit of 260 MB"


@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [
        (V2, {"memory.events": "low 0\noom 3\noom_kill 4\n"}, LIMIT),
        (V2, {"memory.events": "low 0\noom 2\noom_kill 4\n"}, BELOW),
        (V2 | {"memory.max": "max\n"}, {"memory.events": "low 0\noom 2\noom_kill 4\n"}, MACHINE),
        (V1, {"memory/memory.oom_control": "oom_kill 4\n", "memory/memory.failcnt": "9\n"}, LIMIT),
        (V1, {"memory/memory.oom_control": "oom_kill 4\n"}, BELOW),
        (
            V1 | {"memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n"},
            {"memory/memory.oom_control": "oom_kill 4\n"},
            MACHINE,
        ),
    ],
)
def test_a_kill_says_whose_memory_was_wanting(tmp_path, monkeypatch, caplog, before, after, cause):
    """The kernel counts a kill in the container in both cases, and its limit only where that was reached."""
    cgroup, later = tmp_path / "cgroup", tmp_path / "later"
    for root, files in ((cgroup, before), (later, after)):
        (root / "memory").mkdir(parents=True)
        for name, text in files.items():
            (root / name).write_text(text)
    monkeypatch.setattr(supervisor, "CGROUP", cgroup)
    command = f"[ -e {tmp_path}/two ] && exit 0; touch {tmp_path}/two"
    assert Supervisor(["sh", "-c", f"{command}; cp -r {later}/. {cgroup}; kill -9 $$"]).run() == 0
    assert f"killed for want of memory: {cause}; started again" in caplog.text
