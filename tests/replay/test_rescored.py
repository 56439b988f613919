"""Logged responses under another reward, beside what is worked out by hand."""

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from helpers.commands import refused, run_here

from areal_q.config import dump_toml, load
from areal_q.messages import Array, Group, Ticket
from areal_q.tasks import CharTokenizer
from buffer.logs.trajectory_log import TrajectoryLog
from learner.replay.cli import main

CHARS = CharTokenizer()
SHARE_OF_NINES = """
def reward(prompt, response, answer):
    if response == "7":
        raise ValueError("seven")
    return response.count("9") / len(response)
"""
STEPS = [
    [("1+1=", "2", [("2", 1.0), ("99", 0.0)]), ("1+2=", "3", [("9", 1.0), ("39", 0.5)])],
    [("4+4=", "8", [("7", 1.0), ("8", 1.0)]), ("4+5=", "9", [("90", 1.0), ("91", 0.0)])],
]
"""By step the groups: prompt, answer, and responses with their logged rewards"""


@pytest.fixture
def logged(
    tmp_path: Path, make_group: Callable[..., Group], make_ticket: Callable[..., Ticket]
) -> Callable[..., Path]:
    """logged(*settings, sources=("a", "b")) is the directory of a run of those settings with a log of STEPS,
    whose groups are of these sources."""

    def write(*settings: str, sources: Sequence[str] = ("", "")) -> Path:
        directory = tmp_path / "run"
        directory.mkdir()
        (directory / "config.toml").write_text(dump_toml(load(None, settings)))
        (directory / "mine.py").write_text(SHARE_OF_NINES)
        log = TrajectoryLog(directory / "trajectories")
        for step, groups in enumerate(STEPS):
            made = [
                _group(make_group, make_ticket(2 * step + i, source=source, group_size=2), *one)
                for i, (one, source) in enumerate(zip(groups, sources, strict=True))
            ]
            log.append(step, step, made)
        log.close()
        return directory

    return write


def _group(make_group: Callable[..., Group], ticket: Ticket, prompt: str, answer: str, said):
    made = make_group(msgspec.structs.replace(ticket, prompt=prompt, answer=answer))
    replaced = []
    for one, (text, reward) in zip(made.trajectories, said, strict=True):
        ids = [*CHARS.encode(text), CHARS.eos_id]
        span = msgspec.structs.replace(one.spans[0], tokens=len(ids))
        fields = {"behavior_logprobs": Array.of([-1.0] * len(ids), "float32"), "spans": [span]}
        fields |= {"loss_mask": Array.of([1] * len(ids), "uint8"), "reward": reward}
        ids = Array.of(ids, "int32")
        replaced.append(msgspec.structs.replace(one, response_ids=ids, **fields))
    return msgspec.structs.replace(made, trajectories=replaced)


def rows_of(directory: Path) -> list[dict[str, str]]:
    with (directory / "replay" / "rewards.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def replay(directory: Path, *arguments: str):
    return run_here("replay", main, str(directory), *arguments)


def test_each_step_has_both_rewards_as_worked_out_by_hand(logged: Callable[..., Path]):
    """Nines: 0, 1; 1, 0.5; failed, 0; 0.5, 0.5. The response that failed counts in neither mean."""
    directory = logged()
    done = replay(directory, "--set", f"reward.path={directory / 'mine.py'}")
    assert done.returncode == 0, done.stderr
    names = ("responses", "failed", "logged", "now", "alike", "uniform_logged", "uniform_now")
    first, second = ([float(row[name]) for name in names] for row in rows_of(directory))
    assert first == [4, 0, 2.5 / 4, 2.5 / 4, 2 / 4, 0, 0]
    assert second == pytest.approx([4, 1, 2 / 3, 1 / 3, 0, 1 / 2, 1])
    assert "seven" in done.stdout
    shown = done.stdout.partition("differ most:\n")[2].splitlines()[1:-1]
    assert [line.split()[-1] for line in shown] == ["2", "99", "8", "90", "91"]


def test_steps_can_be_chosen(logged: Callable[..., Path]):
    directory = logged()
    assert replay(directory, "--step", "1", "--set", "reward.correct=2").returncode == 0
    assert [row["step"] for row in rows_of(directory)] == ["1"]


def test_tasks_of_a_mixture_have_rows_and_rewards_of_their_own(logged: Callable[..., Path]):
    tasks = [f"task.sources.{n}.task={{type='arithmetic', digits=1, heldout=9}}" for n in "ab"]
    directory = logged("task={type='mix'}", *tasks, sources=("a", "b"))
    file = directory / "mine.py"
    done = replay(directory, "--set", f"task.sources.b.reward={{path='{file}'}}", "--to=1")
    assert done.returncode == 0, done.stderr
    found = [(row["step"], row["source"], float(row["now"])) for row in rows_of(directory)]
    assert found == [("0", "a", 1 / 2), ("0", "b", 3 / 4)]


def test_rows_of_the_data_are_there_though_no_log_has_them(
    logged: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """As in a run with a built-in grader, which asks for no columns."""
    asked = [(prompt, answer) for step in STEPS for prompt, answer, _ in step]
    rows = [
        {"prompt": p, "answer": a, "worth": n} for n, (p, a) in enumerate([*asked, ("9=", "9")])
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    directory = logged(f"task={{type='jsonl', path='{data}', heldout=0.2}}")
    file = directory / "mine.py"
    file.write_text("def reward(response, row):\n    return row['worth']\n")
    set_reward = ("--set", f"reward.path={file}")
    assert replay(directory, *set_reward).returncode == 0
    assert [float(row["now"]) for row in rows_of(directory)] == [0.5, 2.5]
    assert not caplog.text
    data.write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    assert replay(directory, *set_reward).returncode == 0
    assert "ticket 0: no columns of its row but the log's" in caplog.text
    data.unlink()
    refused(replay(directory, *set_reward), "no response could be scored", "worth")
    assert f"{data}: No such file" in caplog.text


PYTHON_TASK = ["task={type='python', path='other.py'}"]


def test_the_file_of_a_python_task_is_its_reward(logged: Callable[..., Path]):
    directory = logged(*PYTHON_TASK)
    assert replay(directory, "--set", f"task.path={directory / 'mine.py'}").returncode == 0
    assert [row["failed"] for row in rows_of(directory)] == ["0", "1"]


@pytest.mark.parametrize(
    ("settings", "arguments", "named"),
    [
        (["rollout.environment={type='external'}"], ["--set=reward.correct=2"], "'external'"),
        (
            ["rollout.environment={type='python', path='env.py', max_given_tokens=9}"],
            ["--set=reward.correct=2"],
            "rollout.environment.type = 'python'",
        ),
        ([], ["--set=reward.correct=2", "--set=learner.max_lag=1"], "learner.max_lag"),
        ([], ["--set=reward.correct=2", "--until-diverges"], "--until-diverges"),
        ([], ["--set=reward.correct=2", "--from=7"], "no such steps"),
        ([], ["--set=reward.path=none.py"], "none.py"),
        ([], ["--set=reward.correct=x"], "reward.correct"),
        ([], ["--set=task.grader=none"], "grader"),
    ],
)
def test_what_cannot_be_scored_again_is_one_line(
    logged: Callable[..., Path], settings: list[str], arguments: list[str], named: str
):
    refused(replay(logged(*settings), *arguments), named)


def test_a_reward_that_scores_nothing_says_why(logged: Callable[..., Path]):
    directory = logged()
    (directory / "mine.py").write_text("def reward(prompt, response, answer):\n    1 / 0\n")
    done = replay(directory, "--set", f"reward.path={directory / 'mine.py'}")
    refused(done, "no response could be scored", "ZeroDivisionError")
