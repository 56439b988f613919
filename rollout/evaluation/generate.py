"""Generates a saved model's answers to problems with the reference engine, in the order they are done."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence

from msgspec.structs import replace

from areal_q.config import Run, Sampling, TorchEngine
from areal_q.config.run import ROUNDS_ACTIVATIONS, WEIGHT_SCALES
from areal_q.errors import ConfigError
from areal_q.evaluation.estimates import Answered, ScoredReply
from areal_q.messages import Array
from areal_q.models import Decoder, load_model
from areal_q.models.shape import config_at
from areal_q.models.smoothed_state import first_folds
from areal_q.quant import quantize_state
from areal_q.quant.state_dict import rest_in_bf16
from areal_q.tasks import Problem, Reward, Tokenizer, answer_of, build_reward
from areal_q.tasks.prompt_lengths import short
from areal_q.weights.version import WeightVersion, pack_version
from rollout import engines
from rollout.build import EndpointAddress, build_endpoint
from rollout.environments.base import Environment, Response, scored
from rollout.environments.engine_client import EngineClient
from rollout.environments.registry import build_environment
from rollout.evaluation.questions import EvalQuestions

TELL_EVERY_S = 10.0
"""Seconds without an agent after which a line says that they are waited for, and from one line to the next"""
Tell = Callable[[str], object]


def fitting(asked: EvalQuestions, tokenizer: Tokenizer) -> dict[int, Problem]:
    """Returns the problems whose prompts leave room for an answer in the model's positions, by their places
    among all that are asked. Raises ConfigError if there are none."""
    rollout = replace(asked.run.rollout, sampling=asked.sampling)
    positions = config_at(asked.run.model, asked.model).max_positions
    longest = positions - rollout.tokens_after_prompt
    given = f"--max-tokens {asked.sampling.max_tokens}"
    if longest < 1:
        raise ConfigError(f"{given}: no prompt fits before it into max_positions = {positions}")
    kept = short(asked.problems, tokenizer, longest)
    if not kept:
        raise ConfigError(f"{given}: every prompt has more than {longest} tokens")
    places = enumerate(asked.problems)
    return {next(i for i, other in places if other == problem): problem for problem in kept}


async def answered(
    asked: EvalQuestions, problems: Mapping[int, Problem], tokenizer: Tokenizer, tell: Tell
) -> AsyncGenerator[Answered, None]:
    """Yields each of `problems` once, with the answers that are asked for. `tell` gets a line for the user when
    agents may begin, and while none of them comes.

    All problems are in flight at once, and the engine's slots bound how many are computed. Closing the iterator
    cancels the rest. Raises RecordError for a prompt that cannot fit into the model.
    """
    run, reward = asked.run, build_reward(asked.run)
    config = run.rollout.engine
    engine = engines.build_engine(config if isinstance(config, TorchEngine) else TorchEngine())
    client = EngineClient(engine, tokenizer)
    environment = build_environment(run, client)
    endpoint = build_endpoint(run, run.name, client, environment, EndpointAddress(*asked.serve))
    answering = _Answering(asked, environment, tokenizer, reward)
    tasks, told = list[asyncio.Task[Answered]](), list[asyncio.Task[None]]()
    try:
        await reward.start()
        await environment.start()
        await engine.start()
        prompts = (tokenizer.encode_prompt(problem.asked) for problem in problems.values())
        await engine.load_weights(  # the model, which is not kept, as a learner publishes it
            as_published(load_model(run.model, asked.model).requires_grad_(False), run, prompts)
        )
        for index, problem in problems.items():
            tasks.append(asyncio.create_task(answering.one(index, problem)))
        if endpoint:
            url = endpoint.url(await endpoint.start())
            told.append(asyncio.create_task(_tell_of_agents(environment, url, tell)))
        for done in asyncio.as_completed(tasks):
            yield await done
    finally:
        for task in [*tasks, *told]:
            task.cancel()
        await asyncio.gather(*tasks, *told, return_exceptions=True)
        for part in filter(None, (endpoint, engine, reward, environment)):
            await part.close()


async def _tell_of_agents(plays: Environment, url: str, tell: Tell) -> None:
    tell(f"agents may play at {url}")
    while True:
        await asyncio.sleep(TELL_EVERY_S)
        if not plays.open:
            tell(f"waiting for agents at {url}, 0 of {plays.unfinished} episodes open")


class _Answering:
    def __init__(
        self, asked: EvalQuestions, environment: Environment, tokenizer: Tokenizer, reward: Reward
    ) -> None:
        self._asked, self._tokenizer, self._reward = asked, tokenizer, reward
        self._environment, run = environment, asked.run
        self._given = {
            name: answer_of(run.of(name).task, run.rollout.sampling) for name in run.sources
        }
        """What takes the answer out of a response, by the problem's source"""

    async def one(self, index: int, problem: Problem) -> Answered:
        sampling = self._asked.sampling
        most_likely = Sampling(temperature=0.0, max_tokens=sampling.max_tokens, stop=sampling.stop)
        first = await self._replies(index, problem, int(self._asked.greedy), most_likely)
        return Answered(
            index=index,
            prompt=problem.prompt,
            answer=problem.answer,
            greedy=first[0] if first else None,
            samples=await self._replies(index, problem, self._asked.preset.samples, sampling),
            source=problem.source,
        )

    async def _replies(
        self, index: int, problem: Problem, count: int, sampling: Sampling
    ) -> list[ScoredReply]:
        if count == 0:
            return []
        ticket = problem.ticket(
            run=self._asked.run.name,
            number=index,
            purpose="eval",
            step=0,
            prompt_ids=Array.of(self._tokenizer.encode_prompt(problem.asked), "int32"),
            group_size=count,
            sampling=sampling,
            seed=self._asked.run.seed + index * count,
        )
        responses = [Response() for _ in range(count)]
        try:
            await self._environment(ticket, responses)
        except ExceptionGroup as several:  # raised by an environment that plays several at a time
            raise several.exceptions[0] from several
        scores = await scored(self._reward, ticket, responses, self._tokenizer)
        completed = [response.completed(self._tokenizer, sampling) for response in responses]
        return [
            ScoredReply(
                response=response.text,
                given=self._given.get(problem.source, str.strip)(response.text),
                correct=score.correct,
                reward=score.reward,
                tokens=response.tokens,
                finished=response.finish_reason == "stop",
                failed=not score.valid,
            )
            for response, score in zip(completed, scores, strict=True)
        ]


def as_published(
    model: Decoder, run: Run, prompts: Iterable[Sequence[int]], version: int = 0
) -> WeightVersion:
    """Returns the weights as a learner publishes them; smoothing's scales are those of `prompts`."""
    smoothing, folds = run.rollout.smooths, None
    if smoothing and run.rollout.format in ROUNDS_ACTIVATIONS + WEIGHT_SCALES:
        folds = first_folds(model, prompts, smoothing, run.rollout.format)
    published = quantize_state(model.state_dict(), run.rollout.format, folds=folds)
    if run.rollout.unquantized == "bf16":
        published = rest_in_bf16(published, run.rollout.format)
    return pack_version(
        published,
        run="eval",
        epoch="",
        version=version,
        format=run.rollout.format,
        uaq_scale=1.0,
        model=model.config.to_hf(),
        published_s=time.time(),
    )
