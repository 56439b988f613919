"""`type = "verifiers"`: verifiers, unmodified, in a process of its own, plays episodes of two turns."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from errno import EAGAIN
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers.openai_server.verifiers_place import PYTHON, TASKSET, Place, stand_in, with_verifiers

from areal_q.config import Sampling, VerifiersTask, load
from areal_q.errors import ConfigError, TaskError
from areal_q.messages import Ticket
from areal_q.tasks import build_task
from areal_q.tasks.environments.verifiers_rows import PLAYER

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@with_verifiers
@pytest.mark.slow
async def test_verifiers_plays_two_turns_token_by_token(
    tmp_path: Path, make_ticket: Callable[..., Ticket], dead_proxy: None
) -> None:
    """Double entry: its traces and the worker's records agree on every id, mask and log-prob, and a shifted id
    is found. All turns are drawn as the ticket says, whatever the settings say by now. No request goes through
    a proxy."""
    asked = Sampling(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop=("end",), max_tokens=200)
    script = ["one", "two", "one", "three"]
    place = Place(tmp_path, make_ticket, script, sampling=asked)
    async with place.played() as playing:
        responses = await playing
    assert [r.score.reward for r in responses if r.score] == [1.0, 0.5]
    assert [r.score.parts for r in responses if r.score] == [
        {"turns_of_it": 2.0, "right": 1.0},
        {"turns_of_it": 2.0, "right": 0.5},
    ]
    assert [(r.turns, len(r.branches)) for r in responses] == [(2, 0), (2, 0)]
    assert place.differences(responses) == []
    drawn = [msgspec.structs.replace(one, max_tokens=200) for one in place.engine.samplings]
    assert drawn == [asked] * 4
    responses[1].ids[-2] += 1
    assert place.differences(responses) == ["1: ids"]
    assert place.episodes.process is not None and place.episodes.process.returncode is not None


@with_verifiers
@pytest.mark.slow
async def test_an_error_of_a_taskset_is_a_cause_and_no_reward(
    tmp_path: Path, make_ticket: Callable[..., Ticket], capfd: pytest.CaptureFixture[str]
) -> None:
    """Of what follows from an error, which verifiers records too, nothing is said."""
    place = Place(tmp_path, make_ticket, ["bad", "one", "two"])
    async with place.played() as playing:
        responses = await playing
    assert [(r.score.valid, r.score.failure) for r in responses if r.score] == [
        (False, "environment"),
        (True, None),
    ]
    said = [line for line in capfd.readouterr().err.splitlines() if line.endswith("is at fault")]
    ours = [line for line in said if line.startswith("verifiers: ")]
    assert ours == ["verifiers: ValueError: the taskset is at fault"]


@with_verifiers
@pytest.mark.slow
async def test_errors_before_any_token_end_after_their_attempts(
    tmp_path: Path, make_ticket: Callable[..., Ticket]
) -> None:
    """A record has a token at least, which is drawn for each of them."""
    first = "            first = (await"
    down = TASKSET.replace(first, f"            raise ValueError('the game is down')\n{first}")
    place = Place(tmp_path, make_ticket, ["one", "two"], down)
    async with place.played() as playing:
        responses = await playing
    assert [(r.score.failure, r.drawn) for r in responses if r.score] == [("environment", 1)] * 2
    assert place.engine.script == [] and "the game is down" in place.episodes.failure


@with_verifiers
@pytest.mark.slow
async def test_the_taskset_of_the_page_is_played(
    tmp_path: Path, make_ticket: Callable[..., Ticket]
) -> None:
    run = load(EXAMPLES / "asker.toml", ["model.path=x"])
    assert isinstance(run.task, VerifiersTask) and run.task.env == {"taskset": {"id": "asker"}}
    place = Place(tmp_path, make_ticket, [], (EXAMPLES / "asker.py").read_text())
    place.engine.script = ["?", place.ticket.answer, "0"]
    async with place.played() as playing:
        responses = await playing
    assert [(r.turns, r.score.reward, r.score.correct) for r in responses if r.score] == [
        (2, 1.0, True),
        (1, 0.0, False),
    ]


@with_verifiers
@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "script", "ends"),
    [
        ({4}, ["one", "two", "one", "lost", "one", "two"], (True, None, 2)),
        ({4, 5}, ["one", "two", "one", "lost", "lost", "x"], (False, "killed", 1)),
    ],
)
async def test_a_killed_process_loses_the_episode_under_way(
    tmp_path: Path,
    make_ticket: Callable[..., Ticket],
    killed: set[int],
    script: list[str],
    ends: tuple[bool, str | None, int],
) -> None:
    """Killed in the second episode's second turn: the first one stays, the second begins again, and has failed
    once both of its attempts are lost."""
    place = Place(tmp_path, make_ticket, script)
    turns = 0

    async def wait() -> None:
        nonlocal turns
        turns += 1
        if turns in killed:
            assert place.episodes.process is not None
            os.kill(place.episodes.process.pid, signal.SIGKILL)
            await asyncio.Event().wait()

    place.engine.wait = wait
    async with place.played() as playing:
        responses = await playing
    assert [(r.score.valid, r.score.failure, r.turns) for r in responses if r.score] == [
        (True, None, 2),
        ends,
    ]
    assert turns == 6


async def test_what_the_process_started_ends_with_it(
    short_dir: Path, make_ticket: Callable[..., Ticket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although it has left the process's session. Its requests to the worker go through no proxy."""
    monkeypatch.setenv("no_proxy", "example.org")
    async with stand_in(short_dir) as heard:
        place = Place(short_dir, make_ticket, [], python=f"{short_dir}/player")
        async with place.played():
            _, environment = json.loads(await heard.get())
            direct = environment["no_proxy"].split(",")
            assert {"example.org", "127.0.0.1", "localhost"} <= {*direct}
        assert await heard.get() == b""


LATE = """
import os
from areal_q.system import processes

fork, (read, write) = os.fork, os.pipe()  # exec closes the child's ends

def late():
    if child := fork():
        os.close(write)
        os.read(read, 1)
    return child

os.fork = late
raise SystemExit(processes._supervise("areal_q.system.processes", "/bin/sh", "-c", "exit 3"))
"""


def test_a_supervisor_that_is_late_supervises_all_the_same() -> None:
    """Its child is another program by then, whose group cannot be changed."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")


ASKS = """
import asyncio, sys, types
sys.path.insert(0, sys.argv[1])
import verifiers_player
pauses, answers = [], [500, 503, 503, 500, 500, 503]

class Over(Exception):
    pass

class Http:
    async def post(self, url, json):
        if not answers:
            raise Over
        return types.SimpleNamespace(status_code=answers.pop(0), is_success=False)

async def sleep(seconds):
    pauses.append(seconds)

asyncio.sleep = sleep
players = verifiers_player.Players(None, [], {"endpoint": "", "token": ""})
players._http = Http()
try:
    asyncio.run(players._player())
except Over:
    print(pauses)
"""


@with_verifiers
def test_no_ticket_is_no_failure() -> None:
    """An endpoint answers 503 once it has waited for a ticket in vain: it is asked again at once."""
    command = [PYTHON, "-P", "-c", ASKS, str(PLAYER.parent)]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "[1.0, 1.0, 2.0]\n"


@with_verifiers
def test_a_missing_taskset_is_told_in_one_line(tmp_path: Path) -> None:
    task = VerifiersTask(env={"taskset": {"id": "absent"}}, directory=str(tmp_path), python=PYTHON)
    with pytest.raises(TaskError, match=r"task.env.taskset.id = 'absent': .*not found") as told:
        build_task(task)
    assert "\n" not in str(told.value)


def test_an_environment_that_is_not_made_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_Q_ENVIRONMENTS", str(tmp_path))
    with pytest.raises(ConfigError, match="areal-q setup verifiers"):
        build_task(VerifiersTask(env={"taskset": {"id": "two"}}))


@pytest.mark.parametrize(
    ("mode", "content", "error", "why"),
    [
        (None, "", ConfigError, "no such file"),
        (0o644, "", ConfigError, "may not be run"),
        (0o755, "no program", TaskError, "cannot be run: Exec format error"),
        (0o755, "#!/nowhere/python", TaskError, "cannot be run: No such file or directory"),
        (0o755, "#!/bin/sh\necho lost >&2", TaskError, "lost"),
    ],
)
def test_a_python_that_cannot_be_run_is_named(
    tmp_path: Path, mode: int | None, content: str, error: type[Exception], why: str
) -> None:
    python = tmp_path / "python"
    if mode is not None:
        python.write_text(content)
        python.chmod(mode)
    with pytest.raises(error, match=f"task.python: {python}: {why}$") as told:
        build_task(VerifiersTask(env={"taskset": {"id": "two"}}, python=str(python)))
    assert "\n" not in str(told.value)


async def test_a_process_that_does_not_start_is_told(
    short_dir: Path,
    make_ticket: Callable[..., Ticket],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And tried again: the machine may have had no process left."""
    monkeypatch.setattr("rollout.environments.played_episodes._PAUSE_S", 0.0)
    async with stand_in(short_dir) as heard:
        place = Place(short_dir, make_ticket, [], python=f"{short_dir}/player")
        begin, errors = (
            asyncio.create_subprocess_exec,
            [BlockingIOError(EAGAIN, os.strerror(EAGAIN))],
        )

        async def run(*command: str, **options: Any) -> Any:
            for error in errors:
                errors.remove(error)
                raise error
            return await begin(*command, **options)

        monkeypatch.setattr("asyncio.create_subprocess_exec", run)
        async with place.played():
            assert await heard.get()
    said = f"{sys.executable}: cannot be run: {os.strerror(EAGAIN)}"
    assert place.episodes.failure == said and said in caplog.text


def test_a_role_that_draws_otherwise_is_refused() -> None:
    client = {"type": "eval", "base_url": "http://127.0.0.1:1/v1"}
    env: dict[str, Any] = {
        "taskset": {"id": "two"},
        "agent": {"sampling": {"max_tokens": 8}},
        "user": {"client": client, "sampling": {"temperature": 0.5}},
    }
    VerifiersTask(env=env)
    env["agent"]["sampling"]["top_p"] = 0.5
    with pytest.raises(ValueError, match=r"env\.agent\.sampling\.top_p: rollout\.sampling"):
        VerifiersTask(env=env)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("system", '"Sum."'),
        ("template_args", "{thinking=false}"),
        ("template_file", '"own.jinja"'),
        ("reply_format", '"text"'),
        ("split_special", "false"),
    ],
)
def test_chat_settings_that_it_does_not_read_are_named(name: str, value: str) -> None:
    asked = [
        "model={type='pretrained', path='x'}",
        "task={type='verifiers', env={taskset={id='two'}}}",
        "rollout.environment.type=verifiers",
    ]
    load(None, [*asked, 'task.chat.date="2026-01-31"'])
    with pytest.raises(ConfigError, match=rf"task\.chat\.{name} has no effect"):
        load(None, [*asked, f"task.chat.{name}={value}"])
