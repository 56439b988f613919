"""Rewards: their parts by hand, and what raises, hangs or dies is bounded, counted and stalls nobody."""

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from helpers.commands import stretched
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from areal_q.checks.settings import preflight
from areal_q.config import Overlong, Run, load
from areal_q.errors import ConfigError, TaskError
from areal_q.messages.trajectories import FailureCause
from areal_q.tasks import (
    Completed,
    Problem,
    Reward,
    Score,
    build_reward,
    build_task,
    check_reward,
    second_opinion,
)
from areal_q.tasks.grading.child_process import failure_of
from areal_q.tasks.grading.own_reward import as_score, load_reward
from areal_q.tasks.grading.rewards import STYLES, overlong_penalty

PROBLEM = Problem("2+2=", "4")
PRETRAINED = ["model.type=pretrained", "model.path=model", "task.path=data.jsonl"]
CAUSES: dict[str, FailureCause] = {
    "exit": "killed",
    "memory": "killed",
    "down": "unavailable",
}
"""What fails in another way than by an exception"""

USERS = """
import os, sys, time
from areal_q.errors import RewardUnavailable
print("loaded, on what was stdout")

def reward(prompt, response, answer):
    print("noise", flush=True)
    match response:
        case "hang":
            while True:
                pass
        case "sleep":
            time.sleep(3600)
        case "raise":
            return 1 / 0
        case "exit":
            os._exit(3)
        case "sysexit":
            sys.exit(3)
        case "nan":
            return float("nan")
        case "text":
            return "good"
        case "parts":
            return {"reward": 0.25, "correct": 1, "style": 2}
        case "pid":
            return os.getpid()
        case "memory":
            raise MemoryError
        case "allocate":
            return len(bytearray(1 << 28)) / (1 << 28)
        case "down":
            raise RewardUnavailable("the judge does not answer")
        case "flaky":
            with open(__file__ + ".asked", "a+") as asked:
                asked.write(".")
            assert os.path.getsize(__file__ + ".asked") >= 3
            return 1.0
        case "stdin":
            return float(sys.stdin.read() == "")
        case "flood":
            raise ValueError("x" * 10_000_000)
    return float(response == answer)

def other(prompt, response, answer):
    return 7
"""
WITH_CLASSES = """
from __future__ import annotations
import multiprocessing, pickle
from dataclasses import dataclass
from typing import ClassVar

@dataclass
class Rule:
    worth: float
    calls: ClassVar[int] = 0

def worth(rule):
    return rule.worth

def reward(prompt, response, answer):
    if response == "elsewhere":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.map(worth, [Rule(3.0)])[0]
    return pickle.loads(pickle.dumps(Rule(2.0))).worth
"""
ASYNC = """
import asyncio
loops = []

async def reward(prompt, response, answer):
    loops.append(asyncio.get_running_loop())
    await asyncio.sleep(0.001)
    if response == "raise":
        raise KeyError(prompt)
    if response == "hang":
        await asyncio.sleep(3600)
    return {"reward": float(response == answer), "loops": len(set(loops))}
"""


def settings(tmp_path: Path, *more: str, source: str = USERS) -> Run:
    file = tmp_path / "mine.py"
    file.write_text(source)
    return load(None, [f'reward.path="{file}"', "reward.timeout_s=600", *more])


@asynccontextmanager
async def using(run: Run) -> AsyncIterator[Reward]:
    reward = build_reward(run)
    try:
        await reward.start()
        yield reward
    finally:
        await reward.close()


async def one(reward: Reward, problem: Problem, response: str, tokens: int = 1) -> Score:
    (score,) = await reward(problem, [Completed(response, tokens)])
    return score


def scored(run: Run, *responses: str) -> list[Score]:
    async def work() -> list[Score]:
        async with using(run) as reward:
            return [await one(reward, PROBLEM, response, len(response)) for response in responses]

    return asyncio.run(work())


# A user's own file


def test_reward_from_a_file_scores_its_parts_whatever_it_prints(tmp_path: Path):
    right, wrong, parts, stdin = scored(settings(tmp_path), "4", "5", "parts", "stdin")
    assert (right, wrong) == (Score(1.0, True), Score(0.0, False))
    assert parts == Score(0.25, True, {"style": 2.0})
    assert stdin.reward == 1.0
    (other,) = scored(settings(tmp_path, "reward.function=other"), "4")
    assert other == Score(7.0, True)


@pytest.mark.parametrize(
    "bad", ["raise", "exit", "sysexit", "nan", "text", "flood", "memory", "down"]
)
def test_a_failed_reward_is_no_score_and_the_next_is_scored(
    tmp_path: Path, bad: str, caplog: pytest.LogCaptureFixture
):
    failed, after = scored(settings(tmp_path, "reward.processes=1"), bad, "4")
    assert failed == Score.failed(CAUSES.get(bad, "exception")) and not failed.valid
    assert after == Score(1.0, True)
    assert "reward failed, 1 so far" in caplog.text


def test_a_reward_that_takes_too_much_memory_is_killed(tmp_path: Path):
    held, after = scored(
        settings(tmp_path, "reward.processes=1", "reward.memory_mib=128"), "allocate", "4"
    )
    assert held == Score.failed("killed")
    assert after == Score(1.0, True)
    (free,) = scored(settings(tmp_path, "reward.memory_mib=0"), "allocate")
    assert free == Score(1.0, True)


@pytest.mark.parametrize(
    ("on_error", "zero_on", "expected"),
    [
        ("drop", "[]", [Score.failed("exception"), Score.failed("unavailable")]),
        ("drop", '["exception"]', [Score.zero("exception"), Score.failed("unavailable")]),
        (
            "zero",
            "[]",
            [Score.zero("exception", "exception"), Score.zero("unavailable", "unavailable")],
        ),
    ],
)
def test_settings_say_which_failures_are_worth_0(
    tmp_path: Path, on_error: str, zero_on: str, expected: list[Score]
):
    """The judge that is down never counts as the response's own fault."""
    run = settings(tmp_path, f"reward.on_error={on_error}", f"reward.zero_on={zero_on}")
    assert scored(run, "raise", "down") == expected


@pytest.mark.parametrize(
    ("retries", "expected"), [(1, Score.failed("exception")), (2, Score(1.0, True))]
)
def test_a_failed_reward_is_asked_again_so_many_times(
    tmp_path: Path, retries: int, expected: Score
):
    """The reward fails twice before it works."""
    asked = f"reward.retries={retries}"
    run = settings(tmp_path, "reward.on_error=retry", asked, "reward.retry_pause_s=0.01")
    assert scored(run, "flaky") == [expected]
    assert len((tmp_path / "mine.py.asked").read_text()) == retries + 1


def test_infrastructure_cannot_be_declared_the_responses_fault():
    with pytest.raises(ConfigError, match="zero_on"):
        load(None, ['reward.zero_on=["unavailable"]'])


@pytest.mark.timeout(60)
def test_a_file_of_dataclasses_can_pickle_them(tmp_path: Path):
    run = settings(tmp_path, source=WITH_CLASSES)
    assert [s.reward for s in scored(run, "here", "elsewhere")] == [2.0, 3.0]


ROW = '{"prompt": "q", "answer": "#### 4", "level": 3}'
USER = {"role": "user", "content": "q"}
CHAT = Problem.of(({"role": "system", "content": "s"}, USER), "4")
TWO = (Completed("r", 2, [7, 8], "length"), Completed("s", 1, [9]))
SIGNATURES = {
    "prompt, response, answer": "('q', 'r', '4')",
    "p, r, a": "('q', 'r', '4')",
    "prompt, response, expected": "('q', 'r', '4')",
    "*given": "('q', 'r', '4')",
    "prompt, response, answer, /": "('q', 'r', '4')",
    "answer, response": "('4', 'r')",
    "response, *, answer='', scale=2": "('r', '4', 2)",
    "response": "('r',)",
    "row, group": f"({ROW}, ['r', 's'])",
    "messages, completion_ids, finish_reason='stop'": f"([{USER}], [7, 8], 'length')",
    "response, **more": f"""('r', {{'prompt': 'q', 'answer': '4', 'row': {ROW}, 'messages': [{USER}],
        'completion_ids': [7, 8], 'finish_reason': 'length'}})""",
}
"""Parameters of a reward, and what it gets for them"""


def given_by(file: Path, problem: Problem, name: str = "reward") -> Any:
    return load_reward(str(file), name).call(problem, TWO, 0)


@pytest.mark.parametrize("parameters", SIGNATURES)
def test_a_reward_gets_what_its_parameters_name(tmp_path: Path, parameters: str):
    names = re.sub(r"=[^,]*|\*|/", "", parameters).split(",")
    values = ", ".join(name.strip() for name in names if name.strip())
    body = "given == due" if parameters == "*given" else f"({values},) == due"
    source = f"def reward({parameters}):\n    due = {SIGNATURES[parameters]}\n"
    (tmp_path / "mine.py").write_text(f"{source}    return float({body})\n")
    assert given_by(tmp_path / "mine.py", Problem("q", "4", columns=ROW)) == 1.0


def test_a_reward_without_data_of_its_own_gets_prompt_and_answer(tmp_path: Path):
    (tmp_path / "mine.py").write_text("def reward(row, messages): return row, messages")
    row, messages = given_by(tmp_path / "mine.py", CHAT)
    assert (row, messages) == ({"prompt": CHAT.messages, "answer": "4"}, [*CHAT.messages])


TRL = """
def all_columns(completions, **columns):
    assert callable(columns.pop("log_extra")) and callable(columns.pop("log_metric"))
    return [{**columns, "completions": completions}]

def some(prompts, completions, level, missing=None):
    return [prompts, completions, level, missing]
"""


@pytest.mark.parametrize("chat", [False, True])
def test_a_reward_written_for_trl_works_unchanged(tmp_path: Path, chat: bool):
    """As TRL's GRPOTrainer calls it: a list of all responses, of conversations where the prompt is one."""
    (tmp_path / "mine.py").write_text(TRL)
    problem = replace(CHAT if chat else Problem("q", "4"), columns=ROW)
    texts = [[{"role": "assistant", "content": t}] if chat else t for t in "rs"]
    (everything,) = given_by(tmp_path / "mine.py", problem, "all_columns")
    assert everything == {
        "prompts": [CHAT.messages if chat else "q"] * 2,
        "completions": texts,
        "completion_ids": [[7, 8], [9]],
        "answer": ["#### 4"] * 2,
        "level": [3, 3],
    }
    assert given_by(tmp_path / "mine.py", problem, "some") == [
        everything["prompts"], texts, [3, 3], None
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["trainer_state", "environments"])
def test_what_only_trls_trainer_has_needs_a_default(tmp_path: Path, name: str):
    file = tmp_path / "mine.py"
    file.write_text(f"import json\ndef reward(completions, {name}): return [1.0]")
    with pytest.raises(
        TaskError, match=rf"mine\.py:2: asks for TRL's {name}, which .*: {name}=None$"
    ):
        load_reward(str(file), "reward")
    file.write_text(f"def reward(completions, {name}=None): return [{name}]")
    assert given_by(file, PROBLEM) == [None]


LOGGING = """
def accuracy_reward(completions, answer, log_extra=None, log_metric=None, **kwargs):
    rewards = [None if c == "none" else float(c == a) for c, a in zip(completions, answer)]
    if log_extra is not None:
        log_extra("answer", list(answer))
        log_extra("tokens", [len(c) for c in completions])
    if log_metric is not None:
        log_metric("length", sum(map(len, completions)) / len(completions))
        log_metric("length", 0)
    return rewards

async def later(completions, log_metric, **columns):
    columns["log_extra"]("upper", [c.upper() for c in completions])
    log_metric("correct", 0.5)
    return [{"reward": 2, "own": 1, "why": "so"} for _ in completions]

def uneven(completions, log_extra):
    log_extra("few", ["x"])
    return [1.0] * len(completions)

def not_finite(completions, log_metric):
    log_metric("loss", float("nan"))
    return [1.0] * len(completions)
"""


async def test_what_a_reward_of_trl_logs_is_of_its_responses(tmp_path: Path):
    """By TRL's calling convention: `log_extra(column, values)` has a value for each completion, and the values
    of `log_metric(name, value)` in a call are averaged."""
    failures = list[str]()
    three, problem = [Completed("4"), Completed("none"), Completed("77")], Problem("2+2=", "4")

    async def scores(function: str) -> list[Score]:
        run = settings(tmp_path, f"reward.function={function}", source=LOGGING)
        async with using(run) as reward:
            found = await reward(problem, three)
            failures.append(reward.failure)
            return found

    parts = {"length": (1 + 4 + 2) / 3 / 2}
    right, none, wrong = await scores("accuracy_reward")
    assert right == Score(1.0, True, parts, notes={"answer": "4", "tokens": "1"})
    assert none == Score.failed("exception")
    assert wrong == Score(0.0, False, parts, notes={"answer": "4", "tokens": "2"})
    shown = [{"why": "so", "upper": text} for text in ("4", "NONE", "77")]
    assert await scores("later") == [
        Score(2.0, True, {"own": 1.0, "correct": 0.5}, notes=notes) for notes in shown
    ]
    for function, said in (
        ("uneven", "log_extra('few') got 1 values for 3 responses"),
        ("not_finite", "loss is nan"),
    ):
        assert await scores(function) == [Score.failed("exception")] * 3
        assert said in failures[-1]


WHOLE = {
    "def reward_group(rows): return [{'reward': len(r['response']), 'n': len(rows)} for r in rows]": (),
    "async def reward(rows): return [{'reward': len(r['response']), 'n': len(rows)} for r in rows]": (),
    "def reward(completions, prompts): return [{'reward': len(c), 'n': len(prompts)} for c in completions]": (),
    "async def reward(response, group): return {'reward': len(response), 'n': len(group)}": (),
    "def reward(response, group): return {'reward': len(response), 'n': len(group)}": (),
}


@pytest.mark.parametrize("source", WHOLE)
async def test_a_reward_that_wants_it_sees_the_whole_group(tmp_path: Path, source: str):
    async with using(settings(tmp_path, source=source)) as reward:
        groups = await asyncio.gather(
            *(reward(PROBLEM, [Completed("x" * i) for i in range(size)]) for size in (3, 1, 5))
        )
    for scores, size in zip(groups, (3, 1, 5), strict=True):
        assert [(s.reward, s.parts) for s in scores] == [(i, {"n": size}) for i in range(size)]


async def test_one_bad_entry_of_a_group_leaves_the_others_scored(tmp_path: Path):
    source = "def reward_group(rows): return [None if r['response'] == 'a' else 1 for r in rows]"
    async with using(settings(tmp_path, source=source)) as reward:
        bad, good = await reward(PROBLEM, [Completed("a"), Completed("b")])
    assert (bad, good) == (Score.failed("exception"), Score(1.0, True))


async def test_a_list_of_another_length_is_no_score_of_anybody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    source = "def reward(completions): return [1.0]"
    async with using(settings(tmp_path, source=source)) as reward:
        assert await reward(PROBLEM, [*TWO]) == [Score.failed("exception")] * 2
        assert "gave 1 rewards for 2 responses" in reward.failure
        assert await reward(PROBLEM, []) == []


@pytest.mark.parametrize(
    "parameters",
    [
        "response, label",
        "response, prompt, label",
        "answer, x, label",
    ],
)
def test_a_reward_that_asks_for_what_is_not_there_is_refused(tmp_path: Path, parameters: str):
    """Three names of its own are taken by place, unless one of them is that of another place."""
    run = settings(tmp_path, source=f"import json\ndef reward({parameters}): return 1.0")
    with pytest.raises(TaskError, match=r"mine\.py:2: a reward asks for (x, )?label; there are "):
        scored(run)


@pytest.mark.parametrize("name", ["json", "random", "math_verify", "my.reward", "a-b", "areal_q"])
def test_a_file_named_as_a_module_hides_it_from_nobody(tmp_path: Path, name: str):
    file = tmp_path / f"{name}.py"
    file.write_text(WITH_CLASSES)
    before = sys.modules.get(name)
    scorer = load_reward(str(file), "reward")
    assert sys.modules.get(name) is before
    assert scorer.call(PROBLEM, [Completed("here")], 0) == 2.0


def test_a_coroutine_is_a_reward_in_a_loop_that_stays(tmp_path: Path):
    run = settings(
        tmp_path, f"reward.timeout_s={stretched(3.0)}", "reward.processes=1", source=ASYNC
    )
    right, wrong, raised, hung, after = scored(run, "4", "5", "raise", "hang", "4")
    assert right == Score(1.0, True, {"loops": 1.0})
    assert wrong == Score(0.0, False, {"loops": 1.0})
    assert (raised, hung) == (Score.failed("exception"), Score.failed("timeout"))
    assert after == right


MANY = """
import asyncio, os, sys, time
open_ones = most = 0

async def reward(response):
    global open_ones, most
    open_ones += 1
    most = max(most, open_ones)
    try:
        match response:
            case "together":
                while most < 200:
                    await asyncio.sleep(0.001)
            case "hang":
                await asyncio.sleep(3600)
            case "raise":
                raise TimeoutError("of the judge")
            case "sysexit":
                sys.exit(3)
            case "block":
                time.sleep(3600)
            case "exit":
                os._exit(3)
    finally:
        open_ones -= 1
    return {"reward": 1.0, "most": most, "pid": os.getpid()}
"""


def many(tmp_path: Path, timeout_s: float) -> Run:
    limit = f"reward.timeout_s={stretched(timeout_s)}"
    return settings(tmp_path, limit, "reward.processes=1", source=MANY)


def test_half_a_character_in_a_note_ends_no_process():
    """A model writes "\\ud83d", the reward decodes it, and the process could not send its answer."""
    assert as_score({"reward": 1.0, "\ud83d": "\ud83d"}).notes == {"?": "?"}
    assert failure_of(ValueError("\ud83d"), "")[0] == "raised ValueError: ?"


@pytest.mark.timeout(60)
async def test_two_hundred_coroutines_run_at_once_in_one_process(tmp_path: Path):
    """Each waits until 200 are open. The groups come one by one, as from a worker."""
    async with using(many(tmp_path, 20.0)) as reward:
        asked = (reward(PROBLEM, [Completed("together")] * 8) for _ in range(25))
        groups = await asyncio.gather(*asked)
    scores = [score for group in groups for score in group]
    assert [(s.valid, s.parts.get("most")) for s in scores] == [(True, 200.0)] * 200
    assert len({s.parts["pid"] for s in scores}) == 1


@pytest.mark.timeout(60)
async def test_a_coroutine_that_hangs_or_raises_costs_nobody_else(tmp_path: Path):
    async with using(many(tmp_path, 1.0)) as reward:
        texts = ["hang", "", "raise", "sysexit", ""]
        hung, one_, raised, exited, other = await reward(PROBLEM, [Completed(t) for t in texts])
        (after,) = await reward(PROBLEM, [Completed("")])
    assert (hung, raised, exited) == (Score.failed("timeout"), *[Score.failed("exception")] * 2)
    assert one_.parts["pid"] == other.parts["pid"] == after.parts["pid"]
    assert after.valid


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("bad", "cause"), [("block", "timeout"), ("exit", "killed")])
async def test_the_end_of_a_process_is_blamed_on_who_was_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str, cause: FailureCause
):
    """Of several that were open nobody knows which one blocked or ended it."""
    monkeypatch.setattr("areal_q.tasks.grading.isolated_reward._BLOCKED_S", 0.1)
    async with using(many(tmp_path, 0.5)) as reward:
        assert await reward(PROBLEM, [Completed(bad)]) == [Score.failed(cause)]
        scores = await reward(PROBLEM, [Completed("hang"), Completed(bad)])
        assert scores == [Score.failed("unavailable")] * 2
        (after,) = await reward(PROBLEM, [Completed("")])
    assert after.valid


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bad", ["hang", "sleep"])
async def test_a_reward_that_hangs_is_killed_and_stalls_nobody(tmp_path: Path, bad: str):
    run = settings(tmp_path, f"reward.timeout_s={stretched(4.0)}", "reward.processes=2")
    async with using(run) as reward:

        async def both_pids() -> set[int]:
            """Asks twice at once until both processes have answered: one may be fast enough for two."""
            found: set[int] = set()
            while len(found) < 2:
                scores = await asyncio.gather(*(one(reward, PROBLEM, "pid", 1) for _ in range(2)))
                found |= {int(score.reward) for score in scores}
            return found

        before = await both_pids()
        hanging = asyncio.create_task(one(reward, PROBLEM, bad, 1))
        await asyncio.sleep(0)  # it has taken one of the two processes
        for _ in range(3):
            assert (await one(reward, PROBLEM, "4", 1)).correct
        assert not hanging.done()
        assert await hanging == Score.failed("timeout")
        (killed,) = before - await both_pids()
        while not gone(killed):
            await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    """Ended; perhaps not waited for yet, where the machine's init does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


async def test_many_at_once_share_processes_and_get_their_own_scores(tmp_path: Path):
    async with using(settings(tmp_path)) as reward:
        responses = ["4", "5", "raise"] * 40
        scores = await asyncio.gather(*(one(reward, PROBLEM, r, 1) for r in responses))
        assert [s.correct for s in scores] == [r == "4" for r in responses]
        assert [s.valid for s in scores] == [r != "raise" for r in responses]


async def test_scores_do_not_wait_for_turns_of_the_event_loop(tmp_path: Path):
    async with using(settings(tmp_path, "reward.processes=1")) as reward:  # begun by `start`
        scores = asyncio.gather(*(one(reward, PROBLEM, "4", 1) for _ in range(64)))
        turns = 0
        while not scores.done():
            time.sleep(stretched(0.02))  # a step of an engine
            await asyncio.sleep(0)
            turns += 1
        assert turns < 64, turns
        assert all(score.correct for score in await scores)


async def test_a_cancelled_score_leaves_no_reply_for_the_next_question(tmp_path: Path):
    run = settings(tmp_path, f"reward.timeout_s={stretched(3.0)}", "reward.processes=1")
    async with using(run) as reward:
        waiting = asyncio.create_task(one(reward, PROBLEM, "sleep", 1))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert (await one(reward, PROBLEM, "4", 1)).correct


def test_no_process_outlives_close_or_the_death_of_its_parent(tmp_path: Path):
    pids = [int(s.reward) for s in scored(settings(tmp_path), "pid")]
    assert all(map(gone, pids))

    program = f"""
import asyncio
from areal_q.config import load
from areal_q.tasks import Completed, Problem, build_reward

async def main():
    reward = build_reward(load(None, ['reward.path="{tmp_path / "mine.py"}"']))
    await reward.start()
    (score,) = await reward(Problem("p", "4"), [Completed("pid")])
    print(int(score.reward), flush=True)
    await reward(Problem("p", "4"), [Completed("hang")])

asyncio.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not gone(pid)
        parent.kill()
    while not gone(pid):
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import nowhere_to_be_found", "ModuleNotFoundError"),
        ("def rewards(): pass", "no function 'reward'"),
        ("reward = 3", "no function 'reward'"),
        ("def reward(:", "SyntaxError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_named_before_any_work(
    tmp_path: Path, source: str, complaint: str
):
    with pytest.raises(TaskError, match=rf"mine\.py(:1)?: .*{complaint}"):
        scored(settings(tmp_path, source=source))


def test_a_missing_file_is_named_before_anything_starts(tmp_path: Path):
    with pytest.raises(TaskError, match=r"gone\.py: no such Python file"):
        check_reward(load(None, [f'reward.path="{tmp_path}/gone.py"']))
    check_reward(load(None))


@pytest.mark.parametrize(
    ("given", "score"),
    [
        (1, Score(1.0, True)),
        (True, Score(1.0, True)),
        (0.99, Score(0.99, False)),
        ({"reward": 2, "correct": 0, "a": 3}, Score(2.0, False, {"a": 3.0})),
        ({"reward": 1, "why": "fine"}, Score(1.0, True, notes={"why": "fine"})),
        ({"reward": 1, "why": "x" * 20_000}, Score(1.0, True, notes={"why": "x" * 16_383 + "…"})),
    ],
)
def test_what_a_reward_may_return(given: object, score: Score):
    assert as_score(given) == score


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "reward is None, no number"),
        ([1.0], "reward is [1.0], no number"),
        ("x", "reward is 'x', no number"),
        (10**400, "no number"),
        (numpy.array([1.0]), "reward is array([1.]), no number"),
        (torch.ones(2), "reward is tensor([1., 1.]), no number"),
        ({"reward": 1, "a": None}, "a is None, no number"),
        (float("inf"), "reward is inf"),
        (-1e300, "reward is -1e+300"),
        ({}, "the table has no `reward`"),
        ({"a": 1}, "the table has no `reward`"),
        ({"reward": float("nan")}, "reward is nan"),
    ],
)
def test_what_a_reward_may_not_return(given: object, said: str):
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        as_score(given)


def test_a_task_of_ones_own_is_one_file_and_one_line(tmp_path: Path):
    file = tmp_path / "doubling.py"
    file.write_text(
        "def problems():\n"
        "    return [(f'{n}*2=', str(2 * n)) for n in range(100)]\n"
        "def reward(prompt, response, answer):\n"
        "    return float(response == answer)\n"
    )
    run = load(None, [f'task = {{type = "python", path = "{file}"}}'])
    task = build_task(run.task)
    assert (len(task.train), len(task.heldout)) == (90, 10)
    assert task.heldout[0] == Problem("90*2=", "180")
    assert scored(run, "4", "5") == [Score(1.0, True), Score(0.0, False)]
    for rows in ("[1]", "[('1*2=', '2', '')]", "[('1*2=', 2)]", "[{'prompt': '1*2='}]"):
        file.write_text(f"def problems():\n    return {rows}\n")
        with pytest.raises(
            TaskError, match=r"doubling\.py: problems\(\)\[0\]: must be a pair, or a table with"
        ):
            build_task(run.task)
    file.write_text("def problems():\n    return [('1*2=', '2'), (' ', '')]\n")
    with pytest.raises(TaskError, match=r"doubling\.py: problems\(\)\[1\]: the prompt is empty"):
        build_task(run.task)


# math-verify


def mathematics(*more: str) -> Run:
    return load(
        None, ["model.type=pretrained", "model.path=x", "task.type=math", "task.path=x", *more]
    )


@pytest.mark.timeout(60)
async def test_equal_mathematics_is_rewarded_and_what_hangs_is_not():
    cases = [
        (r"\frac{1}{2}", r"so \boxed{0.5}", True),
        ("5", r"\boxed{5}", True),
        ("(1,2)", r"\boxed{(1, 2)}", True),
        ("x^2+1", r"\boxed{1+x^2}", True),
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", True),
        ("7", r"\boxed{8} not \boxed{9}", False),
        ("7", "7", False),
        ("7", r"\boxed{}", False),
        ("7", "\\boxed{" + "1+" * 5000 + "1}", False),
        ("7", r"\boxed{9999^{9999^{9999}}}", False),
    ]
    async with using(
        mathematics(f"reward.timeout_s={stretched(3.0)}", "reward.processes=1")
    ) as reward:
        scores = [
            await one(reward, Problem("p", answer), response, 1) for answer, response, _ in cases
        ]
        assert [s.correct for s in scores] == [correct for _, _, correct in cases]
        assert [s.parts for s in scores] == [{}] * 9 + [{"error": 1.0, "timeout": 1.0}]


def test_without_math_verify_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    gone = SimpleNamespace(find_spec=lambda name: None)
    monkeypatch.setattr("areal_q.tasks.grading.graders.importlib.util", gone)
    with pytest.raises(ConfigError, match=r"pip install .*\[math\]"):
        check_reward(mathematics())


# Parts


async def test_parts_add_up_with_their_weights():
    run = load(
        None,
        [
            "reward.correct=2.0",
            "reward.format=0.5",
            "reward.style=hash",
            "reward.length=0.25",
            "reward.overlong={max_tokens=10, cache_tokens=4}",
            "rollout.sampling.max_tokens=10",
        ],
    )
    async with using(run) as reward:
        assert await one(reward, Problem("p", "4"), "4", 2) == Score(
            2.0 + 0.25 * 0.8, True, {"format": 0.0, "length": 0.8, "overlong": 0.0}
        )
        assert await one(reward, Problem("p", "4"), "no\n#### 5", 8) == Score(
            0.5 - 0.5, False, {"format": 1.0, "length": 0.0, "overlong": -0.5}
        )


def test_with_default_settings_the_reward_is_the_score():
    assert scored(load(None), "4", "5") == [Score(1.0, True), Score(0.0, False)]


def test_an_error_has_a_defined_reward_whatever_the_weights(tmp_path: Path):
    run = settings(tmp_path, "reward.overlong={max_tokens=4, cache_tokens=2}", "reward.format=1.0")
    assert scored(run, "raise")[0].reward == 0.0


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(1, 0.0), (12, 0.0), (13, -0.25), (14, -0.5), (16, -1.0), (20, -1.0)]
)
def test_overlong_penalty_falls_linearly_over_the_cache(tokens: int, penalty: float):
    # max 16, cache 4: free up to 12, then (12 - L)/4, -1 from 16 on
    assert overlong_penalty(tokens, Overlong(max_tokens=16, cache_tokens=4)) == penalty


@pytest.mark.parametrize(
    ("style", "text", "fits"),
    [
        ("boxed", r"so \boxed{3}", True),
        ("boxed", r"\boxed{}", False),
        ("boxed", r"\boxed{3", False),
        ("think", "<think>a < b\n</think>\n<answer>3</answer>", True),
        ("think", "<think>a</think><answer>3</answer> and more", False),
        ("think", "<think>a < b</think>\n<answer>x < 4</answer>", True),
        ("think", "<think>a</think><answer>1</answer><answer>2</answer>", False),
        ("think", "<think>a</think><think>b</think><answer>3</answer>", False),
        ("think", "<answer>3</answer>", False),
        ("hash", "It is\n#### 1,200.5", True),
        *(
            ("hash", f"so\n#### {number}", True)
            for number in ("–5", "- 5", "−5", "-(5)", ".5", "1 000", "1e3", "$5.", "-$5", "3/4")
        ),
        *(
            ("hash", f"#### {text}", False)
            for text in ("5 dollars", "about 5", "12:30", "10 - 5", "x = 5", "1_000", "", "5 6")
        ),
        ("hash", "5", False),
        ("hash", "#### 3\nor so", False),
        ("hash", "", False),
    ],
)
def test_the_styles_of_responses(style: str, text: str, fits: bool):
    assert STYLES[style](text) is fits


TAGS = ["<think>", "</think>", "<answer>", "</answer>", "a", "<", "\n", "####", "1", "{", "}"]


@pytest.mark.parametrize("style", STYLES)
@given(text=st.lists(st.sampled_from(TAGS)).map("".join))
def test_a_style_is_a_yes_or_no_for_any_text(style: str, text: str):
    assert STYLES[style](text) in (True, False)


def test_a_task_without_its_reward_is_named_before_its_problems(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("def problems(): return [('1+1=', '2')] * 20\n")
    run = load(None, ["task.type=python", f'task.path="{file}"'])
    with pytest.raises(TaskError, match="no function 'reward'"):
        preflight(run)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], None),
        (["reward.path=mine.py"], {"4": True, " 4": True, "5": False}),
        (["reward.path=mine.py", "rollout.sampling.stop=['\\n']"], {"4\n": True, "5\n": False}),
        (["task.type=python", "task.path=mine.py"], {"4": True, "4 \n": True, "four": None}),
        (
            ["task.type=math", *PRETRAINED, "reward.path=mine.py"],
            {"4": True, "\\boxed{4}": None},
        ),
        (
            ["task.type=gsm8k", *PRETRAINED, "reward.path=mine.py"],
            {"it is 4": True, "it is 5": False},
        ),
    ],
)
def test_a_users_reward_has_a_second_opinion(settings: list[str], said: dict[str, bool] | None):
    opinion = second_opinion(load(None, settings))
    told = None if opinion is None else {text: opinion(PROBLEM, text) for text in said or {}}
    assert told == said
