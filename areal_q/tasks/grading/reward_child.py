"""The process that runs a slow reward or a user's own.

It reads questions from stdin, writes answers to its original stdout, and ends when stdin is closed. It scores
one response after the other, or many at once where the reward is a coroutine. Its supervisor
(areal_q/system/processes.py) ends it, and all processes that the reward started.
"""

import asyncio
import importlib
import inspect
import os
import socket
import tomllib
from collections.abc import Callable
from typing import Any

import msgspec

from areal_q.config.tasks import Judge
from areal_q.errors import ConfigError, TaskError
from areal_q.plugins import RAISED
from areal_q.sandbox.confine import NotIsolated, confine
from areal_q.system.command import accept_any_text
from areal_q.system.processes import limit_memory, others_alive
from areal_q.tasks.grading.child_process import failure_of, frame, private_socket
from areal_q.tasks.grading.graders import GRADERS, check_extra, is_confined
from areal_q.tasks.grading.judge import AskedJudge
from areal_q.tasks.grading.own_reward import Scorer, load_reward, scores_of
from areal_q.tasks.grading.reward_process import TIMED_OUT, Answer, Ask, Graded, RewardReady

_asks = msgspec.msgpack.Decoder(Ask)


def main(kind: str, name: str, function: str, memory_mib: str, timeout_s: str) -> None:
    parent = private_socket()
    accept_any_text()  # a reward may print what the model wrote
    try:
        scorer = SCORERS[kind](name, function)
    except (ConfigError, TaskError) as error:
        ready = RewardReady(error=str(error), extra_missing=isinstance(error, ConfigError))
        parent.sendall(frame(ready))
        return
    if is_confined((kind, name, function)):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)  # a print to a log would fail there
        os.dup2(nothing, 2)
        try:
            confine(int(memory_mib), None, site_packages=True)
        except (NotIsolated, OSError) as error:
            parent.sendall(frame(RewardReady(error=f"grader {name!r}: {error}")))
            return
    else:
        limit_memory(int(memory_mib) << 20)
    ready = RewardReady(
        ids=scorer.ids, group=scorer.group, at_once=scorer.at_once, whole=scorer.whole
    )
    parent.sendall(frame(ready))
    if scorer.at_once:
        asyncio.run(_many(scorer, parent, float(timeout_s)))
    else:
        _one_by_one(scorer, parent)


def _file(path: str, call: str) -> Scorer:
    return load_reward(path, **tomllib.loads(call))


def _grader(name: str, _: str) -> Scorer:
    check_extra(name)
    if needs := GRADERS[name].needs:
        importlib.import_module(
            needs
        )  # imported now, so that it does not count against the first timeout
    score = GRADERS[name].score
    return Scorer(lambda problem, responses, index: score(problem, responses[index].text))


def _judge(settings: str, _: str) -> Scorer:
    judge = AskedJudge(msgspec.json.decode(settings, type=Judge))
    return Scorer(judge.score, at_once=True)


SCORERS: dict[str, Callable[[str, str], Scorer]] = {
    "file": _file,
    "grader": _grader,
    "judge": _judge,
}
"""What loads a reward, by the first argument"""


def _one_by_one(scorer: Scorer, parent: socket.socket) -> None:
    """Answers until the parent has gone. What a function gives that is a coroutine all the same runs in one
    event loop, to which a client that the file keeps is bound."""
    questions, loop = parent.makefile("rb"), asyncio.Runner()
    while size := questions.read(4):
        ask = _asks.decode(questions.read(int.from_bytes(size, "little")))
        try:
            given = scorer.call(ask.problem, ask.responses, ask.index)
            given = loop.run(given) if inspect.iscoroutine(given) else given
            graded = _graded(scorer, ask, given)
        except RAISED as error:  # sympy may raise anything, too
            graded = [_failed(error, scorer)]
        parent.sendall(frame(Answer(ask.number, graded)))


async def _many(scorer: Scorer, parent: socket.socket, timeout_s: float) -> None:
    """Answers all questions as they come, each in a task of its own, until the parent has gone."""
    questions, answers = await asyncio.open_connection(sock=parent)
    at_first = others_alive()  # what the file itself has started

    async def one(ask: Ask) -> None:
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                given = await scorer.call(ask.problem, ask.responses, ask.index)
            graded = _graded(scorer, ask, given)
        except RAISED as error:
            late = limit.expired()
            graded = [Graded(error=TIMED_OUT, cause="timeout") if late else _failed(error, scorer)]
        last = limit.expired() and bool(others_alive() - at_first)
        answers.write(frame(Answer(ask.number, graded, last)))

    async with asyncio.TaskGroup() as tasks:
        try:
            while True:
                size = int.from_bytes(await questions.readexactly(4), "little")
                tasks.create_task(one(_asks.decode(await questions.readexactly(size))))
        except (asyncio.IncompleteReadError, ConnectionError):
            os._exit(0)  # nobody waits for what is still open


def _graded(scorer: Scorer, ask: Ask, given: Any) -> list[Graded]:
    count = len(ask.responses) if scorer.whole else 1
    return [
        _failed(found, scorer) if isinstance(found, Exception) else Graded(found)
        for found in scores_of(given, count, scorer.whole)
    ]


def _failed(error: BaseException, scorer: Scorer) -> Graded:
    """Returns why there is no score: of code of the user's own, with their line."""
    said, cause = failure_of(error, scorer.path)
    return Graded(error=said, cause=cause)
