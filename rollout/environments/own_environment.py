"""The environment that is a class of the user's own: the model draws a turn, the class answers it, and so on.

    reset ─▶ prompt ─▶ [engine: a turn ─▶ the tools that it calls, or step ─▶ what they give, mask 0] ─▶ reward

Turns append: what was drawn is never decoded and encoded again. An episode is played in a process of its own
(own_process.py). It begins again with another worker if this one ends, since its state is in that process.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

from areal_q.config import PythonEnvironment, Run
from areal_q.config.tasks import chat_of
from areal_q.errors import RecordError, TaskError
from areal_q.messages import Ticket
from areal_q.tasks import Problem, Score, unscored
from areal_q.tasks.base import Message
from areal_q.tasks.environments.tools import check_tools
from rollout.engines.base import Completion
from rollout.environments.base import Environment, Response
from rollout.environments.engine_client import EngineClient
from rollout.environments.own_child import BeginAsked, Call, EnvironmentReady, JudgeAsked, StepAsked
from rollout.environments.own_process import EpisodeFailed, OwnProcess, OwnProcesses
from rollout.reply_formats.reader import ReplyReader

logger = logging.getLogger(__name__)
LONGEST_TOKEN = 256
"""Characters of a token at most: what is far too long for the room is not tokenised, which takes seconds"""


class OwnTurns(Environment):
    """An Environment (rollout/environments/base.py), between `start` and `close`."""

    def __init__(self, run: Run, client: EngineClient, cfg: PythonEnvironment) -> None:
        self._client, self._tokenizer, self._cfg = client, client.tokenizer, cfg
        self._chat = chat = chat_of(run.task)
        self._reader = ReplyReader(client.tokenizer, chat.reply_format if chat else "auto")
        self._reward = run.reward
        self._own, self._processes = EnvironmentReady(), OwnProcesses(cfg)
        self._failures = 0

    async def start(self) -> None:
        """Raises TaskError for a class that cannot be used, or whose tools the model's chat template leaves
        out or calls in a format that is not known."""
        self._own = await self._processes.start()
        try:
            check_tools(self._own.tools, self._tokenizer, self._cfg, self._chat)
        except TaskError:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends the processes."""
        await self._processes.close()

    async def __call__(self, ticket: Ticket, responses: list[Response]) -> None:
        async with asyncio.TaskGroup() as group:
            played = [
                group.create_task(self._play(ticket, index, place))
                for index, place in enumerate(responses)
            ]
        responses[:] = [one.result() for one in played]

    async def _play(self, ticket: Ticket, index: int, place: Response) -> Response:
        """Returns one response. `place` is marked as ended with it, so that the worker claims others, and stays
        empty: half an episode is of no use to another worker."""
        response = Response()
        try:
            async with self._processes.episode() as process:
                await self._turns(ticket, index, response, process)
        except EpisodeFailed as failed:
            if not response.drawn:  # a record has a token at least
                response.prompt = self._prompt(ticket, "")
                stops = self._client.stop_ids
                await self._client.generate_turn(ticket, index, response, stops, 1)
            response.score = self._failed(failed, ticket)
            response.turn_rewards.clear()
        except TaskError as error:
            raise RecordError(f"{self._cfg.path}: {error}") from error
        response.ended = place.ended = True
        return response

    async def _turns(
        self, ticket: Ticket, index: int, response: Response, process: OwnProcess
    ) -> None:
        problem, most = Problem.of_ticket(ticket), ticket.sampling.max_tokens
        said = (await process.ask(BeginAsked(problem, ticket.seed + index))).text
        too_much = RecordError(f"{self._cfg.path}: reset gave more than max_given_tokens")
        if len(said) > LONGEST_TOKEN * self._cfg.max_given_tokens:
            raise too_much
        response.prompt = self._prompt(ticket, said)
        room = self._cfg.max_given_tokens + len(ticket.prompt_ids.numpy())
        room -= len(response.context(ticket))
        if room < 0:
            raise too_much
        stops = self._client.stop_ids | self._reader.ends
        while True:
            left = most - response.drawn
            done = await self._client.generate_turn(ticket, index, response, stops, left)
            answers, calls = await self._answers(ticket, response, done, process)
            if not answers:
                break
            ended = int(done.response_ids[-1]) in stops
            if sum(len(answer["content"]) for answer in answers) > LONGEST_TOKEN * room:
                response.finish_reason = "length"
                break
            given = self._tokenizer.encode_turn(answers, ended, calls=calls)
            room -= len(given)
            if room < 0 or response.drawn >= most:
                response.finish_reason = "length"
                break
            response.add_given(given, response.spans[-1])
        if self._own.scores and not self._own.steps:
            completed = response.completed(self._tokenizer, ticket.sampling)
            response.score = (await process.ask(JudgeAsked(problem, completed))).score

    def _prompt(self, ticket: Ticket, said: str) -> list[int] | None:
        """Returns the prompt with the tools and what `reset` gave: behind a text, or in the last message of a
        conversation. None is the ticket's own."""
        if not (said or self._own.tools):
            return None
        if not self._tokenizer.template:
            return [*ticket.prompt_ids.numpy().tolist(), *self._tokenizer.encode(said)]
        *before, last = ticket.messages or ({"role": "user", "content": ticket.prompt},)
        texts = filter(None, (last["content"], said))
        return self._encoded([*before, {**last, "content": "\n\n".join(texts)}])

    def _encoded(self, messages: Sequence[Message]) -> list[int]:
        opened = self._tokenizer.opened(messages)
        return self._tokenizer.encode_messages(opened, tools=self._own.tools)

    async def _answers(
        self, ticket: Ticket, response: Response, done: Completion, process: OwnProcess
    ) -> tuple[list[Message], list[Any]]:
        """Returns the messages that follow a turn, and the calls in it that they answer; no messages if it was
        the last turn. After each `step` the score is that of all turns so far."""
        goes_on = done.finish_reason == "stop" and response.turns < self._cfg.max_turns
        drawn = done.response_ids.tolist()
        if self._own.steps:
            turn = Response(ids=drawn, mask=[1] * len(drawn))
            reply = await process.ask(StepAsked(turn.text(self._tokenizer, ticket.sampling)))
            response.score = reply.score
            response.turn_rewards[len(response.ids) - 1] = reply.reward
            goes_on &= not reply.done
            return [{"role": "user", "content": reply.text}] * goes_on, []
        answers, calls = list[Message](), list[Any]()
        before = response.context(ticket)[: -len(drawn)]
        parts = self._reader.parts(drawn, before, self._own.tools) if goes_on else ()
        for number, part in enumerate(part for part in parts if part.kind == "call"):
            # Some chat templates ask for ids of nine letters and digits.
            id = f"call{response.turns % 100:02}{number % 1000:03}"
            function = {"name": part.name, "arguments": json.loads(part.text)}
            calls.append({"id": id, "type": "function", "function": function})
            result = (await process.ask(Call(part.name, part.text))).text
            answer = {"role": "tool", "name": part.name, "tool_call_id": id, "content": result}
            answers.append(answer)
        return answers, calls

    def _failed(self, failed: EpisodeFailed, ticket: Ticket) -> Score:
        """Returns the score of an episode that failed, and counts it; only the 1st, 2nd, 4th … is logged."""
        self._failures += 1
        self.failure = f"the environment {failed}"
        if self._failures & (self._failures - 1) == 0:
            said = "%s, %d so far, for prompt %.80r"
            logger.warning(said, self.failure, self._failures, ticket.prompt)
        if failed.cause in self._reward.zero_on:
            return Score.zero(failed.cause)
        return unscored(failed.cause, self._reward)
