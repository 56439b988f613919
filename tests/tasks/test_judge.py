"""A judge over a server that misbehaves: a response gets a verdict or is left out; no failure is a reward."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from helpers.commands import stretched
from helpers.openai_server.stand_in import Server, reply

from areal_q.checks.settings import preflight
from areal_q.config import load
from areal_q.config.tasks import Judge
from areal_q.errors import ConfigError, RewardUnavailable, TaskError
from areal_q.tasks import Completed, Problem, Score, build_reward, check_reward
from areal_q.tasks.grading.judge import AskedJudge, asked_of_judge

PROBLEM = Problem("2+2=", "4", columns='{"rubric": "be brief", "level": 3}')
QUICK: dict[str, Any] = {"model": "wise", "retry_pause_s": 0.001, "retries": 2}


GOOD = reply("Right, and brief.\n**Score: 7**")
OUTCOMES = {
    "at once": ([GOOD], 0.7),
    "the last score": ([reply("Score: 3? No.\nscore = 10/10")], 1.0),
    "a fraction": ([reply("Score: 2.5")], 0.25),
    "after two errors": ([web.Response(status=500), web.Response(status=503), GOOD], 0.7),
    "after too many requests": ([web.Response(status=429, headers={"Retry-After": "0"}), GOOD], 0.7),
    "after nonsense": ([web.Response(text="<html>"), web.json_response([1]), GOOD], 0.7),
    "after no score": ([reply("I'd rather not."), reply(None), GOOD], 0.7),
    "after a reply cut off": ([reply("Score: 1", finish_reason="length"), GOOD], 0.7),
    "after a hang": (["hang", GOOD], 0.7),
    "after hanging up": (["hang up", GOOD], 0.7),
    "never, of errors": ([web.Response(status=500)] * 3, "500"),
    "never, refused": ([web.Response(status=401, text="bad key")], "401 bad key"),
    "never, elsewhere": ([web.Response(status=302, headers={"Location": "/elsewhere"})], "302"),
    "never, of hangs": (["hang"] * 3, "no answer in 0.5 s"),
    "never, without a score": ([reply("Good!")] * 3, "no score"),
    "never, cut off": ([reply("Score: 1", finish_reason="length")] * 3, "cut off at max_tokens = 512"),
    "never, too high": ([reply("Score: 11")] * 3, "11 is not between 0 and 10"),
    "never, below 0": ([reply("Score: -3")] * 3, "-3 is not between 0 and 10"),
    "never, not a number": ([reply("Score: 1" + "0" * 400)] * 3, "inf is not between"),
    "never, endless": (["endless"] * 3, "more than 1048576 bytes"),
}  # fmt: skip
"""What the server does, one request after the other, and the score that results, or what is said"""


def ask(server: Server, *responses: str, **settings: Any) -> tuple[AskedJudge, list[Any]]:
    """Returns the judge, and its verdicts on responses that are asked about together."""

    async def use(url: str) -> Any:
        judge = AskedJudge(msgspec.convert(QUICK | {"url": url} | settings, Judge))
        found = await asyncio.gather(
            *(judge.score(PROBLEM, [Completed(text)], 0) for text in responses),
            return_exceptions=True,
        )
        if judge._session:
            await judge._session.close()
        return judge, found

    return asyncio.run(server.told(use))


@pytest.mark.parametrize("name", OUTCOMES)
def test_response_gets_a_verdict_or_is_left_out(name):
    doings, expected = OUTCOMES[name]
    server = Server(*doings)
    hangs = "hang" in doings
    _, (found,) = ask(server, "4", timeout_s=0.5 if name == "never, of hangs" else stretched(2))
    assert len(server.asked) == len(doings) or hangs
    if isinstance(expected, float):
        assert found["reward"] == expected and "core" in found["judge"]
    else:
        assert isinstance(found, RewardUnavailable) and expected in str(found)


def test_judge_is_asked_by_the_prompt_of_the_settings(tmp_path, monkeypatch, dead_proxy):
    key = tmp_path / "key"
    key.write_text("sesame\n")
    monkeypatch.setenv("AREAL_Q_JUDGE_TOKEN_FILE", str(key))
    server = Server(GOOD)
    ask(server, "{answer}", prompt="{prompt}|{response}|{answer}|{rubric}|{level}|{}", max_tokens=9)
    assert server.asked == [
        {
            "model": "wise",
            "messages": [{"role": "user", "content": "2+2=|{answer}|4|be brief|3|{}"}],
            "temperature": 0.0,
            "max_tokens": 9,
        }
    ]
    assert server.keys == ["Bearer sesame"]


def test_unknown_field_of_the_prompt_is_named():
    cfg = Judge(url="http://h", model="m", prompt="{response} {rubrik}")
    with pytest.raises(TaskError, match=r"no \{rubrik\}; there are rubric, level, prompt"):
        asked_of_judge(cfg, PROBLEM, "4")


JUDGED = '{ url = "http://h", model = "m", prompt = "{response} {rubric}" }'
ROWS = 'type = "jsonl", prompt = "question", answer = "reference"'


@pytest.mark.parametrize(
    "settings",
    [
        ["task.type=arithmetic"],
        [f'task={{ {ROWS}, path = "FILE" }}'],
        [f'task={{ {ROWS}, path = "good", heldout = "FILE" }}'],
        [f'task={{ {ROWS}, path = "good" }}', 'eval.sets={ hard = { path = "FILE" } }'],
        [
            "task.type=mix",
            f'task.sources.a.task={{ {ROWS}, path = "good" }}',
            f'task.sources.b.task={{ {ROWS}, path = "FILE" }}',
        ],
    ],
)
def test_prompt_that_a_source_cannot_fill_is_refused(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    columns = {"bare": {}, "good": {"rubric": "be brief"}, "other": {"rubric": "be kind"}}
    for i, name in enumerate(columns):
        rows = [{"question": f"{i}{n}+2=", "reference": "4"} | columns[name] for n in range(20)]
        Path(name).write_text("\n".join(map(json.dumps, rows)))
    for name in ("other", "bare") if "FILE" in str(settings) else ("bare",):
        table = [one.replace("FILE", name) for one in settings]
        run = load(None, ["model.type=small", f"reward.judge={JUDGED}", *table])
        if name == "other":
            preflight(run)
            continue
        with pytest.raises(TaskError, match=r"reward.judge.prompt: no \{rubric\}"):
            preflight(run)


def test_same_content_is_asked_once():
    server = Server(GOOD)
    _, found = ask(server, *["4"] * 20, "5")
    assert [verdict["reward"] for verdict in found] == [0.7] * 21
    assert len(server.asked) == 2


def test_failed_verdict_is_not_remembered():
    server = Server(web.Response(status=400), GOOD)

    async def use(url: str) -> list[float]:
        judge = AskedJudge(Judge(url=url, model="m", retry_pause_s=0.001))
        with pytest.raises(RewardUnavailable):
            await judge.verdict("4")
        found = [(await judge.verdict("4")).score for _ in range(2)]
        await judge._session.close()
        return found

    assert asyncio.run(server.told(use)) == [0.7, 0.7]
    assert len(server.asked) == 2


def test_verdict_that_fails_unheard_is_not_remembered():
    server = Server(web.Response(status=400), GOOD)

    async def use(url: str) -> float:
        judge = AskedJudge(Judge(url=url, model="m"))
        given_up = asyncio.create_task(judge.verdict("4"))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait(judge._verdicts.values())
        found = await judge.verdict("4")
        await judge._session.close()
        return found.score

    assert asyncio.run(server.told(use)) == 0.7


def test_as_many_requests_are_open_as_there_are_connections():
    server, texts = Server(GOOD, together=101), map(str, range(101))
    _, found = ask(server, *texts, connections=101, retries=0, timeout_s=stretched(10))
    assert [isinstance(one, dict) for one in found] == [True] * 101, found


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ({"max_calls": 3}, "max_calls: all 3 are spent"),
        ({"max_total_tokens": 25}, "max_total_tokens: 30 of 25 are spent"),
    ],
)
def test_budget_ends_the_asking(budget, said):
    server = Server(GOOD)
    judge, found = ask(server, *map(str, range(8)), connections=1, **budget)
    assert len(server.asked) == judge.calls == 3
    assert [isinstance(one, dict) for one in found] == [True] * 3 + [False] * 5
    assert all(isinstance(one, RewardUnavailable) and said in str(one) for one in found[3:])


def test_retry_waits_as_long_as_the_server_asks(monkeypatch):
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr("areal_q.tasks.grading.judge.asyncio.sleep", note)
    waits = [web.Response(status=429, headers={"Retry-After": s}) for s in ("7", "9999", "soon")]
    ask(Server(*waits, GOOD), "4", retries=3, retry_pause_s=1.0)
    bounds = [(7, 9), (60, 75), (4, 5)]
    long = [pause for pause in pauses if pause >= 1]
    assert [low <= p <= high for p, (low, high) in zip(long, bounds, strict=True)] == [True] * 3


def scored(server: Server, *texts: str, **settings: Any) -> list[Score]:
    """Returns the scores of a run's reward, which asks the server from a process of its own."""

    async def use(url: str) -> list[Score]:
        table = {"reward.judge.url": url, "reward.judge.model": "wise", "task.type": "arithmetic"}
        table |= {"reward.judge.retry_pause_s": 0.001, "reward.judge.retries": 1} | settings
        run = load(None, [f"{name}={value}" for name, value in table.items()])
        check_reward(run)
        reward = build_reward(run)
        await reward.start()
        try:
            return await reward(PROBLEM, [Completed(text) for text in texts])
        finally:
            await reward.close()

    return asyncio.run(server.told(use))


def test_verdict_of_a_run_is_its_reward_and_in_its_notes():
    found = scored(Server(GOOD), "4", "5", **{"reward.correct": 2.0})
    assert [(one.reward, one.correct, one.valid) for one in found] == [(1.4, False, True)] * 2
    assert found[0].notes == {"judge": "Right, and brief.\n**Score: 7**"}
    best = scored(Server(reply("Score: 10")), "4")
    assert best[0].correct


@pytest.mark.parametrize("on_error", ["drop", "retry", "zero"])
def test_failure_of_a_judge_is_never_a_reward(on_error):
    server = Server(web.Response(status=500), reply("no"), "hang")
    table = {"zero_on": '["timeout", "exception", "killed"]', "on_error": on_error}
    table |= {"retry_pause_s": 0.001, "judge.timeout_s": 0.5, "judge.connections": 1}
    found = scored(server, "4", "5", "6", **{f"reward.{name}": table[name] for name in table})
    assert [(one.valid, one.failure) for one in found] == [(False, "unavailable")] * 3
    assert 3 < len(server.asked) <= 6  # each response once, and once more: reward.judge.retries


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"reward.judge.url": "http://me:secret@host/v1"}, "reward.judge.url"),
        ({"reward.judge.prompt": "How good?"}, r"reward.judge.prompt: \{response\} is not in it"),
        ({"reward.judge.pattern": "'score'"}, "reward.judge.pattern: one group"),
        ({"reward.judge.pattern": "'('"}, "reward.judge.pattern: missing"),
        ({"reward.path": "mine.py"}, "reward.judge, reward.path"),
    ],
)
def test_judge_that_cannot_work_is_refused(settings, said):
    table = {"reward.judge.url": "http://host/v1", "reward.judge.model": "m"} | settings
    with pytest.raises(ConfigError, match=said):
        check_reward(load(None, [f"{name}={value}" for name, value in table.items()]))
