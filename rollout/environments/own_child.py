"""The process that has loaded an environment of the user's own, and forks one for each episode.

    worker ──number and a socket──▶ this process ──fork──▶ an episode ◀── questions over that socket ── worker
           ──number alone─────────▶ kills it

The file is loaded once, whatever its imports take. An episode has its process to itself: memory, random numbers
and a crash are its own. The supervisor (areal_q/system/processes.py) ends all of them. Imports no torch.
"""

import os
import random
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn

import msgspec

from areal_q.errors import ConfigError, TaskError
from areal_q.messages.trajectories import FailureCause
from areal_q.plugins import RAISED
from areal_q.system.command import accept_any_text
from areal_q.system.processes import limit_memory
from areal_q.tasks.base import Completed, Problem, Score, Tool
from areal_q.tasks.environments.own_class import OwnEnvironment, OwnEpisode, load_environment
from areal_q.tasks.grading.child_process import failure_of, frame, private_socket

NUMBER_BYTES = 8
"""Size of an episode's number on the socket to the worker"""
_CLOSE_S = 5.0
"""Seconds that the user's `close` may take"""


class EnvironmentReady(msgspec.Struct, frozen=True):
    """The first frame: what the user's class is, or why it cannot be used."""

    steps: bool = False
    scores: bool = False
    tools: list[Tool] = []
    error: str = ""


class BeginAsked(msgspec.Struct, frozen=True, tag="begin"):
    problem: Problem
    seed: int


class Call(msgspec.Struct, frozen=True, tag="call"):
    name: str
    arguments: str


class StepAsked(msgspec.Struct, frozen=True, tag="step"):
    text: str


class JudgeAsked(msgspec.Struct, frozen=True, tag="judge"):
    problem: Problem
    completed: Completed


Question = BeginAsked | Call | StepAsked | JudgeAsked


class EnvironmentReply(msgspec.Struct, frozen=True):
    """The answer to a question, or, with a cause, why there is none."""

    text: str = ""
    done: bool = False
    reward: float = 0.0
    """The reward of this turn"""
    score: Score | None = None
    cause: FailureCause | None = None


_questions = msgspec.msgpack.Decoder(Question)


def main(path: str, settings: str, memory_mib: str) -> None:
    worker = private_socket()
    accept_any_text()  # an environment may print what the model wrote
    try:
        own = load_environment(path, msgspec.json.decode(settings))
    except (ConfigError, TaskError) as error:
        worker.sendall(frame(EnvironmentReady(error=str(error))))
        return
    tools = [tool.described for tool in own.tools.values()]
    worker.sendall(frame(EnvironmentReady(own.steps, own.scores, tools)))
    sys.stdout.flush()  # what the file has printed is not printed again by each episode
    episodes: dict[int, int] = {}
    while True:
        data, sockets, _, _ = socket.recv_fds(worker, NUMBER_BYTES, 1, socket.MSG_WAITALL)
        if len(data) < NUMBER_BYTES:
            return  # the worker has gone
        _bury(episodes)
        number = int.from_bytes(data, "little")
        if not sockets:
            if number in episodes:  # it has not been waited for, so that its id is no other's
                os.killpg(episodes[number], signal.SIGKILL)
            continue
        pid = os.fork()
        if pid == 0:
            worker.close()
            os.setpgid(0, 0)
            _play(own, socket.socket(fileno=sockets[0]), msgspec.json.decode(settings), memory_mib)
        with suppress(OSError):  # each of the two does this, as nobody knows which comes first
            os.setpgid(pid, pid)
        os.close(sockets[0])
        episodes[number] = pid


def _bury(episodes: dict[int, int]) -> None:
    """Forgets the processes of `episodes` that have ended, and ends what they started and left behind: as long
    as one has not been waited for, its group's id is no other's."""
    for number, pid in [*episodes.items()]:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            del episodes[number]


def _play(
    own: OwnEnvironment, worker: socket.socket, settings: dict[str, object], memory_mib: str
) -> NoReturn:
    """Answers the questions of one episode until the worker closes its socket, and ends this process."""
    limit_memory(int(memory_mib) << 20)
    questions, episode = worker.makefile("rb"), None
    with suppress(OSError):  # the worker has gone
        while size := questions.read(4):
            question = _questions.decode(questions.read(int.from_bytes(size, "little")))
            try:
                if isinstance(question, BeginAsked):
                    _seed(question.seed)
                    episode = OwnEpisode(own, settings)
                assert episode is not None
                reply = _answer(episode, question)
            except RAISED as error:
                said, cause = failure_of(error, own.path)
                reply = EnvironmentReply(said, cause=cause)
            worker.sendall(frame(reply))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _CLOSE_S)
    try:
        if episode is not None:
            episode.close()
    except RAISED as error:
        print("close:", failure_of(error, own.path)[0], file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _answer(episode: OwnEpisode, question: Question) -> EnvironmentReply:
    match question:
        case BeginAsked(problem, seed):
            return EnvironmentReply(episode.reset(problem, seed))
        case Call(name, arguments):
            return EnvironmentReply(episode.call(name, arguments))
        case StepAsked(text):
            found = episode.step(text)
            return EnvironmentReply(found.observation, found.done, found.reward, found.score)
        case JudgeAsked(problem, completed):
            return EnvironmentReply(score=episode.reward(problem, completed))


def _seed(seed: int) -> None:
    """Seeds what every fork has inherited in the same state."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
