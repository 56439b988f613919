"""One whole training run in one process, without Redis and sockets: for experiments on the algorithms.

    Admission ──tickets──▶ engine (published, quantized weights) ──groups──▶ learn (step t)
        ▲                    ▲ version max(0, t - η)                              │
        └──── version ───────┴─────────────── VersionBuilder ◀────────────────────┘

Every part is the one that `areal-q run` uses: admission, version history, policy, quantizer, engine, reward.
What is left out is transport and chance: tickets and groups wait in lists, and a version is handed to the
engine instead of sent. The mathematics is the same: a step is a function of weights and groups alone
(learner/train_step.py), a group one of weights and ticket. What does differ is which version draws a group. In
a real run that depends on timing, here it is a rule: the groups of step t are drawn by version max(0, t - η),
so that all tokens lag by η = `learner.max_lag`, the most that the bound allows. One run twice gives the same
bits.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from msgspec import structs

from areal_q.config import Run, Sampling, TorchEngine
from areal_q.messages import Group, Ticket, Trajectory
from areal_q.models import Decoder
from areal_q.quant.awq import scales_for
from areal_q.tasks import (
    Completed,
    Problem,
    Reward,
    Task,
    Tokenizer,
    build_reward,
    build_task,
    build_tokenizer,
)
from areal_q.weights.version import WeightVersion
from bench.records import drawn_trajectory, make_group
from buffer.redis_store import LearnerBuffer
from buffer.sampling.replay_pool import SampledGroups
from learner.backends.precision import set_precision
from learner.backends.single_device import TorchPolicy
from learner.build_policy import begin_smoothing, build_model, prepare_for_rounding
from learner.data.admission import Admission
from learner.data.staleness import VersionHistory
from learner.measure.reward_check import RewardCheck
from learner.policy_update import SingleProcessUpdater
from learner.publishing.version_builder import VersionBuilder
from learner.supervised.warm_start import warm_start
from learner.train_step import train_step
from rollout.engines.base import Completion, Engine, Request
from rollout.engines.reference.torch_engine import torch_engine

Values = dict[str, float]
NEVER = threading.Event()


def warm_model(run: Run, task: Task, tokenizer: Tokenizer) -> Decoder:
    """The model at the start of RL, prepared for rounding: the same for every arm of a seed (cached)."""
    model = build_model(run.model, tokenizer, run.seed).to(run.learner.device)
    warm_start(model, run, task, tokenizer, lambda step, loss: None, NEVER)
    prepare_for_rounding(model, run)
    return model


class Tickets:
    """Stands in for the buffer towards the admission. Admitted tickets wait in a list, first come first served;
    nothing is encoded and decoded on the way."""

    run_id = ""

    def __init__(self) -> None:
        self.waiting: list[Ticket] = []

    def admit(self, tickets: list[Ticket], cursor: int) -> None:
        self.waiting += tickets

    def next(self, count: int) -> list[Ticket]:
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken


@dataclass
class Drawer:
    """A worker without its loops: draws the groups of tickets and scores them."""

    engine: Engine
    tokenizer: Tokenizer
    reward: Reward
    format: str

    async def draw(self, ticket: Ticket) -> Group:
        completions = await self.engine.generate(
            Request(
                prompt_ids=ticket.prompt_ids.numpy(),
                num_samples=ticket.group_size,
                sampling=ticket.sampling,
                seed=ticket.seed,
                stop_ids=frozenset(self.tokenizer.stops),
                masked=ticket.masked,
            )
        )
        problem = Problem.of_ticket(ticket)
        return make_group(
            ticket,
            engine=self.engine.name,
            weight_format=self.format,
            trajectories=[await self._trajectory(problem, i, c) for i, c in enumerate(completions)],
        )

    async def _trajectory(self, problem: Problem, index: int, completion: Completion) -> Trajectory:
        score = await self.score(problem, completion)
        return drawn_trajectory(
            index,
            completion,
            reward=score.reward,
            reward_parts={**score.parts, "correct": float(score.correct)},
            valid=score.valid,
            failure=score.failure,
        )

    async def score(self, problem: Problem, completion: Completion):
        ids = [i for i in completion.response_ids.tolist() if i not in self.tokenizer.stops]
        completed = Completed(self.tokenizer.decode(ids), len(ids))
        (score,) = await self.reward(problem, [completed])
        return score

    async def accuracy(self, problems: Sequence[Problem], max_tokens: int) -> float:
        """Mean reward of greedy answers to `problems`: the share that is right, of problems right or wrong."""
        greedy = Sampling(temperature=0.0, max_tokens=max_tokens)

        async def rewarded(problem: Problem) -> float:
            ids = np.array(self.tokenizer.encode_prompt(problem.asked), np.int32)
            stop = frozenset(self.tokenizer.stops)
            request = Request(prompt_ids=ids, num_samples=1, sampling=greedy, seed=0, stop_ids=stop)
            [completion] = await self.engine.generate(request)
            return (await self.score(problem, completion)).reward

        return float(np.mean(await asyncio.gather(*map(rewarded, problems))))


def build_engines(run: Run) -> tuple[Engine, Engine]:
    """The run's own engine twice: one that draws, with room for a whole step, and one that is examined."""
    drawn, here = run.learner.groups * run.learner.group_size, run.learner.device
    own = cast(TorchEngine, run.rollout.engine)
    first, second = (torch_engine(structs.replace(own, slots=n, device=here)) for n in (drawn, 512))
    return first, second


async def train(
    run: Run,
    flaky: Reward | None = None,
    watch: Callable[[TorchPolicy, int], None] = lambda policy, version: None,
) -> AsyncIterator[Values]:
    """Yields each step's metrics, with `eval/accuracy` of the learner's own policy (greedy, bf16 weights) on
    every `eval.every`-th and on the last. `flaky` scores what is trained on in place of the run's own
    reward; `watch` is called for each version that is published. Raises what its parts raise."""
    task, tokenizer, reward = (
        build_task(run.task),
        build_tokenizer(run.model, run.task),
        build_reward(run),
    )
    model = warm_model(run, task, tokenizer)
    set_precision(model, run)
    policy = TorchPolicy(model, run.learner, run.rollout.sampling.temperature)
    if run.rollout.smooths:
        scales = scales_for(run.rollout.format, run.rollout.smooths, policy.model.config.head_dim)
        begin_smoothing(policy, scales, run, task, tokenizer)
    tickets = Tickets()
    buffer = cast(LearnerBuffer, tickets)
    admission = Admission(run, task, tokenizer, buffer, 0, set())
    history, check = VersionHistory(run.learner.versions_kept), RewardCheck(run, tokenizer)
    # The numbers with which the policy itself computes
    own = "bf16" if run.learner.precision == "full" else run.rollout.format
    as_it_computes = structs.replace(run, rollout=structs.replace(run.rollout, format=own))
    builders = (
        VersionBuilder(run, smoothing=policy.smoothing),
        VersionBuilder(as_it_computes, smoothing=policy.smoothing),
    )
    engines = build_engines(run)
    drawer = Drawer(engines[0], tokenizer, flaky or reward, run.rollout.format)
    judge = Drawer(engines[1], tokenizer, reward, own)
    heldout = task.heldout[: run.eval.problems]
    kept: list[WeightVersion] = []
    """The newest versions, oldest first: the groups of the next step are drawn by the first"""

    async def publish(version: int) -> None:
        kept.append(builders[0].build(policy.model, version))
        watch(policy, version)
        history.add(version, kept[-1].manifest.digest)
        if len(kept) > run.learner.max_lag + 1:
            kept.pop(0)
        if engines[0].version != kept[0].manifest.version:
            await engines[0].load_weights(kept[0])

    async def accuracy(version: int) -> float:
        await engines[1].load_weights(builders[1].build(policy.model, version))
        return await judge.accuracy(heldout, run.rollout.sampling.max_tokens)

    try:
        for engine in engines:
            await engine.start()
        await publish(0)
        for step in range(run.steps):
            began = time.process_time()
            groups: list[Group] = []
            while missing := run.learner.groups - len(groups):
                admission.admit(step)
                for group in await asyncio.gather(*map(drawer.draw, tickets.next(missing))):
                    # As learner/data/group_reader.py does; others take the places of these.
                    if len(group.valid_trajectories) >= run.learner.fewest_valid:
                        groups.append(group)
                    else:
                        admission.done(group)
            values = train_step(SingleProcessUpdater(policy), SampledGroups(groups), history, step)
            values |= check.metrics(groups)
            for group in groups:
                admission.done(group)
            await publish(step + 1)
            values["cpu_s"] = time.process_time() - began
            if (step + 1) % run.eval.every == 0 or step + 1 == run.steps:
                values["eval/accuracy"] = await accuracy(step + 1)
            yield values
    finally:
        for part in (*engines, reward):
            await part.close()
